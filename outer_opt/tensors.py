"""What the pieces need to know of a model: the tensors of its flat vector, by name, shape and place."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

EMBEDDINGS = re.compile(r"embed|wte|wpe|head", re.IGNORECASE)
LAYER = re.compile(r"(?:^|\.)(\d+)\.")


class TensorKind(Enum):
    """What optimizers and merges treat differently."""

    MATRIX = "matrix"  # projects one hidden layer onto another
    EMBEDDING = "embedding"  # or output head: its rows are tokens
    VECTOR = "vector"  # norms, biases


@dataclass(frozen=True)
class Tensor:
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
        """The number in its name, as in `blocks.3.norm.weight`; None outside the layers."""
        match = LAYER.search(self.name)
        return int(match[1]) if match else None


def kind_of(name: str, dimensions: int) -> TensorKind:
    """By its name, the same for every model: one that says embed, wte, wpe or head is an embedding."""
    if dimensions < 2:
        return TensorKind.VECTOR
    return (
        TensorKind.EMBEDDING
        if EMBEDDINGS.search(name.removesuffix(".weight").rpartition(".")[2])
        else TensorKind.MATRIX
    )


def placed(layout: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[Tensor, ...]:
    """The tensors of a flat vector in which these follow one another."""
    found, offset = [], 0
    for name, shape in layout:
        found.append(Tensor(name, tuple(shape), offset))
        offset += found[-1].numel
    return tuple(found)
