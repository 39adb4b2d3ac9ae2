"""A simulated node: the real machine, and around it what the daemon does, with lists of samples for tensors.

The outer state is a round and a digest. The local vector is the list of samples whose steps it has beyond the
state `base`; a contribution is a copy of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from sim import invariants
from sim.beyond import Beyond
from sim.control import Control
from sim.disk import PATIENCE, Disk, Durable
from sim.engine import Process
from sim.plane import Plane
from sim.trainer import Trainer
from sim.truth import Contribution, Life, digest, next_state, norm, root

from atoll.comm.ids import NodeId
from atoll.comm.plan import NOBODY
from atoll.coordinator.state_machine import events as ev
from atoll.node import state_machine

if TYPE_CHECKING:
    from sim.world import World


@dataclass(slots=True)
class Host:
    """A machine: what outlives the processes on it."""

    name: str
    speed: float  # of its trainer; 1: the fastest
    offset: float  # seconds that its clock is off
    session: str = ""  # remembered on its disk
    gone: bool = False  # for ever
    sick: bool = False  # its trainer, or what merges, hangs, for ever, and its daemon does not see it
    leaf: bool = False  # nobody can dial it
    role: str = ""  # "reducer": has no trainer
    disk: Disk | None = None  # what it has of the run; None: no place for it
    lies: list[str] = field(default_factory=list)  # what it will lie about, once each

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
        self.machine = state_machine.Node(in_turns=bool(world.fragments))
        self.control, self.trainer, self.plane = Control(self), Trainer(self), Plane(self)
        self.durable = Durable(self)
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

    @property
    def me(self) -> NodeId:
        return self.control.me

    @property
    def session(self) -> Life:
        return self.control.session

    @property
    def clock(self) -> float:
        """Seconds on its own clock."""
        return self.engine.now + self.host.offset

    @property
    def step_time(self) -> float:
        """Seconds that one inner step takes."""
        return self.world.step_time / self.host.speed

    @property
    def progress(self) -> tuple[str, int, int]:
        """For the heartbeat: phase, round, inner step."""
        task = self.machine.task
        return self.machine.phase, task.round if task is not None else 0, self.trainer.steps

    def say(self, sentence: str) -> None:
        if self.world.tracing:
            self.world.say(f"{self.place} {self.me}.{self.control.life} {sentence}")

    def feed(self, event: state_machine.Event) -> None:
        if isinstance(event, state_machine.ViewArrived):
            self.serve = [donor.node_id for donor in event.view.serve]
        self.machine, effects = state_machine.step(self.machine, event)
        if self.world.tracing:
            self.say(f"{told(event)} -> {', '.join(map(told, effects)) or 'nothing'}")
        for effect in effects:
            self._act(effect)
        self.world.moved(self)

    def report(self, event: Callable[[NodeId, int], ev.Event]) -> None:
        said = event(*self.session)
        self.world.truth.hear(said)
        self.control.report(said)

    def _act(self, effect: state_machine.Effect) -> None:
        match effect:
            case state_machine.Initialise():
                self.trainer.busy(0.1, self._initialised)
            case state_machine.Train():
                self._train(effect)
            case state_machine.Evaluate(round_):
                self.trainer.busy(0.1, lambda: self.feed(state_machine.TrainerEvaluated(round_, 2.0)))
            case state_machine.FinishTraining(round_):
                self.trainer.finish(round_)
            case state_machine.StartReduce(plan):
                self.world.planned(plan)
                behind = self.beyond.of(plan.round)
                local, vague = tuple(self.local), self.beyond.vague
                self.plane.begin(plan, Contribution(self.me, local, self.base, behind, vague))
            case state_machine.Prove(view):
                self.plane.prove(view.plan.round, view.ledger)
            case state_machine.StopReduce():
                self.plane.cancel()
            case state_machine.Apply(view):
                if not self.plane.holds(view.sealed):
                    self.later(0.0, self.feed, state_machine.MoveFailed(self.state[0]))
                    return
                self.still = False
                self.later(self.world.apply_time, self._apply, view.committed, self.plane.result())
                self.plane.cancel()
            case state_machine.Recover(_, differs, rebase):
                self._recover(effect, differs, rebase)
            case state_machine.FallBack():
                self.later(self.world.apply_time, self._fall_back)
            case state_machine.Renumber(round_):
                self.still = False
                self.later(self.world.apply_time, self._renumber, round_)
            case state_machine.ReportLayout():
                numel, sizes = self.world.numel, self.world.fragments
                self.report(lambda n, life: ev.LayoutReported(n, life, numel, digest("layout"), sizes))
            case state_machine.ReportState(round_, state):
                self.report(lambda n, life: ev.StateReported(n, life, round_, state))
            case state_machine.ReportReached(round_):
                self.report(lambda n, life: ev.StepsReached(n, life, round_))
            case state_machine.ReportReady(work):
                self.later(self.world.encode_time, self._report_when_written, work, self.clock)
            case state_machine.ReportEvaluated(round_, loss):
                self.report(lambda n, life: ev.LossEvaluated(n, life, round_, loss))
            case state_machine.RunFinished():
                self.world.over(self)
            case _:
                assert_never(effect)

    # Training

    def _train(self, effect: state_machine.Train) -> None:
        order, carried, on = effect.order, effect.carried, effect.on
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

    def trainer_died(self, training: bool) -> None:
        """It may have died while it wrote the local vector."""
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

    def _report_when_written(self, work: state_machine.Work, since: float) -> None:
        if self.durable.busy(work.round - 1) and self.clock - since < PATIENCE:
            self.later(0.05, self._report_when_written, work, since)
        elif state_machine.still_ready(self.machine, work):
            self._report_ready(work)

    def _report_ready(self, work: state_machine.Work) -> None:
        lies_about = self.host.lies_about
        front = work.front + lies_about("front")
        samples = work.samples + 1000 * lies_about("samples")
        self.world.truth.contributed[self.session, work.round] = tuple(self.local)
        self.report(
            lambda n, life: ev.ContributionReady(
                n, life, work.round, front, samples, work.steps, work.loss, norm(n, samples), fresh=work.fresh
            )
        )

    # The outer state

    def restore(self) -> None:
        """Begin with what is on the disk."""
        if self.host.disk is not None and self.host.disk.snapshots and self.state[0] < 0:
            round_, state = self.host.disk.state()
            self.state, self.still, self.base = (round_, state), True, state
            self.world.restored(self, state)
            self.feed(state_machine.StateMoved(round_, state))

    def _fall_back(self) -> None:
        if self.host.disk is None or not self.host.disk.snapshots:
            self.feed(state_machine.MoveFailed(self.state[0]))
            return
        round_, state = self.host.disk.state()
        self.state, self.still, self.base = (round_, state), True, state
        self.world.restored(self, state)
        self.feed(state_machine.StateMoved(round_, state))

    def _initialised(self) -> None:
        self.drop_for_good()
        self.beyond.clear()
        self.durable.doubt()
        self._settle(0, self.world.initial_state(self), alone=True)

    def _renumber(self, round_: int) -> None:
        self.durable.renumbered(self.state[0])
        self._settle(round_, self.state[1], alone=True, computed=False)

    def _apply(self, round_: int, payloads: tuple[bytes, ...]) -> None:
        sealed = root(payloads)
        self.world.applies(self, round_, sealed)
        if self.world.left_out(self, round_):
            self.drop_for_good()
        self.beyond.apply(round_)
        self.durable.committed(round_, sealed)
        self._settle(round_, next_state(self.state[1], sealed))

    def _recover(self, order: state_machine.Recover, differs: bool, rebase: bool) -> None:
        self.still = False
        if differs:
            self.durable.doubt()
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

    def recovered(self, order: state_machine.Recover) -> None:
        self._settle(order.view.committed, order.view.state_digest)

    def not_recovered(self) -> None:
        if self.world.rng.random() < 0.3:
            self.state = -1, b""  # some chunks are of another round now
        self.feed(state_machine.MoveFailed(self.state[0]))

    def _settle(self, round_: int, state: bytes, alone: bool = False, computed: bool = True) -> None:
        if self.flip and computed:
            self.flip = False
            state = digest("flipped", state)
            self.world.truth.flipped.add(self.me)
        self.state, self.still, self.base = (round_, state), True, state
        self.world.settled(self, round_)
        self.durable.settled(round_, state, alone)
        self.feed(state_machine.StateMoved(round_, state))

    def state_of(self, round_: int) -> bytes:
        """What peers may fetch; empty if it does not have it."""
        return self.state[1] if self.still and self.state[0] == round_ else b""

    def passed_on(self, round_: int) -> bytes:
        """The same, where it has it from a leaf that dialled this node to offer it."""
        cut = self.world.network.cut
        offering = (n for n in self.world.living if self.me in n.serve and not n.stopped)
        here = (n.state_of(round_) for n in offering if not {(n.place, self.place), (self.place, n.place)} & cut)
        return self.state_of(round_) or next(filter(None, here), b"")


def told(event: object) -> str:
    """An event or an effect on one line."""
    match event:
        case state_machine.ViewArrived(view):
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
        case state_machine.Apply(view):
            return f"Apply({view.committed})"
        case state_machine.Recover(view, differs, rebase):
            donors = " ".join(d.node_id for d in view.donors)
            return f"Recover({view.committed}, {differs=}, {rebase=}, from {donors})"
        case state_machine.Train(order, carried, on, kept, rebased):
            return f"Train({order.round}, {carried=}, {on=}, {kept=}, {rebased=})"
        case state_machine.Prove(view):
            return f"Prove({view.plan.round}/{view.plan.attempt})"
        case state_machine.StartReduce(plan):
            return f"StartReduce({plan.round}/{plan.attempt})"
        case _:
            return str(event)
