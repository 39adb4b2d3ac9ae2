"""The makers of the last commit's state that are here, and what they say that it is. Pure.

Up to a quarter of the members may lie, or be broken. While most of them are here the majority of these
tells which state is right (`state_sync`); when half are gone, or more, it takes more than that quarter, and the
run waits for it, and makes no round meanwhile (`rollback`): who stays while the others' connections are broken is
no majority. Where no more than half of the members made the state it takes most of those, here or gone.
"""

from collections import Counter
from collections.abc import Iterable

from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine.conduct import Consequence, consequence
from atoll.coordinator.state_machine.members import Member, MemberState
from atoll.coordinator.state_machine.state import CommittedState, State, most_common, order

AWAY_ROUNDS = 20  # commits for which a member that is away, or left, still counts as one


def makers_here(state: State) -> list[Member]:
    """Those of the members that made state_committed, and did not lose it, heard lately or not."""
    return [
        m
        for n in sorted(state.makers, key=order)
        if (m := state.members.here.get(n)) is not None and _made(state, m)
    ]


def _made(state: State, member: Member) -> bool:
    """Whether it made state_committed, and did not lose it. One that came back without its state waits for its
    digest."""
    able = member.state is MemberState.ACTIVE or member.state_round == state.committed
    return able and member.node in state.makers


def votes(state: State, member: Member) -> bool:
    """Whether it is a maker of state_committed that names its digest."""
    return _made(state, member) and member.suspected is None


def voters(state: State) -> tuple[NodeId, ...]:
    """Who names the digest of state_committed: those that made it, live and did not lose it, or, where none of
    them is here, whoever else holds it."""
    here = makers_here(state)
    return tuple(m.node for m in here if m.suspected is None) if here else state.holders


def told_digests(state: State) -> dict[NodeId, bytes]:
    """What they said that it is, with its makers that said it and then good-bye, while others of these are here:
    a stranger's word is not added to theirs."""
    here = state.members.here
    members = [here[n] for n in voters(state)]
    if makers_here(state):
        members += _makers_that_left(state)
    return {m.node: m.state_digest for m in members if m.state_round == state.committed}


def _makers_that_left(state: State) -> list[Member]:
    """With a good-bye, and not banned since."""
    departed = ((n, state.members.departed.get(n)) for n in sorted(state.makers, key=order))
    left = [m for _, m in departed if m is not None and m.state is MemberState.LEFT]
    return [m for m in left if consequence(state, m.node) is not Consequence.BANNED]


def silent_makers(state: State) -> list[NodeId]:
    """Those that are here, heard lately or not, and have not said what they made."""
    return [m.node for m in makers_here(state) if m.state_round != state.committed]


def known_lately(state: State, took_part: Iterable[NodeId]) -> dict[NodeId, int]:
    """At the commit of the round, in which these took part: whoever did lately, and the last round in which it
    did. They are among all members, of whom a quarter may lie: that one is away makes others' lies no truer."""
    number, members = state.round.number, state.members
    known = {
        n: last
        for n, last in state.known_lately.items()
        if last > number - AWAY_ROUNDS and (n in members.here or n in members.departed)
    }
    return known | dict.fromkeys(sorted(took_part, key=order), number)


def took_part(state: State) -> frozenset[NodeId]:
    """Whoever took part in the last committed round, and was among all members of whom a quarter may lie."""
    return frozenset(n for n, last in state.known_lately.items() if last == state.committed)


def may_hold(state: State, node: NodeId, round_: int) -> bool:
    """Whether a member's word that it holds the state of this round can be true. Before its digest is known nobody
    can fetch it, and who took no part in the round cannot make it."""
    if round_ == state.committed:
        return bool(state.digest) or state.known_lately.get(node) == round_
    before = state.unnamed
    return before is None or round_ != before.round or node in before.took_part


def are_too_few(state: State, votes: int) -> bool:
    """Whether all who have so many votes on the last commit's state may lie, and too few are here to tell."""
    here = len(makers_here(state))
    return not may_tell(state, votes, here > 0) and are_few(state, here)


def are_few(state: State, makers: int) -> bool:
    """Whether so many of the makers, of which others are gone, are half of those that are to tell, or less."""
    return makers < len(state.makers) and 2 * makers <= _electorate(len(state.makers), state.fleet)


def believed_digest(state: State) -> bytes:
    """What more of them told than anything else, and so many that not all can lie; empty: nothing."""
    told = told_digests(state)
    digest, votes = most_common(told)
    tells = may_tell(state, votes, bool(makers_here(state)))
    return digest if tells and not is_equal_vote(told, votes) else b""


def is_equal_vote(told: dict[NodeId, bytes], votes: int) -> bool:
    """Whether more than one digest has so many votes."""
    return list(Counter(told.values()).values()).count(votes) > 1


def may_tell(state: State, votes: int, made: bool = True) -> bool:
    """Whether those who have so many votes on the last commit's state cannot all lie; `made`: they made it, else
    they may be any of the members."""
    return 4 * votes > (_electorate(len(state.makers), state.fleet) if made else state.fleet)


def _electorate(makers: int, fleet: int) -> int:
    """Of how many a quarter is too few: of all members, and of who made the state, where these are fewer than half
    of them, so many that it takes most of these: more of them may lie, but then nobody can tell."""
    return min(fleet, 2 * makers)


def told_late(state: State) -> CommittedState | None:
    """The commit before the last one, where its digest was not known in time, as its makers have told by now what
    it is, or more than a quarter of all members."""
    if (before := state.unnamed) is None:
        return None
    here = state.members.here
    told = {n: here[n].state_digest for n in sorted(here, key=order) if here[n].state_round == before.round}
    makers = {n: digest for n, digest in told.items() if n in before.makers}
    for words, of in ((makers, _electorate(len(before.makers), before.fleet)), (told, before.fleet)):
        digest, votes = most_common(words)
        if 4 * votes > of and not is_equal_vote(words, votes):
            return CommittedState(before.round, digest, before.tokens)
    return None
