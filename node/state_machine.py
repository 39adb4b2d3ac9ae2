"""The node as a pure state machine: `step(node, event) -> (node, effects)`.

It compares the coordinator's latest view with what the node has and does, and asks for what is missing. Views
are whole and idempotent, so nothing depends on having seen every one of them.

    trainer:  down -> idle -> (initialise | evaluate | train) -> idle
    state:    none -> moving (apply or recover) -> at round k -> moving -> at round k+1 ...
    work:     train -> ready -> committed with the others, or left out: carried over and trained on

With overlap a trainer that handed its work over does not stop: it goes `ahead`, on the samples that follow, and
takes the new state when it is told to `Train` on. While it is ahead, and only then, the state moves under a
trainer at work: it reads neither anchor nor local vector until it is told, and from then on both stand still until
it hands over again.

Where fragments take turns, a round commits the steps of one fragment only. What the local vector has of the others
is `kept`: the next steps start from it, though no sample of it is to be committed any more.
"""

from dataclasses import dataclass, replace
from typing import assert_never

from atoll.comm.leases import Range, remaining
from atoll.comm.leases import samples as samples_of
from atoll.comm.proto import atoll_pb2 as pb


@dataclass(frozen=True, slots=True)
class Work:
    """What the local vector holds beyond the anchor: steps on the first `samples` of the lease at `front`."""

    round: int  # in which it was done
    front: int
    samples: int
    steps: int = 0  # of this round
    loss: float = 0.0  # mean over the samples
    norm: float = 0.0  # l2, of the local vector's distance from the anchor
    fresh: bool = True  # it began from the anchor, with nothing kept of earlier rounds
    lease: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """What the trainer is busy with."""

    kind: str  # initialise, train, evaluate, or ahead: it trains on what follows work that is ready
    round: int = 0  # of train; of the work that is ready, when it is ahead
    front: int = 0  # of the lease; of what follows, when it is ahead
    lease: tuple[Range, ...] = ()
    base: Work | None = None  # what it started from, besides the anchor
    finishing: bool = False
    waits: bool = False  # it is as far ahead as it may be
    fresh: bool = True  # it began from the anchor


Attempt = tuple[int, int]  # (round, attempt)


@dataclass(frozen=True, slots=True)
class Node:
    view: pb.View | None = None
    trainer_up: bool = False
    task: Task | None = None
    round: int = -1  # of the state it holds; -1: none
    digest: bytes = b""
    moving: bool = False  # the state is being applied to, or fetched
    ready: Work | None = None  # on the state it holds
    carried: Work | None = None  # of rounds that left it out, brought to the state it holds
    reached: int = -1  # the round that has its inner steps here
    reducing: Attempt | None = None
    held: Attempt | None = None  # the last one of which every sealed chunk was here
    held_root: bytes = b""
    apart: bool = False  # that was in an earlier session
    fell_back: bool = False  # it had what its disk brings back, since it fetched last
    evaluated: int = -1
    evaluating: bool = False  # in between, by a trainer that is ahead or was
    in_turns: bool = False  # fragments take turns; of no meaning else:
    kept: bool = False  # the local vector has what was trained of other fragments in committed rounds
    rebased: bool = False  # since the trainer handed over, the local vector was brought to another anchor
    applying: bool = False  # the state is moving by sealed bytes that are here
    taken: Work | None = None  # the work that it went over in so doing, last

    @property
    def phase(self) -> str:
        """What the node is doing, in the goodput meter's words."""
        if self.evaluating:
            return "waiting"
        if self.ahead and self.task is not None and not self.task.waits:
            return "inner"
        if self.moving and self.view is not None and self.view.you == "active":
            return "sync"
        if self.moving or (self.round < 0 and self.trainer_up):
            return "recovering"
        if not self.trainer_up:
            return "starting"
        if self.reducing or (self.ready is not None and self.held is not None):
            return "sync"
        if self.task is not None and self.task.kind == "train":
            return "inner"
        return "waiting"

    @property
    def ahead(self) -> bool:
        """The trainer goes on beyond what it handed over."""
        return self.task is not None and self.task.kind == "ahead"

    @property
    def watched(self) -> bool:
        """The trainer owes an answer."""
        return self.task is not None and (not self.ahead or self.evaluating)


# Events


@dataclass(frozen=True, slots=True)
class ViewArrived:
    view: pb.View


@dataclass(frozen=True, slots=True)
class TrainerUp:
    """The trainer said hello and has its vectors."""


@dataclass(frozen=True, slots=True)
class TrainerDown:
    pass


@dataclass(frozen=True, slots=True)
class TrainerReached:
    """The round's inner steps are taken; the trainer goes on."""

    round: int


@dataclass(frozen=True, slots=True)
class TrainerReady:
    """The local vector is written; the trainer stopped, or goes ahead."""

    round: int
    steps: int
    samples: int  # of this round
    loss: float
    norm: float
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class TrainerWaits:
    """The trainer is as far ahead of that round's work as it may be."""

    round: int


@dataclass(frozen=True, slots=True)
class TrainerEvaluated:
    round: int
    loss: float


@dataclass(frozen=True, slots=True)
class ReduceHeld:
    """Every sealed chunk of the attempt is here."""

    attempt: Attempt
    root: bytes  # over the sealed chunks' digests


@dataclass(frozen=True, slots=True)
class StateMoved:
    """The outer state stands still at `round`."""

    round: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """Peers could not give the state; `round` is where it stands, -1: nowhere."""

    round: int


@dataclass(frozen=True, slots=True)
class Rejoined:
    """A new session with the coordinator: it knows nothing of this node yet."""


Event = (
    ViewArrived
    | TrainerUp
    | TrainerDown
    | TrainerReached
    | TrainerReady
    | TrainerWaits
    | TrainerEvaluated
    | ReduceHeld
    | StateMoved
    | MoveFailed
    | Rejoined
)


# Effects


@dataclass(frozen=True, slots=True)
class Initialise:
    pass


@dataclass(frozen=True, slots=True)
class Train:
    """Take inner steps from the anchor, or from the local vector where work was carried over. A trainer that is to
    go `on` has begun: it puts its steps since it handed over on top of the one or the other."""

    order: pb.Train
    carried: int  # samples from the front of the lease that the local vector has; 0: start from the anchor
    on: bool = False
    kept: bool = False  # start from the local vector, though nothing was carried over
    rebased: bool = False  # of a trainer that goes on: what it has of other fragments is to be rebased


@dataclass(frozen=True, slots=True)
class Evaluate:
    round: int


@dataclass(frozen=True, slots=True)
class FinishTraining:
    round: int


@dataclass(frozen=True, slots=True)
class StartReduce:
    """Take part in a round's reduce, or go on with it under this plan."""

    plan: pb.Plan


@dataclass(frozen=True, slots=True)
class Prove:
    """Hold the sealed chunks that have the digests of this view, and say so: others were found here."""

    view: pb.View


@dataclass(frozen=True, slots=True)
class StopReduce:
    """The round's reduce is over for this node."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Step to the view's committed round with the sealed bytes that the reduce left here; `MoveFailed` if these
    are not the ones that it names, as some were given up under a later plan."""

    view: pb.View


@dataclass(frozen=True, slots=True)
class Recover:
    """Bring the state to the view's committed round with the peers' help. `differs`: it is of that round, and not
    the run's. With `rebase` what was trained comes along, as
    `outer.left_out` says."""

    view: pb.View
    differs: bool
    rebase: bool


@dataclass(frozen=True, slots=True)
class FallBack:
    """Take the state that the disk brings back, in the place of parts of a newer one that nobody has any more;
    `MoveFailed` if it brings back none."""


@dataclass(frozen=True, slots=True)
class Renumber:
    """The state is that of `round`, too: the rounds in between are void."""

    round: int


@dataclass(frozen=True, slots=True)
class ReportLayout:
    pass


@dataclass(frozen=True, slots=True)
class ReportState:
    round: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class ReportReached:
    round: int


@dataclass(frozen=True, slots=True)
class ReportReady:
    """It may have to wait, for the disk or for the norm: then it is made only if the work is `still_ready`."""

    ready: Work


@dataclass(frozen=True, slots=True)
class ReportEvaluated:
    round: int
    loss: float


@dataclass(frozen=True, slots=True)
class RunFinished:
    pass


Effect = (
    Initialise
    | Train
    | Evaluate
    | FinishTraining
    | StartReduce
    | Prove
    | StopReduce
    | Apply
    | Recover
    | FallBack
    | Renumber
    | ReportLayout
    | ReportState
    | ReportReached
    | ReportReady
    | ReportEvaluated
    | RunFinished
)


def step(node: Node, event: Event) -> tuple[Node, list[Effect]]:
    effects: list[Effect] = []
    node = _take(node, event, effects)
    while True:
        after = _decide(node, effects)
        if after == node:
            break
        node = after
    if isinstance(event, ViewArrived) and node.view is event.view and event.view.ledger:
        effects.append(Prove(event.view))
    return node, effects


def _take(node: Node, event: Event, out: list[Effect]) -> Node:
    match event:
        case ViewArrived(view):
            if node.view is not None and _order(view) <= _order(node.view):
                return node
            _repeat(node, view, out)
            return replace(node, view=view)
        case TrainerUp():
            if not node.trainer_up:
                out.append(ReportLayout())
            return replace(node, trainer_up=True, task=None, evaluating=False)
        case TrainerDown():
            moving = node.moving and not _initialising(node)
            training = node.task is not None and node.task.kind == "train"
            carried = None if training else node.carried  # it may have died while it wrote the local vector
            node = replace(node, kept=node.kept and not training)
            return replace(node, trainer_up=False, task=None, moving=moving, carried=carried, evaluating=False)
        case TrainerReached(round_):
            if node.task is None or node.task.kind != "train" or node.task.round != round_:
                return node
            out.append(ReportReached(round_))
            return replace(node, reached=round_)
        case TrainerReady(round_, steps, samples, loss, norm, ahead):
            if node.task is None or node.task.kind != "train" or node.task.round != round_:
                return node
            work = Work(round_, node.task.front, samples, steps, loss, norm)
            return _ready(node, node.task, work, ahead, out)
        case TrainerWaits(round_):
            if node.task is None or not node.ahead or node.task.round != round_:
                return node
            return replace(node, task=replace(node.task, waits=True))
        case TrainerEvaluated(round_, loss):
            out.append(ReportEvaluated(round_, loss))
            task = node.task if node.evaluating else None
            return replace(node, task=task, evaluated=round_, evaluating=False)
        case ReduceHeld(attempt, root):
            if attempt not in (node.reducing, node.held):
                return node
            return replace(node, reducing=None, held=attempt, held_root=root, apart=False)
        case StateMoved(round_, digest):
            out.append(ReportState(round_, digest))
            task = None if _initialising(node) else node.task
            carried = node.ready or node.carried
            node = replace(node, moving=False, applying=False, round=round_, digest=digest)
            return replace(node, task=task, ready=None, carried=carried)
        case MoveFailed(round_):
            if node.applying and node.in_turns:  # what of the local vector is committed cannot be told
                node = replace(node, kept=False, task=_of_no_use(node.task))
            return replace(node, moving=False, round=round_, applying=False)
        case Rejoined():
            if node.round >= 0 and not node.moving:
                out.append(ReportState(node.round, node.digest))  # before the layout: then it has said all
            if node.trainer_up:
                out.append(ReportLayout())
            if node.reducing is not None and node.held is None:
                out.append(StopReduce())  # the run goes on without what this node had entered
            # What it holds may be committed, and nobody else have it.
            return replace(node, view=None, reducing=None, apart=node.held is not None)
        case _:
            assert_never(event)


def still_ready(node: Node, work: Work) -> bool:
    """Whether the node still has the work, on the state it holds: a report of what it has dropped, or begun anew,
    would have other steps weighed with these tokens."""
    return node.ready == work


def _repeat(node: Node, view: pb.View, out: list[Effect]) -> None:
    """Say again what the coordinator should know by now and does not."""
    counted = view.you == "active" and view.phase in ("inner", "collecting") and view.HasField("train")
    if counted and node.ready is not None and not view.ready and _is_for(node.ready, view.train):
        out.append(ReportReady(node.ready))
    if counted and node.reached == view.train.round and not view.reached:
        out.append(ReportReached(node.reached))
    unheard = view.you == "recovering" and node.round == view.committed and not node.moving
    known = view.state_digest != b"" and node.digest == view.state_digest
    if unheard and (known or view.initialise):  # it may have state_0 that it is to make: everybody was away
        out.append(ReportState(node.round, node.digest))


def _ready(node: Node, task: Task, done: Work, ahead: bool, out: list[Effect]) -> Node:
    """The trainer's steps on top of what was carried over."""
    base = task.base or Work(task.round, task.front, 0, fresh=task.fresh)
    node = replace(node, rebased=False)
    total = base.samples + done.samples
    if not total:
        return replace(node, task=None, carried=None)
    mean = (base.loss * base.samples + done.loss * done.samples) / total
    ready = replace(done, samples=total, loss=mean, fresh=base.fresh, lease=task.lease)
    counted = node.view is not None and node.view.you == "active"  # else its state may yet be found to be another
    if counted and node.round == task.round - 1:
        out.append(ReportReady(ready))  # else a later view asks for it, if it can be used
    rest = remaining(task.lease, total) if ahead else ()
    following = Task("ahead", task.round, rest[0][0]) if rest else None
    return replace(node, task=following, ready=ready, carried=None)


def _decide(node: Node, out: list[Effect]) -> Node:
    """The next thing to do, if any."""
    view = node.view
    if view is None:
        return node
    if view.finished:
        if node.reducing is not None:
            out.append(StopReduce())
        out.append(RunFinished())
        return replace(node, view=None, reducing=None)
    if node.moving:
        return node
    if node.reducing is not None and node.reducing[0] <= view.committed:
        if not _holds(node, view):
            out.append(StopReduce())
        return replace(node, reducing=None)
    if node.round != view.committed or _differs(node, view):
        return _move(node, view, out)
    if view.HasField("plan") and (reducing := _reduce(node, view.plan, out)) is not None:
        return reducing
    return _occupy_trainer(node, view, out)


def _differs(node: Node, view: pb.View) -> bool:
    return view.you == "recovering" and view.state_digest != b"" and node.digest != view.state_digest


def _move(node: Node, view: pb.View, out: list[Effect]) -> Node:
    """Get to the committed state; what was trained and not committed comes along."""
    if node.evaluating:
        return node
    if node.task is not None and not node.ahead:  # first the steps at hand are written down, on the state they
        return _finish(node, node.task, out)  # started from
    if view.initialise:
        return _initialise(node, out)
    if 0 <= node.round < view.committed and node.digest == view.state_digest:
        out.append(Renumber(view.committed))
        return replace(node, moving=True, held=None)
    if node.round == view.committed:  # and differs
        out.append(Recover(view, differs=True, rebase=False))
        node = replace(node, kept=False, task=_of_no_use(node.task))
        return replace(node, moving=True, round=-1, ready=None, carried=None, held=None, fell_back=False)
    if node.round == view.committed - 1 and _holds(node, view):
        out.append(Apply(view))
        node = replace(node, kept=node.in_turns, applying=True, taken=node.ready)
        return replace(node, moving=True, ready=None, carried=None, held=None)
    if view.lost and node.round < 0 and node.trainer_up and not node.fell_back:
        out.append(FallBack())
        return replace(node, moving=True, fell_back=True)
    if not view.has_state or not view.state_digest or not view.donors or not node.trainer_up:
        return node  # nobody has it yet, the others are still applying; or the vectors are not there yet
    rebase = node.ready is not None or node.carried is not None or node.kept
    out.append(Recover(view, differs=False, rebase=rebase))
    return replace(node, moving=True, held=None, fell_back=False, rebased=node.rebased or rebase)


def _holds(node: Node, view: pb.View) -> bool:
    """It has what was committed, if only from an attempt before the last."""
    return node.held is not None and node.held[0] == view.committed and node.held_root == view.sealed


def _initialise(node: Node, out: list[Effect]) -> Node:
    if not node.trainer_up:
        return node
    out.append(Initialise())
    return replace(node, task=Task("initialise"), moving=True, ready=None, carried=None, kept=False)


def _of_no_use(task: Task | None) -> Task | None:
    """What the trainer has, it is not to go on from."""
    return None if task is None else replace(task, front=-1, waits=True)


def _reduce(node: Node, plan: pb.Plan, out: list[Effect]) -> Node | None:
    mine = _attempt(plan)
    if node.reducing == mine or node.held == mine:
        return None
    if node.ready is None or node.ready.round != plan.round:
        return None
    held = node.held
    if node.apart or (held is not None and held[0] != plan.round):
        out.append(StopReduce())
        held = None
    out.append(StartReduce(plan))
    return replace(node, reducing=mine, held=held, apart=False)


def _occupy_trainer(node: Node, view: pb.View, out: list[Effect]) -> Node:
    if not node.trainer_up:
        return node
    if node.task is not None and not node.ahead:
        return _hurry(node, node.task, view, out)
    if view.evaluate and node.evaluated != view.committed and not node.evaluating:
        out.append(Evaluate(view.committed))
        if node.ahead:
            return replace(node, evaluating=True)
        return replace(node, task=Task("evaluate", view.committed))
    if not view.HasField("train") or view.train.round != node.round + 1 or view.HasField("plan"):
        return node
    if node.ready is not None and _is_for(node.ready, view.train):
        return node
    return _train(node, view.train, out)


def _train(node: Node, order: pb.Train, out: list[Effect]) -> Node:
    """Begin the round's steps; a trainer that is ahead has, if its samples are the next ones of the lease."""
    lease = tuple((r.first, r.count) for r in order.lease)
    front = lease[0][0]
    base = node.carried if node.carried is not None and node.carried.front == front else None
    carried = base.samples if base is not None else 0
    rest = remaining(lease, carried)
    on = node.task is not None and bool(rest) and rest[0][0] == node.task.front
    if node.reducing is not None or node.held is not None:
        out.append(StopReduce())  # what is encoded is of other steps
    # Work that is not the lease's front is of no use; or it is committed, and what follows it goes on. What came
    # when all chunks were sealed is to be committed yet: it is trained anew, so no fragment may keep it.
    dropped = node.ready is not None or (node.carried is not None and base is None)
    kept = node.in_turns and node.kept and not dropped and not _in(front, node.taken)
    out.append(Train(order, carried, on, kept and not on, node.in_turns and on and node.rebased))
    old = node.ready or node.carried  # that its steps are committed may be by an earlier life of this node
    begun = old is not None and old.fresh if on else not kept
    task = Task("train", order.round, front, lease, base, fresh=begun)
    node = replace(node, task=task, kept=kept or (node.in_turns and on))
    return replace(node, ready=None, carried=base, reached=-1, reducing=None, held=None)


def _in(sample: int, work: Work | None) -> bool:
    return work is not None and sample in samples_of(work.lease, 0, work.samples)


def _hurry(node: Node, task: Task, view: pb.View, out: list[Effect]) -> Node:
    """End inner steps that the run no longer waits for, or waits for longer than it should."""
    if task.kind != "train":
        return node
    order = view.train
    wanted = view.HasField("train") and task.round == order.round and task.front == order.lease[0].first
    return node if wanted and not view.closing else _finish(node, task, out)


def _finish(node: Node, task: Task, out: list[Effect]) -> Node:
    """Have the trainer stop after the step at hand."""
    if task.kind != "train" or task.finishing:
        return node
    out.append(FinishTraining(task.round))
    return replace(node, task=replace(task, finishing=True))


def _initialising(node: Node) -> bool:
    return node.task is not None and node.task.kind == "initialise"


def _is_for(work: Work, order: pb.Train) -> bool:
    return work.round == order.round and work.front == order.lease[0].first


def _attempt(plan: pb.Plan) -> Attempt:
    return plan.round, plan.attempt


def _order(view: pb.View) -> tuple[int, int]:
    return view.incarnation, view.version
