"""Run a transcript: commands, `----`, and what the node's state machine did at them.

turns                       fragments take turns in the run (first of all)
blind                       the trainer cannot evaluate (first of all)
up / down                   the trainer said hello / is gone
state ROUND [WORD]          the outer state stands still there; WORD: its digest, ROUND unless told
failed [ROUND]              peers could not give the state; it stands at that round, or nowhere
joining WORD [KEY=VALUE...] the view of a node that is joining, recovering or synced, of the run's state 0
round K [front=F] [KEY=VALUE...]    the view in which round K takes inner steps: the node is active, with a
                            lease of 40 samples from F on, which is where the last one began unless told
collecting / reducing [ATTEMPT]     the round closes / its reduce has that attempt's plan
committed [front=F]         the round is committed; members are still applying it
view [KEY=VALUE...] [WORD] [-WORD]  the last view but for these; WORD: a flag that is set, or is no more
begin                       `up`, `state 0`, `round 1` (only that is said)
steps [K]                   the trainer took the inner steps of that round, or its latest order's, and goes on
ready [K] [steps=5] [samples=10] [skipped=0] [loss=2] [ahead]    it stopped, or goes ahead
bad [K]                     nothing of its steps can be used, and it waits for an order
infinite                    the delta of its work cannot be encoded
waits [K] / evaluated [K]   it is as far ahead as it may be / it measured the loss of state K
still SECONDS               it has made no progress for so long; more than 70 s are too many
held [ATTEMPT] [WORD]       every sealed chunk of the round's attempt is here; WORD: with another root
trained                     `steps`, `ready` (only that is said)
commit                      `trained`, `reducing`, `held`, the next `round`, its `state` (only that is said)
rejoined                    a new session with the coordinator
pause [bytes] / resume      its owner says that it may take no steps, and is to save bytes / that it may again
part                        it is to leave once what it trained is committed
slow / written              what is to be reported waits for the disk / no longer does
show                        the machine's state

A view's keys: you, phase, committed, digest, sealed, donors (names), train (ROUND@FIRST..LAST[+FIRST..LAST]), plan
(ROUND/ATTEMPT), tokens, version, incarnation; - is none. Its flags: has_state, initialise, evaluate, ready,
reached, closing, finished, lost, saves_bytes, ledger. Lines that begin with => say what the node is doing, in the
goodput meter's words, where that changed.
"""

from typing import Any

from atoll.comm.proto import atoll_pb2 as pb
from atoll.node import trainer_channel as trainer
from atoll.node.state_machine import effects as ef
from atoll.node.state_machine import events as ev
from atoll.node.state_machine.state import (
    Ahead,
    Down,
    Evaluating,
    Idle,
    Moving,
    Reduced,
    Reducing,
    State,
    Training,
    Work,
)
from atoll.node.state_machine.step import step

LEASE = 40  # samples
STALL = 100.0  # seconds
FLAGS: tuple[str, ...] = (
    "has_state",
    "initialise",
    "witness",
    "evaluate",
    "ready",
    "reached",
    "closing",
    "finished",
    "lost",
)
FLAGS += ("tied", "saves_bytes", "ledger")


class Run:
    """The node's machine, and just enough of the world around it to speak to it."""

    def __init__(self) -> None:
        self.state = State(stall=STALL)
        self.layout = pb.LayoutReported(numel=40)
        self.said: list[str] = []
        self.view: dict[str, Any] = {"incarnation": 1, "version": 0, "committed": 0, "donors": "bo"}
        self.slow, self.waiting = False, list[Work]()  # work whose report waits for the disk
        self.front = 0  # of the next round's lease
        self.work: Work  # that was to be encoded last
        self.order = 0  # the round that the trainer was last told to train

    def feed(self, event: ev.Event) -> None:
        before = self.state.phase
        self.state, effects = step(self.state, event)
        for effect in effects:
            if isinstance(effect, ef.Encode):
                self.work = effect.work
            if isinstance(effect, ef.OrderTraining):
                self.order = effect.view.train.round
            if not isinstance(effect, ef.Encode):
                self.said.append(shown(effect))
            elif self.slow:
                self.waiting.append(effect.work)
                self.said.append(f"work of round {effect.work.round} is to be reported once the disk is done")
            else:
                self.encoded(effect.work)
        if self.state.phase != before:
            self.said.append(f"=> {self.state.phase}")

    def encoded(self, work: Work) -> None:
        before = len(self.said)
        self.feed(ev.EncodingBegun(work, work.norm, 1.0))
        if len(self.said) == before:
            self.said.append("it is not: the node no longer has that work")

    @property
    def round(self) -> int:
        return int(self.view["committed"]) + 1

    def do(self, verb: str, args: list[str]) -> None:
        words = [a for a in args if "=" not in a]
        options = dict(a.split("=", 1) for a in args if "=" in a)
        flags = {w.removeprefix("-"): not w.startswith("-") for w in words}
        changes = options | {flag: on for flag, on in flags.items() if flag in FLAGS}
        number = int(words[0]) if words and words[0].isdigit() else None
        match verb:
            case "turns":
                self.layout = pb.LayoutReported(numel=40, fragments=[20, 20])
            case "blind":
                self.layout = pb.LayoutReported(numel=40, no_evaluation=True)
            case "up":
                self.feed(ev.TrainerUp(self.layout))
            case "down":
                self.feed(ev.TrainerDown())
            case "state":
                assert number is not None
                self.feed(ev.StateMoved(number, digest(words[-1])))
            case "failed":
                self.feed(ev.MoveFailed(-1 if number is None else number))
            case "joining":
                self.see({"you": words[0], "phase": "inner", "has_state": True, "digest": "0"} | changes)
            case "round":
                assert number is not None
                self.front = int(changes.pop("front", self.front))
                self.see(self.of_round(number) | changes)
            case "collecting":
                self.see({"phase": "collecting", "closing": True} | changes)
            case "reducing":
                plan = f"{self.round}/{1 if number is None else number}"
                self.see({"phase": "reducing", "closing": True, "plan": plan} | changes)
            case "committed":
                self.front = int(changes.pop("front", self.front))
                self.see(self.of_round(self.round + 1) | {"digest": "-", "has_state": False} | changes)
            case "view":
                self.see(changes)
            case "begin":
                for line in ("up", "state 0", "round 1"):
                    self.last(line)
            case "trained":
                for line in ("steps", "ready"):
                    self.last(line)
            case "commit":
                after = f"round {self.round + 1} front={self.front + 10}", f"state {self.round}"
                for line in ("trained", "reducing", "held", *after):
                    self.last(line)
            case "steps":
                self.feed(trainer.Reached(self.order if number is None else number))
            case "ready":
                round_ = self.order if number is None else number
                steps = int(options.get("steps", 5))
                samples = int(options.get("samples", 2 * steps))
                loss = float(options.get("loss", 2.0))
                skipped = int(options.get("skipped", 0))
                self.feed(trainer.Ready(round_, steps, loss, samples, 1.0, "ahead" in words, skipped))
            case "bad":
                self.feed(trainer.BadArithmetic(self.order if number is None else number, "the loss is too large"))
            case "infinite":
                self.feed(ev.EncodingFailed(self.work, "the delta holds NaN"))
            case "waits":
                self.feed(trainer.Waits(self.order if number is None else number))
            case "evaluated":
                self.feed(trainer.Evaluated(self.round - 1 if number is None else number, 2.0))
            case "held":
                attempt = self.round, 1 if number is None else number
                word = words[-1] if words and not words[-1].isdigit() else ""
                self.feed(ev.AttemptComplete(attempt, root(f"{self.round} {word}".strip())))
            case "still":
                self.feed(ev.TrainerSilent(float(words[0])))
            case "pause":
                self.feed(ev.PauseChanged(True, "bytes" in words))
            case "resume":
                self.feed(ev.PauseChanged(False))
            case "part":
                self.feed(ev.PartingAsked())
            case "rejoined":
                self.feed(ev.Rejoined())
            case "slow":
                self.slow = True
            case "written":
                self.slow, waiting, self.waiting = False, self.waiting, []
                for work in waiting:
                    self.encoded(work)
            case "show":
                self.said += shown_state(self.state)
            case _:
                raise ValueError(f"no such command: {verb}")

    def last(self, line: str) -> None:
        """Do this, and say only what came of it."""
        self.said = []
        verb, *args = line.split()
        self.do(verb, args)

    def of_round(self, number: int) -> dict[str, Any]:
        """The view in which a round's inner steps are taken."""
        lease = f"{number}@{self.front}..{self.front + LEASE - 1}"
        known = {"committed": number - 1, "digest": str(number - 1), "sealed": str(number - 1), "train": lease}
        flags = dict.fromkeys(FLAGS, False) | {"has_state": True}
        return {"you": "active", "phase": "inner", "plan": "-"} | known | flags

    def see(self, changes: dict[str, Any]) -> None:
        """The next view: the last one with these changes."""
        told = self.view = self.view | {"version": int(self.view["version"]) + 1} | changes
        view = pb.View(incarnation=int(told["incarnation"]), version=int(told["version"]))
        view.committed, view.you, view.phase = int(told["committed"]), told.get("you", ""), told.get("phase", "")
        view.state_digest, view.sealed = digest(told.get("digest", "-")), root(told.get("sealed", "-"))
        for flag in FLAGS[:-1]:
            setattr(view, flag, bool(told.get(flag, False)))
        for name in told["donors"].replace("-", "").split(","):
            if name:
                view.donors.add(node_id=name)
        if (train := told.get("train", "-")) != "-":
            number, ranges = train.split("@")
            view.train.CopyFrom(pb.Train(round=int(number), steps=5, floor=1, ceiling=9))
            for span in ranges.split("+"):
                first, last = map(int, span.split(".."))
                view.train.lease.add(first=first, count=last - first + 1)
        if (plan := told.get("plan", "-")) != "-":
            view.plan.round, view.plan.attempt = map(int, plan.split("/"))
        if told.get("ledger"):
            view.ledger = b"digests of all sealed chunks"
        self.feed(ev.ViewArrived(view))


def digest(words: str) -> bytes:
    return b"" if words == "-" else f"state {words}".encode()


def root(words: str) -> bytes:
    return b"" if words == "-" else f"root {words}".encode()


def shown(effect: ef.Effect) -> str:
    match effect:
        case ef.OrderInitialisation():
            return "initialise the model"
        case ef.OrderTraining(view, carried, resume, on, rebased, _, doubted):
            start = "the local vector" if resume else "the anchor"
            how = [f"on top of {carried} samples"] * (carried > 0)
            how += ["keeping other fragments' steps"] * (resume and not carried)
            how += ["the steps that it is ahead are of this round"] * on
            how += ["its other fragments' steps are rebased"] * rebased
            how += [f"without its moments since round {doubted}"] * (doubted > 0)
            ranges = "+".join(f"{r.first}..{r.first + r.count - 1}" for r in view.train.lease)
            return "; ".join([f"train round {view.train.round} on {ranges}, from {start}", *how])
        case ef.OrderEvaluation(round_):
            return f"evaluate state {round_}"
        case ef.FinishTraining(round_, rest):
            return f"finish the inner steps of round {round_}{' at once, and take none ahead' * rest}"
        case ef.HoldTraining(round_):
            return f"go no further ahead of round {round_}"
        case ef.EndTrainer():
            return "end the trainer"
        case ef.LeaveRun(sentence):
            return f"leave the run: {sentence}"
        case ef.Encode(work):
            return f"encode {shown_work(work)}"
        case ef.StartReduce(plan):
            return f"reduce round {plan.round}, attempt {plan.attempt}"
        case ef.VerifySeals(view):
            return f"compare the sealed chunks of round {view.plan.round} with the ledger"
        case ef.StopReduce():
            return "stop the reduce"
        case ef.Apply(view):
            return f"apply what round {view.committed} sealed"
        case ef.Recover(view, differs, rebase):
            why = ", as the node's own is wrong" * differs + ", and rebase what was trained" * rebase
            donors = " ".join(d.node_id for d in view.donors) or "nobody"
            return f"recover state {view.committed} from {donors}{why}"
        case ef.StopRecovery():
            return "stop recovering"
        case ef.FallBack():
            return "fall back to what the disk has"
        case ef.Renumber(view):
            return f"renumber the state to {view.committed}"
        case ef.ReportLayout():
            return "report the layout"
        case ef.ReportState(round_, words):
            return f"report {words.decode()!r} of round {round_}"
        case ef.ReportReached(round_):
            return f"report that round {round_} has its inner steps"
        case ef.ReportReady(round_, c):
            return f"report {shown_steps(c.samples, c.skipped, c.front, c.steps, round_, c.loss, c.fresh)}"
        case ef.ReportEvaluated(trainer.Evaluated(round_, loss)):
            return f"report a loss of {loss:g} of state {round_}"
        case ef.Depart():
            return "leave the run: all that was trained is committed"
        case ef.RunFinished():
            return "the run is finished"


def shown_work(work: Work) -> str:
    return shown_steps(work.samples, work.skipped, work.front, work.steps, work.round, work.loss, work.fresh)


def shown_steps(samples: int, skipped: int, front: int, steps: int, round_: int, loss: float, fresh: bool) -> str:
    but = f" but {skipped} that were skipped" if skipped else ""
    earlier = "" if fresh else ", with steps of earlier rounds"
    return f"{samples} samples from {front} on{but}, {steps} steps of round {round_}, loss {loss:g}{earlier}"


def shown_state(state: State) -> list[str]:
    at = f"of round {state.round}" if state.round >= 0 else "none"
    moving = f", moving: {state.outer.by.value}" if isinstance(state.outer, Moving) else ""
    lines = [f"trainer {shown_trainer(state)}; state {at}{moving}"]
    if state.ready is not None:
        lines.append(f"ready: {shown_work(state.ready)}")
    if state.carried is not None:
        lines.append(f"carried over: {shown_work(state.carried)}")
    if isinstance(state.reduce, Reducing):
        lines.append(f"reducing round {state.reduce.attempt[0]}, attempt {state.reduce.attempt[1]}")
    if state.left:
        lines.append("left a reduce, which the coordinator may not know")
    if state.trouble:
        lines.append(f"trouble: {state.trouble}, {state.bad_orders or state.bad_deltas} in a row")
    match state.reduced:
        case Reduced((round_, attempt), _, in_session):
            lines.append(f"held: round {round_}, attempt {attempt}{', of an earlier session' * (not in_session)}")
    return lines


def shown_trainer(state: State) -> str:
    between = ", evaluating in between" * state.evaluating
    match state.trainer:
        case Down():
            return "down"
        case Idle():
            return "idle"
        case Training(round=round_, finishing=finishing):
            return f"training round {round_}{', told to finish' * finishing}{between}"
        case Ahead(round_, front):
            where = f" from sample {front} on" if front is not None else ", in vain"
            return f"ahead of round {round_}{where}{between}"
        case Evaluating():
            return "evaluating"
