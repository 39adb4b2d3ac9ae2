"""Members in their first exchange, of whose links nobody knows what they carry. Pure.

What such a member says of its link it may have made up; and to wait for it as long as the slowest link needs that
is of any use would let every stranger with an invite hold up a run for that long. So, among others that were in
exchanges, a newcomer

    owns no chunks (`chunk_owners`). With a link ten times slower than the others' it would be late with them; so
    it has to carry no more than its own contribution and the sealed chunks
    has as much time as all (`lateness`), in each stage and for its contribution. How much it needs nobody could
    know: so it is no straggler within that. Who is late owes the others the time, and is struck for it only if it
    is late again while it does

From then on plans go by what the others saw of its link meanwhile, though it was late (`Member.rates`). It is a
newcomer until an exchange is committed with it.

Where most are new, as when a run begins, there is nobody to rely on in their place: all of them own chunks, and a
stage takes its `rounds.reduce_timeout`.
"""

from collections.abc import Iterable, Iterator

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine.conduct import consequence, owes_time
from atoll.coordinator.state_machine.ledger import Ledger
from atoll.coordinator.state_machine.members import REDUCER, Members, put
from atoll.coordinator.state_machine.state import State


def newcomers(state: State, nodes: Iterable[NodeId]) -> frozenset[NodeId]:
    """The newcomers of these nodes, which are all of an exchange; nobody, where most that contribute are new."""
    here = state.members.here
    contributing = [n for n in nodes if n in here and here[n].role != REDUCER]
    new = frozenset(n for n in contributing if not here[n].exchanged)
    return new if 2 * len(new) <= len(contributing) else frozenset()


def excused(state: State, nodes: Iterable[NodeId]) -> frozenset[NodeId]:
    """Those of the nodes against whom it is not held that their links are slow: newcomers among others, in the
    exchange under way, that cost nobody any time before."""
    return frozenset() if most_are_new(state) else frozenset(_new(state, nodes))


def most_are_new(state: State) -> bool:
    """Whether most of the attempt are in their first exchange, and cost nobody any time before."""
    members = state.round.ledger.members
    return 2 * sum(1 for _ in _new(state, members)) > len(members)


def is_blameless(state: State, node: NodeId) -> bool:
    """Whether nothing is held against the node, and it owes the others no time."""
    return consequence(state, node) is None and not owes_time(state, node)


def with_exchange(members: Members, ledger: Ledger) -> Members:
    """The members, when the exchange of this ledger is committed."""
    here, there = members.here, (e.node for e in ledger.entries if not e.gone)
    first = (here[n] for n in there if n in here and not here[n].exchanged)
    return put(members, *(replace(m, exchanged=True) for m in first))


def _new(state: State, nodes: Iterable[NodeId]) -> Iterator[NodeId]:
    here = state.members.here
    new = (n for n in nodes if n in here and not here[n].exchanged)
    return (n for n in new if is_blameless(state, n))
