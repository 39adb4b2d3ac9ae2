"""What a node remembers of its rounds, and what it accounts for when it is asked."""

from atoll.comm.ids import NodeId, Round
from atoll.comm.incidents import IncidentKind, is_notable, mask
from atoll.comm.transport.path_tally import PathTallies, PathTally
from atoll.node.control.clock_offset import ClockOffset
from atoll.node.control.event_ring import EventRing
from atoll.node.control.round_account import MAX_INCIDENTS, MAX_LINKS, Accountant
from atoll.node.control.round_book import ROUNDS, RoundBook

A, B = NodeId("n1"), NodeId("n2")


def accountant(tallies: PathTallies | None = None) -> Accountant:
    return Accountant(tallies or PathTallies(), ClockOffset(), lambda start, end: end - start)


# The ring


def test_a_ring_forgets_the_oldest() -> None:
    ring = EventRing(3)
    for k in range(5):
        ring.record(10.0 * k, IncidentKind.PEER_LOST, NodeId(f"n{k}"))
    assert [i.peer for i in ring.between(0, 100)] == ["n2", "n3", "n4"]


def test_what_repeats_at_once_takes_one_place_and_what_repeats_later_another() -> None:
    ring = EventRing(3)
    ring.record(0.0, IncidentKind.TRAINER_DIED)
    for k in range(100):
        ring.record(1.0 + k / 200, IncidentKind.BYTES_SPOILED, A)
    ring.record(9.0, IncidentKind.BYTES_SPOILED, A)
    assert [i.kind for i in ring.between(0.0, 5.0)] == [IncidentKind.TRAINER_DIED, IncidentKind.BYTES_SPOILED]
    assert [i.at for i in ring.between(0.0, 10.0)] == [0.0, 9.0], "of each kind and peer the latest"


# The book


def test_a_round_goes_from_commit_to_commit_and_its_steps_are_counted() -> None:
    book = RoundBook()
    book.committed(6, 100.0)
    book.ordered(7, 100.5, continues=False)
    for k in range(1, 5):
        book.progress(7, k, 0.0, 100.5 + k)
    book.handed_over(105.0)
    book.committed(7, 107.0)
    entry = book.entry(7, 200.0)
    assert entry is not None and (entry.steps, entry.computing) == (4, 4.0)
    assert (entry.began, entry.ended, entry.still) == (100.0, 107.0, 1.0)
    assert book.entry(6, 200.0) is None and (latest := book.entry(8, 200.0)) is not None and latest.ended is None


def test_who_owes_no_step_stands_still_for_nobody() -> None:
    book = RoundBook()
    book.committed(6, 100.0)
    book.ordered(7, 100.0, continues=False)
    book.progress(7, 1, 0.0, 101.0)
    book.handed_over(101.0)
    entry = book.entry(7, 160.0)
    assert entry is not None and entry.still == 1.0


def test_a_trainer_that_hangs_stands_still_in_the_next_round_as_well() -> None:
    book = RoundBook()
    book.committed(6, 100.0)
    book.ordered(7, 100.0, continues=False)
    book.progress(7, 1, 0.0, 101.0)
    book.committed(7, 110.0)
    first, second = book.entry(7, 130.0), book.entry(8, 130.0)
    assert first is not None and second is not None
    assert (first.still, second.still) == (9.0, 29.0)


def test_waits_for_data_are_no_computing() -> None:
    book = RoundBook()
    book.committed(0, 0.0)
    book.ordered(1, 0.0, continues=False)
    book.progress(1, 1, 0.25, 4.0)  # a step, a quarter of it for data
    book.progress(1, 1, 1.0, 9.0)  # no step: it says that it waits
    entry = book.entry(1, 9.0)
    assert entry is not None and (entry.steps, entry.computing, entry.data) == (1, 3.0, 6.0)


def test_a_pause_counts_in_the_rounds_that_it_lasts() -> None:
    book = RoundBook()
    book.committed(0, 0.0)
    book.paused(True, 5.0)
    book.committed(1, 7.0)
    book.paused(False, 10.0)
    entries = [book.entry(k, 20.0) for k in (1, 2)]
    assert [e.paused for e in entries if e is not None] == [2.0, 3.0]


def test_few_rounds_are_remembered() -> None:
    book = RoundBook()
    for k in range(50):
        book.committed(k, float(k))
    assert sum(book.entry(k, 50.0) is not None for k in range(60)) == ROUNDS
    book.committed(3, 60.0)  # an old word
    assert book.latest is not None and book.latest.round == 50


# The clock


def test_a_clock_is_off_only_beyond_what_a_calls_round_trip_leaves_in_doubt() -> None:
    clock = ClockOffset()
    clock.add(1000.0, 1000.2, 0.2, 1000.1)
    assert clock.seconds == 0.0
    clock = ClockOffset()
    clock.add(1000.0, 1030.0, 30.0, 1000.0)  # it took 30 s: half of that may be anywhere
    assert clock.seconds == 0.0
    clock = ClockOffset()
    clock.add(4600.0, 4600.25, 0.25, 1000.125)
    assert clock.seconds == 3600.0


def test_a_clock_that_is_set_is_judged_by_what_follows() -> None:
    clock = ClockOffset()
    for k in range(4):
        clock.add(1000.0 + k, 1000.1 + k, 0.1, 1000.05 + k)
    clock.add(1004.0, 4604.1, 0.1, 1004.05)  # in the middle of a call
    assert clock.seconds == 0.0
    clock.add(4605.0, 4605.25, 0.25, 1005.125)
    assert clock.seconds == 3600.0
    clock.add(1006.0, 1006.5, 0.5, 1006.2)
    assert clock.seconds == 0.0


def test_a_coordinator_that_does_not_tell_its_time_makes_no_clock_wrong() -> None:
    clock = ClockOffset()
    clock.add(1000.0, 1000.1, 0.1, 0.0)
    assert clock.seconds == 0.0


# The account


def test_a_round_is_accounted_for_once_in_a_session() -> None:
    node = accountant()
    assert node.answer(7, "s.1") is not None
    assert node.answer(7, "s.1") is None
    assert node.answer(8, "s.1") is not None
    assert node.answer(8, "s.2") is not None, "whoever asks in another session has not heard it"


def test_an_account_has_what_happened_in_its_round_and_what_is_wrong_now() -> None:
    node = accountant()
    node.book.committed(6, 100.0)
    node.ring.record(50.0, IncidentKind.TRAINER_DIED, value=-9)
    node.ring.record(104.0, IncidentKind.PEER_LOST, B)
    node.book.committed(7, 110.0)
    node.ring.record(112.0, IncidentKind.STATE_CHANGED, value=1)
    node.conditions = lambda: [IncidentKind.DISK_FULL]
    told = node.account(7, 115.0)
    assert [(i.kind, i.age, i.node_id) for i in told.incidents] == [
        (IncidentKind.PEER_LOST, 11.0, B),
        (IncidentKind.DISK_FULL, 0.0, ""),
    ]
    assert told.away == 11.0, "asked of the round's time"
    assert node.account(3, 115.0).steps == 0, "of a round that is forgotten it says what it knows"


def test_who_has_thousands_of_peers_and_incidents_tells_of_a_few() -> None:
    tallies = PathTallies()
    tallies.begin(Round(7))
    tallies.rounds[Round(7)] = {NodeId(f"n{k}"): PathTally(sent=10**6, busy=0.1 * k) for k in range(200)}
    tallies.rounds[Round(7)][NodeId("n5")].mute = 6.0
    tallies.rounds[Round(7)][NodeId("n9")].segments, tallies.rounds[Round(7)][NodeId("n9")].resent = 100, 30
    node = accountant(tallies)
    node.book.committed(6, 0.0)
    for k in range(200):
        node.ring.record(1.0 + k, IncidentKind.PEER_LOST, NodeId(f"n{k}"))
    told = node.account(7, 300.0)
    assert len(told.incidents) == MAX_INCIDENTS and len(told.links) == MAX_LINKS
    assert [link.node_id for link in told.links[:3]] == ["n5", "n9", "n199"]
    assert told.ByteSize() < 1500


def test_an_account_has_all_that_was_exchanged_and_what_its_owner_lets_through_now() -> None:
    """The upload of an owner goes on after its node has all; and of many paths some are told of."""
    tallies = PathTallies()
    tallies.begin(Round(7))
    tallies.rounds[Round(7)] = {NodeId(f"n{k}"): PathTally(sent=1000, received=10) for k in range(MAX_LINKS + 4)}
    node = accountant(tallies)
    told = node.account(7, 300.0)
    assert (told.sent, told.received) == (1000 * (MAX_LINKS + 4), 10 * (MAX_LINKS + 4))
    assert (told.limit_up, told.limit_down) == (0, 0)
    node.limits = lambda: (125_000.0, 250_000.0)
    told = node.account(7, 300.0)
    assert (told.limit_up, told.limit_down) == (125_000, 250_000)


def test_the_kinds_of_a_round_are_told_as_bits() -> None:
    node = accountant()
    assert node.incidents() == 0
    node.conditions = lambda: [IncidentKind.DISK_FULL]
    assert node.incidents() == mask([IncidentKind.DISK_FULL]) == 1 << 6
    assert is_notable(node.incidents())
    assert not is_notable(mask([IncidentKind.PEER_LOST])) and not is_notable(1 << 31)
