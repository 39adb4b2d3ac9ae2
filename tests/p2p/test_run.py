"""A run whose nodes know no address but a gateway's."""

import time
from collections.abc import Callable

import psutil
import pytest
from e2e.harness import Run, until
from p2p.gateways import LISTEN, multiaddr, start

from atoll.node.state_files import WHEREABOUTS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_nodes_find_a_coordinator_through_a_gateway_and_again_when_it_has_moved(run: Run) -> None:
    start(run, "g", "--listen", LISTEN, "--relay")
    place = multiaddr(run, "g")
    run.start("security.tls=on")
    start(run, "cg", "--peer", place, "--coordinator", str(run.folder / "c"))
    url = run.invite(2, "--dht", place)
    assert f"@dht{place}/" in url
    for name in ("a", "b"):
        run.join(url, name)
    until("three rounds of both", lambda: run.committed() >= 3 and run.contributors() == 2, 180)
    assert run.member("a")["node_id"] != run.member("b")["node_id"]
    before = {name: run.member(name)["node_id"] for name in ("a", "b")}

    move_coordinator(run)
    assert {name: run.member(name)["node_id"] for name in ("a", "b")} == before
    run.whole(3)


def move_coordinator(run: Run, *options: str, then: Callable[[], object] = lambda: None) -> None:
    """Kill the coordinator, start it at another address, do what is to be done `then`, and wait for rounds of both
    there."""
    committed = run.committed()
    run.coordinator.kill()
    run.coordinator.wait()
    run._ports = ("--listen", "127.0.0.1:0", "--http", run.page.removeprefix("http://"), *options)
    run.restart()
    until("the page", lambda: run.run())
    then()
    until("rounds after it moved", lambda: run.committed() > committed + 2 and run.contributors() == 2, 180)


@pytest.mark.parametrize("dialled", [True, False])
def test_nodes_that_joined_by_an_address_find_a_coordinator_again_that_has_moved(
    dialled: bool, run: Run, tell: Callable[[str], None]
) -> None:
    start(run, "g", "--listen", LISTEN, "--relay")
    run.start("security.tls=on")
    start(run, "cg", "--peer", multiaddr(run, "g"), "--coordinator", str(run.folder / "c"))
    url = run.invite(2)
    assert "@127.0.0.1:" in url
    for name in ("a", "b"):
        run.join(url, name)
    until("rounds of both", lambda: run.committed() >= 2 and run.contributors() == 2, 180)
    until("what they keep", lambda: all((run.folder / name / WHEREABOUTS).exists() for name in "ab"))
    assert not gateways(run, "a") and not gateways(run, "b"), "nothing is asked of those that can be dialled"
    before = {name: run.member(name)["node_id"] for name in ("a", "b")}

    run.kill("b")  # of which the next life has to find it
    run.nodes["b"].wait()
    began = time.monotonic()
    nowhere = () if dialled else ("--advertise", "127.0.0.1:9")
    move_coordinator(run, *nowhere, then=lambda: run.join(url, "b"))
    tell(f"rounds of both {time.monotonic() - began:.0f} s after the coordinator was killed")
    assert {name: run.member(name)["node_id"] for name in ("a", "b")} == before
    how = "this node goes on there" if dialled else "this node goes on through them"
    assert all(how in run.log(name) for name in "ab")
    if dialled:
        until("the end of their gateways", lambda: not any(gateways(run, name) for name in "ab"), 30)
    else:
        assert all(gateways(run, name) for name in "ab")
    if dialled:
        run.kill("a")
        run.nodes["a"].wait()
        run.join(url, "a")
        until("that it begins there", lambda: "the coordinator, once at" in run.log("a"))
        committed = run.committed()
        until("rounds of both", lambda: run.committed() > committed + 1 and run.contributors() == 2, 180)
        assert run.member("a")["node_id"] == before["a"]
    run.whole(run.committed() - 1)


def gateways(run: Run, name: str) -> list[psutil.Process]:
    """Those beside a node."""
    return [process for process in run.family(name) if "gateway" in _words(process)]


def _words(process: psutil.Process) -> list[str]:
    """Its command line; none: it ended just now."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_a_run_goes_on_when_its_gateway_was_away_and_its_coordinator_moves_then(run: Run) -> None:
    relay = start(run, "g", "--listen", LISTEN, "--relay")
    place = multiaddr(run, "g")
    run.start("security.tls=on")
    start(run, "cg", "--peer", place, "--coordinator", str(run.folder / "c"))
    url = run.invite(2, "--dht", place)
    for name in ("a", "b"):
        run.join(url, name)
    until("a round of both", lambda: run.committed() >= 1 and run.contributors() == 2, 180)
    relay.terminate()
    relay.wait()
    listen = place.rpartition("/p2p/")[0]
    committed = run.committed()
    start(run, "g", "--listen", listen, "--relay")
    until("rounds of both", lambda: run.committed() > committed + 2 and run.contributors() == 2, 180)
    move_coordinator(run)
    run.whole(committed)


def test_a_node_goes_on_when_its_gateway_is_killed(run: Run) -> None:
    start(run, "g", "--listen", LISTEN, "--relay")
    place = multiaddr(run, "g")
    run.start("security.tls=on")
    start(run, "cg", "--peer", place, "--coordinator", str(run.folder / "c"))
    url = run.invite(2, "--dht", place)
    for name in ("a", "b"):
        run.join(url, name)
    until("a round of both", lambda: run.committed() >= 1 and run.contributors() == 2, 180)
    before = run.member("a")["node_id"]
    (gateway,) = gateways(run, "a")
    gateway.kill()
    until("its end", lambda: "the gateway's process ended" in run.log("a"))
    committed = run.committed()
    until("rounds of both", lambda: run.committed() > committed + 2 and run.contributors() == 2, 180)
    assert run.member("a")["node_id"] == before


def test_a_run_goes_on_by_another_relay(run: Run) -> None:
    relays = [start(run, name, "--listen", LISTEN, "--relay") for name in ("g", "h")]
    places = [multiaddr(run, name) for name in ("g", "h")]
    run.start("security.tls=on")
    peers = [word for place in places for word in ("--peer", place)]
    start(run, "cg", *peers, "--coordinator", str(run.folder / "c"))
    url = run.invite(2, *(word for place in places for word in ("--dht", place)))
    for name in ("a", "b"):
        run.join(url, name)
    until("a round of both", lambda: run.committed() >= 1 and run.contributors() == 2, 180)
    relays[0].kill()
    relays[0].wait()
    committed = run.committed()
    until("rounds of both", lambda: run.committed() > committed + 2 and run.contributors() == 2, 180)
    run.whole(committed)
