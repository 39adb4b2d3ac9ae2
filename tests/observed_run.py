"""Run a transcript with the coordinator's telemetry beside its machine: `scenario`'s commands, and these.

train NAME...         their heartbeats say that they take inner steps (`phase NAME... inner`)
rest NAME...          ... that they wait
save                  the telemetry is saved, as the coordinator does now and then: `restart` goes on from there
away NAME... [steps=9] k=1...   what their next heartbeats say of the time in which nobody answered: seconds in
                      each phase, and so many steps more
time                  seconds of each node in each bucket
cut                   what the last commit's record says of each node's time
failures              what the last commit's record says of failures
goodput               the fleet's goodput, and what others call utilisation
"""

from scenario import Run

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.service.failures import sentences
from atoll.coordinator.service.goodput import BUCKETS, compute_utilisation, fleet_goodput
from atoll.coordinator.service.telemetry import Telemetry, Vitals
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.changes import with_member
from atoll.coordinator.state_machine.state import State
from atoll.coordinator.state_machine.step import step

VERBS = {"train": "inner", "rest": "waiting"}


class ObservedRun(Run):
    """The machine, and what the service sees of its members."""

    def __init__(self) -> None:
        self.telemetry, self.saved = Telemetry(), ""
        self.away = dict[NodeId, dict[str, float]]()
        super().__init__()

    def feed(self, event: ev.Event) -> None:
        before = self.state
        if isinstance(event, ev.Heartbeat):
            self.telemetry.record_heartbeat(event, Vitals(), self.away.pop(event.node, {}), self.now)
        super().feed(event)
        if not isinstance(event, ev.Heartbeat):
            self._observe(before, event, self.now)

    def _observe(self, before: State, event: ev.Event, now: float) -> None:
        after, effects = step(before, event, now)
        records = [effect.record for effect in effects if isinstance(effect, ev.Publish)]
        self.telemetry.record_batch(before, after, [event], records, now)

    def restart(self, away: float) -> None:
        self.telemetry = Telemetry.load(self.saved)
        replayed, until = State(self.config), self.telemetry.until
        for at, event in self.journal:
            before = replayed
            replayed, _ = step(before, event, at)
            if at > until:
                self._observe(before, event, at)
        steps = {n: m.step for n, m in self.state.members.here.items()}
        super().restart(away)
        here = self.state.members.here  # nodes know how far they are
        known = {n: replace(m, step=steps.get(n, m.step)) for n, m in here.items()}
        self.state = replace(self.state, members=replace(self.state.members, here=known))

    def do(self, verb: str, args: list[str]) -> None:
        match verb:
            case "train" | "rest":
                super().do("phase", [*args, VERBS[verb]])
            case "save":
                self.saved = self.telemetry.dump()
            case "away":
                told = {k: float(v) for k, v in (a.split("=") for a in args if "=" in a)}
                steps = int(told.pop("steps", 0))
                for member in [self.member(self.node(name)) for name in args if "=" not in name]:
                    self.away[member.node] = told
                    ahead = member.step[0], member.step[1] + steps
                    self.state = with_member(self.state, replace(member, step=ahead))
            case "time" | "cut" | "failures" | "goodput":
                self.said += self.observed(verb)
            case _:
                super().do(verb, args)

    def observed(self, what: str) -> list[str]:
        meter, cuts = self.telemetry.meter, self.telemetry.cuts
        if what in ("cut", "failures") and not cuts:
            return ["no round is committed"]
        match what:
            case "time":
                return [f"{self.name(n)}: {shown(meter.of_node(n, self.now))}" for n in meter.accounts]
            case "cut":
                return [f"{self.name(n)}: {shown(of)}" for n, of in cuts[max(cuts)].spent.items()] or ["nothing"]
            case "failures":
                failures = [replace(f, at=0.0) for f in cuts[max(cuts)].failures]
                names = {f.node: self.name(f.node) for f in failures}
                worth = {f.number: said for f, said in sentences(tuple(failures), names, max(cuts))}
                return [
                    f"{f.number}: {worth.get(f.number, f'{names[f.node]}, not worth a word')}" for f in failures
                ]
            case _:
                seconds = meter.seconds(self.now)
                return [f"goodput {fleet_goodput(seconds):.1%}, utilisation {compute_utilisation(seconds):.1%}"]


def shown(spent: dict[str, float]) -> str:
    buckets = (f"{bucket} {spent[bucket]:.4g}" for bucket in BUCKETS if round(spent.get(bucket, 0.0), 2))
    return ", ".join(buckets) or "nothing"
