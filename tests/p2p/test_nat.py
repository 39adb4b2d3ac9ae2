"""Nodes behind NATs train together: through relays that come and go, through holes, with a coordinator that
moves."""

import subprocess
import time
from collections.abc import Callable
from functools import partial

import pytest
from e2e.harness import ATOLL, ROOT, TINY, Run, until
from p2p.gateways import multiaddr, start
from p2p.nats import CONE, Internet, Machine, internet

from atoll.coordinator.server import opened_journal
from atoll.coordinator.state_machine.events import CommitRecord

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)]
DIALS = "import socket, sys; socket.create_connection((sys.argv[1], 4700), 3)"
BACK = 60.0  # seconds within which all are to train again


def test_twenty_rounds_behind_two_nats_while_the_coordinator_moves_and_a_relay_dies(
    run: Run, tell: Callable[[str], None]
) -> None:
    with internet() as net:
        front, relay, volunteer, elsewhere = net.publics
        neither_can_be_dialled(net)
        # The one gateway that the URL names, and another beside the coordinator.
        named = start(run, "g", "--listen", f"/ip4/{relay.address}/tcp/4701", "--relay", through=relay.through)
        place = multiaddr(run, "g")
        beside = coordinate(run, front, place)
        url = run.invite(3, "--dht", place)
        for home, name in zip(net.homes, ("a", "b"), strict=True):
            run.join(url, name, through=home.through)
        seconds = timed("20 rounds", lambda: of_both(run) >= 20, 300)
        tell(f"20 rounds of two nodes behind NATs: {seconds:.1f} s")
        assert all(".p2p:1" in run.log(name) for name in ("a", "b"))  # no address at which anybody could dial them
        assert all("reach this gateway through a relay" in run.log(name) for name in ("a", "b"))
        for what, (own, resident) in memory(run, "a").items():
            tell(f"memory of the {what}: {own / 1e6:.0f} MB its own, {resident / 1e6:.0f} MB with its libraries'")
        assert memory(run, "a")["daemon"][0] < 120e6

        kill(run.coordinator, beside)  # it moves to another machine, with another address
        before = of_both(run)
        beside = coordinate(run, elsewhere, place)
        seconds = timed("a round after the coordinator moved", lambda: of_both(run) > before, BACK)
        tell(f"a round of both, after the coordinator had moved to another address: {seconds:.1f} s")

        # A volunteer offers a relay that no URL names; the coordinator tells of it, and the named one dies.
        run.join(url_by_address(run), "v", "relay=true", through=volunteer.through, host=volunteer.address)
        until("the relay", lambda: "this node passes on what others send each other" in run.log("v"))
        until("its places", lambda: all(run.log(n).count("reach this gateway through a relay") >= 2 for n in "ab"))
        kill(named)
        before = of_both(run)
        seconds = timed("a round by the other relay", lambda: of_both(run) > before + 1, BACK)
        tell(f"two rounds of both, after their relay was killed, by another: {seconds:.1f} s")
        assert all(record.digests_equal or record.void for record in records(run))


@pytest.mark.parametrize("kinds", [(CONE, CONE, CONE)], ids=["cones"])
def test_a_fleet_in_which_nobody_can_be_dialled_needs_no_public_reducer(
    run: Run, tell: Callable[[str], None], kinds: tuple[str, ...]
) -> None:
    with internet(kinds) as net:
        front = net.publics[0]
        neither_can_be_dialled(net)
        listen = f"/ip4/{front.address}/tcp/4701"
        start(
            run, "g", "--listen", listen, "--relay", "--coordinator", str(run.folder / "c"), through=front.through
        )
        multiaddr(run, "g")
        serve(run, front)
        until("its note", (run.folder / "c" / "gateways").exists)
        url = url_by_address(run)  # nobody names a gateway, nor says that it cannot be dialled
        for home, name in zip(net.homes, "abd", strict=True):
            run.join(url, name, through=home.through, host="0.0.0.0")
        for name in "abd":
            until("another way", partial(says, run, name, "so the run's gateways pass on"))
        seconds = timed("rounds of all", lambda: of_all(run, 3) >= 5, 240)
        tell(f"5 rounds of three nodes, none of which can be dialled: {seconds:.1f} s")
        assert any("through a hole" in run.log(name) for name in "abd")  # and not by the relay

        kill(run.coordinator)  # no URL of theirs says where it is now, and no node has to be started again
        before = of_all(run, 3)
        serve(run, net.publics[-1])
        seconds = timed("a round after the coordinator moved", lambda: of_all(run, 3) > before, 2 * BACK)
        tell(f"a round of all, after the coordinator had moved to another address: {seconds:.1f} s")
        assert all(
            f"is at {net.publics[-1].address}:4700: this node goes on there" in run.log(name) for name in "abd"
        )
        assert all(record.digests_equal or record.void for record in records(run))


def says(run: Run, name: str, words: str) -> bool:
    return words in run.log(name)


def neither_can_be_dialled(net: Internet) -> None:
    for machine, other in (
        (net.publics[0], net.homes[0]),
        (net.homes[0], net.homes[1]),
        (net.homes[1], net.homes[0]),
    ):
        command = [*machine.through, "python3", "-c", DIALS, other.address]
        assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def coordinate(run: Run, where: Machine, gateway: str) -> "subprocess.Popen[str]":
    """The coordinator on this machine, and a gateway beside it; returns that."""
    serve(run, where)
    beside = ("--coordinator", str(run.folder / "c"), "--peer", gateway)
    return start(run, "cg", *beside, through=where.through)


def serve(run: Run, where: Machine) -> None:
    """The coordinator on this machine, until it is up."""
    ports = ("--listen", f"{where.address}:4700", "--http", "127.0.0.1:0", "--state-dir", str(run.folder / "c"))
    config = (str(ROOT / "configs/demo.yaml"), *TINY)
    run.coordinator = run.spawn("c.log", [*where.through, *ATOLL, "coordinator", "start", *config, *ports])
    until("the coordinator", lambda: f"nodes join at {where.address}:4700" in run.log("c"))


def url_by_address(run: Run) -> str:
    """A join URL with the coordinator's address."""
    return run.invite(3)


def kill(*processes: "subprocess.Popen[str]") -> None:
    for process in processes:
        process.kill()
        process.wait()


def memory(run: Run, name: str) -> dict[str, tuple[int, int]]:
    """Bytes of a node's daemon, its gateway, and libp2p's process: those that no other process shares, and all."""
    found = {"daemon": run.family(name)[0]}
    for process in run.family(name)[1:]:
        words = process.cmdline()
        if "gateway" in words:
            found["gateway"] = process
        elif words and "p2pd" in words[0]:
            found["p2pd"] = process
    sizes = {what: process.memory_full_info() for what, process in found.items()}
    return {what: (size.uss, size.rss) for what, size in sizes.items()}


def timed(what: str, holds: Callable[[], bool], seconds: float) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    until(what, holds, seconds)
    return time.monotonic() - began


def records(run: Run) -> list[CommitRecord]:
    """All commits so far."""
    if not (run.folder / "c" / "journal.sqlite").exists():
        return []
    with opened_journal(run.folder / "c") as journal:
        return journal.rounds(0, 1000)


def of_all(run: Run, nodes: int) -> int:
    """The commits to which so many nodes have contributed."""
    return sum(len(record.contributors) >= nodes for record in records(run))


def of_both(run: Run) -> int:
    """The commits to which both nodes behind NATs have contributed."""
    return of_all(run, 2)
