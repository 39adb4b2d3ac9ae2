"""Samples that count: each token is the one before it and 1, modulo the vocabulary."""

from collections.abc import Iterator

import numpy as np

from atoll.comm.config.run import RunConfig
from atoll.node.config import NodeConfig
from atoll.node.data.samples import Sample, one_document


class Counting:
    """Sample i counts from i on."""

    def __init__(self, seq_len: int, vocab_size: int) -> None:
        self._places, self._vocab_size = np.arange(seq_len + 1), vocab_size

    def train(self, index: int) -> Sample:
        return one_document((index + self._places) % self._vocab_size)

    def validation(self, index: int) -> Sample:
        return self.train(index)

    def expect(self, indices: Iterator[int]) -> None:
        pass  # a sample takes no time


def open_source(run: RunConfig, node: NodeConfig) -> Counting:
    return Counting(run.model.seq_len, run.model.vocab_size)
