"""The node as a pure state machine: `step(node, event) -> (node, effects)`.

It compares the coordinator's latest view with what the node has and does, and asks for what is missing. Views
are whole and idempotent, so nothing depends on having seen every one of them.

    trainer:  down -> idle -> (initialise | evaluate | train) -> idle
    state:    none -> moving (apply or recover) -> at round k -> moving -> at round k+1 ...
"""

from dataclasses import dataclass, replace
from typing import assert_never

from atoll.comm.proto import atoll_pb2 as pb


@dataclass(frozen=True, slots=True)
class Task:
    """What the trainer is busy with."""

    kind: str  # initialise, train or evaluate
    round: int = 0
    first_sample: int = 0
    finishing: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """The local vector holds the result of these inner steps."""

    round: int
    first_sample: int
    steps: int
    tokens: int
    samples: int
    loss: float


Attempt = tuple[int, int]  # (round, attempt)


@dataclass(frozen=True, slots=True)
class Node:
    view: pb.View | None = None
    trainer_up: bool = False
    task: Task | None = None
    round: int = -1  # of the state it holds; -1: none
    digest: bytes = b""
    moving: bool = False  # the state is being applied to, or fetched
    ready: Ready | None = None
    reducing: Attempt | None = None
    held: Attempt | None = None  # has every sealed chunk of it
    held_digests: bytes = b""
    evaluated: int = -1

    @property
    def phase(self) -> str:
        """What the node is doing, in the goodput meter's words."""
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
class TrainerReady:
    round: int
    steps: int
    tokens: int
    samples: int
    loss: float


@dataclass(frozen=True, slots=True)
class TrainerEvaluated:
    round: int
    loss: float


@dataclass(frozen=True, slots=True)
class ReduceHeld:
    """Every sealed chunk of the attempt is here."""

    attempt: Attempt
    digests: bytes  # of the sealed chunks, 16 bytes each


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
    | TrainerReady
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
    order: pb.Train


@dataclass(frozen=True, slots=True)
class Evaluate:
    round: int


@dataclass(frozen=True, slots=True)
class FinishTraining:
    round: int


@dataclass(frozen=True, slots=True)
class StartReduce:
    plan: pb.Plan


@dataclass(frozen=True, slots=True)
class StopReduce:
    pass


@dataclass(frozen=True, slots=True)
class Apply:
    """Step to `round` with the sealed bytes that the reduce left here."""

    round: int


@dataclass(frozen=True, slots=True)
class Recover:
    """Bring the state to the view's committed round with the peers' help; from scratch if it cannot be trusted."""

    view: pb.View
    scratch: bool


@dataclass(frozen=True, slots=True)
class ReportLayout:
    pass


@dataclass(frozen=True, slots=True)
class ReportState:
    round: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class ReportReady:
    ready: Ready


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
    | StopReduce
    | Apply
    | Recover
    | ReportLayout
    | ReportState
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
            return node, effects
        node = after


def _take(node: Node, event: Event, out: list[Effect]) -> Node:
    match event:
        case ViewArrived(view):
            known = node.view is not None and _order(view) <= _order(node.view)
            if known:
                return node
            ready = node.ready
            if ready is not None and view.HasField("train") and not view.ready and _is_for(ready, view.train):
                out.append(ReportReady(ready))  # the coordinator has not heard it
            lost = view.you == "recovering" and node.round == view.committed and not node.moving
            if lost and view.state_digest and node.digest == view.state_digest:
                out.append(ReportState(node.round, node.digest))  # nor this
            return replace(node, view=view)
        case TrainerUp():
            if not node.trainer_up:
                out.append(ReportLayout())
            return replace(node, trainer_up=True, task=None)
        case TrainerDown():
            moving = node.moving and not _initialising(node)
            return replace(node, trainer_up=False, task=None, moving=moving)
        case TrainerReady(round_, steps, tokens, samples, loss):
            if node.task is None or node.task.kind != "train" or node.task.round != round_:
                return node
            ready = Ready(round_, node.task.first_sample, steps, tokens, samples, loss)
            if node.round == round_ - 1:
                out.append(ReportReady(ready))
            return replace(node, task=None, ready=ready)
        case TrainerEvaluated(round_, loss):
            out.append(ReportEvaluated(round_, loss))
            return replace(node, task=None, evaluated=round_)
        case ReduceHeld(attempt, digests):
            if node.reducing != attempt:
                return node
            return replace(node, reducing=None, held=attempt, held_digests=digests)
        case StateMoved(round_, digest):
            out.append(ReportState(round_, digest))
            task = None if _initialising(node) else node.task
            return replace(node, moving=False, round=round_, digest=digest, task=task)
        case MoveFailed(round_):
            return replace(node, moving=False, round=round_)
        case Rejoined():
            if node.trainer_up:
                out.append(ReportLayout())
            if node.round >= 0:
                out.append(ReportState(node.round, node.digest))
            return replace(node, view=None)
        case _:
            assert_never(event)


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
    if node.reducing is not None and (not view.HasField("plan") or node.reducing != _attempt(view.plan)):
        out.append(StopReduce())
        return replace(node, reducing=None)
    if (moved := _move(node, view, out)) is not None:
        return moved
    if node.round != view.committed:
        return _initialise(node, out) if view.initialise else node
    if view.HasField("plan") and (reducing := _reduce(node, view.plan, out)) is not None:
        return reducing
    return _occupy_trainer(node, view, out)


def _move(node: Node, view: pb.View, out: list[Effect]) -> Node | None:
    """Get to the committed state."""
    if node.round == view.committed:
        if view.you != "recovering" or not view.state_digest or node.digest == view.state_digest:
            return None
        out.append(Recover(view, scratch=True))
        return replace(node, moving=True, round=-1, ready=None)
    applicable = node.round == view.committed - 1 and node.held is not None and node.held[0] == view.committed
    if applicable and node.held_digests == view.sealed_digests:
        out.append(Apply(view.committed))
        return replace(node, moving=True, ready=None, held=None)
    if not view.has_state or not view.state_digest or not node.trainer_up:
        return None  # nobody has it yet, the others are still applying; or the vectors are not there yet
    out.append(Recover(view, scratch=False))
    return replace(node, moving=True, ready=None, held=None)


def _initialise(node: Node, out: list[Effect]) -> Node:
    if not node.trainer_up or node.task is not None:
        return node
    out.append(Initialise())
    return replace(node, task=Task("initialise"), moving=True)


def _reduce(node: Node, plan: pb.Plan, out: list[Effect]) -> Node | None:
    mine = _attempt(plan)
    if node.reducing == mine or node.held == mine:
        return None
    if node.ready is None or node.ready.round != plan.round:
        return None
    out.append(StartReduce(plan))
    return replace(node, reducing=mine, held=None)


def _occupy_trainer(node: Node, view: pb.View, out: list[Effect]) -> Node:
    if not node.trainer_up:
        return node
    if node.task is not None:
        return _hurry(node, node.task, view, out)
    if view.evaluate and node.evaluated != view.committed:
        out.append(Evaluate(view.committed))
        return replace(node, task=Task("evaluate", view.committed))
    if not view.HasField("train") or view.train.round != node.round + 1 or view.HasField("plan"):
        return node
    if node.ready is not None and _is_for(node.ready, view.train):
        return node
    out.append(Train(view.train))
    return replace(node, task=Task("train", view.train.round, view.train.first_sample), ready=None)


def _hurry(node: Node, task: Task, view: pb.View, out: list[Effect]) -> Node:
    """End inner steps that the run no longer waits for, or waits for longer than it should."""
    if task.kind != "train" or task.finishing:
        return node
    wanted = task.round == view.train.round and task.first_sample == view.train.first_sample
    if wanted and not view.closing:
        return node
    out.append(FinishTraining(task.round))
    return replace(node, task=replace(task, finishing=True))


def _initialising(node: Node) -> bool:
    return node.task is not None and node.task.kind == "initialise"


def _is_for(ready: Ready, order: pb.Train) -> bool:
    return ready.round == order.round and ready.first_sample == order.first_sample


def _attempt(plan: pb.Plan) -> Attempt:
    return plan.round, plan.attempt


def _order(view: pb.View) -> tuple[int, int]:
    return view.incarnation, view.version
