"""A gateway's log is as bounded as the daemon's: its own file, which it changes itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.comm import log
from atoll.comm.invite import Invite
from atoll.node.gateway.client import gateway_words

INVITE = Invite("dht/ip4/203.0.113.7/tcp/4701/p2p/PEER", "reef", "token")


def test_beside_a_node_that_logs_to_a_file_it_has_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_file", Path("/s/logs/node.log"))
    assert "--log-file=/s/logs/node-gateway.log" in gateway_words(INVITE, Path("/s/gateway"), 7)
    monkeypatch.setattr(log, "_file", None)
    words = gateway_words(INVITE, Path("/s/gateway"), 7)
    assert words[5:] == ["--state-dir=/s/gateway", "--wire=7", f"--peer={INVITE.rendezvous[0]}"]


def test_its_command_takes_the_daemons_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = [sys.executable, "-P", "-m", "atoll.comm.cli", "gateway", f"--log-file={tmp_path / 'file' / 'log'}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "cannot write the log" in done.stderr
