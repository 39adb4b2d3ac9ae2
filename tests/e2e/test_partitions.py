"""A node whose network fails without a word: in one direction, in the other, in both. It is left out by its lease
and comes back by itself. Needs root for a network namespace."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.harness import Run, until
from lan import remove

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.root]

SPACE, HERE, THERE = "atoll-test", "10.77.91.1", "10.77.91.2"
INSIDE = ("ip", "netns", "exec", SPACE)
NOWHERE = "02:00:00:00:00:99"  # frames to this address are dropped by whoever gets them


def ip(*words: str, inside: bool = False) -> None:
    subprocess.run([*(INSIDE if inside else ()), "ip", *words], check=True, capture_output=True)


class Cable:
    """A virtual cable between this host and a namespace; each direction can be cut silently."""

    def __init__(self) -> None:
        self.close()
        ip("netns", "add", SPACE)
        ip("link", "add", "atoll-a", "type", "veth", "peer", "name", "atoll-b", "netns", SPACE)
        ip("address", "add", f"{HERE}/24", "dev", "atoll-a")
        ip("address", "add", f"{THERE}/24", "dev", "atoll-b", inside=True)
        ip("link", "set", "atoll-a", "up")
        ip("link", "set", "lo", "up", inside=True)
        ip("link", "set", "atoll-b", "up", inside=True)

    def cut(self, there: bool = False, back: bool = False) -> None:
        """Lose what goes to the namespace, what comes from it, or both."""
        if there:
            ip("neigh", "replace", THERE, "lladdr", NOWHERE, "dev", "atoll-a", "nud", "permanent")
        if back:
            ip("neigh", "replace", HERE, "lladdr", NOWHERE, "dev", "atoll-b", "nud", "permanent", inside=True)

    def mend(self) -> None:
        for address, device, inside in ((THERE, "atoll-a", False), (HERE, "atoll-b", True)):
            subprocess.run(
                [*(INSIDE if inside else ()), "ip", "neigh", "del", address, "dev", device], check=False
            )

    def close(self) -> None:
        remove(links=["atoll-a"], spaces=[SPACE])


@pytest.fixture
def cable() -> Iterator[Cable]:
    cable = Cable()
    yield cable
    cable.close()


@pytest.mark.parametrize(
    ("there", "back"),
    [*(pytest.param(*one, marks=pytest.mark.chaos) for one in ((True, False), (False, True))), (True, True)],
)
def test_a_silent_partition_costs_a_lease_and_heals(tmp_path: Path, cable: Cable, there: bool, back: bool) -> None:
    run = Run(tmp_path, HERE)
    try:
        run.start("members.lease=4", "rounds.inner_steps=20")
        url = run.invite(2)
        run.join(url, "one", host=HERE)
        run.join(url, "two", host=THERE, through=INSIDE)
        until("a commit of both", lambda: run.contributors() == 2)
        cable.cut(there, back)
        until("it to be missed", lambda: run.member("two").get("state") == "evicted", 30)
        until("a commit without it", lambda: run.contributors() == 1, 60)
        cable.mend()
        until("a commit of both", lambda: run.contributors() == 2, 90)
        run.whole(run.committed() - 1)
    finally:
        run.stop()
        for log in tmp_path.glob("*.log"):  # shown when the test fails
            print(f"--- {log.name}\n{log.read_text()[-3000:]}")
