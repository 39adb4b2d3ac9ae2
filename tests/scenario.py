"""Run a scenario file: commands, `----`, and what the coordinator's machine said.

start N                      members the first round waits for (2 unless told)
join NAME...        the nodes join, connect and tell their layout
state NAME ROUND [DIGEST]    the node holds that state (digest: one word; "s" unless told)
ready NAME [TOKENS]          its inner steps of the round are done (100 tokens unless told)
seal NAME / held NAME [WORD]   it sealed the chunks it owns / it has every sealed chunk (WORD: other bytes)
evaluated NAME LOSS
lost NAME PEER               its connection to PEER broke
disconnect NAME / connect NAME / leave NAME / silent NAME
wait SECONDS                 time passes, in ticks of a quarter second
"""

import hashlib
from dataclasses import replace

from atoll.comm.config import MembersConfig, ReduceConfig, RoundsConfig, RunConfig
from atoll.comm.ids import NodeId
from atoll.coordinator import events as ev
from atoll.coordinator import membership
from atoll.coordinator.kernel import sentence
from atoll.coordinator.machine import Phase, State, step

CONFIG = RunConfig(
    rounds=RoundsConfig(inner_steps=10, quorum=0.5, grace=1.0),
    members=MembersConfig(start=2, minimum=2, lease=10.0, reconnect=2.0),
    reduce=ReduceConfig(block=1, chunk=10),
)
NUMEL = 40  # four chunks


def digest(word: str) -> bytes:
    return hashlib.blake2b(word.encode(), digest_size=16).digest()


class Scenario:
    def __init__(self, config: RunConfig = CONFIG) -> None:
        self.state, self.now = State(config), 0.0
        self.quiet: set[NodeId] = set()  # nodes that send no heartbeats
        self.said: list[str] = []
        self.feed(ev.Started(1))

    def feed(self, event: ev.Event) -> None:
        before = self.state
        self.state, effects = step(self.state, event, self.now)
        for effect in effects:
            self.said.append(effect.sentence if isinstance(effect, ev.Note) else sentence(effect.record))
        r, b = self.state.round, before.round
        if (r.number, r.phase, r.participants) != (b.number, b.phase, b.participants):
            names = " ".join(self.name(n) for n in r.participants)
            self.said.append(f"=> round {r.number} {r.phase}: {names or r.reason}")

    def name(self, node: NodeId) -> str:
        members = self.state.members
        return (members.here.get(node) or members.gone[node]).name

    def node(self, name: str) -> NodeId:
        members = (*self.state.members.here.values(), *self.state.members.gone.values())
        return next(m.node for m in members if m.name == name)

    def join(self, name: str) -> None:
        node = NodeId(f"n{self.state.members.next_id}")
        self.feed(ev.Joined(node, name, f"{name}:1", f"session of {name}"))
        self.feed(ev.Connected(node))
        self.feed(ev.LayoutKnown(node, NUMEL, digest("layout")))

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.25
            for node in self.state.members.here:
                if node not in self.quiet:
                    at_work = self.state.round.phase is Phase.INNER
                    step_ = int(self.now * 4) if at_work else 0
                    self.feed(ev.Heard(node, "inner" if at_work else "starting", 0, step_))
            state = self.state
            for node, reason in membership.overdue(state.members, state.config.members, state.awaited, self.now):
                self.feed(ev.Expired(node, reason))
            self.feed(ev.Tick())

    def seal(self, node: NodeId) -> None:
        plan = self.state.round.plan
        assert plan is not None
        owned = [c for c, owner in enumerate(plan.ledger.owners) if owner == node]
        seals = tuple((c, digest(f"round {self.state.round.number} chunk {c}")) for c in owned)
        self.feed(ev.Sealed(node, self.state.round.number, plan.attempt, seals))

    def held(self, node: NodeId, word: str) -> None:
        plan = self.state.round.plan
        assert plan is not None
        root = digest(word) if word else plan.ledger.root
        self.feed(ev.Held(node, self.state.round.number, plan.attempt, root, 1000, 1000))

    def do(self, verb: str, args: list[str]) -> None:
        r = self.state.round
        if verb == "join":
            for name in args:
                self.join(name)
            return
        if verb == "start":
            members = replace(CONFIG.members, start=int(args[0]))
            self.state = replace(self.state, config=replace(self.state.config, members=members))
            return
        if verb == "wait":
            return self.wait(float(args[0]))
        node = self.node(args[0])
        match verb:
            case "state":
                word = args[2] if len(args) > 2 else "s"
                self.feed(ev.StateAt(node, int(args[1]), digest(f"{word} {args[1]}")))
            case "ready":
                tokens = int(args[1]) if len(args) > 1 else 100
                first = self.state.leases.held[node][0]
                self.feed(ev.BecameReady(node, r.number, 10, tokens, 1, 2.0, 1.0, first))
            case "seal":
                self.seal(node)
            case "held":
                self.held(node, args[1] if len(args) > 1 else "")
            case "evaluated":
                self.feed(ev.Evaluated(node, self.state.committed, float(args[1])))
            case "lost":
                attempt = r.plan.attempt if r.plan is not None else 0
                self.feed(ev.PeerLost(node, self.node(args[1]), r.number, attempt, "connection reset"))
            case "disconnect":
                self.feed(ev.Disconnected(node))
            case "connect":
                self.feed(ev.Connected(node))
            case "leave":
                self.feed(ev.Leaving(node, "its operator stopped it"))
            case "silent":
                self.quiet.add(node)
            case _:
                raise ValueError(f"no such command: {verb}")


def play(text: str) -> str:
    """`text` with every expected block replaced by what the machine really says."""
    scenario, out = Scenario(replace(CONFIG)), []
    for block in text.strip().split("\n\n"):
        head = block.split("\n----")[0]
        scenario.said = []
        for line in head.splitlines():
            if not line.startswith("#"):
                verb, *args = line.split()
                scenario.do(verb, args)
        out.append("\n".join([head, "----", *(scenario.said or ["ok"])]))
    return "\n\n".join(out) + "\n"
