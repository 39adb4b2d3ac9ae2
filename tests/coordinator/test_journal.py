"""The journal: what was appended is read back as it was, tokens are counted, one coordinator at a time."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.comm.config import RunConfig
from atoll.comm.errors import ConfigError, Refused, ResourceError
from atoll.comm.ids import NodeId
from atoll.coordinator import events as ev
from atoll.coordinator.journal import KINDS, Journal
from atoll.coordinator.machine import State, step

N = NodeId("n1")
EVENTS: list[ev.Event] = [
    ev.Started(1),
    ev.Joined(N, "ada", "h:1", "secret"),
    ev.Connected(N),
    ev.LayoutKnown(N, 1000, b"l" * 16),
    ev.StateAt(N, 0, b"d" * 16),
    ev.Evaluated(N, 0, 5.5),
    ev.BecameReady(N, 1, 10, 100, 10, 2.5, 0.1, 0),
    ev.Sealed(N, 1, 1, ((0, b"s" * 16),)),
    ev.PeerLost(N, NodeId("n2"), 1, 1, "reset"),
    ev.Held(N, 1, 1, b"r" * 16, 1, 2),
    ev.Disconnected(N),
    ev.Expired(N, "silent"),
    ev.Leaving(N, "bye"),
    ev.Tick(),
]


def test_every_durable_event_is_read_back_as_it_was(tmp_path: Path) -> None:
    assert {type(e).__name__ for e in EVENTS} | {"Heard"} == set(KINDS)
    journal = Journal(tmp_path)
    journal.append([(float(i), e) for i, e in enumerate(EVENTS)], [])
    journal.close()
    again = Journal(tmp_path)
    assert list(again.events()) == [(float(i), e) for i, e in enumerate(EVENTS)]
    again.close()


def test_replaying_gives_the_same_state(tmp_path: Path) -> None:
    state, journal = State(RunConfig()), Journal(tmp_path)
    for i, event in enumerate(EVENTS):
        state, _ = step(state, event, float(i))
        journal.append([(float(i), event)], [])
    replayed = State(RunConfig())
    for at, event in journal.events():
        replayed, _ = step(replayed, event, at)
    assert replayed == state
    journal.close()


def test_commit_records_are_read_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    records = [
        ev.CommitRecord(
            *(k, 1, 1, (N,), {N: 100.0}, 100 * k, 2.0, {"inner": 1.0}, {N: 5}, {N: 6}, "all ready", "ab"),
            digests={N: "cd"},
            val_loss=None if k == 2 else 1.0 / k,
        )
        for k in (1, 2, 3)
    ]
    journal.append([], records)
    assert journal.rounds() == records
    assert journal.rounds(since=2) == records[2:]
    journal.close()


def test_a_token_is_good_for_its_uses_and_its_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    token = journal.issue_token("for ada", 2, expires=100.0)
    assert journal.redeem_token(token, 50.0) == "for ada"
    assert journal.redeem_token(token, 50.0) == "for ada"
    with pytest.raises(Refused, match="used up"):
        journal.redeem_token(token, 50.0)
    with pytest.raises(Refused, match="expired"):
        journal.redeem_token(journal.issue_token("", 1, 100.0), 101.0)
    with pytest.raises(Refused, match="not one of this run's"):
        journal.redeem_token("guess", 50.0)
    journal.close()


def test_the_token_itself_is_not_in_the_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    token = journal.issue_token("", 1, 1e12)
    journal.close()
    assert all(token.encode() not in f.read_bytes() for f in tmp_path.iterdir())


def test_a_second_coordinator_is_refused_and_an_invite_is_not(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(ResourceError, match="another coordinator"):
        Journal(tmp_path)
    Journal(tmp_path, lock=False).close()
    journal.close()
    Journal(tmp_path).close()


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.set_meta("format", "99")
    journal.close()
    with pytest.raises(ConfigError, match="format 99"):
        Journal(tmp_path)


def test_joins_and_events_from_two_threads_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    token = journal.issue_token("", 100, 1e12)
    with ThreadPoolExecutor(2) as threads:
        joins = [threads.submit(journal.redeem_token, token, 0.0) for _ in range(100)]
        appends = [threads.submit(journal.append, [(float(i), ev.Tick())], []) for i in range(100)]
        for join in joins:
            join.result(30)
        for append in appends:
            append.result(30)
    assert len(list(journal.events())) == 100
    with pytest.raises(Refused, match="used up"):
        journal.redeem_token(token, 0.0)
    journal.close()
