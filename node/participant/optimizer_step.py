"""The step on one batch: the ranks agree on its loss and on the norm of its gradient, which is bounded, and all
step their optimizers, or none where the gradient is not finite.

Made and called by the participant, on every rank at the same time.
"""

import math
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from atoll.node.participant.flat_vector import ShardedParameters
from atoll.node.participant.gradients import bound_norm, norm_of, squared_norm
from atoll.node.participant.rank_group import RankGroup
from atoll.node.participant.step_outcome import (
    NORM_LIMIT,
    RankStep,
    Step,
    bounded_loss,
    fault_of,
    loss_of,
    rank_step,
)


class OptimizerStep:
    """Takes the steps of an order, or is told of those that an engine has taken, and says what came of each."""

    def __init__(
        self,
        parameters: ShardedParameters,
        optimizers: Sequence[Optimizer],
        ranks: RankGroup,
        clip: float,
        before_step: Callable[[], None],
        tell: Callable[[str], None],
    ) -> None:
        """`clip`: bound of the gradient's norm; `before_step` returns when parameters may change; `tell` takes
        sentences for the node's log."""
        self._parameters, self._optimizers, self._ranks = parameters, optimizers, ranks
        self._clip, self._before_step, self._tell = clip, before_step, tell
        self.fault = ""  # of the order's steps: what was not finite, and of which rank

    def begin(self) -> None:
        """An order begins: what is not finite in its steps is told anew."""
        self.fault = ""

    def take(self, loss: Tensor | float, targets: int, figures: Sequence[float]) -> Step:
        """Step the optimizers by the gradients that there are, and clear them. `loss`: mean of this rank's share,
        which has so many `targets`; `figures`: this rank's part of what `Step` says from its targets on."""
        ranks, parameters, value = self._ranks, self._parameters, loss_of(loss, targets)
        part, wrong = squared_norm(parameters), float(not math.isfinite(value))
        sums = ranks.total(part, bounded_loss(value) / ranks.size, wrong, *figures)
        square, mean, wrong_losses, *common = sums
        norm, has_targets = norm_of(square), common[0] > 0
        if math.isfinite(norm) and has_targets:
            bound_norm(parameters, norm, self._clip)
            self._before_step()
            for optimizer in self._optimizers:
                optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        left_out = has_targets and not math.isfinite(norm)
        if left_out or has_targets and wrong_losses:
            self._name_fault(rank_step(loss, targets, part), left_out)
        return Step(mean, min(norm, NORM_LIMIT) if has_targets else 0.0, left_out, *common)

    def note(
        self, loss: Tensor | float | None, targets: int, norm: float, skipped: bool, figures: Sequence[float]
    ) -> Step:
        """Take note of a step that the engine has taken, or `skipped`. As `take` otherwise; without a loss the
        rank knows none."""
        value = None if loss is None else loss_of(loss, targets)
        mine = (0.0, 0.0) if value is None else (bounded_loss(value), 1.0)
        total, known, skips, *common = self._ranks.total(*mine, float(skipped), *figures)
        norm = min(norm, NORM_LIMIT) if norm == norm else NORM_LIMIT
        return Step(total / max(known, 1.0), norm, skips > 0 and common[0] > 0, *common)

    def _name_fault(self, mine: RankStep, left_out: bool) -> None:
        """Say of which rank a loss or gradient is not finite, once an order."""
        fault = fault_of(self._ranks.gather(mine, RankStep), left_out)
        if fault and not self.fault:
            self._tell(f"the gradient of a step is not finite: {fault}" if left_out else fault)
        self.fault = fault or self.fault
