"""The model between its parameters and the flat vectors that daemon and trainer share."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from torch import Tensor

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import AtollError, ConfigError
from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.node.outer.layout import fragments_and_chunks
from atoll.node.outer.method import anchor_adoption
from atoll.node.participant.flat_vector import ShardedParameters, map_vector
from atoll.node.participant.rank_group import RankGroup
from atoll.node.trainer_channel import Attach, Ready, Train
from atoll.outer_opt.overlap import rebase

T = TypeVar("T")

# Of the way that the parameters went in a round: by how much copies of them may be apart at its end.
COPIES_APART = 0.01
MAX_NORM = 1e30  # l2, of a delta that a coordinator takes


class Diverged(AtollError):
    """The parameters are of no use: not finite any more, or not moved by the steps that were taken."""


@dataclass(frozen=True)
class MappedVectors:
    """The flat vectors shared with the daemon, (numel,) fp32 each; None on another machine than the daemon's."""

    anchor: Tensor | None
    local: Tensor | None

    @classmethod
    def attach(cls, command: Attach, numel: int, remote: bool) -> "MappedVectors":
        """Map the vectors that the daemon shares, for a model of `numel` parameters, unless this rank is `remote`.
        Raises `ConfigError` if they are of another model."""
        if command.numel != numel:
            raise ConfigError(
                f"the run's flat vector has {command.numel} parameters, this node's model {numel}: "
                "model= must build the model that the run's other nodes train"
            )
        if remote:
            return cls(None, None)
        return cls(map_vector(command.anchor, numel), map_vector(command.local, numel))


class VectorIO:
    """Moves parameters to and from the shared vectors. Every rank calls each method at the same time."""

    def __init__(
        self, run: RunConfig, parameters: ShardedParameters, vectors: MappedVectors, ranks: RankGroup
    ) -> None:
        self._parameters, self._vectors, self._ranks = parameters, vectors, ranks
        self._adopt = anchor_adoption(run.overlap)
        self._sent: list[Tensor] = []  # this rank's blocks at the last hand-over from which it went ahead
        self._sent_round = 0  # of the last hand-over
        fragments, _ = fragments_and_chunks(run, parameters.layout.shapes)
        self._fragment_schedule = FragmentSchedule(len(fragments))
        self._slot_fragments = [p for p, fragment in enumerate(fragments) for _ in fragment.tensors]

    def initialise(self) -> None:
        """Make the parameters, as they are now, the anchor."""
        self._parameters.write(self._vectors.anchor)
        self._ranks.barrier()

    def load(self, resume: bool) -> None:
        """Copy the anchor, or with `resume` the local vector, into the parameters."""
        self._parameters.read(self._vectors.local if resume else self._vectors.anchor)

    def hand_over(self, ready: Ready, moved: bool) -> Ready:
        """Write the parameters to the local vector, and keep a copy if training goes on ahead; return `ready` with
        the l2 norm of the exchanged parameters' distance from the anchor. Raises `Diverged` where a parameter is
        not finite, where all steps were left out, and where steps should have `moved` the parameters and none
        has."""
        self._parameters.write(self._vectors.local)
        if ready.ahead:
            self._sent = self._parameters.copy(into=self._sent)
        self._sent_round = ready.round
        # What follows is also: every rank has written its blocks.
        squares = self._squared_distances()
        if ready.samples and ready.samples == ready.skipped:
            raise Diverged("the gradients of all steps were not finite")
        if moved and not any(squares):
            raise Diverged("the parameters are what they were before the steps, at a learning rate above zero")
        chosen = self._exchanged(ready.round)
        norm = math.sqrt(sum(square for slot, square in enumerate(squares) if chosen(slot)))
        self._demand_equal_copies(norm)
        return msgspec.structs.replace(ready, norm=norm)

    def take_state(self, order: Train) -> None:
        """Adopt the new anchor under the training since the hand-over, or the local vector where the order resumes
        it. Of a committed round only its fragment has a new anchor; other fragments have one if later rounds were
        missed. The daemon touches neither vector before the next hand-over."""
        vectors, adopt, sent = self._vectors, self._parameters.adopt, self._sent
        exchanged = self._exchanged(self._sent_round)
        if order.resume:
            adopt(vectors.local, sent, rebase)
        else:
            adopt(vectors.anchor, sent, self._adopt, exchanged)
            if order.rebased:
                adopt(vectors.local, sent, rebase, lambda slot: not exchanged(slot))

    def at_anchor(self, measure: Callable[[], T], keep: bool) -> T:
        """Return what `measure` does with the anchor as parameters. With `keep` they are then as before, for which
        they are copied."""
        trained = self._parameters.copy() if keep else None
        self._parameters.read(self._vectors.anchor)
        found = measure()
        if trained is not None:
            self._parameters.restore(trained)
        return found

    def _exchanged(self, round_: int) -> Callable[[int], bool]:
        """Whether a slot is of the round's fragment."""
        fragment = self._fragment_schedule.fragment(round_)
        return lambda slot: self._slot_fragments[slot] == fragment

    def _demand_equal_copies(self, norm: float) -> None:
        """Raise `ConfigError` where ranks have copies of parameters, and trained them apart. `norm`: l2, of the
        parameters' distance from the anchor."""
        (apart,) = self._ranks.total(self._parameters.copies_distance(self._vectors.local))
        if apart > COPIES_APART**2 * norm**2 * self._ranks.size:
            raise ConfigError(
                "this node's ranks have copies of the parameters that differ after training: have their gradients "
                "averaged (DistributedDataParallel, fully_shard), and give those that work on the same samples "
                "the same share of them (data_parallel=)"
            )

    def _squared_distances(self) -> list[float]:
        """The squared l2 norm of what the parameters, all ranks', are away from the anchor, by slot. Raises
        `Diverged` if one is not finite, or beyond what can be told."""
        squares = self._ranks.total(*self._parameters.squared_distances(self._vectors.anchor))
        for slot, square in zip(self._parameters.layout.slots, squares, strict=True):
            if not square <= MAX_NORM**2:
                raise Diverged(f"training diverged: {slot.name} holds NaN, infinity or values too large")
        return squares
