"""A sample of a run's data, and the sources of samples.

A sample is three rows of `model.seq_len` numbers under Hugging Face's names: what the model reads, what it is to
predict there, and where each token stands in its document. `Source` is what every kind of data implements; the
participant makes batches of tensors from it. Nothing here imports torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.node.data.manifest import Block

Array = NDArray[np.int64]

# The label of a token that is not learned: torch's cross entropy leaves it out by default.
UNLEARNED = -100


@dataclass(frozen=True, slots=True)
class Sample:
    """A window of a run's data: three arrays of (seq_len,) int64."""

    input_ids: Array
    labels: Array  # the tokens that follow those of `input_ids`; `UNLEARNED` where none is to be learned
    position_ids: Array  # from 0 at the window's beginning, and again at that of each document

    @property
    def arrays(self) -> dict[str, Array]:
        """The arrays by their names."""
        return {"input_ids": self.input_ids, "labels": self.labels, "position_ids": self.position_ids}


class Source(Protocol):
    """Samples of a run's data, by index: the same on every node. Training samples may be asked for in another
    thread than validation samples, at the same time."""

    def train(self, index: int) -> Sample:
        """Training sample `index`. Raises `ResourceError` if it cannot be read."""

    def validation(self, index: int) -> Sample:
        """Validation sample `index`, the same in every evaluation. Raises `ResourceError` if it cannot be
        read."""

    def expect(self, indices: Iterator[int]) -> None:
        """Take note of the training samples that are asked for next, in this order, in place of those that were
        expected before; a source that fetches them from elsewhere begins to. Returns at once; the iterator is the
        source's from then on."""


def one_document(tokens: Array) -> Sample:
    """The sample of (seq_len + 1,) tokens that are all of one document, and all learned."""
    return Sample(tokens[:-1], tokens[1:], np.arange(len(tokens) - 1))


def window_count(tokens: int, seq_len: int, block_tokens: int) -> int:
    """The number of windows of a block that holds so many tokens before its padding: those in which a token is
    followed by another."""
    return min(block_tokens // seq_len, -(-(tokens - 1) // seq_len))


def window_of(block: Block, number: int, seq_len: int, tokens: int) -> Sample:
    """Window `number` of a block that holds so many tokens before its padding. Not learned are the first token of
    a document, which the end of another does not tell; padding; what the data set's mask leaves out; and the token
    behind the block's last one, which is not in it."""
    first, last = number * seq_len, (number + 1) * seq_len
    following = slice(first + 1, min(last + 1, tokens))
    learned = block.learned[following] & ~block.begins[following]
    labels, places = np.full(seq_len, UNLEARNED, np.int64), np.arange(seq_len)
    np.copyto(labels[: len(learned)], block.tokens[following], casting="same_kind", where=learned)
    starts = np.maximum.accumulate(np.where(block.begins[first:last], places, 0))
    return Sample(block.tokens[first:last].astype(np.int64), labels, places - starts)


def nothing_learned(seq_len: int) -> Sample:
    """The sample in the place of one that is damaged wherever it is to be had: of it nothing is learned."""
    empty = np.zeros(seq_len, np.int64)
    return Sample(empty, np.full(seq_len, UNLEARNED, np.int64), np.arange(seq_len))
