"""A node that is told to end (SIGTERM) does so politely, whatever it is about: within 20 seconds, which
docs/volunteer.md promises, with exit code 0, with a good-bye, and without leaving anything of itself in memory."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psutil
import pytest
from e2e.harness import ATOLL, PACED, Run, until

from atoll.comm.errors import Unreachable
from atoll.node.daemon import control_socket
from atoll.node.outer.vector_folders import own_folders

pytestmark = [pytest.mark.e2e, pytest.mark.long]
SECONDS = 20.0  # the promise
SLOW = 0.01  # Mbit/s: what takes a moment takes minutes


def status(run: Run, name: str) -> dict[str, Any]:
    command = [*ATOLL, "node", "status", "--state-dir", str(run.folder / name), "--json"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    found: dict[str, Any] = json.loads(said or "{}")
    return found


def in_state(run: Run, name: str, state: str) -> Callable[[], bool]:
    return lambda: bool(status(run, name).get("state") == state)


def says(run: Run, name: str, words: str) -> Callable[[], bool]:
    return lambda: words in run.log(name)


def end(run: Run, name: str) -> None:
    """Tell the node to end, and hold it to what is promised."""
    family, own = run.family(name), os.getsid(run.nodes[name].pid)
    others = [process.pid for process in family if process.pid != run.nodes[name].pid]
    assert all(os.getsid(pid) != own for pid in others), "Ctrl-C in its terminal is for the daemon alone"
    run.nodes[name].send_signal(signal.SIGTERM)
    assert run.nodes[name].wait(SECONDS) == 0, run.log(name)
    gone, alive = psutil.wait_procs(family, 5)
    assert not alive and not own_folders(run.folder / name)
    assert "Traceback" not in run.log(name)


def said_good_bye(run: Run, name: str) -> None:
    member = until(
        "its good-bye", lambda: (m := run.member(name)).get("state") != "active" and (m or {"state": ""})
    )
    assert member.get("reason", "") in ("", "stopped by its owner")
    with pytest.raises(Unreachable, match="its last word, of .*: the node has left the run, as it was told to"):
        control_socket.ask(run.folder / name, "status")


@pytest.mark.chaos
def test_while_a_coordinator_says_nothing(run: Run) -> None:
    """It takes the connection, and that is all."""
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        run.join(f"atoll://token@127.0.0.1:{silent.getsockname()[1]}/demo", "one")
        until("that it looks", says(run, "one", "this machine:"))
        end(run, "one")
    assert "told to stop before it took part" in run.log("one")


def test_while_there_is_no_coordinator(run: Run) -> None:
    run.join("atoll://token@127.0.0.1:9/demo", "one", "--patience", "3600")
    until("that it tries", says(run, "one", "trying until it answers"))
    end(run, "one")


@pytest.mark.chaos
def test_while_its_trainer_starts(run: Run) -> None:
    run.start("members.start=1")
    run.join(run.invite(1), "one")
    until("its trainer", says(run, "one", "the trainer starts"))
    end(run, "one")
    said_good_bye(run, "one")


@pytest.mark.chaos
def test_while_it_compiles(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.start("members.start=1")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(run.folder / "kernels"))
    run.join(run.invite(1), "one")
    until("its compiler", says(run, "one", "compiling kernels"))
    end(run, "one")
    said_good_bye(run, "one")


@pytest.mark.chaos
def test_while_it_waits_for_others(run: Run) -> None:
    run.start("members.start=2")
    run.join(run.invite(1), "one")
    until("its state", in_state(run, "one", "waiting"))
    end(run, "one")
    said_good_bye(run, "one")


@pytest.mark.parametrize(
    "faults",
    [PACED, pytest.param("trainer.step=stall:60", marks=pytest.mark.chaos)],
    ids=["steps", "a step of a minute"],
)
def test_while_it_trains(faults: str, run: Run) -> None:
    run.start("members.start=1", "rounds.inner_steps=1000")
    run.join(run.invite(1), "one", faults=faults)
    until("its round", says(run, "one", "round 1: 1000 inner steps"))
    until("its step", in_state(run, "one", "inner"))
    end(run, "one")
    said_good_bye(run, "one")


@pytest.mark.chaos
def test_while_it_exchanges(run: Run) -> None:
    run.start()
    url = run.invite(2)
    for name in ("one", "two"):
        run.join(url, name, f"upload={SLOW}")
    until("the exchange", in_state(run, "two", "sync"), 120)
    end(run, "two")
    said_good_bye(run, "two")


@pytest.mark.chaos
def test_while_it_recovers(run: Run) -> None:
    run.start("members.start=1", "rounds.inner_steps=500")
    url = run.invite(2)
    run.join(url, "one")
    until("a commit", lambda: run.committed() >= 1)
    run.join(url, "two", f"download={SLOW}")
    until("its recovery", says(run, "two", "recovering: "))
    end(run, "two")
    said_good_bye(run, "two")


@pytest.mark.chaos
def test_while_it_evaluates(run: Run) -> None:
    run.start("members.start=1", "data.val_batches=20000")
    run.join(run.invite(1), "one")
    until("the state that it evaluates", lambda: status(run, "one").get("round") == 0)
    until("its evaluation", in_state(run, "one", "waiting"))
    end(run, "one")
    said_good_bye(run, "one")


@pytest.mark.chaos
def test_while_it_is_paused(run: Run) -> None:
    run.start("members.start=1")
    run.join(run.invite(1), "one")
    until("a commit", lambda: run.committed() >= 1)
    command = [*ATOLL, "node", "pause", "--state-dir", str(run.folder / "one")]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    until("the pause", in_state(run, "one", "paused"))
    end(run, "one")
    said_good_bye(run, "one")


@pytest.mark.chaos
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["gone", "stopped"])
def test_while_the_coordinator_is_away(how: signal.Signals, run: Run) -> None:
    run.start("members.start=1", "rounds.inner_steps=1000")
    run.join(run.invite(1), "one")
    until("its step", in_state(run, "one", "inner"))
    everybody = [
        psutil.Process(run.coordinator.pid),
        *psutil.Process(run.coordinator.pid).children(recursive=True),
    ]
    for process in everybody:
        process.send_signal(how)
    try:
        end(run, "one")
    finally:
        if how is signal.SIGSTOP:
            for process in everybody:
                process.send_signal(signal.SIGCONT)
