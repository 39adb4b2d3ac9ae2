"""The beginning of a run: which model its members have, and the state 0 that they train from. Pure.

No single member decides either. While nothing is committed,

    layout    the first that is told stands until another differs; from then on nobody makes a state, and no round
              starts, before two members agree. Who differs from two is out. (Where the config says the layout,
              the service has refused all others: `run_layout`.)
    state 0   is made by two members, each by itself, from the run's seed or from what the run begins with, and is
              the run's when both have the same digest. Where they differ, a third makes it, and more, until two
              agree. Who has another one fetches it.

A member that is alone goes on with what it has made; the next to come makes state 0 too, before it does anything
else, and the run says whether it is the same (`record_check`). Where the run's code cannot give the same bits on
all machines (`RunConfig.remakes_beginning`), and all have made it and no two agree, the first one's counts.

Whoever was asked has `MAX_STALLS` times `members.stall` in all, whatever progress its heartbeats tell: then
another is asked as well, and the first two that agree are heard. Once one has made it, another is asked, too, in
the place of who takes `MAX_TIMES` as long as that one did, and longer than that takes on a slow machine: else a
member that only says that it makes progress would have the run begin so late. Each further one has twice the time:
else one that lies about it at once would have so many asked, where all are slow, that its accomplice is among
them. The slow one's word counts as ever, and while it may come nobody's alone does. Nobody is slow where they have
to fetch what the run begins with, as some have that at hand. `state_sync` takes the reports here.
"""

import math
from collections.abc import Mapping

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import members as who
from atoll.coordinator.state_machine.changes import remove, with_member
from atoll.coordinator.state_machine.conduct import Evidence, Offence, charge
from atoll.coordinator.state_machine.events import Effect, Note
from atoll.coordinator.state_machine.members import REDUCER, Member, MemberState
from atoll.coordinator.state_machine.run_layout import RunLayout
from atoll.coordinator.state_machine.state import Beginning, Phase, RoundState, State, most_common

MAX_CHECKERS = 2  # members that make at the same time what one alone had made
MAX_STALLS = 6  # times members.stall that who makes state 0 may take in all before another is asked, too
# Times what who made it first took, which may be a lie, and seconds at least, and for each parameter: it is slow.
MAX_TIMES, MIN_PATIENCE, PATIENCE_PER_PARAMETER = 3.0, 10.0, 1e-7


def record_layout(state: State, node: NodeId, layout: RunLayout, out: list[Effect]) -> State:
    """Enter the layout that a member told. The run has one from then on; a member whose differs stays out of the
    run, or until there is a majority is kept waiting."""
    other = state.layout is not None and state.has_other_layout(*layout)
    if state.layout is not None and (state.beginning.settled or _counts(state)):
        if other:
            return remove(state, node, MemberState.EVICTED, _differs(state, layout), out)
        return _recovering(state, node)
    told = _layouts(state) | {node: layout}
    state = replace(state, beginning=replace(state.beginning, layouts=told))
    if state.layout is None or not other:
        return _with_layout(state, layout, out)
    values = list(told.values())
    if values.count(layout) > 1 or RunLayout(*state.layout, state.fragments) not in values:
        return _with_layout(state, layout, out)
    out.append(Note(f"{state.name(node)}: {_differs(state, layout)}: a third member has to say which it is", node))
    waits = "its model is another than the first member's: waits for what a third one says"
    return with_member(state, replace(state.members.here[node], reason=waits))


def is_disputed(state: State) -> bool:
    """Whether members have different models, and nobody can tell yet which is the run's."""
    if state.committed or state.beginning.settled or len(state.beginning.layouts) < 2:
        return False
    return len(set(_layouts(state).values())) > 1


def wait_reason(state: State) -> str:
    """The sentence that says why no first round starts though enough members are there; empty: it may."""
    if state.committed or state.round.phase is not Phase.WAITING:
        return ""
    if is_disputed(state):
        names = state.names(_layouts(state))
        return f"{names} have different models, and no two agree: a further member has to say which is the run's"
    if not state.digest and len(made := _made(state)) > 1:
        return f"{state.names(made)} made different states 0: a further member has to say which is the run's"
    return ""


def ask_makers(state: State, now: float, out: list[Effect]) -> State:
    """Ask members to make state 0, until the run has one that two made alike, or until nobody else can; take over
    what was made."""
    begun = state.beginning
    if state.committed:
        return _with(state, replace(begun, asked=_checkers(state, now)))
    if state.digest and not state.state_held:
        state = replace(state, digest=b"")  # state_0 went with its last holder: it is made again
    if state.layout is None and (told := _layouts(state)):  # whose model was another's, who is gone
        state = _with_layout(state, next(iter(told.values())), out)
    if state.digest:
        return _with(state, replace(state.beginning, asked=_checkers(state, now)))
    if is_disputed(state):
        return _with(state, replace(state.beginning, asked={}))
    return _ask(state, now, out)


def record_made(state: State, node: NodeId, digest: bytes, now: float, out: list[Effect]) -> State:
    """Enter that a member that was asked made a state 0 of this digest. Empty: it could not make one."""
    begun = state.beginning
    asked = {n: at for n, at in begun.asked.items() if n != node}
    took = begun.took if any(begun.made.values()) else now - begun.asked[node]
    begun = replace(begun, asked=asked, made=begun.made | {node: digest}, took=took)
    state = replace(state, beginning=begun)
    if not digest:
        out.append(Note(f"{state.name(node)} cannot make state 0", node))
        return state
    state = replace(state, members=who.report_state(state.members, node, 0, digest))
    named = begun.first if state.committed else state.digest
    if not named:
        return state
    if digest == named:
        out.append(Note(f"{state.name(node)} made the same state 0 as the run's", node))
        return _with(state, replace(state.beginning, agreed=digest))
    if state.committed:
        return _doubt(state, node, digest, out)
    holds = [n for n, d in _made(state).items() if d == named]
    sentence = f"{state.name(node)} made another state 0 than {state.names(holds) or 'the one that is gone'}"
    out.append(Note(f"{sentence}: no round starts before two members agree", node))
    attempt = state.round.ledger.attempt
    fresh = RoundState(number=1, reason=sentence, started_at=state.round.started_at)
    return replace(state, digest=b"", round=replace(fresh, ledger=replace(fresh.ledger, attempt=attempt)))


def _doubt(state: State, node: NodeId, digest: bytes, out: list[Effect]) -> State:
    """One made another state 0 than the one that the committed rounds began with."""
    alike = [n for n, d in state.beginning.made.items() if d == digest]
    sentence = f"{state.names(alike)} made another state 0 than the one that the run began with"
    over = replace(state.beginning, agreed=state.beginning.first)  # nobody needs to be asked any more
    if not state.config.remakes_beginning:
        out.append(Note(f"{sentence}: on other machines it may be another", node))
        return _with(state, over)
    more = ", and they agree: begin the run anew" if len(alike) > 1 else ": the next to come makes it, too"
    out.append(Note(f"{sentence}, which one member alone had made{more}", node))
    return _with(state, over) if len(alike) > 1 else state


def _checkers(state: State, now: float) -> dict[NodeId, float]:
    """Members that are to make state 0 before they fetch the run's, as only one member has made it so far."""
    begun, here = state.beginning, state.members.here
    if begun.agreed or not begun.first:
        return {}
    asked = {n: at for n, at in begun.asked.items() if _may_make(here.get(n))}
    able = [n for n in _able(state, first=False) if here[n].state_round < 0]
    # Who comes back takes no place from one that is new: else two, who never answer, could hold both for good.
    waited_for = [n for n in _pending(state, asked, now) if here[n].life == 1]
    new = [n for n in able if here[n].life == 1][: max(MAX_CHECKERS - len(waited_for), 0)]
    again = [n for n in able if here[n].life > 1][: max(MAX_CHECKERS - len(asked) - len(new), 0)]
    return asked | dict.fromkeys((*new, *again), now)


def _pending(state: State, asked: Mapping[NodeId, float], now: float) -> list[NodeId]:
    """Those of whom an answer may still be expected. Who is not heard is heard again soon, or out: else who is
    back first when all streams broke would name the state alone."""
    limit = MAX_STALLS * state.config.members.stall
    return [n for n, at in asked.items() if now - at <= limit]


def _ask(state: State, now: float, out: list[Effect]) -> State:
    begun, here = state.beginning, state.members.here
    made = _made(state)
    asked = {n: at for n, at in begun.asked.items() if _may_make(here.get(n))}
    state = _with(state, replace(begun, asked=asked, made=made))
    if (digest := _agreed(made)) or (digest := begun.agreed if begun.agreed in made.values() else b""):
        return _named(state, digest, digest, out)
    pending = _pending(state, asked, now)
    words = [d for d in made.values() if d]
    patience = _patience(state)
    prompt = [n for i, n in enumerate(pending) if not words or now - asked[n] <= patience * 2.0**i]
    more = 1 if len(words) > 1 and not prompt else 2 - len(words) - len(prompt)
    if more > 0 and (new := _able(state, first=not asked and not words)[:more]):
        return _with(state, replace(state.beginning, asked=asked | dict.fromkeys(new, now)))
    if not words or pending:
        return state
    if len(set(words)) == 1:  # nobody else is there
        return _named(state, words[0], b"", out)
    if state.config.remakes_beginning:
        return state
    out.append(Note(f"{state.names(made)} made different states 0, as may be on different machines"))
    return _named(state, words[0], words[0], out)


def _patience(state: State) -> float:
    """Seconds after which who makes state 0 is slow, once another has made it; the next has twice as many."""
    if state.config.init_from or state.layout is None:
        return math.inf
    return max(MAX_TIMES * state.beginning.took, MIN_PATIENCE + PATIENCE_PER_PARAMETER * state.layout[0])


def _able(state: State, first: bool) -> list[NodeId]:
    """Members that may be asked to make state 0. The `first` is to be one that others can fetch it from."""
    begun, here = state.beginning, state.members.here
    every = state.members.of(MemberState.RECOVERING)
    able = [n for n in every if n not in begun.asked and n not in begun.made]
    if first:
        coming = any(m.state is MemberState.JOINING and not m.leaf for m in here.values())
        if coming or not all(here[n].leaf for n in every):
            able = [n for n in able if not here[n].leaf]
    return able


def _named(state: State, digest: bytes, agreed: bytes, out: list[Effect]) -> State:
    """The run's state 0 is known; it counts as checked if it is `agreed`."""
    makers = [n for n, d in state.beginning.made.items() if d == digest]
    out.append(Note(f"{state.names(makers)} initialised the model", makers[0]))
    others = [n for n, d in state.beginning.made.items() if d not in (b"", digest)]
    begun = replace(state.beginning, first=digest, agreed=agreed, asked={})
    state = replace(state, digest=digest, beginning=begun)
    if state.config.remakes_beginning:
        for node in others:
            sentence = f"it made another state 0 than {state.names(makers)}, who made the same"
            state = charge(state, node, Evidence(0, Offence.FALSE_CLAIM, sentence), out)
    return state


def _with_layout(state: State, layout: RunLayout, out: list[Effect]) -> State:
    """The run has this layout, which a member has told; once two have, members that have told another are out."""
    told = _layouts(state)
    settled = list(told.values()).count(layout) > 1
    begun = replace(state.beginning, settled=settled, layouts={} if settled else told)
    if state.layout is None or state.has_other_layout(*layout):
        begun = replace(begun, asked={}, made={}, first=b"", agreed=b"")
        state = replace(state, layout=layout[:2], fragments=layout.fragments, digest=b"")
    state = replace(state, beginning=begun)
    for node, theirs in told.items():
        if theirs == layout:
            state = _recovering(state, node)
    if settled:  # only now: with nobody here who has built it the run has no layout
        for node, theirs in told.items():
            if theirs != layout:
                state = remove(state, node, MemberState.EVICTED, _differs(state, theirs), out)
    return state


def _recovering(state: State, node: NodeId) -> State:
    member = state.members.here[node]
    if member.state is not MemberState.JOINING:
        return state
    return with_member(state, replace(member, state=MemberState.RECOVERING, reason="fetches the live state"))


def _counts(state: State) -> bool:
    """Whether a round counts on the run's layout."""
    return state.committed > 0 or state.round.phase is not Phase.WAITING


def _layouts(state: State) -> dict[NodeId, RunLayout]:
    """What members that are here have told."""
    here = state.members.here
    return {n: layout for n, layout in state.beginning.layouts.items() if n in here}


def _made(state: State) -> dict[NodeId, bytes]:
    """What members that still have it made of state 0; empty of those that could not."""
    here = state.members.here
    return {
        n: d
        for n, d in state.beginning.made.items()
        if (m := here.get(n)) is not None and (not d or (m.state_round == 0 and m.state_digest == d))
    }


def _agreed(made: dict[NodeId, bytes]) -> bytes:
    """The digest that two made."""
    digest, votes = most_common({n: d for n, d in made.items() if d})
    return digest if votes > 1 else b""


def _may_make(member: Member | None) -> bool:
    return member is not None and member.state is MemberState.RECOVERING and member.role != REDUCER


def _with(state: State, begun: Beginning) -> State:
    return state if begun == state.beginning else replace(state, beginning=begun)


def _differs(state: State, layout: RunLayout) -> str:
    assert state.layout is not None
    return (
        f"its model has {layout.numel:,} parameters in layout {layout.digest.hex()[:8]}, the run's has "
        f"{state.layout[0]:,} in layout {state.layout[1].hex()[:8]}"
    )
