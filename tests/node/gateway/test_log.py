"""A gateway's log is as bounded as the daemon's: its own file, which it changes itself."""

import subprocess
import sys
from pathlib import Path

import msgspec

from atoll.comm import log
from atoll.node.gateway.client import RelayOffer, gateway_words

GATEWAY = "/ip4/203.0.113.7/tcp/4701/p2p/PEER"
COMMAND = [sys.executable, "-P", "-m", "atoll.comm.cli", "gateway"]


def test_it_logs_as_its_node_does_and_where_that_has_a_file_to_another_one(tmp_path: Path) -> None:
    log.about(run="deep", node="n07")
    words = gateway_words(Path("/s/gateway"), 7, 8, [GATEWAY], RelayOffer("203.0.113.9", 4711))
    own = ["--listen=/ip4/0.0.0.0/tcp/4711", "--announce=/ip4/203.0.113.9/tcp/4711", "--relay"]
    assert words[5:-1] == ["--state-dir=/s/gateway", "--wire=7", "--entrance=8", f"--peer={GATEWAY}", *own]
    how = msgspec.json.decode(words[-1].removeprefix("--log-setup="), type=log.LogSetup)
    assert how == log.LogSetup("gateway", run="deep", node="n07")
    (tmp_path / "file").touch()
    beside = msgspec.structs.replace(how, file=str(tmp_path / "file" / "node-gateway.log"))
    done = subprocess.run([*COMMAND, f"--log-setup={msgspec.json.encode(beside).decode()}"], capture_output=True)
    assert done.returncode == 3 and b"cannot write the log" in done.stderr and b"node-gateway.log" in done.stderr


def test_its_command_takes_the_daemons_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = [*COMMAND, f"--log-file={tmp_path / 'file' / 'log'}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "cannot write the log" in done.stderr
