"""The emulated network is what it says: rates, delays, losses, cuts, and nothing left behind. Needs root."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from bench import tcp
from bench.wan import Wan, WanError, build

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.root, pytest.mark.chaos]

NAME, NET = "wtest", "10.79.0"
UDP_SINK = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
s.bind((sys.argv[1], 5000))
print("up", flush=True)
s.settimeout(1)
try:
    while True:
        print(int.from_bytes(s.recv(2000)[:4], "big"))
except TimeoutError:
    pass
"""
UDP_SOURCE = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for k in range(int(sys.argv[2])):
    s.sendto(k.to_bytes(4, "big") * 25, (sys.argv[1], 5000))
    if k % 50 == 49:
        time.sleep(0.002)
"""
HASH_SINK = """
import hashlib, socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("up", flush=True)
peer, digest = server.accept()[0], hashlib.sha256()
while data := peer.recv(1 << 20):
    digest.update(data)
print(digest.hexdigest())
"""
HASH_SOURCE = """
import hashlib, random, socket, sys
data = random.Random(1).randbytes(int(sys.argv[2]))
with socket.create_connection((sys.argv[1], 5000), timeout=10) as s:
    s.sendall(data)
print(hashlib.sha256(data).hexdigest())
"""
REFUSED = """
import socket, sys, time
best = 0.0
for _ in range(5):
    begun = time.perf_counter()
    try:
        socket.create_connection((sys.argv[1], 1), timeout=2)
    except ConnectionRefusedError:
        took = 1e3 * (time.perf_counter() - begun)
        best = min(best or took, took)
    except TimeoutError:
        break
print(best)
"""


network = partial(Wan, name=NAME, net=NET)


def namespaces() -> list[str]:
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.glob(f"{NAME}*")) if folder.exists() else []


def send(wan: Wan, sink: str, source: str, amount: int, node: int = 2) -> tuple[str, str]:
    """What the sink on that node and the source on node 1 said."""
    python = [sys.executable, "-P", "-c"]
    sinking = subprocess.Popen(
        [*wan.prefix(node), *python, sink, wan.host(node)], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert sinking.stdout is not None and sinking.stdout.readline() == "up\n"
        command = [*wan.prefix(1), *python, source, wan.host(node), str(amount)]
        sent = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return sinking.communicate(timeout=60)[0], sent.stdout
    finally:
        sinking.kill()
        sinking.wait()


def arrived(wan: Wan, amount: int) -> set[int]:
    return arrived_at(wan, 2, amount)


def arrived_at(wan: Wan, node: int, amount: int) -> set[int]:
    return set(map(int, send(wan, UDP_SINK, UDP_SOURCE, amount, node)[0].split()))


def round_trip(wan: Wan) -> float:
    """Milliseconds until node 2 refuses a connection of node 1; 0 if it does not answer."""
    command = [*wan.prefix(1), sys.executable, "-P", "-c", REFUSED, wan.host(2)]
    return float(subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout)


def test_a_round_trip_takes_its_time() -> None:
    with network(2, rtt=50) as wan:
        assert round_trip(wan) == pytest.approx(50, abs=3)
        wan.set(2, rtt=10)
        assert round_trip(wan) == pytest.approx(30, abs=3)


def test_regions_are_farther_apart_and_share_a_link() -> None:
    with network(3, up=200, down=200, rtt=10) as wan:
        for i in (1, 2, 3):
            wan.set(i, region=int(i == 2), far=60, between=40)
        assert round_trip(wan) == pytest.approx(70, abs=3)
        flow = tcp.measure(wan, [1, 3], streams=4, seconds=3)
    assert 35 < flow.wire[1] < 41, "1 and 3 share what leads to 2"
    assert flow.wire[0] + flow.wire[2] > 150


def test_a_cut_node_hears_nothing_until_it_is_healed() -> None:
    with network(2, rtt=4) as wan:
        wan.cut(2)
        assert round_trip(wan) == 0
        assert wan.stat().nodes[0].severed > 0
        wan.heal(2)
        assert 0 < round_trip(wan) < 10


def test_what_one_node_sends_to_another_can_be_cut_alone() -> None:
    with network(3, rtt=4) as wan:
        wan.pair(1, 2, cut=1)
        assert round_trip(wan) == 0
        before = wan.stat().nodes
        assert before[0].severed > 0 and before[1].severed == 0
        assert arrived_at(wan, 3, 100) == set(range(100)), "1 still reaches 3"
        wan.pair(1, 2, cut=0)
        assert 0 < round_trip(wan) < 10


def test_what_one_node_sends_to_another_can_be_slow_alone() -> None:
    with network(3, up=100, down=100, rtt=20) as wan:
        wan.pair(1, 2, rate=10)
        flow = tcp.measure(wan, [1], streams=2, seconds=3)
    assert 8 < flow.wire[1] < 10.3 and flow.wire[2] > 60


def test_bytes_that_are_spoiled_arrive_as_others_and_no_checksum_tells() -> None:
    with network(2, rtt=4) as wan:
        wan.pair(1, 2, spoil=1)
        got, sent = send(wan, HASH_SINK, HASH_SOURCE, 3_000_000)
        assert len(got.strip()) == len(sent.strip()) == 64 and got != sent
        assert wan.stat().nodes[0].lost == 0


def test_four_streams_fill_a_link_and_no_more() -> None:
    with network(2, up=100, down=100, rtt=50) as wan:
        flow = tcp.measure(wan, [1], streams=4, seconds=3)
    assert 95 < flow.wire[1] < 101


def test_the_slower_link_is_the_limit() -> None:
    with network(3, up=100, down=100, rtt=20) as wan:
        wan.set(2, down=20)
        wan.set(3, up=10)
        flow = tcp.measure(wan, [1, 3], streams=2, seconds=3)
    assert flow.wire[1] < 20.6
    assert flow.wire[0] < 10.3


def test_the_same_seed_loses_the_same_packets() -> None:
    everything = set(range(5000))
    lost = []
    for seed in (1, 1, 2):
        with network(2, rtt=2, loss=2, seed=seed) as wan:
            lost.append(everything - arrived(wan, 5000))
            assert wan.stat().nodes[0].lost >= len(lost[-1])
    assert lost[0] == lost[1] != lost[2]
    assert 60 < len(lost[0]) < 150  # 100 are expected


def test_what_finds_no_room_in_the_queue_is_dropped() -> None:
    with network(2, up=1, queue=20) as wan:
        got = arrived(wan, 2000)
        dropped = wan.stat().nodes[0].dropped
    assert 0 < len(got) < 1000 and dropped >= 2000 - len(got)


@pytest.mark.parametrize(("loss", "jitter", "up", "queue"), [(1.0, 0, 0, 200), (0.3, 5, 200, 200), (0, 0, 50, 3)])
def test_bytes_arrive_as_they_were_sent(loss: float, jitter: float, up: float, queue: float) -> None:
    with network(2, rtt=4, loss=loss, jitter=jitter, up=up, queue=queue) as wan:
        got, sent = send(wan, HASH_SINK, HASH_SOURCE, 12_000_000)
        assert got == sent != ""
        counts = wan.stat().nodes
    assert sum(node.lost + node.dropped for node in counts) > 0


def test_nothing_is_left_behind_whatever_ends_it() -> None:
    def quit_(process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.write(b"quit\n")
        process.stdin.flush()

    def end_of_input(process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.close()

    def signalled(number: signal.Signals) -> Callable[[subprocess.Popen[bytes]], None]:
        return lambda process: process.send_signal(number)

    for end in (quit_, end_of_input, signalled(signal.SIGTERM), signalled(signal.SIGINT)):
        command = [str(build()), "3", f"name={NAME}", f"net={NET}"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            assert len(namespaces()) == 3
            end(process)
            process.wait(10)
        assert namespaces() == []


def test_a_namespace_of_somebody_else_is_refused_and_kept() -> None:
    subprocess.run(["ip", "netns", "add", f"{NAME}2"], check=True)
    try:
        with pytest.raises(WanError, match="exists"), network(3):
            pass
        assert namespaces() == [f"{NAME}2"]
    finally:
        subprocess.run(["ip", "netns", "del", f"{NAME}2"], check=True)


def test_a_wrong_command_is_answered_with_an_error() -> None:
    with network(2) as wan:
        with pytest.raises(WanError, match="not a key"):
            wan.set(1, colour=3)
        with pytest.raises(WanError, match="from 1 to 2"):
            wan.cut(3)
        with pytest.raises(WanError, match="two nodes"):
            wan.pair(1, 1, cut=1)
        with pytest.raises(WanError, match="not a key"):
            wan.pair(1, 2, up=1)
        assert wan.stat().nodes[0].tx == 0


def test_it_costs_nothing_while_nothing_happens() -> None:
    with network(4, rtt=50) as wan:
        before = wan.stat().cpu_s
        time.sleep(0.5)
        assert wan.stat().cpu_s - before < 0.05


def test_it_is_only_for_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(WanError, match="root"), network(2):
        pass
