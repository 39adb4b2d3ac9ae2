"""A fleet of nodes on a virtual clock: whose inner step ends next, when a fragment's round closes, who was in it.

A round of a fragment is

    OPEN        nodes train; it closes when all have their inner steps, or a quorum has and those that would soon
                have them had their grace (as the coordinator's rounds do)
    CLOSING     everybody finishes the step at hand and contributes; with overlap nobody stops for that
    EXCHANGING  the exchange takes its time
    OPEN        committed: each node takes the new anchor, at once or after `overlap.delay` steps of its own

What a node trained and could not contribute, or contributed in vain, it keeps, as `outer.left_out` says. The run
ends when the tokens trained are all there; what is left is then contributed in a last round of each fragment.
Everything that happens follows from the config, the conditions and the seed.

Some of the nodes may be liars (`liars`), and the run may defend itself (`defence`). The run's length and the
learning rate then go by what the honest nodes trained, as if all had trained as much: so what a lie costs is in
the loss, and in nothing else.
"""

import heapq
from collections.abc import Callable
from math import ceil

import numpy as np
from numpy.typing import NDArray

from atoll.comm.codecs.codec import NonFinite
from atoll.comm.config.run import RunConfig
from atoll.node.participant.lr_schedule import learning_rate
from atoll.node.simulate.conditions import Conditions
from atoll.node.simulate.defence import Defence, Seals
from atoll.node.simulate.exchange import MemberDelta, ReplicatedState
from atoll.node.simulate.learner import SimulatedTrainer
from atoll.node.simulate.liars import TRAINING, Liar, LieKind, parsed
from atoll.node.simulate.method import Method
from atoll.node.simulate.state import (
    FleetEvent,
    FragmentRound,
    FragmentShare,
    RoundPhase,
    RoundRecord,
    SimulatedNode,
)
from atoll.outer_opt.arrays import dot, norm
from atoll.outer_opt.overlap import Adopt, replace

F32 = NDArray[np.float32]


class SimulatedFleet:
    """The nodes of one simulated run. `simulate` takes it from its start to its end; then `records`, `val_loss`,
    `utilisation`, `bytes_sent` (by a node on average) and `inner_steps_lost` say how it went."""

    def __init__(
        self,
        run: RunConfig,
        conditions: Conditions,
        method: Method,
        make_trainer: Callable[[], SimulatedTrainer],
        evaluator: SimulatedTrainer,  # whose flat vector the anchor is written to for an evaluation
        start: SimulatedTrainer,
        on_record: Callable[[RoundRecord], None] = lambda record: None,
    ) -> None:
        self.run, self.conditions, self.method = run, conditions, method
        self._make, self._evaluator, self._on_record = make_trainer, evaluator, on_record
        self.states = [ReplicatedState(run, method, fragment, start.flat) for fragment in method.fragments]
        self.rounds = [self._next(p, due) for p, due in enumerate(method.due)]
        self.nodes: list[SimulatedNode] = []
        self.now, self.cursor, self.committed = 0.0, 0, 0.0
        self.bytes_sent, self.records, self.inner_steps_lost, self.idle_of_killed = (
            0.0,
            list[RoundRecord](),
            0,
            0.0,
        )
        self._random = np.random.default_rng((run.seed, 7))
        liars = [n for n in range(conditions.nodes) if conditions.liar(n)]
        self.liars = {n: Liar(parsed(conditions.lie), (run.seed, 13, n)) for n in liars}
        self.defence, self.commits, self.refused = Defence.of(run, conditions.defence), 0, 0
        # By fragment: nodes whose work the last round counted, so that their next begins from its anchor.
        self._counted_last = [set[int]() for _ in self.states]
        # Time, whether it is no commit (of one moment those come first), order of entry, kind, who, ticket.
        self._events: list[tuple[float, bool, int, FleetEvent, int, int]] = []
        self._entries, self._last, self._present, self.val_loss = 0, False, 0.0, float("nan")
        for number in range(conditions.nodes):
            self._join(number).trainer.resume(start)

    def simulate(self) -> None:
        """Take one event after the other until the tokens that were asked for are trained on. Raises `NonFinite`
        if training diverges."""
        self._record(0, self.states[0].round, [])
        for node in self.nodes:
            self._begin(node)
        while self._events and not self._finished():
            self.now, _, _, kind, who, ticket = heapq.heappop(self._events)
            match kind:
                case FleetEvent.STEP:
                    if self.nodes[who].ticket == ticket and self.nodes[who].alive:
                        self._step_ends(self.nodes[who])
                case FleetEvent.COMMIT:
                    self._commit(who)
                case FleetEvent.KILL:
                    self._kill(int(self._random.choice([n.number for n in self._living()])))
                case FleetEvent.JOIN:
                    self._replace_killed()
            for p in range(len(self.rounds)):
                self._close_if_due(p)
        assert self._finished(), "nobody trains and nothing is exchanged"
        self._finish()

    def _finished(self) -> bool:
        """Whether the tokens that were asked for are committed or in the parameters of somebody alive."""
        goal = self.conditions.steps * self.conditions.nodes * self.step_tokens
        return self.committed + self._outstanding() * self.step_tokens >= goal - 0.5 * self.step_tokens

    def _finish(self) -> None:
        """Commit what is being exchanged, then a last round of each fragment for what is left."""
        for node in self.nodes:
            self._halt(node)
        self._last = True
        for time, _, _, kind, who, _ in sorted(self._events):
            if kind is FleetEvent.COMMIT:
                self.now = time
                self._commit(who)
        for p, round_ in enumerate(self.rounds):
            if any(node.shares[p].owed for node in self.nodes if node.alive):
                round_.phase, round_.included = RoundPhase.CLOSING, {}
                for node in self._living():
                    self._contribute(node, p)
                self._commit(p)
        for node in self._living():
            node.idle += self.now - node.stopped
            self._present += self.now - node.joined
        self.val_loss = self.anchor_loss()

    @property
    def step_tokens(self) -> int:
        """The tokens of one inner step of one node."""
        return self.run.inner.batch_size * self.run.model.seq_len

    @property
    def utilisation(self) -> float:
        """The share of the nodes' time in which they trained."""
        idle = self.idle_of_killed + sum(node.idle for node in self.nodes if node.alive)
        return 1.0 - idle / self._present if self._present else 1.0

    @property
    def numel(self) -> int:
        """The number of the model's parameters."""
        return sum(state.fragment.numel for state in self.states)

    def anchor(self) -> F32:
        """Copy the anchor of the whole model, (numel,) fp32."""
        flat = np.empty(self.numel, np.float32)
        for state in self.states:
            state.fragment.scatter(state.anchor, flat)
        return flat

    def anchor_loss(self) -> float:
        """The validation loss of the anchor."""
        self._evaluator.flat[:] = self.anchor()
        return self._evaluator.validation_loss()

    # Inner steps

    def _begin(self, node: SimulatedNode) -> None:
        """Start the next step, unless the node has to wait."""
        if node.busy or not node.alive or self._last or self._must_wait(node):
            return
        node.idle += self.now - node.stopped
        node.busy, node.started, node.ticket = True, self.now, node.ticket + 1
        self._schedule(self.now + 1.0 / node.speed, FleetEvent.STEP, node.number, node.ticket)

    def _must_wait(self, node: SimulatedNode) -> bool:
        for share, round_ in zip(node.shares, self.rounds, strict=True):
            if share.steps_since >= round_.max_steps:
                return True
            travels = round_.phase is not RoundPhase.OPEN and share.sent is not None
            if travels and share.steps_after >= round_.max_ahead:
                return True
        return False

    def _step_ends(self, node: SimulatedNode) -> None:
        fleet = self.conditions.nodes if self.liars else len(self._living())
        uncommitted = self.step_tokens * fleet * sum(s.owed for s in node.shares) / len(node.shares)
        rate = learning_rate(self.run.inner, self.committed + uncommitted)
        if self._trains(node.number):
            node.losses.append(node.trainer.step(self.cursor, rate))
        self.cursor += self.run.inner.batch_size
        node.busy, node.stopped = False, self.now
        for p, share in enumerate(node.shares):
            share.steps_since, share.owed = share.steps_since + 1, share.owed + 1
            share.steps_after += share.sent is not None
            if share.pending and share.steps_after >= self.rounds[p].delay:
                self._adopt(node, p)
            if node.number in self.rounds[p].finishing:
                self._contribute(node, p)
        self._begin(node)

    def _halt(self, node: SimulatedNode) -> None:
        """The step at hand is not taken."""
        if node.busy:
            node.busy, node.ticket, node.stopped = False, node.ticket + 1, self.now

    # Rounds

    def _close_if_due(self, p: int) -> None:
        round_ = self.rounds[p]
        if round_.phase is RoundPhase.CLOSING and not round_.finishing:
            self._send(p)
            return
        if round_.phase is not RoundPhase.OPEN:
            return
        here = self._living()
        counted = [node for node in here if node.joined <= round_.opened] or here
        reached = sum(node.shares[p].steps_since >= round_.due for node in counted)
        if not counted or reached < max(1, ceil(self.run.rounds.quorum * len(counted))):
            return
        round_.quorum = self.now if round_.quorum is None else round_.quorum
        deadline = round_.quorum + self.run.rounds.grace * (round_.quorum - round_.opened)
        if any(self._reaches(node, p) <= deadline for node in counted if node.shares[p].steps_since < round_.due):
            return
        round_.phase, round_.closed = RoundPhase.CLOSING, self.now
        for node in here:
            if node.busy and node.started < self.now:
                round_.finishing.add(node.number)
            else:
                self._contribute(node, p)
        if not round_.finishing:
            self._send(p)

    def _reaches(self, node: SimulatedNode, p: int) -> float:
        """When the node will have the round's inner steps, if nothing happens."""
        missing = self.rounds[p].due - node.shares[p].steps_since
        if node.busy:
            return node.started + missing / node.speed
        return float("inf")

    def _contribute(self, node: SimulatedNode, p: int) -> None:
        """Send what the node has of the fragment; from now on its round waits for it no more."""
        share, state, round_ = node.shares[p], self.states[p], self.rounds[p]
        round_.finishing.discard(node.number)
        if share.pending:
            self._adopt(node, p)
        if not share.owed:
            return
        local = np.empty_like(state.anchor)
        state.fragment.gather(node.trainer.flat, local)
        delta = state.anchor - local
        if self.method.feedback is not None:
            if share.residual is None:
                share.residual = np.zeros_like(delta)
            share.offered = np.empty_like(delta)
            self.method.feedback.offer(share.residual, delta, share.offered)
            delta = share.offered
        refused, claim, liar = False, 1.0, self.liars.get(node.number)
        if liar is not None:
            others = [m.decoded for number, m in sorted(round_.included.items()) if number not in self.liars]
            delta, claim = liar.delta(p, delta, others), liar.claim
            if liar.lie.kind is LieKind.NAN:  # no encoder makes such bytes: it writes them itself
                refused, delta = state.refuses(0xFF), np.zeros_like(delta)
                self.refused += refused
        try:
            share.decoded = state.over_the_wire(delta)
        except NonFinite as error:
            raise NonFinite(
                f"training diverged on node {node.number} in round {state.round + 1}: {error}"
            ) from None
        share.sent, share.in_flight, share.steps_since, share.steps_after = local, share.owed, 0, 0
        if round_.delay == 0:
            self._halt(node)
        safe = self._last or round_.data_parallel
        arrives = self._random.random() >= self.conditions.drop or safe
        if arrives and not refused and self.defence.may_contribute(node.number, self.commits):
            factor = share.gap.damping if self.run.outer.damping else 1.0
            steps = round(share.owed * claim)
            round_.included[node.number] = MemberDelta(share.decoded, steps * self.step_tokens, steps, factor)

    def _in_data_parallel_start(self, p: int) -> bool:
        """Whether the fragment's round is one of those at the start that have one inner step."""
        return self.states[p].round < self.run.rounds.data_parallel

    def _next(self, p: int, due: int, opened: float = 0.0) -> FragmentRound:
        rounds, delay = self.run.rounds, self.run.overlap.delay
        if self._in_data_parallel_start(p):
            return FragmentRound(opened=opened, due=1, max_steps=1, data_parallel=True)
        fragment = -(-rounds.inner_steps // (len(self.states) if self.run.fragments.stagger else 1))
        max_ahead = max(fragment, int(fragment * rounds.ceiling), delay) if delay else 0
        return FragmentRound(opened=opened, due=due, max_steps=rounds.max_steps, delay=delay, max_ahead=max_ahead)

    def _send(self, p: int) -> None:
        """Begin the exchange: all contributions are there."""
        round_ = self.rounds[p]
        round_.phase = RoundPhase.EXCHANGING
        size = self.states[p].bytes_sent(len(round_.included))
        seconds = size * 8e-6 / self.conditions.bandwidth if self.conditions.bandwidth else 0.0
        self._schedule(self.now + self.conditions.latency + seconds, FleetEvent.COMMIT, p)

    def _commit(self, p: int) -> None:
        """End the exchange: the anchor moves, if anything arrived, and each node takes it or keeps what it
        trained."""
        round_, state = self.rounds[p], self.states[p]
        included = [round_.included[number] for number in sorted(round_.included)]
        old = state.anchor.copy()
        if included:
            members = len(included)
            self.bytes_sent += state.bytes_sent(members) * members / self.conditions.nodes
            self._seal_and_judge(p, sorted(round_.included), included)
            tokens = sum(c.tokens for n, c in round_.included.items() if n not in self.liars)
            self.committed += tokens * self._scale / len(self.states)
        for node in self._living():
            if node.number in round_.included and node.shares[p].sent is not None:
                self._counted(node, p)
            else:
                self._left_out(node, p, old if included else None)
            node.shares[p].offered = node.shares[p].decoded = None
        # After a data-parallel start, where all were exchanged at once, the fragments begin their turns.
        due = self.method.due[p] if round_.data_parallel else self.run.rounds.inner_steps
        self.rounds[p] = self._next(p, due, round_.closed)
        if included:
            self._record(p, state.round, included)
            if p == 0 and self.conditions.churn and not self._last and not self._in_data_parallel_start(p):
                self._churn(state.round - self.run.rounds.data_parallel)
        for node in self._living():
            if self.defence.is_out(node.number, self.commits):
                self._kill(node.number)
            self._begin(node)

    def _seal_and_judge(self, p: int, nodes: list[int], included: list[MemberDelta]) -> None:
        """Commit the contributions of these nodes, and hold against them what there is to hold."""
        state, fresh = self.states[p], [number in self._counted_last[p] for number in nodes]
        last, self.commits, self._counted_last[p] = state.sealed, self.commits + 1, set(nodes)
        squares, dots, reference = [norm(c.decoded) ** 2 for c in included], [0.0] * len(included), 0.0
        if last is not None:
            dots, reference = [dot(c.decoded, last) for c in included], norm(last) ** 2
        state.commit(included, Seals(self.defence, self.liars, self.commits, nodes))
        self.defence.judge(self.commits, nodes, squares, dots, reference, fresh)

    def _counted(self, node: SimulatedNode, p: int) -> None:
        """The commit counted the node's contribution: settle its feedback, and take the anchor if it is time."""
        share, round_ = node.shares[p], self.rounds[p]
        share.owed, share.in_flight, share.pending = share.owed - share.in_flight, 0, True
        share.gap.advance(self.states[p].moved, owed=False)
        if self.method.feedback is not None and share.offered is not None and share.decoded is not None:
            assert share.residual is not None
            self.method.feedback.commit(share.residual, share.offered, share.decoded)
        if share.steps_after >= round_.delay and not node.busy:
            self._adopt(node, p, replace if round_.data_parallel else self.method.adopt)

    def _left_out(self, node: SimulatedNode, p: int, old: F32 | None) -> None:
        """The round did not count the node's contribution, or it made none. `old`: the anchor (numel,) before the
        commit; None: nothing was committed."""
        share = node.shares[p]
        if old is None:
            share.sent, share.in_flight = None, 0
            return
        if share.pending:
            self._adopt(node, p)
        else:
            self._replace(node, p, self.method.left_out, old)
            share.sent, share.in_flight = None, 0
        share.gap.advance(self.states[p].moved, owed=share.owed > 0)

    def _adopt(self, node: SimulatedNode, p: int, adopt: Adopt | None = None) -> None:
        """Take the newest anchor in place of the parameters that were sent."""
        share = node.shares[p]
        assert share.sent is not None
        self._replace(node, p, adopt or self.method.adopt, share.sent)
        share.pending, share.sent = False, None

    def _replace(
        self, node: SimulatedNode, p: int, adopt: Callable[[F32, F32, F32, F32], None], sent: F32
    ) -> None:
        state = self.states[p]
        local, scratch = np.empty_like(state.anchor), np.empty_like(state.anchor)
        state.fragment.gather(node.trainer.flat, local)
        adopt(local, state.anchor, sent, scratch)
        state.fragment.scatter(local, node.trainer.flat)

    # Who is there

    def _living(self) -> list[SimulatedNode]:
        return [node for node in self.nodes if node.alive]

    def _outstanding(self) -> float:
        """Inner steps of the living that are not committed, on average over the fragments."""
        honest = [node for node in self._living() if node.number not in self.liars]
        return self._scale * sum(share.owed for node in honest for share in node.shares) / len(self.states)

    @property
    def _scale(self) -> float:
        """Nodes of the run for each that is honest."""
        return self.conditions.nodes / (self.conditions.nodes - len(self.liars))

    def _trains(self, number: int) -> bool:
        """Whether the node trains, and does not only look as if: a lie may need no delta."""
        return number not in self.liars or self.liars[number].lie.kind in TRAINING

    def _join(self, number: int) -> SimulatedNode:
        node = SimulatedNode(number, self._make(), self.now, self.conditions.speed(number), [], stopped=self.now)
        node.shares = [FragmentShare() for _ in self.states]
        self.nodes[number : number + 1] = [node]
        return node

    def _churn(self, round_: int) -> None:
        """Kill in the middle of this round, or join at its beginning, as the conditions say."""
        every = self.conditions.churn
        if round_ % every == 0 and len(self._living()) > 1:
            half = 0.5 * self.run.rounds.inner_steps * self.conditions.step_seconds
            self._schedule(self.now + half, FleetEvent.KILL)
        if round_ % every == every // 2:
            self._schedule(self.now, FleetEvent.JOIN)

    def _kill(self, number: int) -> None:
        """Its inner steps since its last commit are gone with it; what travels arrives."""
        node = self.nodes[number]
        node.idle += 0.0 if node.busy else self.now - node.stopped
        self._halt(node)
        node.alive = False
        self.inner_steps_lost += max(share.owed for share in node.shares)
        self._present += self.now - node.joined
        self.idle_of_killed += node.idle
        for round_ in self.rounds:
            round_.finishing.discard(number)

    def _replace_killed(self) -> None:
        """A new node in the place of one that was killed: it has the anchor, and nothing else. Its learning rate
        rises, as a node's that has no moments."""
        for node in self.nodes:
            if not node.alive and not self.defence.is_out(node.number, self.commits):
                fresh = self._join(node.number)
                fresh.ticket = node.ticket + 1
                for state in self.states:
                    state.fragment.scatter(state.anchor, fresh.trainer.flat)
                fresh.trainer.begin_without_moments(
                    1 if self._in_data_parallel_start(0) else int(self.run.round_steps)
                )
                self._begin(fresh)
                return

    # Bookkeeping

    def _schedule(self, time: float, kind: FleetEvent, who: int = 0, ticket: int = 0) -> None:
        self._entries += 1
        heapq.heappush(self._events, (time, kind is not FleetEvent.COMMIT, self._entries, kind, who, ticket))

    def _record(self, p: int, round_: int, included: list[MemberDelta]) -> None:
        losses = [loss for node in self.nodes for loss in node.losses]
        every, together = self.run.data.eval_every, self.run.rounds.data_parallel
        count = round_ - together if round_ >= together else round_ / self.run.rounds.inner_steps
        due = p == 0 and not self._last and count % every == 0
        record = RoundRecord(
            p,
            round_,
            self.now,
            self.committed,
            len(included),
            self.bytes_sent,
            sum(losses) / len(losses) if losses else None,
            self.anchor_loss() if due else None,
        )
        for node in self.nodes:
            node.losses.clear()
        self.records.append(record)
        self._on_record(record)
