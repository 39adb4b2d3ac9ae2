"""What `/metrics` tells of a run, in names that Prometheus's own linter has nothing to say against."""

import asyncio
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from control_nodes import Coordinator, commit, coordinator, get
from long_runs import long_record
from promtool import promtool

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.service.metrics import Metrics
from atoll.coordinator.state_machine.events import Failure

EVERYTHING: dict[str, Any] = {
    **dict(tokens_per_s=5000.0, mfu=0.25, data_wait=0.125, gradient_norm=0.5, learning_rate=0.001),
    **dict(device_bytes=3 << 30, trainer_rss_bytes=5 << 30, rss_bytes=1 << 27, bytes_up=5, bytes_down=6),
}


async def scrape(c: Coordinator) -> str:
    status, body = await get(c, "/metrics")
    assert status == 200
    return body.decode()


def value(text: str, series: str) -> float:
    return next(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.rpartition(" ")[0] == series)


def test_metrics_tell_of_the_control_plane_the_run_and_its_members(tmp_path: Path) -> None:
    async def story() -> str:
        async with coordinator(tmp_path) as c:
            ada, bo = await c.pair()
            await ada.heartbeat(phase="inner", **EVERYTHING)
            await commit(ada, bo, round_=1)
            return await scrape(c)

    text = asyncio.run(story())
    assert value(text, "atoll_heartbeats_total") == 1
    assert value(text, 'atoll_reports_total{kind="layout_reported"}') == 2
    assert value(text, 'atoll_members{state="active"}') == value(text, "atoll_open_streams") == 2
    assert value(text, "atoll_committed_rounds_total") == 1
    assert value(text, 'atoll_round_phase{phase="inner"}') == 1
    assert value(text, 'atoll_alert{kind="stall"}') == 0
    assert value(text, 'atoll_member_mfu_ratio{name="ada",node="n1"}') == 0.25
    assert 0 <= value(text, "atoll_fleet_goodput_ratio") <= value(text, "atoll_compute_utilisation_ratio") <= 1
    assert re.search(r'atoll_build_info\{.*version="\d', text) and 'atoll_run_info{config="' in text
    assert value(text, "process_resident_memory_bytes") > 1e7
    assert "_created" not in text


@pytest.mark.long
def test_promtool_has_nothing_to_say_against_the_names(tmp_path: Path) -> None:
    async def story() -> str:
        async with coordinator(tmp_path) as c:
            ada, _ = await c.pair()
            await ada.heartbeat(phase="inner", **EVERYTHING)
            c.event_loop.metrics.publish(replace(long_record(3, 2), failures=(FAILURE,)))
            await get(c, "/api/rounds?since=x")
            return await scrape(c)

    checked = subprocess.run(
        [promtool(), "check", "metrics"], input=asyncio.run(story()), capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


FAILURE = Failure(7, NodeId("n1"), 3, "its connection broke", 1000.0, 2.0, None, 30.0, 12.0)


def test_a_failure_is_counted_once_and_what_it_comes_to_cost_as_it_is_told() -> None:
    metrics = Metrics()

    def found(name: str) -> float:
        return metrics.registry.get_sample_value(name) or 0.0

    metrics.publish(replace(long_record(3, 2), failures=(FAILURE,)))
    metrics.publish(replace(long_record(4, 2), failures=(replace(FAILURE, recovered=40.0, lost=35.0),)))
    assert found("atoll_failures_total") == found("atoll_failure_detection_seconds_count") == 1
    assert found("atoll_failure_recovery_seconds_sum") == 40
    assert found("atoll_failure_lost_seconds_total") == 35 and found("atoll_failure_waited_seconds_total") == 12
    metrics.publish(replace(long_record(4, 2), void=True))
    assert found("atoll_void_rounds_total") == 1 and found("atoll_failures_total") == 1
