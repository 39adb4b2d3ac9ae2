"""Which events become durable together; what the simulation does not show."""

from dataclasses import dataclass
from pathlib import Path

from scenario import CONFIG

from atoll.comm.ids import NodeId
from atoll.coordinator.service.group_commit import MAX_BATCH_EVENTS, GroupCommit
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.journaled_machine import JournaledMachine
from atoll.coordinator.service.tick_schedule import MAX_TICK_GAP
from atoll.coordinator.state_machine import events as ev

ADA = NodeId("n1")


@dataclass(frozen=True)
class Caller:
    """One that waits, or waits no more, for its event."""

    gone: bool = False

    def cancelled(self) -> bool:
        return self.gone


def group(folder: Path) -> GroupCommit[Caller]:
    return GroupCommit(JournaledMachine(CONFIG, Journal(folder)), 0.0)


def joined(number: int) -> ev.Joined:
    node = NodeId(f"n{number}")
    return ev.Joined(node, 1, node, f"{node}:1", f"session of {node}")


def test_a_long_queue_makes_several_commits_in_its_order(tmp_path: Path) -> None:
    commits = group(tmp_path)
    events = [joined(i) for i in range(1, MAX_BATCH_EVENTS + 3)]
    for event in events:
        commits.put(event)
    first = commits.prepare_queue(1.0)
    assert first.events == events[:MAX_BATCH_EVENTS] and commits.waiting
    assert commits.prepare_queue(2.0).events == events[MAX_BATCH_EVENTS:] and not commits.waiting


def test_an_event_whose_caller_is_gone_is_left_out(tmp_path: Path) -> None:
    commits, waits = group(tmp_path), Caller()
    commits.put(joined(1), Caller(gone=True))
    commits.put(joined(2), waits)
    commit = commits.prepare_queue(1.0)
    assert commit.events == [joined(2)] and commit.waiters == [waits]
    assert list(commit.batch.state.members.here) == ["n2"]


def test_of_a_nodes_heartbeats_the_latest_is_entered_with_the_next_commit(tmp_path: Path) -> None:
    machine = JournaledMachine(CONFIG, Journal(tmp_path))
    commits = GroupCommit[Caller](machine, 0.0)
    commits.put(joined(1))
    machine.adopt(commits.prepare_queue(1.0).batch)
    commits.hear(ev.Heartbeat(ADA, 1, "inner", 1, 4))
    commits.hear(ev.Heartbeat(ADA, 1, "inner", 1, 5))
    assert machine.state.members.here[ADA].heard_at == 1.0
    commit = commits.prepare_queue(2.0)
    assert not commit.batch.entries, "it makes nothing that must be written"
    assert (machine.state.members.here[ADA].heard_at, machine.state.members.here[ADA].step) == (2.0, (1, 5))


def test_after_the_coordinator_stood_still_the_machine_is_told_before_anything_else(tmp_path: Path) -> None:
    commits = group(tmp_path)
    commits.put(joined(1))
    assert commits.prepare_queue(MAX_TICK_GAP).events == [joined(1)]
    commits.put(joined(2), waits := Caller())
    commit = commits.prepare_queue(MAX_TICK_GAP + 40.0)
    assert commit.events == [ev.HeardNobody(40.0), joined(2)] and commit.waiters == [waits]
    assert commits.prepare_tick(MAX_TICK_GAP + 41.0).events == [ev.Tick()]
    assert commits.prepare_tick(100.0).events[0] == ev.HeardNobody(100.0 - MAX_TICK_GAP - 41.0)


def test_a_start_is_the_first_event_of_an_incarnation_however_long_it_took(tmp_path: Path) -> None:
    commits = group(tmp_path)
    assert commits.prepare_start(100.0, b"nonce").events == [ev.Started(1, b"nonce")]
    assert commits.prepare_tick(101.0).events == [ev.Tick()]
