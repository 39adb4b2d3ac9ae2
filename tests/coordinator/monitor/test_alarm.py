"""The coordinator looks at its alerts, tells who is to be told, and does not say them again after a restart."""

import asyncio
from pathlib import Path

from control_nodes import coordinator
from long_runs import long_record

from atoll.comm.replace import replace
from atoll.coordinator.monitor.alarm import Alarm
from atoll.coordinator.monitor.alerts import Alert, AlertKind
from atoll.coordinator.state_machine.events import Publish


def test_alerts_are_sent_once_over_all_restarts(tmp_path: Path) -> None:
    odd = replace(long_record(1, 2), digests_equal=False)

    async def first() -> list[Alert]:
        async with coordinator(tmp_path) as c:
            c.journal.append([], [odd])
            sent = list[Alert]()
            alarm = Alarm(c.journal, [sent.append])
            await alarm.look(c.event_loop)
            await alarm.look(c.event_loop)
            return sent

    async def second() -> list[Alert]:
        async with coordinator(tmp_path) as c:
            sent = list[Alert]()
            alarm = Alarm(c.journal, [sent.append])
            await alarm.look(c.event_loop)
            assert not sent
            alarm.tell(Publish(long_record(2, 2)))
            await alarm.look(c.event_loop)
            return sent

    sent = asyncio.run(first()) + asyncio.run(second())
    assert [(alert.kind, alert.on) for alert in sent] == [
        (AlertKind.STATE_DIVERGENCE, True),
        (AlertKind.STATE_DIVERGENCE, False),
    ]
