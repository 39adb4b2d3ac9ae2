"""What the journal has, and what is published of it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct
from sim.invariants.violation import hold

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.service.journaled_machine import Batch
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.events import CommitRecord
from atoll.coordinator.state_machine.makers import may_hold
from atoll.coordinator.state_machine.members import Member
from atoll.coordinator.state_machine.state import State

if TYPE_CHECKING:
    from sim.service import Service
    from sim.world import World


def only_what_nobody_can_bring_is_void(
    world: "World", before: State, batch: Batch, records: list[CommitRecord]
) -> None:
    """A committed round is void only when nobody who took part in it and is here, and heard, has its state, unless
    patience with those that come and go has run out twice. Where all disks work it is the newest one alone. The
    run goes on from the state before. Or nobody could tell which of its states was right."""
    truth, after, first, last = world.truth, batch.state, records[0].round, records[-1].round
    limit = 2 * len(records) * after.config.checkpoint.patience
    spent = before.lost_state is not None and batch.now >= before.lost_state.at + limit
    hold([r.round for r in records] == list(range(first, len(truth.roots) + 1)), f"void are {records}")
    # nobody could tell which of its states was right; it is void at once where others have the one before
    tied = before.tied or "nobody can tell" in records[-1].reason
    for node in () if tied else world.living:
        holds = node.state == (last, truth.states[last]) and node.still and not node.control.joining
        known = after.members.trusted(node.me) and after.members.here[node.me].life == node.control.life
        known = known and may_hold(before, node.me, last)  # else it made it as another, and lost that one's key
        hold(
            spent or not (holds and known and not node.stopped),
            f"round {last} is void, though {node.me} has its state",
        )
    for host in () if tied else world.hosts.values():
        members = (*before.members.here.values(), *before.members.departed.values())
        if not host.session or not any(m.key == host.key and may_hold(before, m.node, last) for m in members):
            continue
        back = host.gone or host.sick or host.disk is None or host.disk.state() != (last, truth.states[last])
        hold(spent or back, f"round {last} is void, though the disk of {host.name} has its state")
    certain = not after.config.checkpoint.copies and all(h.disk is not None for h in world.hosts.values())
    hold(last == first or not certain, f"rounds {first} to {last} are void, though disks had the first of them")
    hold(after.digest == truth.states[first - 1], f"the run does not go on from state {first - 1}")
    truth.states[first:] = [truth.states[first - 1]] * (last - first + 1)
    truth.void_roots |= dict(enumerate(truth.roots[first - 1 :], first))
    truth.roots[first - 1 :] = [b"void"] * (last - first + 1)
    truth.credited = {k: parts for k, parts in truth.credited.items() if k < first}
    truth.void |= {*range(first, last + 1)}
    truth.tokens = truth.tokens_at[first - 1]
    truth.tokens_at |= dict.fromkeys(range(first, last + 1), truth.tokens)
    hold(after.tokens == truth.tokens, f"the run has {truth.tokens} tokens, not {after.tokens}")


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
    if isinstance(a, Struct) and type(a) is type(b):
        for name in a.__struct_fields__:
            yield from differences(getattr(a, name), getattr(b, name), f"{where}.{name}")
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in a | b:
            yield from differences(a.get(key), b.get(key), f"{where}[{key}]")
    else:
        yield f"{where}: {a} instead of {b}"


def durable(state: State) -> State:
    """Without what heartbeats move: they are not in the journal."""

    def still(members: dict[NodeId, Member]) -> dict[NodeId, Member]:
        return {
            n: replace(
                m,
                heard_at=0.0,
                moved_at=0.0,
                stuck=0.0,
                phase="",
                step=(0, 0),
                step_before=(0, 0),
                says_paused=False,
                says_saves_bytes=False,
            )
            for n, m in members.items()
        }

    members = replace(state.members, here=still(state.members.here), departed=still(state.members.departed))
    return replace(state, members=members)


def the_journal_has_every_record(world: "World") -> None:
    """What was published is in the journal, once and in order."""
    kept = [record.round for record in world.service.journal.rounds()]
    hold(
        kept == world.truth.published,
        f"the journal has the records {kept}, published were {world.truth.published}",
    )
