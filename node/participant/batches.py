"""Batches of tensors, made from the run's sample indices."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from atoll.comm.errors import ConfigError
from atoll.node.config import TrainerSpec
from atoll.node.data.text import Source, open_source
from atoll.node.participant.rank_group import RankGroup


class Dataset(Protocol):
    """Samples by index, as torch's map-style datasets have them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True)
class Share:
    """The part of each batch that a rank takes: number `index` of `count` equal ones."""

    index: int
    count: int

    def of(self, batch_size: int) -> slice:
        """The rank's samples of a batch. Raises `ConfigError` if it cannot be divided."""
        if batch_size % self.count:
            raise ConfigError(
                f"inner.batch_size={batch_size} cannot be divided among ranks={self.count}: "
                f"start this node with a number of ranks that divides {batch_size}"
            )
        size = batch_size // self.count
        return slice(self.index * size, (self.index + 1) * size)


class RunTokens:
    """The run's own text as a dataset: sample i is (T + 1,) int64 tokens, the same on every node."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @classmethod
    def open(cls, spec: TrainerSpec, ranks: RankGroup) -> "RunTokens":
        """Open the data; each machine's first rank first, since it may tokenise the text that the others then find
        in the cache. Raises `AtollError` as `open_source` does."""
        source = None
        if ranks.is_first_on_host:
            source = open_source(spec.run, spec.node, Path(spec.cache))
        ranks.barrier()
        return cls(source or open_source(spec.run, spec.node, Path(spec.cache)))

    def __len__(self) -> int:
        return 1 << 62  # its epochs follow one another without end

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.source.train(index))

    def validation(self, indices: Sequence[int]) -> Tensor:
        """Validation samples: (len(indices), T + 1) int64."""
        return torch.from_numpy(np.stack([self.source.validation(index) for index in indices]))


def collated(samples: list[Any]) -> Any:
    """A batch of samples, as torch's DataLoader makes it."""
    return default_collate(samples)
