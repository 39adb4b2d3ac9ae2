"""A past run, shown by its records alone: those in a coordinator's state directory (which may go on beside it), or
in an archive. `opened` finds them, `web` and `terminal` show them."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from atoll.comm.config.run import RunConfig, from_json
from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.errors import ConfigError
from atoll.comm.ids import NodeId
from atoll.coordinator.history.archived_records import ArchivedRecords
from atoll.coordinator.history.record_archive import RecordArchive
from atoll.coordinator.history.record_store import opened as opened_store
from atoll.coordinator.history.segment import ROUNDS
from atoll.coordinator.monitor.contributions import MAX_ACCOUNTS, account, contributions
from atoll.coordinator.monitor.figures import facts_of_nodes
from atoll.coordinator.monitor.members import AtWork
from atoll.coordinator.monitor.recorded import NodeFacts, RecordedRun
from atoll.coordinator.monitor.run_source import Records
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.journaled_machine import JournaledMachine
from atoll.coordinator.service.run_records import RunRecords
from atoll.coordinator.state_machine.events import CommitRecord, Decision, Failure
from atoll.coordinator.state_machine.state import State


class PastRun:
    """A run that nobody serves, as `RunAnswers` asks for it. Nothing in it changes."""

    live = False

    def __init__(self, records: Records, facts: RecordedRun, state: State | None = None) -> None:
        """`state`: the last one that the run's journal has; None: there is no journal."""
        self.records, self._facts, self._state = records, facts, state
        self._added_up: dict[str, Any] | None = None
        self._turn = Lock()

    def facts(self) -> RecordedRun:
        return self._facts

    def snapshot(self) -> None:
        return None

    def decisions(self, since: float, until: float) -> list[tuple[float, Decision]]:
        return self.records.decisions(since, until)

    def pending(self) -> CommitRecord | None:
        return None

    def at_work(self) -> dict[str, AtWork]:
        return {}

    def now(self) -> float:
        series = self.records.series()
        return float(series.column("committed_at")[-1]) if len(series) else 0.0

    def failures(self) -> list[Failure]:
        return []

    def round_trips(self) -> dict[NodeId, dict[NodeId, float]]:
        members = self._state.members.here if self._state is not None else {}
        return {node: member.rtts for node, member in members.items() if member.rtts}

    def contributions(self, limit: int, offset: int) -> dict[str, Any]:
        if self._state is not None and self._state.credit.nodes:
            return contributions(self._state, self._facts.run, limit, offset)
        said = self._by_records()
        page = slice(offset, offset + min(limit, MAX_ACCOUNTS))
        return said | {"owners": said["owners"][page], "nodes": said["nodes"][page]}

    def account(self, node: NodeId) -> dict[str, Any] | None:
        if self._state is not None and self._state.credit.nodes:
            return account(self._state, node)
        return next((a for a in self._by_records()["nodes"] if a["node_id"] == node), None)

    def _by_records(self) -> dict[str, Any]:
        with self._turn:
            if self._added_up is None:
                self._added_up = _added_up(self.records, self._facts)
            return self._added_up

    def crowded(self) -> bool:
        return False

    def over(self) -> bool:
        return False


@contextmanager
def opened(place: str) -> Iterator[PastRun]:
    """The run whose records are in `place`: a coordinator's state directory, a folder of segments, or a store's
    URL. Raises `ConfigError` where no run is."""
    with ExitStack() as stack:
        folder = None if "://" in place else Path(place).expanduser()
        if folder is not None and (folder / "journal.sqlite").exists():
            journal = Journal(folder, lock=False)
            stack.callback(journal.close)
            yield _of_journal(journal, folder)
            return
        archive = RecordArchive(opened_store(place if folder is None else str(folder)))
        facts = archive.facts()
        if facts is None and not archive.spans():
            inner = Path(place) / "coordinator"
            hint = f": {inner} has" if folder is not None and (inner / "journal.sqlite").exists() else ""
            raise ConfigError(
                f"{place} has neither a coordinator's journal nor records of a run{hint}: give a coordinator's "
                "--state-dir, or what --archive was"
            )
        configs = facts.configs.values() if facts is not None else ()
        name = facts.run if facts is not None else place
        owners = facts.owners if facts is not None else {}
        nodes = {node: NodeFacts(owner=owner) for node, owner in owners.items()}
        yield PastRun(ArchivedRecords(archive), RecordedRun(name, max(map(_total, configs), default=0), nodes))


def _of_journal(journal: Journal, folder: Path) -> PastRun:
    said, name = journal.meta("config"), journal.meta("run") or str(folder)
    config = from_json(said.encode()) if said is not None else RunConfig()
    state = JournaledMachine(config, journal).state
    facts = RecordedRun(name, config.rounds.total, facts_of_nodes(state))
    return PastRun(RunRecords(journal, folder, name), facts, state)


def _total(config: msgspec.Raw) -> int:
    """The rounds of a run with this config; 0: its end is open, or it is another version's."""
    try:
        return from_json(bytes(config)).rounds.total
    except (ConfigError, *DECODE_ERRORS):
        return 0


def _added_up(records: Records, facts: RecordedRun) -> dict[str, Any]:
    """Who contributed how much, by all records. They have nodes' names; owners, those that had the nodes last."""
    tokens, rounds, names = Counter[NodeId](), Counter[NodeId](), dict[NodeId, dict[str, None]]()
    owned, owned_rounds = Counter[str](), Counter[str]()
    owner = {node: known.owner for node, known in facts.nodes.items()}
    last, there = records.series().last, list(map(int, records.series().column("round")))
    for at in range(0, len(there), ROUNDS):
        for view in records.views(there[at : at + ROUNDS]):
            if view.void:
                continue
            called, weights = view.names, view.of_nodes("contributors")
            for node, weight in weights.items():
                tokens[node] += int(weight)
                rounds[node] += 1
                if node in owner:
                    owned[owner[node]] += int(weight)
                if node in called:
                    names.setdefault(node, {})[called[node]] = None
            owned_rounds.update({owner[node] for node in weights if node in owner})
    whole = int(records.series().column("tokens")[-1]) if last else 0
    nodes = [
        {
            **{"node_id": node, "key": "", "name": next(reversed(names.get(node, {node: None})))},
            **{"former_names": list(names.get(node, {}))[:-1], "owner": owner.get(node, "")},
            **{"tokens": count, "rounds": rounds[node]},
        }
        for node, count in tokens.most_common()
    ]
    belong = Counter(owner[node] for node in tokens if node in owner)
    owners = [
        {"owner": name, "tokens": count, "rounds": owned_rounds[name], "nodes": belong[name]}
        for name, count in owned.most_common()
    ]
    return {
        **{"run_id": facts.run, "committed": last, "tokens": whole},
        **{"uncredited": max(whole - tokens.total(), 0), "owners_total": len(owners), "nodes_total": len(nodes)},
        **{"owners": owners, "nodes": nodes},
    }
