"""The list of members pieced together from views, however they are cut, late or lost."""

import random

from atoll.comm.ids import NodeId, PublicKey
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.service.admission_list import AdmissionList
from atoll.node.control.roster import Roster

Lists = list[AdmissionList]


def lists(rng: random.Random, count: int) -> Lists:
    """Lists as they follow on each other: somebody comes, goes, or comes back with another key."""
    members, found = dict[NodeId, PublicKey](), Lists()
    for version in range(1, count + 1):
        for _ in range(rng.randrange(1, 3)):
            node = NodeId(f"n{rng.randrange(6)}")
            if rng.random() < 0.4:
                members.pop(node, None)
            else:
                members[node] = PublicKey(bytes([rng.randrange(256)]))
        found.append(AdmissionList(dict(members), version // 3, bytes([1 + version // 3]), version))
    return found


def view_of(new: AdmissionList, known: AdmissionList | None, version: int) -> pb.View:
    view = pb.View.FromString(new.encode(known))
    view.version = version
    return view


def test_what_changed_since_the_list_before_gives_the_list() -> None:
    for seed in range(50):
        rng, roster, known = random.Random(seed), Roster(), None
        for version, new in enumerate(lists(rng, 12), 1):
            if rng.random() < 0.3:
                continue  # a slow reader gets the latest view
            if rng.random() < 0.1:
                roster.open_stream()
                known = None
            assert roster.read(view_of(new, known, version))
            known = new
            assert (roster.members, roster.data_key, roster.number) == (new.members, new.data_key, new.number)
            assert roster.read(view_of(new, new, version)) is False, "nothing new"


def test_a_stream_that_lacks_a_list_is_to_be_opened_again_and_what_was_known_stays_until_then() -> None:
    one, two, three = lists(random.Random(1), 3)
    roster = Roster()
    assert roster.read(view_of(one, None, 1))
    assert roster.read(view_of(three, two, 3)) is None and roster.members == one.members
    assert roster.read(view_of(three, three, 4)) is None and roster.members == one.members
    roster.open_stream()
    assert roster.members == one.members
    assert roster.read(view_of(three, None, 4)) and roster.members == three.members


def test_a_view_that_comes_late_says_nothing() -> None:
    one, two = lists(random.Random(1), 2)
    roster = Roster()
    assert roster.read(view_of(two, None, 2))
    assert roster.read(view_of(one, None, 1)) is False and roster.members == two.members


def test_who_is_no_member_is_told_nothing() -> None:
    assert Roster().read(pb.View(version=1)) is False


def test_a_list_is_short_where_little_changed() -> None:
    members = {NodeId(f"n{i}"): PublicKey(bytes([2]) + i.to_bytes(32, "big")) for i in range(1000)}
    before = AdmissionList(members, 0, b"k" * 32, 1)
    after = AdmissionList(members | {NodeId("n1000"): PublicKey(b"\x03" * 33)}, 0, b"k" * 32, 2)
    assert len(before.encode(None)) < 50_000 and len(after.encode(before)) < 120 and len(after.encode(after)) < 8
