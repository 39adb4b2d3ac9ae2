"""The defence of a simulated run: what is held against members, what is audited, and who is out for it.

The rules are those of a real run (`outer_opt.clip`, `outer_opt.weights.bounded`, `outer_opt.outliers`,
`comm.strikes`); the lots are drawn from the run's seed. Simulated auditors are honest: two liars that audit each
other are the business of the coordinator's own tests.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from atoll.comm.chunks import Chunks
from atoll.comm.config.run import RunConfig
from atoll.comm.evidence import Consequence, Evidence, Offence
from atoll.comm.ids import NodeId
from atoll.comm.strikes import Strikes, strike
from atoll.node.simulate.liars import Liar, LieKind
from atoll.outer_opt.outliers import odd_ones

F32 = NDArray[np.float32]
Encode = Callable[[int, F32], F32]  # a chunk's elements, as they are once they were encoded
Recompute = Callable[[int], F32]  # a chunk, sealed anew from its contributions
MIN_AUDITED = 3  # members, for any audit


@dataclass(frozen=True)
class Decision:
    """Something that was held against a member."""

    round: int  # of all fragments together
    node: int
    offence: str
    consequence: str
    sentence: str


@dataclass
class Defence:
    """What a run does about wrong deltas and seals, beside the bounds that its config sets (`undefended`)."""

    audits: float  # chunks that are audited in a round on average
    outliers: bool
    seed: int = 0
    strikes: dict[int, Strikes] = field(default_factory=dict)  # by node
    decisions: list[Decision] = field(default_factory=list)

    @staticmethod
    def of(run: RunConfig, on: bool) -> "Defence":
        """The defence of a run that begins."""
        if not on:
            return Defence(0.0, False, run.seed)
        return Defence(run.security.audits, True, run.seed)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng((self.seed, 11))

    def consequence(self, node: int, round_: int) -> Consequence | None:
        """What follows in this round from what is held against a node; None: nothing is."""
        record = self.strikes.get(node)
        return None if record is None or record.forgotten(round_) else record.consequence(round_)

    def may_own(self, node: int, round_: int) -> bool:
        """Whether the node may be given chunks to merge."""
        return self.consequence(node, round_) in (None, Consequence.STRUCK)

    def may_contribute(self, node: int, round_: int) -> bool:
        """Whether the node's work is taken."""
        return self.consequence(node, round_) in (None, Consequence.STRUCK, Consequence.NO_OWNER)

    def is_out(self, node: int, round_: int) -> bool:
        """Whether the node has to leave the run."""
        return self.consequence(node, round_) in (Consequence.EVICTED, Consequence.BANNED)

    def charge(self, node: int, offence: Offence, round_: int, sentence: str) -> None:
        """Hold this against a node."""
        before = self.strikes.get(node) or Strikes(NodeId(f"n{node}"))
        after = strike(before, Evidence(round_, offence, sentence), round_)
        self.strikes[node] = after
        self.decisions.append(Decision(round_, node, offence, after.consequence(round_), sentence))

    def judge(
        self,
        round_: int,
        nodes: Sequence[int],
        squares: Sequence[float],
        dots: Sequence[float],
        last: float,
        fresh: Sequence[bool],
    ) -> None:
        """Charge those whose deltas are unlike the others' of a round (`outliers.odd_ones`)."""
        if self.outliers:
            for i, sentence in odd_ones(squares, dots, last, fresh).items():
                self.charge(nodes[i], Offence.OUTLIER, round_, sentence)


def undefended(run: RunConfig) -> RunConfig:
    """The run without bounds on what a member may do to a merged delta."""
    outer, security = replace(run.outer, clip=False), replace(run.security, weight_bound=0.0)
    return replace(run, outer=outer, security=security)


class Seals:
    """The sealing of a round's chunks by owners of whom some may lie, with audits before the commit."""

    def __init__(self, defence: Defence, liars: dict[int, Liar], round_: int, members: Collection[int]) -> None:
        """`members`: those that contribute to the round, by number."""
        self._defence, self._liars, self._round = defence, liars, round_
        self._members = sorted(members)

    def __call__(self, chunks: Chunks, sealed: F32, encoded: Encode, again: Recompute) -> None:
        """Put into `sealed` (numel,) what the chunks' owners make of the true means that it has."""
        due, defence = list(range(chunks.count)), self._defence
        while due:
            owners = self._deal(due)
            for c in self._forged(chunks.count, owners):
                span, liar = chunks.span(c), self._liars[owners[c]]
                sealed[span] = encoded(c, liar.seal(sealed[span]))
            chance = defence.audits / chunks.count if len(self._members) >= MIN_AUDITED else 0.0
            drawn = [c for c in due if defence._random.random() < chance]
            caught = dict[int, int]()
            for c in drawn:
                if again(c).tobytes() != sealed[chunks.span(c)].tobytes():
                    caught.setdefault(owners[c], c)
            for owner, c in caught.items():
                sentence = f"it sealed chunk {c} as something other than its inputs come to"
                defence.charge(owner, Offence.FORGED_SEAL, self._round, sentence)
            due = [c for c in due if owners[c] in caught]
            for c in due:
                sealed[chunks.span(c)] = again(c)

    def _deal(self, chunks: Sequence[int]) -> dict[int, int]:
        """Owners of the chunks in equal shares, each of what follows one another: all are equally fast here."""
        able = [n for n in self._members if self._defence.may_own(n, self._round)] or self._members
        return {c: able[i * len(able) // len(chunks)] for i, c in enumerate(chunks)}

    def _forged(self, count: int, owners: dict[int, int]) -> list[int]:
        found = list[int]()
        for number, liar in self._liars.items():
            if liar.lie.kind is LieKind.SEAL:
                found += [c for c, owner in owners.items() if owner == number][: round(liar.lie.size * count)]
        return found
