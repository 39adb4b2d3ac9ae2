"""What the page asks the run of its own process for."""

import asyncio
from pathlib import Path

from control_nodes import coordinator
from journal_contents import sample

from atoll.comm.replace import replace
from atoll.coordinator.causes.explanation import Verdict
from atoll.coordinator.causes.observations import Observations
from atoll.coordinator.monitor.http import LiveRun
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.state import Inquiry


def test_the_last_record_has_what_the_inquiry_has_found_so_far(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            loop, run = c.event_loop, LiveRun(c.event_loop, c.records, "reef")
            assert run.pending() is None
            record = replace(sample(ev.CommitRecord), verdict=None)
            asked = Inquiry(sample(Observations))
            loop._machine.state = replace(loop.state, pending=record, inquiry=asked)
            assert run.pending() == record
            found = replace(asked, named=sample(Verdict))
            loop._machine.state = replace(loop.state, inquiry=found)
            assert run.pending() == replace(record, verdict=found.named)
            loop._machine.state = replace(loop.state, pending=None)
            assert run.pending() is None

    asyncio.run(story())


def test_decisions_of_a_time_are_read_again_as_soon_as_there_are_more(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            loop, run = c.event_loop, LiveRun(c.event_loop, c.records, "reef")
            for number in (1, 2):
                made = replace(sample(ev.Decision), number=number)
                c.journal.append([], [], [], [(10.0 * number, made)])
                loop._machine.state = replace(loop.state, conduct=replace(loop.state.conduct, decisions=number))
                assert run.decisions(10.0 * number, 99.0) == [(10.0 * number, made)]
            assert run.decisions(0.0, 9.0) == []
            assert [at for at, _ in run.decisions(0.0, 10.0)] == [10.0]

    asyncio.run(story())
