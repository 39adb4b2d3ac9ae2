"""The operator's rulings on nodes of a run, bans and pardons: left in the journal of its coordinator, which may be
running and takes them within seconds, or at its next start."""

from collections.abc import Iterable
from pathlib import Path

from atoll.comm.config.run import from_json
from atoll.comm.errors import ConfigError
from atoll.comm.ids import NodeId
from atoll.coordinator.monitor.blame import MIN_KEY_PREFIX, about
from atoll.coordinator.server import opened_journal
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.journaled_machine import JournaledMachine
from atoll.coordinator.state_machine.conduct import identity
from atoll.coordinator.state_machine.events import Banned, Pardoned
from atoll.coordinator.state_machine.state import State


def ban_node(state_dir: Path, node: str, reason: str) -> NodeId:
    """Leave word that the node of this id, name or key is out for good; return its id. Raises `ConfigError` where
    the run knows none, or several."""
    with opened_journal(state_dir) as journal:
        state = _state(journal)
        members = state.members.departed | state.members.here
        named = ((n, m.name) for n, m in members.items() if _is(n, m.name, identity(state, n), node))
        found = _one(node, named, {n: identity(state, n) for n in members})
        if found is None:
            raise ConfigError(
                f"the run knows no node {node!r}: give the id, the name or the key of one that is or was there "
                "(`atoll status`, `atoll contributions`)"
            )
        journal.leave_ruling(Banned(found, reason))
        return found


def pardon_node(state_dir: Path, node: str, reason: str) -> NodeId:
    """Leave word that nothing is held any more against the node of this id, name or key; return its id. Raises
    `ConfigError` where nothing was held against it, or against several."""
    with opened_journal(state_dir) as journal:
        decisions = [] if node.isdigit() else [d for _, d in about(journal.decisions(), node)]
        named = ((d.node, d.name) for d in decisions)
        found = _one(node, named, {d.node: d.key or d.node for d in decisions})
        if found is None:
            raise ConfigError(f"nothing was held against {node!r}: `atoll blame` shows against whom something was")
        journal.leave_ruling(Pardoned(found, reason))
        return found


def _state(journal: Journal) -> State:
    """The run's state as it is in the journal now. Raises `ConfigError` where no coordinator came up yet."""
    with journal.one_moment():
        if (config := journal.meta("config")) is None:
            raise ConfigError(f"the coordinator in {journal.directory} has not come up yet: start it first")
        return JournaledMachine(from_json(config.encode()), journal).state


def _is(node: NodeId, name: str, key: str, what: str) -> bool:
    return what in (node, name) or (len(what) >= MIN_KEY_PREFIX and key.startswith(what.lower()))


def _one(what: str, named: Iterable[tuple[NodeId, str]], keys: dict[NodeId, str]) -> NodeId | None:
    """The one that is meant by `what`, of those with their names that it may be; the latest, where all have one
    key. An id is nobody's name: whoever calls itself so is not meant. Raises `ConfigError` for several."""
    found = dict(named)
    if what in found:
        return NodeId(what)
    if len({keys[n] for n in found}) > 1:
        several = ", ".join(f"{n} ({name})" for n, name in found.items())
        raise ConfigError(f"{what!r} may be each of {several}: give the id of one")
    return next(reversed(found), None)
