"""The node's decisions: `step(state, event) -> (state, effects)`. Pure; the daemon calls it, and nobody else
changes the state.

It compares the coordinator's latest view with what the node has and does, and asks for what is missing. Views
are whole and idempotent, so nothing depends on having seen every one of them.

    trainer:  Down -> Idle -> Training | Evaluating -> Idle
    outer:    NoState -> Moving (initialise or recover) -> At round k -> Moving (apply) -> At round k+1 ...
    work:     trained -> Ready -> committed with the others, or left out: Carried, and trained on
    reduce:   none -> Reducing (attempt 1, 2, ...) -> Reduced -> none

With overlap a trainer that handed its work over does not stop: it goes `Ahead`, on the samples that follow, and
takes the new state when it is told to `OrderTraining` on. While it is ahead, and only then, the state moves under
a trainer at work: it reads neither anchor nor local vector until it is told, and from then on both stand still
until it hands over again.

A node that saves bytes takes part in no exchange: it leaves the reduce under way, and the recovery, and applies
what is here already. Also when bytes may be spent again it takes no part in a reduce before the coordinator has
said that it knows: until then it plans with what the node has dropped.

Where fragments take turns, a round commits the steps of one fragment only. What the local vector has of the others
stays (`FragmentTurns`): the next steps start from it, though no sample of it is to be committed any more.
"""

from dataclasses import replace
from typing import assert_never

from atoll.comm.digest import DIGEST_SIZE
from atoll.comm.leases import remaining
from atoll.comm.leases import samples as samples_of
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node import trainer_channel as trainer
from atoll.node.state_machine.effects import (
    Apply,
    Depart,
    Effect,
    Encode,
    EndTrainer,
    FallBack,
    FinishTraining,
    HoldTraining,
    LeaveRun,
    OrderEvaluation,
    OrderInitialisation,
    OrderTraining,
    Recover,
    Renumber,
    ReportEvaluated,
    ReportLayout,
    ReportReached,
    ReportReady,
    ReportState,
    RunFinished,
    StartReduce,
    StopRecovery,
    StopReduce,
    VerifySeals,
)
from atoll.node.state_machine.events import (
    AttemptComplete,
    EncodingBegun,
    EncodingFailed,
    Event,
    MoveFailed,
    PartingAsked,
    PauseChanged,
    Rejoined,
    StateMoved,
    TrainerDown,
    TrainerSilent,
    TrainerUp,
    ViewArrived,
)
from atoll.node.state_machine.state import (
    Ahead,
    At,
    Attempt,
    CarriedWork,
    Down,
    Evaluating,
    FragmentTurns,
    Idle,
    Move,
    Moving,
    NoState,
    OuterPosition,
    Parting,
    ReadyWork,
    Reduced,
    Reducing,
    State,
    Training,
    UnusableWork,
    Work,
)

STALL_SHARE = 0.7  # share of `members.stall`: a hung trainer is ended before the coordinator gives its node up
NO_STATE = b"there is nothing"[:DIGEST_SIZE]  # as a state's digest: no state has it
MAX_BAD_ORDERS = 5  # in a row of which nothing could be used: then the node leaves


def step(state: State, event: Event) -> tuple[State, list[Effect]]:
    """Take `event` in, and decide until nothing is left to decide: returns the new state, and the effects to carry
    out, in order."""
    effects: list[Effect] = []
    state = _take(state, event, effects)
    while True:
        after = _decide(state, effects)
        if after == state:
            break
        state = after
    # Without a reduce there is nothing to compare: this is a new life of the node that was asked.
    if (
        isinstance(event, ViewArrived)
        and state.view is event.view
        and event.view.ledger
        and state.reduce is not None
    ):
        effects.append(VerifySeals(event.view))
    return state, effects


def _take(state: State, event: Event, out: list[Effect]) -> State:
    match event:
        case ViewArrived(view):
            if state.view is not None and _order(view) <= _order(state.view):
                return state
            _repeat(state, view, out)
            left = state.left and not view.saves_bytes
            return replace(state, view=view, unusable=_still_unusable(state.unusable, view), left=left)
        case TrainerUp(layout):
            if isinstance(state.trainer, Down):
                out.append(ReportLayout(layout))
            turns = state.turns or (FragmentTurns() if len(layout.fragments) > 1 else None)
            return replace(state, trainer=Idle(), layout=layout, turns=turns)
        case TrainerDown():
            return _without_trainer(state)
        case TrainerSilent(seconds):
            if state.owes_answer and seconds > STALL_SHARE * state.stall:
                out.append(EndTrainer(seconds))
            return state
        case trainer.Reached(round_):
            if not isinstance(state.trainer, Training) or state.trainer.round != round_:
                return state
            out.append(ReportReached(round_))
            return replace(state, reached=round_, doubted_round=0)
        case trainer.Ready():
            if not isinstance(state.trainer, Training) or state.trainer.round != event.round:
                return state
            return _handed_over(replace(state, doubted_round=0), state.trainer, event, out)
        case trainer.BadArithmetic():
            return _without_steps(state, event, out)
        case trainer.Waits(round_):
            if not isinstance(state.trainer, Ahead) or state.trainer.round != round_:
                return state
            return replace(state, trainer=replace(state.trainer, waits=True))
        case trainer.Evaluated():
            out.append(ReportEvaluated(event))
            return replace(_evaluated(state), evaluated=event.round)
        case EncodingBegun(work, norm, damping):
            # A report of what the node has dropped since, or begun anew, would have other steps weighed with these
            # tokens.
            if state.ready == work:
                out.append(ReportReady(work.round, _contribution(work, norm, damping)))
                return replace(state, work=ReadyWork(work, reported=True))
            return state
        case EncodingFailed(work, sentence):
            return state if state.ready != work else _without_work(state, work, sentence, out)
        case AttemptComplete(attempt, root):
            if attempt not in _attempts(state):
                return state
            state = replace(state, bad_deltas=state.bad_deltas if state.ready is None else 0)
            reduced, now = Reduced(attempt, root), state.reduce
            if isinstance(now, Reducing) and now.attempt != attempt:  # what was held is told anew, once compared
                return replace(state, reduce=replace(now, before=reduced))
            return replace(state, reduce=reduced)
        case StateMoved(round_, digest):
            out.append(ReportState(round_, digest))
            if isinstance(state.work, ReadyWork):
                state = replace(state, work=CarriedWork(state.work.work))
            return replace(state, outer=At(round_, digest))
        case MoveFailed(round_):
            return _not_moved(state, round_, out)
        case Rejoined():
            return _in_new_session(state, out)
        case PauseChanged(paused, saves_bytes):
            return replace(state, paused=paused, saves_bytes=saves_bytes)
        case PartingAsked():
            return replace(state, parting=state.parting or Parting(_round_at_hand(state)))
        case _:
            assert_never(event)


def _without_trainer(state: State) -> State:
    if isinstance(state.outer, Moving) and state.outer.by is Move.INITIALISE:
        state = replace(state, outer=state.outer.before)
    if isinstance(state.trainer, Training):  # it may have died while it wrote the local vector
        turns = state.turns and replace(state.turns, from_local=False)
        state = replace(state, work=state.work if isinstance(state.work, ReadyWork) else None, turns=turns)
    return replace(state, trainer=Down())


def _without_steps(state: State, bad: trainer.BadArithmetic, out: list[Effect]) -> State:
    """The trainer dropped its steps, and idles; it may have written some of them to the local vector. What it had
    handed over before it went ahead stays good."""
    count = state.bad_orders + 1
    _leave_after(count, bad.sentence, out)
    state = replace(state, trouble=bad.sentence, bad_orders=count)
    match state.trainer:
        case Training(round=round_, evaluating=evaluating) if round_ == bad.round:
            turns = state.turns and replace(state.turns, from_local=False)
            state = replace(state, work=None, doubted_round=0, turns=turns)
        case Ahead(round=round_, evaluating=evaluating) if round_ == bad.round:
            pass
        case _:  # it has another order by now, which it takes up from the anchor
            return state
    return replace(state, trainer=Evaluating(round_) if evaluating else Idle())


def _evaluated(state: State) -> State:
    match state.trainer:
        case Evaluating():
            return replace(state, trainer=Idle())
        case Training() | Ahead():
            return replace(state, trainer=replace(state.trainer, evaluating=False))
        case _:
            return state


def _without_work(state: State, work: Work, sentence: str, out: list[Effect]) -> State:
    """What was handed over cannot be used, nor what was taken ahead on top of it, nor the moments since."""
    count = state.bad_deltas + 1
    _leave_after(count, sentence, out)
    if isinstance(state.reduce, Reducing):
        out.append(StopReduce())
    reported = isinstance(state.work, ReadyWork) and state.work.reported
    return replace(
        _drop_steps(state),
        work=None,
        reduce=state.reduced,
        trouble=sentence,
        bad_deltas=count,
        doubted_round=work.round,
        unusable=UnusableWork(work) if reported else None,
    )


def _still_unusable(unusable: UnusableWork | None, view: pb.View) -> UnusableWork | None:
    """What could not be encoded, until the coordinator has another round, another lease for this node, or does
    without the report."""
    if unusable is None or not view.HasField("train") or not _is_for(unusable.work, view.train):
        return None
    if unusable.in_ledger and not view.ready:
        return None
    return replace(unusable, in_ledger=view.ready)


def _leave_after(count: int, sentence: str, out: list[Effect]) -> None:
    if count >= MAX_BAD_ORDERS:
        out.append(LeaveRun(f"nothing of {count} orders in a row could be used: {sentence}"))


def _not_moved(state: State, round_: int, out: list[Effect]) -> State:
    by = state.outer.by if isinstance(state.outer, Moving) else None
    if by is Move.APPLY and state.turns is not None:  # what of the local vector is committed cannot be told
        state = _drop_steps(state)
    if by is Move.INITIALISE:
        out.append(ReportState(0, b""))
    if round_ < 0:
        return replace(state, outer=NoState(disk_tried=by is Move.FALL_BACK, unable=by is Move.INITIALISE))
    before = state.outer.before if isinstance(state.outer, Moving) else state.outer
    whole = by is not Move.REPLACE  # else it is closed, and some of its chunks may be the run's by now
    at = At(round_, before.digest if isinstance(before, At) and whole else b"", disk_tried=by is Move.FALL_BACK)
    if state.view is not None:
        _deny(at, state.view, out)
    return replace(state, outer=at)


def _deny(at: At, view: pb.View, out: list[Effect]) -> None:
    """Say that the state is none, where the coordinator takes it for the run's by what the node said before."""
    if not at.digest and at.round == view.committed and view.you in ("synced", "active"):
        out.append(ReportState(at.round, NO_STATE))


def _in_new_session(state: State, out: list[Effect]) -> State:
    if isinstance(state.outer, At) and state.outer.digest:
        out.append(ReportState(state.outer.round, state.outer.digest))  # before the layout: then it has said all
    if state.layout is not None and not isinstance(state.trainer, Down):
        out.append(ReportLayout(state.layout))
    reduced = state.reduced
    if state.reduce is not None and reduced is None:
        out.append(StopReduce())  # the run goes on without what this node had entered
    # What it holds may be committed, and nobody else have it.
    reduced = reduced and replace(reduced, in_session=False)
    return replace(state, view=None, reduce=reduced, unusable=None, left=False)


def _repeat(state: State, view: pb.View, out: list[Effect]) -> None:
    """Say again what the coordinator should know by now and does not."""
    counted = view.you == "active" and view.phase in ("inner", "collecting") and view.HasField("train")
    if counted and state.ready is not None and not view.ready and _is_for(state.ready, view.train):
        out.append(Encode(state.ready))
    if counted and state.reached == view.train.round and not view.reached:
        out.append(ReportReached(view.train.round))
    at = state.outer
    initialises = view.initialise and not _makes_no_state_0(at, view)
    if view.initialise and not initialises:
        out.append(ReportState(0, b""))
    if isinstance(at, At):
        _deny(at, view, out)
    if view.you == "recovering" and isinstance(at, At) and at.digest and at.round == view.committed:
        known = view.state_digest != b"" and at.digest == view.state_digest
        if known or initialises:  # it may have state_0 that it is to make: everybody was away
            out.append(ReportState(at.round, at.digest))


def _handed_over(state: State, task: Training, ready: trainer.Ready, out: list[Effect]) -> State:
    """The trainer's steps on top of what was carried over."""
    state = replace(state, turns=state.turns and replace(state.turns, rebased=False))
    base = state.carried or Work(task.round, task.lease, 0, fresh=task.fresh)
    total, skipped = base.samples + ready.samples, base.skipped + ready.skipped
    at_rest = Evaluating(task.round) if task.evaluating else Idle()
    if total == skipped:
        return replace(state, trainer=at_rest, work=None)
    state = replace(state, trouble="", bad_orders=0)
    mean = (base.loss * base.claimed + ready.loss * (ready.samples - ready.skipped)) / (total - skipped)
    work = Work(task.round, task.lease, total, ready.steps, mean, ready.norm, base.fresh, skipped)
    # Else its state may yet be found to be another; a later view asks for the work, if it can be used.
    if state.view is not None and state.view.you == "active" and state.round == task.round - 1:
        out.append(Encode(work))
    rest = remaining(task.lease, total) if ready.ahead else ()
    following = Ahead(task.round, rest[0][0], evaluating=task.evaluating) if rest else at_rest
    return replace(state, trainer=following, work=ReadyWork(work))


def _decide(state: State, out: list[Effect]) -> State:
    """The next thing to do, if any."""
    view = state.view
    if (resting := _rest(state, out)) is not None:
        return resting
    if state.saves_bytes and (silent := _silence(state, out)) is not None:
        return silent
    if state.parting is not None and not state.parting.done and not _owes_commit(state):
        out.append(Depart())
        return replace(state, parting=replace(state.parting, done=True))
    if view is None:
        return state
    if view.finished:
        if isinstance(state.reduce, Reducing):
            out.append(StopReduce())
        out.append(RunFinished())
        return replace(state, view=None, reduce=state.reduced)
    if isinstance(state.outer, Moving):
        return state
    if isinstance(state.reduce, Reducing) and state.reduce.attempt[0] <= view.committed:
        if not _holds(state, view):
            out.append(StopReduce())
        return replace(state, reduce=state.reduced)
    if view.tied and view.you == "recovering" and isinstance(state.outer, At):
        return _go_back(state, state.outer, view, out)
    if not isinstance(state.outer, At) or state.outer.round != view.committed or _is_wrong(state.outer, view):
        return _move(state, state.outer, view, out)
    if view.HasField("plan") and (reducing := _reduce(state, view.plan, out)) is not None:
        return reducing
    return _occupy_trainer(state, state.outer, view, out)


def _round_at_hand(state: State) -> int:
    """The round whose inner steps are taken, or were; else the last one that is committed."""
    match state.trainer:
        case Training(round=round_) | Ahead(round=round_):
            return round_
        case _:
            return state.work.work.round if state.work is not None else state.round


def _owes_commit(state: State) -> bool:
    """Whether steps that the node has taken may yet be committed. Those that only further steps would bring into a
    round are not waited for while it may take none."""
    if isinstance(state.outer, Moving) and state.outer.by is Move.APPLY:
        return True
    if isinstance(state.trainer, Training) or (state.ready is not None and not _is_left_out(state, state.ready)):
        return True
    ahead = isinstance(state.trainer, Ahead) and state.trainer.front is not None
    return not state.paused and (ahead or state.carried is not None)


def _is_left_out(state: State, ready: Work) -> bool:
    """Whether that work is in no exchange, and is brought into none while the node saves bytes."""
    view, reduced = state.view, state.reduced
    if not state.saves_bytes or view is None:
        return False
    if ready.round <= view.committed:
        return not _holds(state, view)
    return reduced is None or reduced.attempt[0] != ready.round


def _is_wrong(at: At, view: pb.View) -> bool:
    """Whether its state of the committed round is not the run's, or none."""
    if not at.digest:
        return view.state_digest != b"" or view.initialise
    return view.you == "recovering" and view.state_digest != b"" and at.digest != view.state_digest


def _move(state: State, before: NoState | At, view: pb.View, out: list[Effect]) -> State:
    """Get to the committed state; what was trained and not committed comes along."""
    if state.evaluating:
        return state
    if isinstance(state.trainer, Training):  # first the steps at hand are written down, on the state they started
        return _finish(state, state.trainer, out)  # from
    if view.initialise and not _makes_no_state_0(before, view):
        if isinstance(before, At) and before.round == view.committed and before.digest:
            return state  # it has made one, and says so (`_repeat`): made again it may have other bits
        return _initialise(state, before, view.witness, out)
    if isinstance(before, At) and before.round < view.committed and before.digest == view.state_digest:
        out.append(Renumber(view))
        return replace(_forget_reduced(state), outer=Moving(Move.RENUMBER, before))
    if isinstance(before, At) and before.round == view.committed:  # and differs
        if state.saves_bytes:
            return state
        out.append(Recover(view, differs=True, rebase=False))
        state = replace(_drop_steps(_forget_reduced(state)), work=None)
        return replace(state, outer=Moving(Move.REPLACE, before))
    if isinstance(before, At) and before.round == view.committed - 1 and _holds(state, view):
        out.append(Apply(view))
        turns = state.turns and replace(state.turns, from_local=True, applied=state.ready)
        return replace(_forget_reduced(state), outer=Moving(Move.APPLY, before), work=None, turns=turns)
    up = not isinstance(state.trainer, Down)
    if view.lost and isinstance(before, NoState) and up and not before.disk_tried:
        out.append(FallBack())
        return replace(state, outer=Moving(Move.FALL_BACK, before))
    if not view.has_state or not view.state_digest or not view.donors or not up:
        return state  # nobody has it yet, the others are still applying; or the vectors are not there yet
    if state.saves_bytes:
        return state
    if view.you == "joining":
        return state  # whether this node's model is the run's is not known: another's state would seem damaged
    rebase = state.work is not None or (state.turns is not None and state.turns.from_local)
    out.append(Recover(view, differs=False, rebase=rebase))
    turns = state.turns and replace(state.turns, rebased=state.turns.rebased or rebase)
    return replace(_forget_reduced(state), outer=Moving(Move.RECOVER, before), turns=turns)


def _makes_no_state_0(at: OuterPosition, view: pb.View) -> bool:
    """Whether it could not make state 0 when it was asked, or has one of a later round of this run: it would lose
    that, to check what a round was committed upon."""
    return at.unable if isinstance(at, NoState) else isinstance(at, At) and min(at.round, view.committed) > 0


def _go_back(state: State, at: At, view: pb.View, out: list[Effect]) -> State:
    """Nobody can tell whether this node's state is right: what its disk has of before it may be known to be."""
    if at.round != view.committed or at.disk_tried or state.evaluating or isinstance(state.trainer, Down):
        return state
    if isinstance(state.trainer, Training):
        return _finish(state, state.trainer, out)
    out.append(FallBack(before=view.committed))
    return replace(_drop_steps(_forget_reduced(state)), outer=Moving(Move.FALL_BACK, at), work=None)


def _holds(state: State, view: pb.View) -> bool:
    """It has what was committed, if only from an attempt before the last."""
    reduced = state.reduced
    return reduced is not None and reduced.attempt[0] == view.committed and reduced.root == view.sealed


def _initialise(state: State, before: NoState | At, witness: bool, out: list[Effect]) -> State:
    if isinstance(state.trainer, Down):
        return state
    out.append(OrderInitialisation(witness))
    turns = state.turns and replace(state.turns, from_local=False)
    return replace(state, trainer=Idle(), outer=Moving(Move.INITIALISE, before), work=None, turns=turns)


def _forget_reduced(state: State) -> State:
    reduce = replace(state.reduce, before=None) if isinstance(state.reduce, Reducing) else None
    return replace(state, reduce=reduce)


def _drop_steps(state: State) -> State:
    """Neither from the local vector nor from what a trainer took ahead is to be gone on."""
    state = replace(state, turns=state.turns and replace(state.turns, from_local=False))
    if isinstance(state.trainer, Ahead):
        state = replace(state, trainer=replace(state.trainer, front=None, waits=True))
    return state


def _attempts(state: State) -> list[Attempt]:
    """The one under way, and the last one that came to its end."""
    return [r.attempt for r in (state.reduce, state.reduced) if r is not None]


def _reduce(state: State, plan: pb.Plan, out: list[Effect]) -> State | None:
    attempt = plan.round, plan.attempt
    work, reduced = state.ready, state.reduced
    if state.exchanges_nothing or attempt in _attempts(state) or work is None or work.round != plan.round:
        return None
    if reduced is not None and not (reduced.in_session and reduced.attempt[0] == plan.round):
        out.append(StopReduce())
        reduced = None
    out.append(StartReduce(plan, work))
    return replace(state, reduce=Reducing(attempt, reduced))


def _occupy_trainer(state: State, at: At, view: pb.View, out: list[Effect]) -> State:
    match state.trainer:
        case Down() | Evaluating():
            return state
        case Training():
            return _hurry(state, state.trainer, view, out)
    if state.paused:
        return state
    if view.evaluate and state.can_evaluate and state.evaluated != view.committed and not state.evaluating:
        out.append(OrderEvaluation(view.committed))
        if isinstance(state.trainer, Ahead):
            return replace(state, trainer=replace(state.trainer, evaluating=True))
        return replace(state, trainer=Evaluating(view.committed))
    if not view.HasField("train") or view.train.round != at.round + 1 or view.HasField("plan"):
        return state
    if state.ready is not None and _is_for(state.ready, view.train):
        return state
    if state.unusable is not None and _is_for(state.unusable.work, view.train):
        return state
    if state.parting is not None and not _owes_commit(state):
        return state
    return _train(state, state.trainer, view, out)


def _train(state: State, task: Idle | Ahead, view: pb.View, out: list[Effect]) -> State:
    """Begin the round's steps; a trainer that is ahead has, if its samples are the next ones of the lease."""
    order, turns = view.train, state.turns
    lease = tuple((r.first, r.count) for r in order.lease)
    front = lease[0][0]
    base = state.carried if state.carried is not None and state.carried.front == front else None
    carried = base.samples if base is not None else 0
    rest = remaining(lease, carried)
    on = isinstance(task, Ahead) and bool(rest) and rest[0][0] == task.front
    if state.reduce is not None:
        out.append(StopReduce())  # what is encoded is of other steps
    # Work that is not the lease's front is of no use; or it is committed, and what follows it goes on. What came
    # when all chunks were sealed is to be committed yet: it is trained anew, so no fragment may keep it.
    dropped = state.ready is not None or (state.carried is not None and base is None)
    local = turns is not None and turns.from_local and not dropped and not _in(front, turns.applied)
    resume, rebased = bool(carried) or (local and not on), turns is not None and on and turns.rebased
    out.append(
        OrderTraining(
            *(view, carried, resume, on, rebased),
            keeps_uncounted=resume or (on and turns is not None),
            doubted_round=state.doubted_round,
        )
    )
    old = state.ready or state.carried  # that its steps are committed may be by an earlier life of this node
    fresh = old is not None and old.fresh if on else not local
    evaluating = isinstance(task, Ahead) and task.evaluating
    return replace(
        state,
        trainer=Training(order.round, lease, fresh, evaluating=evaluating),
        work=None if base is None else CarriedWork(base),
        reduce=None,
        reached=None,
        turns=turns and replace(turns, from_local=local or on),
    )


def _in(sample: int, work: Work | None) -> bool:
    return work is not None and sample in samples_of(work.lease, 0, work.samples)


def _hurry(state: State, task: Training, view: pb.View, out: list[Effect]) -> State:
    """End inner steps that the run no longer waits for, or waits for longer than it should."""
    order = view.train
    wanted = view.HasField("train") and task.round == order.round and task.front == order.lease[0].first
    last = state.parting is not None and task.round > state.parting.round
    return state if wanted and not view.closing and not last else _finish(state, task, out)


def _rests(state: State) -> bool:
    """Whether the trainer is to take no steps beyond those that hand over what it has."""
    return state.paused or state.parting is not None


def _rest(state: State, out: list[Effect]) -> State | None:
    """Have a trainer that may take no steps stop, whatever the run wants; None: there is nothing to be said."""
    match state.trainer:
        case Training(finishing=False) if state.paused:
            return _finish(state, state.trainer, out)
        case Ahead(round_, waits=False, held=False) if _rests(state):
            out.append(HoldTraining(round_))
            return replace(state, trainer=replace(state.trainer, held=True))
    return None


def _silence(state: State, out: list[Effect]) -> State | None:
    """End what goes over the links to peers; None: nothing does. A reduce of which all is here needs them no
    more."""
    if isinstance(state.reduce, Reducing):
        out.append(StopReduce())
        return replace(state, reduce=None, left=True)
    if (
        isinstance(state.outer, Moving)
        and state.outer.by in (Move.RECOVER, Move.REPLACE)
        and not state.outer.halted
    ):
        out.append(StopRecovery())
        return replace(state, outer=replace(state.outer, halted=True))
    return None


def _finish(state: State, task: Training, out: list[Effect]) -> State:
    """Have the trainer stop after the step at hand."""
    if task.finishing:
        return state
    out.append(FinishTraining(task.round, rest=_rests(state)))
    return replace(state, trainer=replace(task, finishing=True))


def _contribution(work: Work, norm: float, damping: float) -> pb.ContributionReady:
    return pb.ContributionReady(
        steps=work.steps,
        samples=work.samples,
        loss=work.loss,
        delta_norm=norm,
        front=work.front,
        damping=damping,
        fresh=work.fresh,
        skipped=work.skipped,
    )


def _is_for(work: Work, order: pb.Train) -> bool:
    return work.round == order.round and work.front == order.lease[0].first


def _order(view: pb.View) -> tuple[int, int]:
    return view.incarnation, view.version
