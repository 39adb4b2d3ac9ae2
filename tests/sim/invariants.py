"""What must hold at every moment of every run. Each is a function with the promise as its docstring; `check_*` say
when it is looked at."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from sim.truth import Contribution, Mean, next_state, norm, root

from atoll.comm.bitmap import places
from atoll.comm.config.outer import WeightName
from atoll.comm.config.run import RunConfig
from atoll.comm.ids import NodeId
from atoll.comm.plan import Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.service.journaled_machine import Batch
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.events import CommitRecord
from atoll.coordinator.state_machine.ledger import Entry
from atoll.coordinator.state_machine.members import RECONNECT_GRACE_SECONDS, Member, MemberState
from atoll.coordinator.state_machine.state import Phase, State

if TYPE_CHECKING:
    from sim.node import Node
    from sim.service import Service
    from sim.world import World


class Violation(AssertionError):
    pass


def hold(condition: bool, sentence: str) -> None:
    if not condition:
        raise Violation(sentence)


# After every write of the coordinator


def check_written(world: "World", before: State, batch: Batch) -> None:
    after = batch.state
    if void := [record for record in batch.records if record.void]:
        only_what_nobody_can_bring_is_void(world, before, batch, void)
    never_backwards(world, before, batch)
    if len(batch.entries) == 1:  # else the quorum may be lost again by the next one
        rounds_close_at_a_quorum(before, after)
    no_round_waits_for_suspects(after)
    epochs_name_memberships(before, after)
    members_said_what_is_believed(world, before, after)
    plan = after.round.plan
    if plan is not None:
        attempts_end_in_time(world, batch)
        if plan is not before.round.plan:
            fences_grow(world, plan.fence)
    if after.round is not before.round:
        check_ledger(world, before, after)
    who_left_takes_what_may_be_committed(world, before, batch)
    if after.committed != before.committed:
        check_commit(world, before, batch)
    if after.digest != before.digest or after.committed != before.committed:
        the_digest_is_the_logs(world, after)
    if after.leases is not before.leases or after.members.departed is not before.members.departed:
        every_sample_has_one_place(world, after)
    if after.members is not before.members or after.digest != before.digest:
        members_have_the_runs_state(after)
        for node in world.nodes.values():
            active_nodes_have_the_logs_state(world, node)
    for record in batch.records:
        published_once_in_order(world, record)


def check_ledger(world: "World", before: State, after: State) -> None:
    the_ledger_has_what_members_said(world, after)
    attempts_continue(world, after)
    if before.round.number == after.round.number:
        seals_are_their_owners(world, before, after)
        orphans_go_to_who_holds_them(world, before, after)


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
    world.truth.roots.append(after.sealed)
    world.truth.states.append(next_state(world.truth.states[-1], after.sealed))


def only_what_nobody_can_bring_is_void(
    world: "World", before: State, batch: Batch, records: list[CommitRecord]
) -> None:
    """A committed round is void only when nobody who is here, and heard, has its state, unless patience with those
    that come and go has run out twice. Where all disks work it is the newest one alone. The run goes on from the
    state before."""
    truth, after, first, last = world.truth, batch.state, records[0].round, records[-1].round
    limit = 2 * len(records) * after.config.checkpoint.patience
    spent = before.lost_state is not None and batch.now >= before.lost_state.at + limit
    hold([r.round for r in records] == list(range(first, len(truth.roots) + 1)), f"void are {records}")
    for node in world.living:
        holds = node.state == (last, truth.states[last]) and node.still and not node.control.joining
        known = after.members.trusted(node.me) and after.members.here[node.me].life == node.control.life
        hold(
            spent or not (holds and known and not node.stopped),
            f"round {last} is void, though {node.me} has its state",
        )
    for host in world.hosts.values():
        back = host.gone or host.sick or host.disk is None or host.disk.state() != (last, truth.states[last])
        hold(back, f"round {last} is void, though the disk of {host.name} has its state")
    certain = not after.config.checkpoint.copies and all(h.disk is not None for h in world.hosts.values())
    hold(last == first or not certain, f"rounds {first} to {last} are void, though disks had the first of them")
    hold(after.digest == truth.states[first - 1], f"the run does not go on from state {first - 1}")
    truth.states[first:] = [truth.states[first - 1]] * (last - first + 1)
    truth.roots[first - 1 :] = [b"void"] * (last - first + 1)
    truth.void |= {*range(first, last + 1)}
    truth.tokens = truth.tokens_at[first - 1]
    truth.tokens_at |= dict.fromkeys(range(first, last + 1), truth.tokens)
    hold(after.tokens == truth.tokens, f"the run has {truth.tokens} tokens, not {after.tokens}")


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
    counts = Counts(world.config, entries)
    parts, most = Counter[NodeId](), Counter[NodeId]()
    for c, (payload, mean) in enumerate(means):
        hold(mean.chunk == c, f"the bytes of chunk {mean.chunk} of round {k} are committed as chunk {c}")
        nodes = [x.node for x in mean.contributions]
        hold(len(set(nodes)) == len(nodes), f"a node is twice in chunk {c} of round {k}: {nodes}")
        real = tuple(counts.of(x.node, len(x.samples), counts.behind(x)) for x in mean.contributions)
        hold(real == mean.weights, f"chunk {c} of round {k} was weighed {mean.weights} for {real}")
        hold(mean.length == counts.length, f"chunk {c} of round {k} has the length {mean.length}")
        listed = {
            tuple(entries[i].node for i in places(inputs))
            for (_, r, since, chunk), (sum_, inputs) in truth.seals.items()
            if (r, chunk, sum_) == (k, c, payload) and since >= truth.began[k]
        }
        hold(listed == {tuple(nodes)}, f"chunk {c} of round {k} has {nodes}, its seal lists {listed}")
        for x in mean.contributions:
            hold(x.base == base or x.node in truth.flipped, f"{x.node} has steps on another state in round {k}")
            parts[x.node] += grid.size(c)
            most[x.node] = max(most[x.node], len(x.samples))
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

    def __init__(self, config: RunConfig, entries: tuple[Entry, ...]) -> None:
        first = min(entry.since for entry in entries)
        founders = [e.contribution for e in entries if e.since == first and e.contribution is not None]
        self.config, self.batch, self.entries = config, config.inner.batch_size, entries
        behind = [c.samples + c.earlier for c in founders]
        steps = [n / self.batch for n in behind]
        self.length = sum(steps) / len(steps) / config.rounds.inner_steps if config.outer.per_token else 1.0
        self.weights = self._raw(behind)
        norms = sorted(c.norm for c in founders)
        self.limit = norms[(len(norms) - 1) // 2]

    def of(self, node: NodeId, samples: int, behind: int) -> tuple[float, float]:
        """Weight and scale of a delta with steps on so many samples behind it, `samples` of them not committed."""
        (weight,) = self._raw([behind])
        if self.config.outer.weights is WeightName.QUALITY:
            weight = min(weight, 4 * median(self.weights))
        own = norm(node, samples)
        return weight, self.limit / own if self.config.outer.clip and own > self.limit else 1.0

    def behind(self, x: Contribution) -> int:
        """Samples that are behind it."""
        known = max(e.contribution.earlier for e in self.entries if e.node == x.node and e.contribution)
        return min(known + len(x.samples), len(x.behind)) if x.vague else len(x.behind)

    def _raw(self, samples: list[int]) -> list[float]:
        tokens = [float(n * self.config.model.seq_len) for n in samples]
        match self.config.outer.weights:
            case WeightName.QUALITY:
                return [t * (t / (n / self.batch)) for t, n in zip(tokens, samples, strict=True)]
            case WeightName.EQUAL:
                return [1.0 for _ in tokens]
        return tokens


def rounds_close_at_a_quorum(before: State, after: State) -> None:
    """A round is closed when its quorum has its inner steps, or has stopped; others may enter at that."""
    r, there = after.round, min(len(before.round.participants), len(after.round.participants))
    if r.phase is Phase.COLLECTING and before.round.phase is Phase.INNER:
        done, need = r.reached | r.ledger.contributions.keys(), after.config.rounds.quorum * there
        hold(len(done) >= need, f"round {r.number} closes with {len(done)} of {there} members")


def no_round_waits_for_suspects(state: State) -> None:
    """A round that closes and has its quorum waits only for members that may still answer."""
    r = state.round
    if r.phase is not Phase.COLLECTING or r.planned_at is not None:
        return
    trusted = [n for n in r.participants if state.members.trusted(n)]
    ready = [n for n in trusted if n in r.ledger.contributions]
    need = max(state.config.rounds.quorum * len(r.participants), min(2, len(r.participants)))
    reducers = (m for m in state.members.here.values() if m.trusted_as(MemberState.REDUCER))
    dialled = any(not state.members.here[n].leaf for n in ready) or any(reducers)
    enough = len(ready) >= max(need, state.config.members.minimum) and dialled
    hold(not enough or len(ready) < len(trusted), f"round {r.number} has all that it can wait for, and waits")


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


def who_left_takes_what_may_be_committed(world: "World", before: State, batch: Batch) -> None:
    """Samples of who left for good are leased again, unless they are in sealed chunks or may be."""
    here, k = before.members.here, before.round.number
    for _, event in batch.entries:
        if isinstance(event, ev.Leaving) and event.node in here and event.life == here[event.node].life:
            for entry in world.truth.entries.get(k, ()):
                if entry.node == event.node and entry.contribution is not None:
                    life = event.node, entry.contribution.life
                    world.truth.withheld.update(world.truth.contributed[life, k])


def every_sample_has_one_place(world: "World", state: State) -> None:
    """Every sample given out so far is consumed, free, or in one lease, and who left for good has none."""
    leases, consumed = state.leases, world.truth.consumed | world.truth.withheld
    end, size = 0, 0
    for first, count in sorted([*leases.free, *(r for lease in leases.by_node.values() for r in lease)]):
        hold(first >= end and count > 0, f"sample {first} is in two leases, or a lease is empty: {leases}")
        hold(consumed.isdisjoint(range(first, first + count)), f"{first}..{first + count - 1} was consumed before")
        end, size = first + count, size + count
    hold(end <= leases.next, f"samples beyond {leases.next} are leased")
    lost = leases.next - size - len(consumed)
    hold(lost == 0, f"{lost} samples are neither consumed, free nor leased")
    for node in leases.by_node:
        member = state.members.departed.get(node)
        left = member is not None and member.state is MemberState.LEFT
        hold(not left, f"{node} left with the lease {leases.by_node[node]}")


def fences_grow(world: "World", fence: Fence) -> None:
    """Each attempt's fence is above all earlier ones."""
    fences = world.truth.fences
    if fences.get((fence.round, fence.attempt)) != fence:
        newest = max(fences.values(), default=None)
        hold(newest is None or fence > newest, f"{fence} is planned after {newest}")
        one_plan_an_attempt(world, fence)


def a_plan_is_of_its_rounds_fragment(world: "World", plan: pb.Plan) -> None:
    """A plan has an owner for each chunk of the fragment that the round's number says, and for no other."""
    grid, told = world.chunks(plan.round), f"round {plan.round} has {len(plan.owners)} chunks of {plan.numel}"
    hold((len(plan.owners), plan.numel) == (grid.count, grid.numel), f"{told}, its fragment {grid}")


def a_round_has_its_inner_steps(world: "World", order: pb.Train) -> None:
    """The rounds of all fragments together have the inner steps of the run's config."""
    rounds = world.config.rounds
    steps = 1 if order.round <= rounds.data_parallel else world.turns.steps(order.round, rounds.inner_steps)
    hold(order.steps == steps <= order.ceiling, f"round {order.round} has {order.steps} inner steps, not {steps}")


def one_plan_an_attempt(world: "World", fence: Fence) -> None:
    """At most one plan is in force for (round, attempt), whoever saw it."""
    known = world.truth.fences.setdefault((fence.round, fence.attempt), fence)
    hold(known == fence, f"attempt {fence.attempt} of round {fence.round} is {known} and {fence}")


def one_result_an_attempt(world: "World", round_: int, since: int, chunk: int, payload: bytes) -> None:
    """No two different sealed results of a chunk since one attempt."""
    known = world.truth.sealed.setdefault((round_, since, chunk), payload)
    hold(known == payload, f"chunk {chunk} of {round_}/{since} was sealed twice, with different bytes")


def attempts_end_in_time(world: "World", batch: Batch) -> None:
    """No attempt is in force for longer than it may."""
    plan, limit = batch.state.round.plan, world.config.rounds.reduce_timeout
    assert plan is not None
    took = batch.now - plan.opened_at
    hold(took < limit + 1.0, f"{plan.fence} is in force for {took:.1f} s of {limit:g}")


def members_said_what_is_believed(world: "World", before: State, after: State) -> None:
    """What is believed of a member, this life of it has said: the state that it holds, and that it left."""
    said, truth_void = world.truth.said, world.truth.void
    for node, m in after.members.here.items():
        b = before.members.here.get(node)
        if m is b or m.state_round < 0:
            continue
        state = f"state {m.state_round} ({m.state_digest.hex()})"
        told = any(  # under an earlier number, where the rounds since are void
            ev.StateReported(node, m.life, r, m.state_digest) in said
            and truth_void.issuperset(range(r + 1, m.state_round + 1))
            for r in range(m.state_round, -1, -1)
        )
        hold(told, f"{node} is believed to hold {state} in life {m.life}")
        old = b is not None and b.life == m.life and b.state_round > m.state_round
        hold(not old, f"{node} is believed to have gone back to {state}")
    for node in after.members.departed.keys() - before.members.departed.keys():
        m = after.members.departed[node]
        if m.state is MemberState.LEFT:
            left = any(isinstance(e, ev.Leaving) and (e.node, e.life) == (node, m.life) for e in said)
            hold(left, f"{node} is said to have left in life {m.life}")


def the_ledger_has_what_members_said(world: "World", state: State) -> None:
    """Contributions and held bytes are of this round, as they were told."""
    truth, r = world.truth, state.round
    here = state.members.here
    for node, c in r.ledger.contributions.items():
        hold(c.front == state.leases.by_node[node][0][0], f"the work of {node} is of another lease")
        ready = ev.ContributionReady(node, here[node].life, r.number, replace(c, life=0, earlier=0))
        hold(ready in truth.said, f"{node} never said that it is ready with {c.samples} samples")
    for node, held in r.completions.items():
        right = held.fence.round == r.number and (node not in here or held.life == here[node].life)
        hold(held in truth.said and right, f"{node} never said that it holds {held.fence}")
        newest = max(r.ledger.since, default=0)
        hold(held.fence.attempt >= newest, f"{node} holds {held.fence}, but chunks have owners since {newest}")
    if r.plan is not None:
        for orphans in r.plan.orphans.values():
            right = orphans in truth.said and orphans.fence == r.plan.fence
            hold(right, f"{orphans.node} did not tell its orphans of {r.plan.fence}")
        for node, chunks in r.plan.missing_chunks.items():
            said = node in here and ev.ChunksMissing(node, here[node].life, r.plan.fence, chunks) in truth.said
            hold(said, f"{node} did not say what it lacks of {r.plan.fence}")


def attempts_continue(world: "World", state: State) -> None:
    """Places are given once, who is gone stays gone, and a chunk has one owner since an attempt."""
    truth, r, ledger = world.truth, state.round, state.round.ledger
    known = truth.entries.get(r.number, ())
    if not ledger.entries:  # if there were some, everybody was away, and the round begins anew
        truth.entries[r.number], truth.began[r.number] = (), ledger.attempt + 1
        return
    hold(len(ledger.entries) >= len(known), f"round {r.number} had {len(known)} places")
    for old, new in zip(known, ledger.entries, strict=False):
        same = (old.node, old.contribution) == (new.node, new.contribution) and new.gone >= old.gone
        hold(same, f"a place of {old.node} in round {r.number} is now of {new.node}")
    truth.entries[r.number] = ledger.entries
    alive = [e.node for e in ledger.entries if not e.gone]
    hold(len(set(alive)) == len(alive), f"a member has two places: {alive}")
    for c, (owner, since) in enumerate(zip(ledger.owners, ledger.since, strict=True)):
        first = truth.owners.setdefault((r.number, since, c), owner)
        hold(owner == first, f"chunk {c} of {r.number}/{since} is owned by {first} and by {owner}")


def seals_are_their_owners(world: "World", before: State, after: State) -> None:
    """A chunk is sealed as its owner said first, since it owns it; and stays so, unless nobody holds it."""
    was, is_, k = before.round.ledger, after.round.ledger, after.round.number
    for c, seal in is_.sealed.items():
        if c not in was.sealed:
            owner, since = was.owners[c], was.since[c]
            first = None if owner is None else world.truth.seals.get((owner, k, since, c))
            foretold = owner and (owner, k, since, c, seal.digest, seal.inputs) in world.truth.foretold
            right = (seal.digest, seal.inputs) == first or foretold
            hold(bool(right), f"chunk {c} of {k}/{since} is sealed otherwise than {owner} did first")
        else:
            hold(was.sealed[c] == seal, f"chunk {c} of round {k} is sealed anew")
    for c in was.sealed.keys() - is_.sealed.keys():
        hold(not is_.owners or is_.since[c] > was.since[c], f"chunk {c} of round {k} is not sealed any more")


def orphans_go_to_who_holds_them(world: "World", before: State, after: State) -> None:
    """A sealed chunk gets another owner only if that told the ledger's digest of it, and is reopened only when
    all members that can be dialled told that they do not have it."""
    was, is_, k = before.round.ledger, after.round.ledger, after.round.number
    plan = before.round.plan
    if plan is None or not was.orphans or not is_.owners or is_.attempt != was.attempt + 1:
        return
    told = [e for e in world.truth.said if isinstance(e, ev.OrphansFound) and e.fence == plan.fence]
    said = {e.node: dict(e.here) for e in told}
    for c in was.orphans:
        owner, digest = is_.owners[c], was.sealed[c].digest
        if c in is_.sealed and owner is not None:
            right = said.get(owner, {}).get(c) == digest
            hold(right, f"chunk {c} of round {k} is given to {owner}, which told {said}")
        elif c not in is_.sealed:
            leaves = {n for n in is_.members if before.members.here[n].leaf}
            nobody = all(n in said and (n in leaves or said[n].get(c) != digest) for n in is_.members)
            hold(nobody, f"chunk {c} of round {k} is reopened, though members told {said}")


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


def members_have_the_runs_state(state: State) -> None:
    """Whoever counts has told the run's digest of the state that it holds; and members are counted right."""
    members, here = state.members, state.members.here.values()
    suspects = {m.node for m in here if m.suspected is not None}
    hold(members.suspects == suspects, f"{suspects} are suspects, known are {members.suspects}")
    holding = Counter(m.state_round for m in here)
    hold(members.holding == holding, f"states are held as in {holding}, known is {members.holding}")
    trusted = Counter(m.state for m in here if m.suspected is None)
    hold(members.trusted_counts == trusted, f"trusted are {trusted}, known is {members.trusted_counts}")
    for member in state.members.here.values():
        if member.state in (MemberState.ACTIVE, MemberState.SYNCED) and member.state_round == state.committed:
            same = not state.digest or member.state_digest == state.digest
            hold(same, f"{member.node} is {member.state} with another state than the run's")


def published_once_in_order(world: "World", record: CommitRecord) -> None:
    """A commit record is published once, in order, with its members' digests equal or the differing ones named."""
    truth = world.truth
    due = truth.published[-1] + 1 if truth.published else 1
    again = record.void and record.round < due
    hold(record.round == due or again, f"the record of round {record.round} is published instead of {due}")
    if not again:
        truth.published.append(record.round)
    for node, state in record.digests.items():
        said = any(
            isinstance(e, ev.StateReported) and (e.node, e.round, e.digest.hex()) == (node, record.round, state)
            for e in truth.said
        )
        hold(said, f"{node} never said that it has {state} in round {record.round}")
    equal = set(record.digests.values()) <= {record.state_digest}
    hold(record.digests_equal == equal or not record.digests, f"digests_equal is wrong: {record}")
    if record.state_digest and len(truth.states) > record.round:
        same = record.state_digest == truth.states[record.round].hex()
        hold(same, f"the record of round {record.round} has another digest than the run")


def never_backwards(world: "World", before: State, batch: Batch) -> None:
    """Time, epoch, rounds and tokens never go back, and each start of the coordinator is a new incarnation."""
    after = batch.state
    hold(batch.now >= world.last, f"the clock went back from {world.last} to {batch.now}")
    world.last = batch.now if batch.entries else world.last
    starts = sum(isinstance(event, ev.Started) for _, event in batch.entries)
    hold(
        after.incarnation == before.incarnation + starts, f"incarnation {after.incarnation} after {starts} starts"
    )
    for what in ("epoch", "committed", "tokens"):
        old, new = getattr(before, what), getattr(after, what)
        void = what == "tokens" and any(record.void for record in batch.records)
        hold(new >= old or void, f"{what} went back from {old} to {new}")


def epochs_name_memberships(before: State, after: State) -> None:
    """No two memberships in a row have the same epoch."""
    same = before.members.here is after.members.here or before.members.generation == after.members.generation
    hold(same or after.epoch > before.epoch, f"epoch {after.epoch} names two memberships")


def _means(world: "World", record: CommitRecord) -> list[tuple[bytes, Mean]]:
    """What was committed, chunk by chunk."""
    truth = world.truth
    held = {p for node in record.bytes_up for p in truth.held[node, record.round]}
    payloads = next(p for p in held if root(p).hex() == record.sealed_digest)
    return [(payload, truth.means[payload]) for payload in payloads]


# After every event, every tick, at a restart


def only_durable_states_are_shown(world: "World", service: "Service") -> None:
    """The coordinator's state, which views and answers show, is durable."""
    shown = service.state
    hold(shown is world.durable or shown is world.durable_before, "a state is shown that is not durable")


def replay_gives_what_was_durable(world: "World", replayed: State) -> None:
    """A restart finds exactly the state that was durable: nothing more, nothing less."""
    mine, theirs = durable(world.durable), durable(replayed)
    hold(mine == theirs, f"the replayed state is not the durable one: {'; '.join(differences(theirs, mine))}")


def differences(a: object, b: object, where: str = "state") -> Iterator[str]:
    """Where two states differ."""
    if a == b:
        return
    if is_dataclass(a) and type(a) is type(b):
        for f in fields(a):
            yield from differences(getattr(a, f.name), getattr(b, f.name), f"{where}.{f.name}")
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in a | b:
            yield from differences(a.get(key), b.get(key), f"{where}[{key}]")
    else:
        yield f"{where}: {a} instead of {b}"


def durable(state: State) -> State:
    """Without what heartbeats move: they are not in the journal."""

    def still(members: dict[NodeId, Member]) -> dict[NodeId, Member]:
        return {
            n: replace(m, heard_at=0.0, moved_at=0.0, stuck=0.0, phase="", step=(0, 0)) for n, m in members.items()
        }

    members = replace(state.members, here=still(state.members.here), departed=still(state.members.departed))
    return replace(state, members=members)


def the_late_are_out(state: State, then: State, now: float) -> None:
    """Who was silent for its lease, hung while it was waited for, or did not come back is out at the next tick."""
    limits, back = state.config.members, RECONNECT_GRACE_SECONDS
    for node, m in then.members.here.items():
        late = now - m.heard_at > limits.lease or (not m.connected and now > m.expire_at + back)
        hung = node in then.awaited_members and now - m.moved_at > limits.stall
        here = state.members.here.get(node)
        out = here is None or here.life > m.life or here.heard_at > m.heard_at or here.connected > m.connected
        hold(out or not (late or hung), f"{node} is a member though it is {'late' if late else 'hung'}")


# At the nodes


def active_nodes_have_the_logs_state(world: "World", node: "Node") -> None:
    """The state of every active member is the log's, bit by bit."""
    round_, state = node.state
    states = world.truth.states
    if (
        0 <= round_ < len(states)
        and state != states[round_]
        and node.still
        and node.alive
        and world.durable.digest
    ):
        member = world.durable.members.here.get(node.me)
        if member is not None and member.trusted_as(MemberState.ACTIVE) and member.life == node.control.life:
            told = member.state_round == round_ == world.durable.committed
            hold(not told, f"{node.me} is active with another state {round_} than the log's")


def states_go_forward(world: "World", node: "Node", round_: int) -> None:
    """A node that had a state never goes back to an older one."""
    hold(round_ >= node.furthest, f"{node.me} goes back from state {node.furthest} to {round_}")
    node.furthest = round_


def sealed_bytes_are_the_logs(world: "World", node: "Node", round_: int, sealed: bytes) -> None:
    """Nodes step with the bytes that were committed, and no others."""
    roots = world.truth.roots
    hold(round_ <= len(roots), f"{node.me} applies round {round_} before it is committed")
    hold(roots[round_ - 1] == sealed, f"{node.me} applies other bytes of round {round_} than were committed")


def carried_work_is_the_front_of_the_lease(world: "World", node: "Node", lease: list[int], carried: int) -> None:
    """What a node believes to carry is what its local vector holds: the front of its lease, once."""
    hold(carried == len(node.local), f"{node.me} carries {carried} samples, its vector has {len(node.local)}")
    hold(node.local == lease[:carried], f"{node.me} carries {node.local}, its lease begins {lease[:carried]}")


def steps_ahead_are_the_next_ones(node: "Node", taken: list[int], samples: list[int]) -> None:
    """What a trainer took steps on while it was ahead is what its next order begins with."""
    hold(taken == samples[: len(taken)], f"{node.me} is ahead on {taken}, its order begins {samples}")


def steps_ahead_are_kept(node: "Node") -> None:
    """A trainer that is ahead starts anew only where what it handed over came to nothing."""
    hold(node.excused, f"{node.me} throws away its steps on {node.trainer.taken}")


def the_state_stands_still_until_it_is_taken(node: "Node", state: tuple[int, bytes]) -> None:
    """Between the order to go on and the step after which the trainer takes the new state, nobody moves it."""
    hold(node.still and node.state == state, f"{node.me} takes {state}, while it has {node.state}")


def only_committed_work_is_dropped(world: "World", node: "Node", samples: list[int], why: str) -> None:
    """A node throws no work away but what was committed."""
    lost = [s for s in samples if s not in world.truth.consumed]
    hold(not lost, f"{node.me} throws away its steps on {lost}: {why}")


def every_step_counts_once(world: "World", node: "Node") -> None:
    """Every sample that a node took steps on is committed once or will be, unless the work died with a trainer."""
    twice = Counter(node.steps)
    for sample in node.lost:
        twice[sample] -= 1
    for sample, count in twice.items():
        hold(count <= 1, f"{node.me} took steps on sample {sample} {count} times for nothing")
        kept = count < 1 or sample in world.truth.consumed or sample in node.local
        hold(kept, f"the steps of {node.me} on sample {sample} are neither committed nor kept")


# At the end of a run


def the_journal_has_every_record(world: "World") -> None:
    """What was published is in the journal, once and in order."""
    kept = [record.round for record in world.service.journal.rounds()]
    hold(
        kept == world.truth.published,
        f"the journal has the records {kept}, published were {world.truth.published}",
    )


def the_run_goes_on(world: "World", rounds: int, seconds: float) -> None:
    """When the faults end, rounds commit again and every living node is active again, by itself."""
    goal = world.durable.committed + rounds
    hold(
        world.until(lambda: world.durable.committed >= goal and not world.unwell(), seconds),
        f"after {seconds:g} s without faults {world.ailing(goal)}",
    )


def the_run_ends(world: "World", seconds: float) -> None:
    """When the faults end, a run of so many rounds commits them all, publishes them, and every node leaves."""
    total = world.config.rounds.total

    def over() -> bool:
        state = world.durable
        return state.committed == total and state.pending is None and all(n.host.sick for n in world.living)

    hold(world.until(over, seconds), f"after {seconds:g} s without faults {world.ailing(total)}")
    hold(world.truth.published == list(range(1, total + 1)), f"published were {world.truth.published} of {total}")
