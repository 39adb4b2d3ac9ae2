"""One node's model and optimizer, with its parameters in one flat vector."""

import copy
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.comm.config import RunConfig
from atoll.node import inner
from atoll.node.config import NodeConfig
from atoll.node.data import Source
from atoll.node.flat import layout_of
from atoll.node.inner import Team
from atoll.node.model import blocks_of, build, build_custom, init_parameters
from atoll.node.optimizer import make
from atoll.outer_opt.tensors import Tensor

F32 = NDArray[np.float32]


class Trainee:
    """The trainer's model, data and optimizer in this process. `flat` (numel,) is the memory of the parameters
    themselves: what is written to it, the model has."""

    def __init__(self, run: RunConfig, node: NodeConfig, source: Source) -> None:
        model = build_custom(node.model, run.model) if node.model else build(run.model)
        self.layout = layout_of(model)
        flat = torch.empty(self.layout.numel)
        parameters = dict(model.named_parameters())
        for slot in self.layout.slots:
            parameter = parameters[slot.name]
            parameter.data = flat[slot.offset : slot.offset + parameter.numel()].view(slot.shape)
        self.flat: F32 = flat.numpy()
        if node.compile:
            for block in blocks_of(model):
                block.compile()
        optimizer = make(model, run.inner)
        self._learner = inner.Learner(run, Team(0, 1), torch.device("cpu"), source, model, optimizer)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(Tensor(slot.name, slot.shape, slot.offset) for slot in self.layout.slots)

    def initialise(self, seed: int) -> None:
        init_parameters(self._learner.model, seed)

    def step(self, first: int, rate: float) -> float:
        """One inner step on the batch of samples from `first` on; returns its loss."""
        count = self._learner.run.inner.batch_size
        self._learner.model.train()
        sequences = inner.batch(self._learner, self._learner.source.train, range(first, first + count))
        return inner.finite(inner.step(self._learner, sequences, rate))

    def validation_loss(self) -> float:
        return inner.evaluate(self._learner, 0).loss

    def resume(self, other: "Trainee") -> None:
        """Take the parameters and the optimizer's state of another."""
        self.flat[:] = other.flat
        self._learner.optimizer.load_state_dict(copy.deepcopy(other._learner.optimizer.state_dict()))


def with_batch(run: RunConfig, sequences: int) -> RunConfig:
    """The run with another number of sequences a step."""
    return replace(run, inner=replace(run.inner, batch_size=sequences))
