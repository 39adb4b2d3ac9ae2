"""What a commit is, and what its bytes contain."""

from collections import Counter
from statistics import median
from typing import TYPE_CHECKING

from sim.invariants.violation import hold
from sim.truth import Contribution, Mean, next_state, norm, root

from atoll.comm.bitmap import places
from atoll.comm.config.outer import WeightName
from atoll.comm.config.run import RunConfig
from atoll.comm.ids import NodeId
from atoll.coordinator.service.journaled_machine import Batch
from atoll.coordinator.state_machine.events import CommitRecord
from atoll.coordinator.state_machine.ledger import Entry
from atoll.coordinator.state_machine.members import MemberState
from atoll.coordinator.state_machine.state import State

if TYPE_CHECKING:
    from sim.world import World


def check_commit(world: "World", before: State, batch: Batch) -> None:
    after = batch.state
    rounds_commit_once_and_in_order(world, before, after)
    record = next(r for r in (after.pending, *batch.records) if r is not None and r.round == after.committed)
    commits_come_from_the_plan_in_force(world, record)
    everyone_holds_what_is_committed(world, record)
    records_say_what_the_bytes_contain(world, record)
    commits_have_enough_members(world, record)
    no_sample_counts_twice(world, record)
    no_fragment_has_a_step_twice(world, record)
    nodes_are_told_what_counted(world, after, record)
    world.truth.credited[record.round] = {n: int(tokens) for n, tokens in record.contributors.items()}
    world.truth.roots.append(after.sealed)
    world.truth.states.append(next_state(world.truth.states[-1], after.sealed))


def rounds_commit_once_and_in_order(world: "World", before: State, after: State) -> None:
    """At most one commit a round number, and no number is left out."""
    hold(
        after.committed == before.committed + 1 == len(world.truth.roots) + 1,
        f"round {after.committed} is committed after round {before.committed} of {len(world.truth.roots)}",
    )


def commits_come_from_the_plan_in_force(world: "World", record: CommitRecord) -> None:
    """Only the newest attempt of a round can commit, which may have been opened by the same event."""
    newest = max(a for r, a in world.truth.fences if r == record.round)
    told = f"round {record.round} is committed by attempt {record.attempts} of {newest}"
    hold(newest <= record.attempts <= newest + 1, told)


def everyone_holds_what_is_committed(world: "World", record: CommitRecord) -> None:
    """The members of a commit's attempt have all its sealed bytes, and the same ones."""
    for node in record.bytes_up:
        held = world.truth.held.get((node, record.round), set())
        same = any(root(payloads).hex() == record.sealed_digest for payloads in held)
        hold(same, f"round {record.round} is committed, but {node} does not hold its bytes")


def records_say_what_the_bytes_contain(world: "World", record: CommitRecord) -> None:
    """Weights, contributors and tokens of the record are those of the contributions in the sealed bytes: each
    chunk is the weighted mean of exactly the contributions that its seal lists, no node's twice."""
    truth, k, sample = world.truth, record.round, world.config.model.seq_len
    base = truth.states[k - 1]
    means, entries, grid = _means(world, record), truth.entries[k], world.chunks(k)
    counts = Counts(world.config, entries, truth.hurried)
    parts, most, seen = Counter[NodeId](), Counter[NodeId](), Counter[NodeId]()
    for c, (payload, mean) in enumerate(means):
        hold(mean.chunk == c, f"the bytes of chunk {mean.chunk} of round {k} are committed as chunk {c}")
        nodes = [x.node for x in mean.contributions]
        hold(len(set(nodes)) == len(nodes), f"a node is twice in chunk {c} of round {k}: {nodes}")
        real = tuple(
            counts.of(x.node, len(x.samples), counts.behind(x) - counts.untimely(x)) for x in mean.contributions
        )
        as_told = [counts.is_as_told(x) for x in mean.contributions]
        right = all(a == b for a, b, told in zip(real, mean.weights, as_told, strict=True) if told)
        hold(right, f"chunk {c} of round {k} was weighed {mean.weights} for {real}")
        hold(mean.length == counts.length, f"chunk {c} of round {k} has the length {mean.length}")
        owners = {
            owner: tuple(entries[i].node for i in places(inputs))
            for (owner, r, since, chunk), (sum_, inputs) in truth.seals.items()
            if (r, chunk, sum_) == (k, c, payload) and since >= truth.began[k]
        }
        listed = set(owners.values())
        hold(listed == {tuple(nodes)}, f"chunk {c} of round {k} has {nodes}, its seal lists {listed}")
        for x in mean.contributions:
            seen[x.node] += 0 if x.node in owners else grid.size(c)
            hold(x.base == base or x.node in truth.flipped, f"{x.node} has steps on another state in round {k}")
            parts[x.node] += grid.size(c)
            most[x.node] = max(most[x.node], len(x.samples) - counts.untimely(x))
    for x in (x for _, mean in means for x in mean.contributions):
        told = f"{x.node} is in round {k}, as others saw it {x.times:g} times longer than it told"
        hidden = x.times**2 * seen[x.node] <= grid.numel or not counts.config.outer.clip
        hold(x.times == 1 or hidden or counts.is_seen_through(x), told)
    hold(parts.keys() == record.contributors.keys(), f"round {k} has {parts}, the record {record.contributors}")
    for node, tokens in record.contributors.items():
        exact = most[node] * sample * parts[node] / grid.numel
        right = tokens == exact if parts[node] == grid.numel else exact - 1.001 < tokens < exact + 0.001
        hold(right, f"{node} has {exact} tokens in round {k}, its record says {tokens}")
    for c, (_, mean) in enumerate(means):
        out = parts.keys() - {x.node for x in mean.contributions}
        hold(out == set(record.lacking.get(c, ())), f"chunk {c} of round {k} lacks {out}: {record.lacking}")
    tokens = truth.tokens + int(sum(record.contributors.values()))
    hold(record.tokens == tokens, f"the run has {tokens} tokens, not {record.tokens}")
    truth.tokens = truth.tokens_at[k] = tokens
    hold(abs(record.train_loss - 2.0) < 1e-9, f"round {k} has a loss of {record.train_loss}")
    hold(sum(record.shares.values()) < 1.001, f"the shares of round {k} are {record.shares}")


class Counts:
    """What contributions to a round are to count, by those of its first attempt."""

    def __init__(self, config: RunConfig, entries: tuple[Entry, ...], hurried: set[NodeId]) -> None:
        """`hurried`: who was once not believed; other fragments' samples of theirs are known for fewer."""
        self.hurried = hurried
        self.few = len({e.node for e in entries}) < 3
        first = min(entry.since for entry in entries)
        founders = [e.contribution for e in entries if e.since == first and e.contribution is not None]
        self.config, self.batch, self.entries = config, config.inner.batch_size, entries
        behind = [c.samples + c.earlier - c.untimely for c in founders]
        self.weights, self.bound = self._raw(behind), config.security.weight_bound
        steps = [n / self.batch for n in behind]
        steps = [min(n, self.bound * median(steps)) for n in steps]
        self.length = sum(steps) / len(steps) / config.rounds.inner_steps if config.outer.per_token else 1.0
        self.most = config.rounds.inner_steps * self.batch
        told = [(c.norm, min(n, self.most)) for c, n in zip(founders, behind, strict=True)]
        norms, steep = sorted(n for n, _ in told), sorted(n / done for n, done in told)
        self.limit, self.steep = norms[(len(norms) - 1) // 2], steep[(len(steep) - 1) // 2]

    def of(self, node: NodeId, samples: int, behind: int) -> tuple[float, float]:
        """Weight and scale of a delta with steps on so many samples behind it, `samples` of them not committed."""
        (weight,) = self._raw([behind])
        if self.config.outer.weights is WeightName.QUALITY:
            weights = [min(w, 4 * median(self.weights)) for w in self.weights]
            weight = min(weight, 4 * median(self.weights), self.bound * median(weights))
        weight = min(weight, self.bound * median(self.weights))
        own, limit = norm(node, samples), max(self.limit, self.steep * min(behind, self.most))
        return weight, limit / own if self.config.outer.clip and own > limit else 1.0

    def is_as_told(self, x: Contribution) -> bool:
        """Whether it counts by the norm that its node told."""
        told = norm(x.node, len(x.samples))
        return all(e.contribution.norm <= told for e in self.entries if e.node == x.node and e.contribution)

    def is_seen_through(self, x: Contribution) -> bool:
        """Whether it counts by a norm that others saw, or nobody else saw enough of it."""
        return not self.is_as_told(x) or self.few

    def untimely(self, x: Contribution) -> int:
        """Samples that count for nothing, as there was no time for their steps."""
        told = (e.contribution for e in self.entries if e.node == x.node)
        return max(c.untimely for c in told if c is not None and c.samples == len(x.samples))

    def behind(self, x: Contribution) -> int:
        """Samples that are behind it."""
        known = max(e.contribution.earlier for e in self.entries if e.node == x.node and e.contribution)
        return min(known + len(x.samples), len(x.behind)) if x.vague or x.node in self.hurried else len(x.behind)

    def _raw(self, samples: list[int]) -> list[float]:
        tokens = [float(n * self.config.model.seq_len) for n in samples]
        match self.config.outer.weights:
            case WeightName.QUALITY:
                return [t * (t / (n / self.batch)) for t, n in zip(tokens, samples, strict=True)]
            case WeightName.EQUAL:
                return [1.0 for _ in tokens]
        return tokens


def commits_have_enough_members(world: "World", record: CommitRecord) -> None:
    """A round never commits with fewer members than the run needs."""
    need = world.config.members.minimum
    hold(len(record.contributors) >= need, f"round {record.round} is committed by {record.contributors}")


def no_sample_counts_twice(world: "World", record: CommitRecord) -> None:
    """A sample that is in any chunk of a commit is in no chunk of another, and one node's."""
    nodes: dict[int, NodeId] = {}
    for _, mean in _means(world, record):
        for contribution in mean.contributions:
            for sample in contribution.samples:
                node = nodes.setdefault(sample, contribution.node)
                hold(node == contribution.node, f"sample {sample} is of {node} and of {contribution.node}")
    used = [s for s in nodes if s in world.truth.consumed]
    hold(not used, f"round {record.round} consumes samples that were consumed before: {used}")
    world.truth.consumed.update(nodes)


def no_fragment_has_a_step_twice(world: "World", record: CommitRecord) -> None:
    """The steps on a sample are in a fragment's deltas once, though each of the fragments has them; and what a
    node commits is in its delta."""
    p = world.turns.fragment(record.round)
    for c, (_, mean) in enumerate(_means(world, record)):
        spent = world.truth.spent.setdefault((p, c), set())
        for x in mean.contributions:
            twice = spent.intersection(x.behind)
            told = f"{x.node} has steps on {sorted(twice)[:3]} in chunk {c} of round {record.round}"
            hold(not twice and len(set(x.behind)) == len(x.behind), f"{told}, which the fragment {p} had before")
            lacks = set(x.samples) - set(x.behind)
            hold(not lacks, f"{x.node} commits {sorted(lacks)[:3]}, which its delta of round {record.round} lacks")
            spent.update(x.behind)


def nodes_are_told_what_counted(world: "World", after: State, record: CommitRecord) -> None:
    """With error feedback the coordinator knows of each node the last commit that has bytes of it, and of that the
    chunks that have none."""
    has: dict[NodeId, set[int]] = {}
    for _, mean in _means(world, record):
        for x in mean.contributions:
            has.setdefault(x.node, set()).add(mean.chunk)
    if not world.config.outer.feedback:
        return hold(not after.last_counted, f"without feedback {after.last_counted}")
    told = {
        n: set(places(lacking)) for n, (round_, lacking) in after.last_counted.items() if round_ == record.round
    }
    chunks = set(range(len(_means(world, record))))
    right = {n: chunks - having for n, having in has.items()}
    hold(told == right, f"round {record.round} lacks {right}, told is {told}")


def the_digest_is_the_logs(world: "World", state: State) -> None:
    """The digest that the run goes by is the one that its log gives."""
    states = world.truth.states
    if state.digest and state.committed == 0:
        states[:] = [state.digest]
    if not state.digest or state.digest == states[-1]:
        return
    makers = state.makers if state.pending is not None else ()
    living = [m for n, m in state.members.here.items() if n in makers and m.suspected is None]
    voters = [m for m in living if m.state is MemberState.ACTIVE or m.state_round == state.committed]
    wrong = [m for m in voters if m.state_round == state.committed and m.state_digest != states[-1]]
    no_majority = 2 * len(wrong) >= len(voters) and {m.node for m in wrong} <= world.truth.flipped
    hold(no_majority, f"state {state.committed} is not what the log gives")
    states[-1] = state.digest  # where no majority is right, the wrong bit is the run's, the same for everybody


def _means(world: "World", record: CommitRecord) -> list[tuple[bytes, Mean]]:
    """What was committed, chunk by chunk."""
    truth = world.truth
    held = {p for node in record.bytes_up for p in truth.held[node, record.round]}
    payloads = next(p for p in held if root(p).hex() == record.sealed_digest)
    hold(truth.vast.isdisjoint(payloads), f"round {record.round} has what is longer than any delta")
    return [(payload, truth.means[payload]) for payload in payloads]
