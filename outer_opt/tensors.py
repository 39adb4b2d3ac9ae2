"""The tensors of a model's flat vector by name, shape and place, which is all that the pieces know of a model."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

EMBEDDINGS = re.compile(r"embed|wte|wpe|head", re.IGNORECASE)
LAYER = re.compile(r"(?:^|\.)(\d+)\.")


class TensorKind(Enum):
    """Kinds of tensors that optimizers and merges treat differently."""

    MATRIX = "matrix"  # projects one hidden layer onto another
    EMBEDDING = "embedding"  # or output head: its rows are tokens
    VECTOR = "vector"  # norms, biases


@dataclass(frozen=True)
class Tensor:
    """One tensor of the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int  # of its first element in the flat vector

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def span(self) -> slice:
        return slice(self.offset, self.offset + self.numel)

    @property
    def kind(self) -> TensorKind:
        return kind_of(self.name, len(self.shape))

    @property
    def layer(self) -> int | None:
        """The layer's number in the name, as in `blocks.3.norm.weight`; None outside the layers."""
        match = LAYER.search(self.name)
        return int(match[1]) if match else None


def kind_of(name: str, dimensions: int) -> TensorKind:
    """The kind of a tensor by its name, the same for every model: a matrix whose name says embed, wte, wpe or head
    is an embedding."""
    if dimensions < 2:
        return TensorKind.VECTOR
    return (
        TensorKind.EMBEDDING
        if EMBEDDINGS.search(name.removesuffix(".weight").rpartition(".")[2])
        else TensorKind.MATRIX
    )


def with_offsets(layout: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[Tensor, ...]:
    """The tensors of a flat vector in which these names and shapes follow one another, from offset 0 on."""
    found, offset = [], 0
    for name, shape in layout:
        found.append(Tensor(name, tuple(shape), offset))
        offset += found[-1].numel
    return tuple(found)
