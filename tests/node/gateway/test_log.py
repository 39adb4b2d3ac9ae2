"""A gateway's log is as bounded as the daemon's: its own file, which it changes itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.comm import log
from atoll.node.gateway.client import RelayOffer, gateway_words

GATEWAY = "/ip4/203.0.113.7/tcp/4701/p2p/PEER"


def test_beside_a_node_that_logs_to_a_file_it_has_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_file", Path("/s/logs/node.log"))
    assert "--log-file=/s/logs/node-gateway.log" in gateway_words(Path("/s/gateway"), 7)
    monkeypatch.setattr(log, "_file", None)
    words = gateway_words(Path("/s/gateway"), 7, [GATEWAY], 8, RelayOffer("203.0.113.9", 4711))
    own = ["--listen=/ip4/0.0.0.0/tcp/4711", "--announce=/ip4/203.0.113.9/tcp/4711", "--relay"]
    assert words[5:] == ["--state-dir=/s/gateway", "--wire=7", f"--peer={GATEWAY}", "--entrance=8", *own]


def test_its_command_takes_the_daemons_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = [sys.executable, "-P", "-m", "atoll.comm.cli", "gateway", f"--log-file={tmp_path / 'file' / 'log'}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "cannot write the log" in done.stderr
