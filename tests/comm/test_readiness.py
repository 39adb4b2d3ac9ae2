"""A process that was started hears nothing and says once that it is up."""

import os
import socket
from pathlib import Path

import pytest

from atoll.comm.readiness import VARIABLE, ready_socket, say_ready


def test_who_started_a_process_hears_that_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    with ready_socket() as ready:
        assert not ready.wait(0.01)
        monkeypatch.setenv(VARIABLE, ready.address)
        say_ready("has joined")
        assert ready.wait(5.0)
        assert VARIABLE not in os.environ, "a child would say it, too"
        say_ready("again")
        assert not ready.wait(0.01)
    assert not Path(ready.address).parent.exists()


def test_systemds_abstract_address_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"atoll-test-{os.getpid()}"
        manager.bind(f"\0{name}")
        manager.settimeout(5.0)
        monkeypatch.setenv(VARIABLE, f"@{name}")
        say_ready("has joined")
        assert manager.recv(100) == b"READY=1\nSTATUS=has joined\n"


def test_nobody_may_be_listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say_ready()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    say_ready()


def test_another_word_is_not_taken_for_it() -> None:
    with ready_socket() as ready, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.sendto(b"STATUS=NOT READY=1", ready.address)
        assert not ready.wait(5.0)
