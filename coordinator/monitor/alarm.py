"""Looks at the run's alerts once a second, and has them sent: the shell of `alerts`."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import closing

from atoll.coordinator.monitor.alerts import RECORDS, Alert, AlertRules
from atoll.coordinator.service.event_loop import EventLoop
from atoll.coordinator.service.journal import Journal, JournalFull
from atoll.coordinator.state_machine.events import Decision, Effect, Publish

log = logging.getLogger("atoll.coordinator")
LOOK_INTERVAL = 1.0  # seconds
ON = "alerts"  # the journal's key of those that are on


class Alarm:
    """The rules of one run's alerts, and who is told. `tell` it effects, `run` it."""

    def __init__(self, journal: Journal, senders: Sequence[Callable[[Alert], None]]) -> None:
        """Begin with what the journal has. Senders return at once."""
        with closing(journal.iter_rounds(max(journal.round_span()[1] - RECORDS, 0))) as past:
            self.rules = AlertRules(past)
        self._journal, self._senders = journal, senders
        self.rules.restore(journal.meta(ON))
        self._kept = self.rules.dump()

    def tell(self, effect: Effect) -> None:
        """Take in what is durable."""
        match effect:
            case Publish(record):
                self.rules.record(record)
            case Decision():
                self.rules.decide(effect)

    async def run(self, loop: EventLoop) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            await self.look(loop)

    async def look(self, loop: EventLoop) -> None:
        """Send the alerts that begin or end now."""
        for alert in self.rules.look(loop.state, loop.clock()):
            log.warning(f"alert: {alert.title}: {alert.sentence}", extra={"fields": {"node": alert.node}})
            for send in self._senders:
                send(alert)
        if (on := self.rules.dump()) != self._kept:
            try:
                await asyncio.to_thread(self._journal.set_meta, ON, on)
                self._kept = on
            except JournalFull:  # the next look tries again
                pass
