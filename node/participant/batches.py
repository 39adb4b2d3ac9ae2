"""Batches of tensors, made from the run's sample indices."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from atoll.node.config import TrainerSpec
from atoll.node.data.dataset import DataSetSource
from atoll.node.data.samples import UNLEARNED, Sample, Source
from atoll.node.data.source import open_source
from atoll.node.participant.daemon_link import DaemonLink
from atoll.node.participant.rank_group import RankGroup
from atoll.node.preflight import check_ranks
from atoll.node.trainer_channel import Preparing

# Of the run's data: input_ids, labels and position_ids, (B, T) int64 each.
Batch = dict[str, Tensor]


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
        check_ranks(batch_size, self.count)
        size = batch_size // self.count
        return slice(self.index * size, (self.index + 1) * size)


class RunTokens:
    """The run's own data as a dataset: sample i is a dict of (T,) int64 tensors, the same on every node."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @classmethod
    def open(cls, spec: TrainerSpec, ranks: RankGroup, link: DaemonLink | None = None) -> "RunTokens":
        """Open the data; each machine's first rank first, since it may fetch what the others then find in the
        cache, and tells `link` where it waits. Raises `AtollError` as `open_source` does."""

        def tell(sentence: str) -> None:
            if link is not None:
                link.send(Preparing(sentence))

        source, here = None, ranks.hosts.count(ranks.hosts[ranks.rank])
        if ranks.is_first_on_host:
            source = open_source(spec.run, spec.node, Path(spec.cache), here, tell, spec.lan)
        ranks.barrier()
        return cls(source or open_source(spec.run, spec.node, Path(spec.cache), here, tell, spec.lan))

    def listen(self, tell: Callable[[str], None], waiting: Callable[[str], None]) -> None:
        """Have sentences told, by any thread, on what does not work with the data; and `waiting` called every
        second with such a sentence, by who asks for a sample and does not get it."""
        if isinstance(self.source, DataSetSource):
            fetcher = self.source.fetcher
            fetcher.tell, fetcher.waiting = tell, lambda: waiting(fetcher.trouble)
            if self.source.notice:
                tell(self.source.notice)

    @property
    def trouble(self) -> str:
        """What keeps data from coming, in words for people; empty: nothing."""
        return self.source.fetcher.trouble if isinstance(self.source, DataSetSource) else ""

    def expect(self, batches: Iterator[list[int]], share: Share) -> None:
        """Say which batches are asked for next, in their order, of which this process takes a share."""
        self.source.expect(index for batch in batches for index in batch[share.of(len(batch))])

    def __len__(self) -> int:
        return 1 << 62  # its epochs follow one another without end

    def __getitem__(self, index: int) -> Batch:
        return tensors(self.source.train(index))

    def validation(self, indices: Sequence[int]) -> Batch:
        """A batch of validation samples."""
        if isinstance(self.source, DataSetSource):
            self.source.request_validation(indices)
        batch: Batch = collated([tensors(self.source.validation(index)) for index in indices])
        return batch


def tensors(sample: Sample) -> Batch:
    """The arrays of a sample as tensors, (T,) int64 each, by their names."""
    return {name: torch.from_numpy(array) for name, array in sample.arrays.items()}


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device. Only a CUDA device copies while the process goes on: from pinned memory, or from a
    copy of its own; Apple's would read what is there later."""
    ahead = device.type == "cuda"
    return {name: tensor.to(device, non_blocking=ahead) for name, tensor in batch.items()}


def pieces(batch: Batch, size: int) -> list[Batch]:
    """The batch in pieces of `size` samples, the last of what is left; 0: in one piece."""
    size = size or len(batch["input_ids"])
    parts = {name: torch.split(tensor, size) for name, tensor in batch.items()}
    return [dict(zip(parts, piece, strict=True)) for piece in zip(*parts.values(), strict=True)]


def learned(batch: Batch) -> Tensor:
    """The number of tokens of the batch that are learned, a scalar on its device."""
    return (batch["labels"] != UNLEARNED).sum()


def collated(samples: list[Any]) -> Any:
    """A batch of samples, as torch's DataLoader makes it."""
    return default_collate(samples)
