"""The machine on its journal: when it is time for a snapshot, and what a restart has of it."""

from contextlib import closing
from pathlib import Path

from scenario import CONFIG

from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.journaled_machine import JournaledMachine
from atoll.coordinator.state_machine import events as ev

EVERY = 4  # events


def start(machine: JournaledMachine, incarnation: int) -> None:
    batch = machine.prepare([ev.Started(incarnation)], float(incarnation))
    machine.write(batch)
    machine.adopt(batch)


def test_a_snapshot_is_due_after_some_events_and_later_while_many_wait(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        machine, due = JournaledMachine(CONFIG, journal, EVERY), []
        for k in range(1, 2 * EVERY + 1):
            start(machine, k)
            due.append((machine.snapshot_due(), machine.snapshot_due(busy=True)))
        calm, busy = zip(*due, strict=True)
        assert calm.index(True) == EVERY - 1 and busy.index(True) == 2 * EVERY - 1
        machine.snapshot()
        assert not machine.snapshot_due()
    with closing(Journal(tmp_path)) as journal:
        again = JournaledMachine(CONFIG, journal, EVERY)
        assert again.events_since_snapshot == 0 and again.state == machine.state
