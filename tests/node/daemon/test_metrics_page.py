"""A node's own `/metrics`: where its owner asks for it, and with names that Prometheus's linter has nothing
against."""

import asyncio
import socket
import subprocess
import sys
import urllib.request
from typing import Any

import pytest
from promtool import promtool

from atoll.comm.errors import ConfigError
from atoll.node.daemon.metrics_page import COUNTERS, GAUGES, metrics_address, metrics_page

STATUS: dict[str, Any] = {
    **dict.fromkeys([*GAUGES, *COUNTERS], 1.5),
    **{"node_id": "n3", "name": "ada", "run": "reef", "phase": "inner", "mfu": None},
    "phase_seconds": {"inner": 12.5, "waiting": 3.0},
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def scraped(status: dict[str, Any]) -> str:
    """What a scrape of a node with this status gets."""

    async def story() -> str:
        port = free_port()
        with metrics_page(str(port), lambda: status):
            url = f"http://127.0.0.1:{port}/metrics"
            return await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=30).read().decode())

    return asyncio.run(story())


def test_a_scrape_gets_what_the_status_says_and_nothing_that_is_not_known() -> None:
    lines = scraped(STATUS).splitlines()
    for line in (
        'atoll_node_info{name="ada",node="n3",run="reef"} 1.0',
        'atoll_node_phase{phase="inner"} 1.0',
        'atoll_node_phase{phase="waiting"} 0.0',
        'atoll_node_phase_seconds_total{phase="inner"} 12.5',
        "atoll_node_sent_bytes_total 1.5",
        "atoll_node_tokens_per_second 1.5",
    ):
        assert line in lines, line
    assert not any("mfu" in line for line in lines)
    assert any(line.startswith("atoll_build_info{") for line in lines)
    assert any(line.startswith("process_cpu_seconds_total") for line in lines)


@pytest.mark.long
def test_promtool_has_nothing_to_say_against_the_names() -> None:
    text = scraped(STATUS | {"mfu": 0.5})
    checked = subprocess.run([promtool(), "check", "metrics"], input=text, capture_output=True, text=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_the_page_is_this_machines_unless_told_and_ends_with_the_node() -> None:
    assert metrics_address("9464") == ("127.0.0.1", 9464)
    assert metrics_address("0.0.0.0:9464") == ("0.0.0.0", 9464)
    with pytest.raises(ConfigError, match="--metrics"):
        metrics_address("ninety")

    async def story() -> None:
        port = free_port()
        with metrics_page(str(port), lambda: STATUS):
            with pytest.raises(ConfigError, match="cannot listen"), metrics_page(str(port), lambda: STATUS):
                pass
        with socket.create_server(("127.0.0.1", port)):
            pass
        with metrics_page("", lambda: STATUS):
            pass

    asyncio.run(story())


def test_a_daemon_that_serves_none_does_not_load_the_library() -> None:
    probe = "import sys, atoll.node.daemon.daemon; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", probe], timeout=60).returncode == 0
