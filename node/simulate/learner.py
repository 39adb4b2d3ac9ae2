"""One node's model and optimizer, with its parameters in one flat vector."""

import copy
from dataclasses import replace
from math import isfinite
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from atoll.comm.config.run import RunConfig
from atoll.node.config import NodeConfig
from atoll.node.data.samples import Source
from atoll.node.participant.batches import RunTokens, collated
from atoll.node.participant.flat_vector import ShardedParameters, parameter_in
from atoll.node.participant.gradients import bound_norm, norm_of, squared_norm
from atoll.node.participant.lr_rewarm import Rewarming
from atoll.node.participant.rank_group import RankGroup
from atoll.node.participant.step_outcome import bounded_loss
from atoll.node.trainer.loss import accumulate, validation_loss
from atoll.node.trainer.model import blocks_of, build_for, init_parameters
from atoll.node.trainer.optimizer import make_optimizer
from atoll.outer_opt import tensors

F32 = NDArray[np.float32]


class SimulatedTrainer:
    """A trainer's model, data and optimizer in this process. `flat` (numel,) is the memory of the parameters
    themselves: what is written to it, the model has."""

    def __init__(self, run: RunConfig, node: NodeConfig, source: Source) -> None:
        model = build_for(run, node.model)
        self._parameters = ShardedParameters([model], RankGroup(0, 1))
        self.layout = self._parameters.layout
        flat = torch.empty(self.layout.numel)
        parameters = dict(model.named_parameters())
        for slot in self.layout.slots:
            parameters[slot.name].data = parameter_in(flat, slot)
        self.flat: F32 = flat.numpy()
        if node.compile:
            for block in blocks_of(model):
                block.compile(dynamic=False)
        self._run, self._data = run, RunTokens(source)
        self._model, self._optimizer = model, make_optimizer(model, run.inner)
        self._trained = MixedPrecisionModel(model) if node.bf16 else model
        self.rewarming = Rewarming()  # the learning rate's rise after a start without moments

    def tensors(self) -> tuple[tensors.Tensor, ...]:
        """The tensors of the flat vector."""
        return tuple(tensors.Tensor(slot.name, slot.shape, slot.offset) for slot in self.layout.slots)

    def initialise(self, seed: int) -> None:
        """Give the parameters their first values, the same for the same seed."""
        init_parameters(self._model, seed)

    def step(self, first: int, rate: float) -> float:
        """One inner step on the batch of samples from `first` on, at this learning rate, or a share of it after
        `begin_without_moments`; returns its loss."""
        self._trained.train()
        indices = range(first, first + self._run.inner.batch_size)
        loss = accumulate(self._trained, collated([self._data[index] for index in indices]))
        rate *= self.rewarming.next_factor()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        norm = norm_of(squared_norm(self._parameters))
        if isfinite(norm):
            bound_norm(self._parameters, norm, self._run.inner.clip)
            self._optimizer.step()
        self._optimizer.zero_grad()
        return bounded_loss(float(loss))

    def begin_without_moments(self, round_steps: int) -> None:
        """Rewarm the learning rate, as for a node without moments that joins a run under way, in rounds of
        `round_steps` inner steps."""
        self.rewarming = Rewarming.without_moments(self._run.inner, round_steps)

    def validation_loss(self) -> float:
        """The mean loss on the validation batches, in nats a token."""
        return validation_loss(self._trained, self._run, self._data, RankGroup(0, 1), torch.device("cpu"))

    def resume(self, other: "SimulatedTrainer") -> None:
        """Take the parameters and the optimizer's state of another."""
        self.flat[:] = other.flat
        self._optimizer.load_state_dict(copy.deepcopy(other._optimizer.state_dict()))


class MixedPrecisionModel(nn.Module):
    """A model computed in bf16, with parameters and gradients in fp32: FSDP2's mixed precision."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.separates_documents = getattr(model, "separates_documents", False)

    def forward(self, tokens: Tensor, **positions: Tensor) -> Tensor:
        copies = {name: parameter.bfloat16() for name, parameter in self.model.named_parameters()}
        return cast(Tensor, functional_call(self.model, copies, (tokens,), positions))


def with_batch(run: RunConfig, sequences: int) -> RunConfig:
    """The run with another number of sequences a step."""
    return replace(run, inner=replace(run.inner, batch_size=sequences))
