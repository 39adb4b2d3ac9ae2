"""Two nodes behind different NATs train together: one public gateway, which relays, and the coordinator by it."""

import subprocess

import pytest
from e2e.harness import ATOLL, ROOT, TINY, Run, until
from p2p.gateways import multiaddr, start
from p2p.nats import PUBLIC, through, two_homes

from atoll.coordinator.server import opened_journal

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)]
ROUNDS = 5
DIALS = "import socket, sys; socket.create_connection((sys.argv[1], 4700), 3)"


def test_nodes_behind_two_nats_exchange_through_a_public_gateway(run: Run) -> None:
    with two_homes() as (public, *homes):
        for home, other in ((homes[0], "192.168.52.2"), (homes[1], "192.168.51.2")):  # neither can dial the other
            command = [*through(home), "python3", "-c", DIALS, other]
            assert subprocess.run(command, capture_output=True, check=False).returncode != 0
        relay = ("--listen", f"/ip4/{PUBLIC}/tcp/4701", "--relay")
        start(run, "g", *relay, "--coordinator", str(run.folder / "c"), through=through(public))
        start_coordinator(run, public, 4700)
        place = multiaddr(run, "g")
        url = run.invite(2, "--dht", place)
        for home, name in zip(homes, ("a", "b"), strict=True):
            run.join(url, name, through=through(home))
        until("their rounds", lambda: rounds_of_both(run) >= ROUNDS, 240)
        run.coordinator.kill()  # it moves to another address in mid-run
        run.coordinator.wait()
        before = rounds_of_both(run)
        start_coordinator(run, public, 4702)
        until("their rounds after it moved", lambda: rounds_of_both(run) >= before + ROUNDS, 120)
        # Not even the coordinator sees an address of the homes at which anybody could reach them.
        assert all(".p2p:1" in run.log(name) for name in ("a", "b"))
        assert all("reach this gateway through a relay" in run.log(name) for name in ("a", "b"))


def start_coordinator(run: Run, where: str, port: int) -> None:
    ports = ("--listen", f"{PUBLIC}:{port}", "--http", "127.0.0.1:0", "--state-dir", str(run.folder / "c"))
    config = (str(ROOT / "configs/demo.yaml"), *TINY)
    run.coordinator = run.spawn("c.log", [*through(where), *ATOLL, "coordinator", "start", *config, *ports])


def rounds_of_both(run: Run) -> int:
    """The commits to which both have contributed."""
    if not (run.folder / "c" / "gateway.json").exists():
        return 0
    with opened_journal(run.folder / "c") as journal:
        return sum(len(record.contributors) == 2 for record in journal.rounds(0, 1000))
