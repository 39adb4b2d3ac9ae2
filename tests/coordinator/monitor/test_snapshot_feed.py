"""A page that follows the changes of a run has, at any moment, what a page that asks anew gets."""

import random
from typing import Any

import msgspec
import pytest

from atoll.coordinator.monitor.snapshot_feed import MAX_CHANGES, SnapshotFeed

Run = dict[str, Any]


def snapshot(rng: random.Random) -> Run:
    members = [
        {
            "node_id": f"n{k}",
            "name": f"m{k}",
            "state": rng.choice(["active", "left"]),
            "last_heard_s": rng.random(),
        }
        for k in rng.sample(range(1, 9), rng.randrange(9))
    ]
    return {"round": rng.randrange(3), "phase": rng.choice("ab"), "members": members, "events": []}


class Page:
    """What the page's script makes of the stream."""

    def __init__(self) -> None:
        self.run: Run = {}
        self.id = ""

    def read(self, events: bytes) -> None:
        for block in filter(None, events.decode().split("\n\n")):
            fields = dict(line.split(": ", 1) for line in block.split("\n"))
            self.id, data = fields["id"], msgspec.json.decode(fields["data"])
            if fields["event"] == "run":
                self.run = data
                continue
            members = {m["node_id"]: m for m in self.run["members"] if m["node_id"] not in data.get("gone", [])}
            for node, changed in data.get("members", {}).items():
                members[node] = members.get(node, {}) | changed
            self.run = self.run | data.get("set", {}) | {"members": list(members.values())}


def shown(run: Run) -> Run:
    members = [{k: v for k, v in m.items() if k != "last_heard_s"} for m in run["members"]]
    return run | {"members": sorted(members, key=lambda m: str(m["node_id"]))}


@pytest.mark.parametrize("seed", range(20))
def test_changes_lead_to_what_is_whether_they_were_all_heard_or_some_were_missed(seed: int) -> None:
    rng, feed, steady, sleepy = random.Random(seed), SnapshotFeed("a"), Page(), Page()
    for _ in range(3 * MAX_CHANGES):
        run = snapshot(rng)
        feed.take(run)
        steady.read(feed.since(steady.id))
        if rng.random() < 0.03:
            sleepy.read(feed.since(sleepy.id))
            assert shown(sleepy.run) == shown(run)
        assert shown(steady.run) == shown(run)


def test_what_is_as_it_was_is_no_change_and_what_changes_by_the_clock_alone_neither() -> None:
    feed, run = SnapshotFeed("a"), snapshot(random.Random(3))
    assert feed.id == "" and feed.take(run) and feed.id == "a.1"
    later = run | {"members": [m | {"last_heard_s": 99.0} for m in run["members"]]}
    assert not feed.take(later) and feed.id == "a.1" and feed.since("a.1") == b""


@pytest.mark.parametrize("id_", ["", "b.1", "a.0", "a.99", "a.x", "a.-1", "a." + "9" * 40, "a.1.1", "\n"])
def test_who_comes_with_an_id_that_is_not_known_is_told_everything(id_: str) -> None:
    feed = SnapshotFeed("a")
    for k in range(MAX_CHANGES + 5):
        feed.take({"round": k, "members": [], "events": []})
    assert b"event: run\n" in feed.since(id_)
    assert feed.since(f"a.{MAX_CHANGES + 3}").count(b"event: change\n") == 2


def test_names_cannot_end_an_event() -> None:
    feed = SnapshotFeed("a")
    feed.take({"round": 1, "members": [{"node_id": "n1", "name": "a\n\nevent: run\ndata: {}"}], "events": []})
    page = Page()
    page.read(feed.since(""))
    assert page.run["members"][0]["name"] == "a\n\nevent: run\ndata: {}"
