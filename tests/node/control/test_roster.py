"""The roster pieced together from views, however they are cut, late or lost."""

import random

from atoll.comm.ids import NodeId, Pin, PublicKey
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.roster import RosterMember, roster_digest
from atoll.coordinator.service.roster import Roster as Told
from atoll.node.control.roster import Roster


def rosters(rng: random.Random, count: int) -> list[Told]:
    """Rosters as they follow on each other: somebody comes, goes, or comes back with another key or address."""
    members, found = dict[NodeId, RosterMember](), list[Told]()
    for number in range(1, count + 1):
        for _ in range(rng.randrange(1, 3)):
            node = NodeId(f"n{rng.randrange(6)}")
            if rng.random() < 0.4:
                members.pop(node, None)
            else:
                address = f"10.0.0.{rng.randrange(256)}:1"
                members[node] = RosterMember(PublicKey(b"k"), address, Pin("p"), rng.random() < 0.5)
        found.append(Told(dict(members), number // 3, bytes([1 + number // 3]) + rng.randbytes(1)))
    return found


def view_of(new: Told, known: Told | None, version: int) -> pb.View:
    view = pb.View.FromString(new.encode(known))
    view.version = version
    return view


def test_what_changed_since_the_roster_before_gives_the_roster() -> None:
    for seed in range(50):
        rng, roster, known = random.Random(seed), Roster(), None
        for version, new in enumerate(rosters(rng, 12), 1):
            if rng.random() < 0.3:
                continue  # a slow reader gets the latest view
            if rng.random() < 0.1:
                assert roster.open_stream() == (known.digest if known is not None else b"")
                known = known if rng.random() < 0.5 else None  # the coordinator may not know that one any more
            assert roster.read(view_of(new, known, version))
            known = new
            assert (roster.members, roster.data_key, roster.number) == (new.members, new.data_key, new.number)
            assert roster.read(view_of(new, new, version)) is False, "nothing new"


def test_a_stream_that_lacks_a_roster_is_to_be_opened_again_and_what_was_known_stays_until_then() -> None:
    one, two, three = rosters(random.Random(1), 3)
    roster = Roster()
    assert roster.read(view_of(one, None, 1))
    assert roster.read(view_of(three, two, 3)) is None and roster.members == one.members
    assert roster.read(view_of(three, three, 4)) is None and roster.members == one.members
    assert roster.open_stream() == one.digest and roster.members == one.members
    assert roster.read(view_of(three, one, 4)) and roster.members == three.members


def test_a_roster_that_is_not_what_its_digest_says_is_not_taken_and_all_of_it_is_asked_for() -> None:
    one, two, three = rosters(random.Random(1), 3)
    roster = Roster()
    assert roster.read(view_of(one, None, 1))
    other = view_of(two, one, 2)
    other.roster.digest = three.digest
    assert roster.read(other) is None and roster.members == one.members
    assert roster.open_stream() == b""
    assert roster.read(view_of(two, None, 3)) and roster.members == two.members


def test_a_view_that_comes_late_says_nothing() -> None:
    one, two = rosters(random.Random(1), 2)
    roster = Roster()
    assert roster.read(view_of(two, None, 2))
    assert roster.read(view_of(one, None, 1)) is False and roster.members == two.members


def test_who_is_no_member_is_told_nothing() -> None:
    assert Roster().read(pb.View(version=1)) is False


def test_a_digest_is_of_everything_and_of_no_order() -> None:
    a, b = RosterMember(PublicKey(b"k"), "a:1", Pin("p")), RosterMember(PublicKey(b"l"), "b:1", Pin("q"), True)
    members = {NodeId("n1"): a, NodeId("n2"): b}
    assert roster_digest(members, b"key", 1) == roster_digest(dict(reversed(members.items())), b"key", 1)
    changed = [a._replace(key=PublicKey(b"m")), a._replace(address="a:2"), a._replace(pin=Pin("r"))]
    others = [members | {NodeId("n1"): m} for m in (*changed, a._replace(leaf=True))]
    digests = [roster_digest(m, b"key", 1) for m in (members, *others, {NodeId("n1"): a})]
    digests += [roster_digest(members, b"kex", 1), roster_digest(members, b"key", 2)]
    assert len(set(digests)) == len(digests)


def test_what_is_told_is_short_where_little_changed() -> None:
    member = RosterMember(PublicKey(b"\x03" * 33), "10.0.0.1:4700", Pin("a" * 52))
    members = {NodeId(f"n{i}"): member for i in range(1000)}
    before = Told(members, 0, b"k" * 32)
    after = Told(members | {NodeId("n1000"): member}, 0, b"k" * 32)
    assert len(before.encode(None)) < 120_000
    assert len(after.encode(before)) < 220 and len(after.encode(after)) < 24
