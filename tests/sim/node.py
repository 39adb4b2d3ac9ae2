"""A simulated node: the real machine, and around it what the daemon does, with lists of samples for tensors.

The outer state is a round and a digest. The local vector is the list of samples whose steps it has beyond the
state `base`; a contribution is a copy of it.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from sim import invariants
from sim.audit import Audits
from sim.beyond import Beyond
from sim.control import Control
from sim.disk import Checkpointer, Disk
from sim.engine import Call, Process
from sim.plane import Plane
from sim.trainer import Trainer
from sim.truth import Contribution, Life, digest, next_state, norm, root

from atoll.comm.ids import NO_KEY, NodeId, PublicKey
from atoll.comm.plan import NOBODY
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node import trainer_channel as channel
from atoll.node.checkpoint.checkpointer import DISK_WAIT
from atoll.node.control.reports import Reports
from atoll.node.state_machine import effects as ef
from atoll.node.state_machine import events as node_ev
from atoll.node.state_machine.state import Ahead, Evaluating, State, Training, Work
from atoll.node.state_machine.step import step

if TYPE_CHECKING:
    from sim.world import World


@dataclass(slots=True)
class Host:
    """A machine: what outlives the processes on it."""

    name: str
    speed: float  # of its trainer; 1: the fastest
    offset: float  # seconds that its clock is off
    session: str = ""  # remembered on its disk
    key: PublicKey = NO_KEY  # the same
    gone: bool = False  # for ever
    sick: bool = False  # its trainer, or what merges, hangs, for ever, and its daemon does not see it
    leaf: bool = False  # nobody can dial it
    evaluates: bool = True  # its trainer can measure a validation loss
    role: str = ""  # "reducer": has no trainer
    disk: Disk | None = None  # what it has of the run; None: no place for it
    lies: list[str] = field(default_factory=list)  # what it will lie about, once each
    liar: bool = False  # it was to lie at some time
    habit: str = ""  # what it does, or leaves out, in every round

    def lies_about(self, what: str) -> bool:
        if what not in self.lies:
            return False
        self.lies.remove(what)
        return True


class Node(Process):
    """One life of the daemon on a host."""

    def __init__(self, world: "World", host: Host) -> None:
        super().__init__(world.engine, host.name)
        self.world, self.host = world, host
        self.machine = State(stall=world.config.members.stall)
        self.control, self.trainer, self.plane = Control(self), Trainer(self), Plane(self)
        self.audits = Audits(self)
        self.reports = Reports(self.control)
        self.durable = Checkpointer(self)
        self.state = -1, b""  # round and digest of what anchor and momentum hold
        self.still = False  # peers may fetch it
        self.flip = False  # the next state that it computes has a wrong bit
        self.local: list[int] = []
        self.base = b""  # digest of the state that `local` is beyond
        self.beyond = Beyond(world.turns)
        self.furthest = -1  # the newest state that it had
        self.lost: list[int] = []  # samples whose steps were lost with a trainer, or with a state that was wrong
        self.steps: list[int] = []  # samples that it took steps on, in order
        self.excused = False  # its trainer may lose what it took ahead
        self.serve: list[str] = []  # whom it dials to offer its state, as a leaf
        self.thrift: Call | None = None  # what happens in the middle of its next exchange: its bytes are gone

    @property
    def me(self) -> NodeId:
        return self.control.me

    @property
    def session(self) -> Life:
        return self.control.session

    @property
    def layout(self) -> pb.LayoutReported:
        world = self.world
        layout = pb.LayoutReported(numel=world.numel, digest=digest("layout"), fragments=world.fragments)
        layout.no_evaluation = not self.host.evaluates
        return layout

    @property
    def clock(self) -> float:
        """Seconds on its own clock."""
        return self.engine.now + self.host.offset

    @property
    def step_time(self) -> float:
        """Seconds that one inner step takes."""
        return self.world.step_time / self.host.speed

    @property
    def silent(self) -> bool:
        """Whether nothing passes over its links to peers, to save bytes."""
        return self.machine.saves_bytes

    @property
    def wishes(self) -> tuple[bool, bool]:
        """For the heartbeat: whether it is paused, and exchanges nothing."""
        return self.machine.paused, self.machine.exchanges_nothing

    @property
    def progress(self) -> tuple[str, int, int]:
        """For the heartbeat: phase, round, inner step."""
        match self.machine.trainer:
            case Training(round_) | Ahead(round_) | Evaluating(round_):
                return self.machine.phase, round_, self.trainer.steps
            case _:
                return self.machine.phase, 0, self.trainer.steps

    def say(self, sentence: str) -> None:
        if self.world.tracing:
            self.world.say(f"{self.place} {self.me}.{self.control.life} {sentence}")

    def feed(self, event: node_ev.Event) -> None:
        if isinstance(event, node_ev.ViewArrived):
            self.serve = [donor.node_id for donor in event.view.serve]
            self.audits.follow(event.view)
            invariants.only_who_can_is_to_evaluate(self, event.view)
        elif isinstance(event, node_ev.Rejoined):
            self.audits.stop()
        self.machine, effects = step(self.machine, event)
        self.reports.view = self.machine.view
        if self.world.tracing:
            self.say(f"{told(event)} -> {', '.join(map(told, effects)) or 'nothing'}")
        for effect in effects:
            self._act(effect)
        self.world.moved(self)

    def wish(self, event: node_ev.PauseChanged | node_ev.PartingAsked) -> None:
        """Its owner wants this."""
        if self.alive:
            self.wake(self.feed, event)

    def _act(self, effect: ef.Effect) -> None:
        match effect:
            case ef.OrderInitialisation():
                self.trainer.busy(0.1, self._initialised)
            case ef.OrderTraining():
                self._train(effect)
            case ef.OrderEvaluation(round_):
                self.trainer.busy(0.1, lambda: self.feed(channel.Evaluated(round_, 2.0)))
            case ef.FinishTraining(round_, rest):
                self.trainer.finish(round_, rest)
            case ef.HoldTraining(round_):
                self.trainer.hold(round_)
            case ef.EndTrainer():
                self.say("ends its trainer, which made no progress")
                self.trainer.die()
            case ef.LeaveRun(sentence):
                self.control.leave(sentence)
                self.world.kill(self)
            case ef.Encode(work):
                self.later(self.world.encode_time, self._encoded, work, self.clock)
            case ef.StartReduce(plan):
                invariants.who_saves_bytes_exchanges_nothing(self)
                self.world.planned(plan)
                behind = self.beyond.of(plan.round)
                local, vague = tuple(self.local), self.beyond.vague
                about = self._times(plan), self._turns(plan)
                self.plane.begin(plan, Contribution(self.me, local, self.base, behind, vague, *about))
            case ef.VerifySeals(view):
                self.plane.prove(view.plan.round, view.ledger)
            case ef.StopReduce():
                self.plane.cancel()
            case ef.Apply(view):
                if not self.plane.holds(view.sealed):
                    self.later(0.0, self.feed, node_ev.MoveFailed(self.state[0]))
                    return
                self.still = False
                self.later(self.world.apply_time, self._apply, view.committed, self.plane.result())
                self.plane.cancel()
            case ef.StopRecovery():
                self.plane.stop_recovery()
            case ef.Recover(_, differs, rebase):
                invariants.who_saves_bytes_exchanges_nothing(self)
                self._recover(effect, differs, rebase)
            case ef.FallBack(before):
                if before:  # what it trained is on top of what may be wrong
                    self.drop_for_good()
                    self.beyond.clear()
                self.later(self.world.apply_time, self._fall_back, before)
            case ef.Renumber(view):
                self.still = False
                self.later(self.world.apply_time, self._renumber, view.committed)
            case ef.ReportLayout(layout):
                self.reports.layout(layout)
            case ef.ReportState(round_, state):
                self.reports.state(round_, state)
            case ef.ReportReached(round_):
                self.reports.steps_reached(round_)
            case ef.ReportReady(round_, contribution):
                self._report_ready(round_, contribution)
            case ef.ReportEvaluated(channel.Evaluated(round_, loss)):
                self.reports.loss(round_, loss)
            case ef.Depart():
                invariants.who_departs_takes_nothing_along(self)
                self._depart()
            case ef.RunFinished():
                self.world.over(self)
            case _:
                assert_never(effect)

    def _depart(self) -> None:
        """Leave, as soon as the run's state survives without it: who alone has it could not be brought back."""
        if self.world.faults.may_go([self]):
            self.say("leaves, all that it trained is committed")
            self.control.leave("stopped by its operator")
            self.world.kill(self)
        else:
            self.later(0.5, self._depart)

    # Training

    def _train(self, effect: ef.OrderTraining) -> None:
        order, carried, on = effect.view.train, effect.carried, effect.continues
        self.beyond.train(effect)
        lease = [s for r in order.lease for s in range(r.first, r.first + r.count)]
        if not carried:
            self.drop(self.local, "training starts from the anchor")
            self.local, self.base = [], self.state[1]
        self.world.resumed(self, order, lease, carried)
        if not on and self.trainer.taken:
            invariants.steps_ahead_are_kept(self)
        self.excused = False
        self.trainer.train(order, lease[carried:], on)

    def trained(self, round_: int, samples: list[int]) -> None:
        """The trainer wrote the local vector."""
        self.beyond.hand_over(round_, samples)
        self.local = self.local + samples
        self.steps += samples

    def without_steps(self, training: bool) -> None:
        """The trainer's steps are gone. It may have died, or given up, while it wrote the local vector."""
        if training:
            self.lost += self.local
            self.local = []
            self.beyond.clear()

    def drop(self, samples: list[int], why: str) -> None:
        """Its steps on the samples will not be committed from here; unless they were, that is for a reason."""
        if samples and self.control.life > 1 and samples[0] in self.world.truth.consumed:
            self.lost += samples  # an earlier life's steps on the first of them were committed
            self.excused = True
        elif samples:
            self.world.dropped(self, samples, why)

    def _encoded(self, work: Work, since: float) -> None:
        if self.durable.is_pending(work.round - 1) and self.clock - since < DISK_WAIT:
            self.later(0.05, self._encoded, work, since)
        else:
            self.feed(node_ev.EncodingBegun(work, work.norm, 1.0))

    def _times(self, plan: pb.Plan) -> float:
        """How much longer its delta is than it told."""
        if self.host.lies_about("norm"):
            self.world.truth.outsized.add((self.me, plan.round))
        return 17.0 if (self.me, plan.round) in self.world.truth.outsized else 1.0

    def _turns(self, plan: pb.Plan) -> bool:
        """Whether its delta is turned against the last round's."""
        if self.host.habit == "turns" or self.host.lies_about("turned"):
            self.world.truth.turned.add((self.me, plan.round))
        return (self.me, plan.round) in self.world.truth.turned

    def _report_ready(self, round_: int, contribution: pb.ContributionReady) -> None:
        contribution.front += self.host.lies_about("front")
        contribution.samples += 1000 * self.host.lies_about("samples")
        contribution.delta_norm = norm(self.me, contribution.samples)
        self.world.truth.contributed[self.session, round_] = tuple(self.local)
        if self.host.habit != "withholds":
            self.reports.contribution(round_, contribution)

    # The outer state

    def restore(self) -> None:
        """Begin with what is on the disk."""
        if self.host.disk is not None and self.host.disk.snapshots and self.state[0] < 0:
            round_, state = self.host.disk.state()
            self.state, self.still, self.base = (round_, state), True, state
            self.world.restored(self, state)
            self.feed(node_ev.StateMoved(round_, state))

    def _fall_back(self, before: int) -> None:
        disk = self.host.disk
        round_, state = (-1, b"") if disk is None else disk.state_before(before) if before else disk.state()
        if round_ < 0:
            self.feed(node_ev.MoveFailed(self.state[0]))
            return
        self.state, self.still, self.base = (round_, state), True, state
        self.world.restored(self, state)
        self.feed(node_ev.StateMoved(round_, state))

    def _initialised(self) -> None:
        self.drop_for_good()
        self.beyond.clear()
        self.durable.distrust()
        self._settle(0, self.world.initial_state(self), alone=True)

    def _renumber(self, round_: int) -> None:
        self.durable.drop_rounds_after(self.state[0])
        self._settle(round_, self.state[1], alone=True, computed=False)

    def _apply(self, round_: int, payloads: tuple[bytes, ...]) -> None:
        sealed = root(payloads)
        self.world.applies(self, round_, sealed)
        if self.world.left_out(self, round_):
            self.drop_for_good()
        self.beyond.apply(round_)
        self.durable.record_round(round_, sealed)
        self._settle(round_, next_state(self.state[1], sealed))

    def _recover(self, order: ef.Recover, differs: bool, rebase: bool) -> None:
        self.still = False
        if differs:
            self.durable.distrust()
        if not rebase:
            self.drop_for_good() if differs else self.drop(self.local, "it recovers without keeping its work")
            self.local = []
            self.beyond.clear()
        self.plane.recover(order)

    def drop_for_good(self) -> None:
        """The state under its work was not the run's, or it came when all chunks were sealed."""
        self.lost += self.local
        self.local = []
        self.excused = True

    def recovered(self, order: ef.Recover) -> None:
        self._settle(order.view.committed, order.view.state_digest)

    def not_recovered(self) -> None:
        if self.world.rng.random() < 0.3:
            self.state = -1, b""  # some chunks are of another round now
        self.feed(node_ev.MoveFailed(self.state[0]))

    def _settle(self, round_: int, state: bytes, alone: bool = False, computed: bool = True) -> None:
        if self.flip and computed:
            self.flip = False
            state = digest("flipped", state)
            self.world.truth.flipped.add(self.me)
        self.state, self.still, self.base = (round_, state), True, state
        self.world.settled(self, round_)
        self.durable.finalized(round_, state, alone)
        self.feed(node_ev.StateMoved(round_, state))

    def state_of(self, round_: int) -> bytes:
        """What peers may fetch; empty if it does not have it."""
        return self.state[1] if self.still and self.state[0] == round_ else b""

    def passed_on(self, round_: int) -> bytes:
        """The same, where it has it from a leaf that dialled this node to offer it."""
        cut = self.world.network.cut
        offering = (n for n in self.world.living if self.me in n.serve and not (n.stopped or n.silent))
        here = (n.state_of(round_) for n in offering if not {(n.place, self.place), (self.place, n.place)} & cut)
        return self.state_of(round_) or next(filter(None, here), b"")


def told(event: object) -> str:
    """An event or an effect on one line."""
    match event:
        case node_ev.ViewArrived(view):
            parts = [f"{view.incarnation}.{view.version} epoch {view.epoch} {view.phase} {view.you}"]
            parts += [
                f"committed {view.committed} digest {view.state_digest.hex()[:6]} sealed {view.sealed.hex()[:6]}"
            ]
            if view.HasField("train"):
                lease = "+".join(f"{r.first}..{r.first + r.count - 1}" for r in view.train.lease)
                parts.append(f"train {view.train.round} on {lease}")
            if view.HasField("plan"):
                members = " ".join(m.node_id + "!" * m.gone for m in view.plan.members)
                owners = " ".join(f"{o}" if o != NOBODY else "-" for o in view.plan.owners)
                parts.append(f"plan {view.plan.round}/{view.plan.attempt} of {members}, owners {owners}")
            flags = "initialise evaluate ready reached closing has_state finished"
            parts += [flag for flag in flags.split() if getattr(view, flag)]
            return f"View({', '.join(parts)})"
        case ef.Apply(view):
            return f"Apply({view.committed})"
        case ef.Recover(view, differs, rebase):
            donors = " ".join(d.node_id for d in view.donors)
            return f"Recover({view.committed}, {differs=}, {rebase=}, from {donors})"
        case ef.OrderTraining(view, carried, resume, on, rebased):
            return f"Train({view.train.round}, {carried=}, {resume=}, {on=}, {rebased=})"
        case ef.VerifySeals(view):
            return f"VerifySeals({view.plan.round}/{view.plan.attempt})"
        case ef.StartReduce(plan):
            return f"StartReduce({plan.round}/{plan.attempt})"
        case _:
            return str(event)
