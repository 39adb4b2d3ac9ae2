"""The operator's rulings on nodes of a run, bans and pardons: left in the journal of its coordinator, which may be
running and takes them within seconds, or at its next start."""

from collections.abc import Iterable

from atoll.comm.config.run import from_json
from atoll.comm.errors import ConfigError
from atoll.comm.ids import NodeId, is_meant
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.journaled_machine import JournaledMachine
from atoll.coordinator.state_machine.conduct import identity
from atoll.coordinator.state_machine.events import Banned, Pardoned
from atoll.coordinator.state_machine.state import State

KEY_DIGITS = 12  # of a key, that are told of those between which a person is to choose


def ban(journal: Journal, what: str, reason: str) -> NodeId:
    """Leave word that the node of this id, name or key is out for good; return its id. Raises `ConfigError` where
    the run knows none, or several, and `JournalFull`."""
    state = _state(journal)
    nodes = [(n, m.name, identity(state, n)) for n, m in (state.members.departed | state.members.here).items()]
    node = _one(what, nodes)
    if node is None:
        raise ConfigError(
            f"the run knows no node {what!r}: give the id, the name or the key of one that is or was there "
            "(`atoll status`, `atoll contributions`)"
        )
    journal.leave_ruling(Banned(node, reason))
    return node


def pardon(journal: Journal, what: str, reason: str) -> NodeId:
    """Leave word that nothing is held any more against the node of this id, name or key; return its id. Raises
    `ConfigError` where nothing was held against it, or against several, and `JournalFull`."""
    node = _one(what, [(d.node, d.name, d.key or d.node) for _, d in journal.decisions()])
    if node is None:
        raise ConfigError(f"nothing was held against {what!r}: `atoll blame` shows against whom something was")
    journal.leave_ruling(Pardoned(node, reason))
    return node


def _state(journal: Journal) -> State:
    """The run's state as it is in the journal now. Raises `ConfigError` where no coordinator came up yet."""
    with journal.one_moment():
        if (config := journal.meta("config")) is None:
            raise ConfigError(f"the coordinator in {journal.directory} has not come up yet: start it first")
        return JournaledMachine(from_json(config.encode()), journal).state


def _one(what: str, nodes: Iterable[tuple[NodeId, str, str]]) -> NodeId | None:
    """The node that is meant by `what`, of these with their names and keys: the latest, where all have one key.
    Raises `ConfigError` for several: a node may call itself by another one's id."""
    found = {node: (name, key) for node, name, key in nodes if is_meant(what, node, name, key)}
    if len({key for _, key in found.values()}) > 1:
        several = ", ".join(f"{node} ({name}, key {key[:KEY_DIGITS]})" for node, (name, key) in found.items())
        raise ConfigError(f"{what!r} may be each of {several}: give so much of the key of one")
    if what in found:
        return NodeId(what)
    return next(reversed(found), None)
