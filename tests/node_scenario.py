"""Run a transcript: commands, `----`, and what the node's state machine did at them.

turns                       fragments take turns in the run (first of all)
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
ready [K] [steps=5] [samples=10] [loss=2] [ahead]    it stopped, or goes ahead
waits [K] / evaluated [K]   it is as far ahead as it may be / it measured the loss of state K
still SECONDS               it has made no progress for so long; 70 s are too many
held [ATTEMPT] [WORD]       every sealed chunk of the round's attempt is here; WORD: with another root
trained                     `steps`, `ready` (only that is said)
commit                      `trained`, `reducing`, `held`, the next `round`, its `state` (only that is said)
rejoined                    a new session with the coordinator
slow / written              what is to be reported waits for the disk / no longer does
show                        the machine's state

A view's keys: you, phase, committed, digest, sealed, donors (names), train (ROUND@FIRST..LAST[+FIRST..LAST]), plan
(ROUND/ATTEMPT), tokens, version, incarnation; - is none. Its flags: has_state, initialise, evaluate, ready,
reached, closing, finished, lost, ledger. Lines that begin with => say what the node is doing, in the goodput
meter's words, where that changed.
"""

from collections.abc import Callable
from typing import Any

from atoll.comm.proto import atoll_pb2 as pb
from atoll.node import state_machine
from atoll.node.state_machine import Effect, Event, Work

LEASE = 40  # samples
FLAGS = ("has_state", "initialise", "evaluate", "ready", "reached", "closing", "finished", "lost", "ledger")


class Run:
    """The node's machine, and just enough of the world around it to speak to it."""

    def __init__(self) -> None:
        self.node = state_machine.Node()
        self.said: list[str] = []
        self.view: dict[str, Any] = {"incarnation": 1, "version": 0, "committed": 0, "donors": "bo"}
        self.slow, self.waiting = False, list[Work]()  # reports that wait for the disk
        self.front = 0  # of the next round's lease
        self.order = 0  # the round that the trainer was last told to train

    def feed(self, event: Event) -> None:
        before = self.node.phase
        self.node, effects = state_machine.step(self.node, event)
        for effect in effects:
            if isinstance(effect, state_machine.Train):
                self.order = effect.order.round
            if isinstance(effect, state_machine.ReportReady) and self.slow:
                self.waiting.append(effect.ready)
                self.said.append(f"work of round {effect.ready.round} is to be reported once the disk is done")
            else:
                self.said.append(shown(effect))
        if self.node.phase != before:
            self.said.append(f"=> {self.node.phase}")

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
                self.node = state_machine.Node(in_turns=True)
            case "up":
                self.feed(state_machine.TrainerUp())
            case "down":
                self.feed(state_machine.TrainerDown())
            case "state":
                assert number is not None
                self.feed(state_machine.StateMoved(number, digest(words[-1])))
            case "failed":
                self.feed(state_machine.MoveFailed(-1 if number is None else number))
            case "joining":
                self.see({"you": words[0], "phase": "inner", "has_state": True, "digest": "0"} | changes)
            case "round":
                assert number is not None
                self.front = int(changes.pop("front", self.front))
                self.see(self.of_round(number) | changes)
            case "collecting":
                self.see({"phase": "collecting", "closing": True})
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
                self.feed(state_machine.TrainerReached(self.order if number is None else number))
            case "ready":
                round_ = self.order if number is None else number
                steps = int(options.get("steps", 5))
                samples = int(options.get("samples", 2 * steps))
                loss = float(options.get("loss", 2.0))
                self.feed(state_machine.TrainerReady(round_, steps, samples, loss, 1.0, "ahead" in words))
            case "waits":
                self.feed(state_machine.TrainerWaits(self.order if number is None else number))
            case "evaluated":
                self.feed(state_machine.TrainerEvaluated(self.round - 1 if number is None else number, 2.0))
            case "held":
                attempt = self.round, 1 if number is None else number
                word = words[-1] if words and not words[-1].isdigit() else ""
                self.feed(state_machine.ReduceHeld(attempt, root(f"{self.round} {word}".strip())))
            case "still":
                if self.node.watched and float(words[0]) > 69:
                    self.said.append("end the trainer")
            case "rejoined":
                self.feed(state_machine.Rejoined())
            case "slow":
                self.slow = True
            case "written":
                self.slow, waiting, self.waiting = False, self.waiting, []
                for work in waiting:
                    if state_machine.still_ready(self.node, work):
                        self.said.append(shown(state_machine.ReportReady(work)))
                    else:
                        self.said.append("it is not: the node no longer has that work")
            case "show":
                self.said += shown_node(self.node)
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
        self.feed(state_machine.ViewArrived(view))


def digest(words: str) -> bytes:
    return b"" if words == "-" else f"state {words}".encode()


def root(words: str) -> bytes:
    return b"" if words == "-" else f"root {words}".encode()


def shown(effect: Effect) -> str:
    match effect:
        case state_machine.Initialise():
            return "initialise the model"
        case state_machine.Train(order, carried, on, kept, rebased):
            start = {True: "the local vector"}.get(bool(carried or kept), "the anchor")
            how = [f"on top of {carried} samples"] * (carried > 0) + ["keeping other fragments' steps"] * kept
            how += ["the steps that it is ahead are of this round"] * on
            how += ["its other fragments' steps are rebased"] * rebased
            ranges = "+".join(f"{r.first}..{r.first + r.count - 1}" for r in order.lease)
            return "; ".join([f"train round {order.round} on {ranges}, from {start}", *how])
        case state_machine.Evaluate(round_):
            return f"evaluate state {round_}"
        case state_machine.FinishTraining(round_):
            return f"finish the inner steps of round {round_}"
        case state_machine.StartReduce(plan):
            return f"reduce round {plan.round}, attempt {plan.attempt}"
        case state_machine.Prove(view):
            return f"compare the sealed chunks of round {view.plan.round} with the ledger"
        case state_machine.StopReduce():
            return "stop the reduce"
        case state_machine.Apply(view):
            return f"apply what round {view.committed} sealed"
        case state_machine.Recover(view, differs, rebase):
            why = ", as the node's own is wrong" * differs + ", and rebase what was trained" * rebase
            donors = " ".join(d.node_id for d in view.donors) or "nobody"
            return f"recover state {view.committed} from {donors}{why}"
        case state_machine.FallBack():
            return "fall back to what the disk has"
        case state_machine.Renumber(round_):
            return f"renumber the state to {round_}"
        case state_machine.ReportLayout():
            return "report the layout"
        case state_machine.ReportState(round_, words):
            return f"report {words.decode()!r} of round {round_}"
        case state_machine.ReportReached(round_):
            return f"report that round {round_} has its inner steps"
        case state_machine.ReportReady(work):
            return f"report {shown_work(work)}"
        case state_machine.ReportEvaluated(round_, loss):
            return f"report a loss of {loss:g} of state {round_}"
        case state_machine.RunFinished():
            return "the run is finished"


def shown_work(work: Work) -> str:
    fresh = "" if work.fresh else ", with steps of earlier rounds"
    steps = f"{work.samples} samples from {work.front} on, {work.steps} steps of round {work.round}"
    return f"{steps}, loss {work.loss:g}{fresh}"


def shown_node(node: state_machine.Node) -> list[str]:
    task = node.task
    kinds: dict[str, Callable[[state_machine.Task], str]] = {
        "initialise": lambda t: "idle",
        "train": lambda t: f"training round {t.round}" + ", told to finish" * t.finishing,
        "ahead": lambda t: (
            f"ahead of round {t.round}" + (f" from sample {t.front} on" if t.front >= 0 else ", in vain")
        ),
        "evaluate": lambda t: "evaluating",
    }
    trainer = "down" if not node.trainer_up else "idle" if task is None else kinds[task.kind](task)
    trainer += ", evaluating in between" * node.evaluating
    state = f"of round {node.round}" if node.round >= 0 else "none"
    lines = [f"trainer {trainer}; state {state}{', moving' * node.moving}"]
    if node.ready is not None:
        lines.append(f"ready: {shown_work(node.ready)}")
    if node.carried is not None:
        lines.append(f"carried over: {shown_work(node.carried)}")
    if node.reducing is not None:
        lines.append(f"reducing round {node.reducing[0]}, attempt {node.reducing[1]}")
    if node.held is not None:
        lines.append(f"held: round {node.held[0]}, attempt {node.held[1]}{', of an earlier session' * node.apart}")
    return lines
