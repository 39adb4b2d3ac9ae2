"""Run a transcript: commands, `----`, and what the coordinator's state machine said to them.

set SECTION.KEY VALUE       the run's config; CONFIG below unless told
begin NAME...               these nodes join and hold state 0: round 1 starts (only that is said)
reducing NAME...            and after 10 s each contributes its ten steps: attempt 1 starts (only that is said)
join NAME...                new nodes join, connect and tell their layout
knock NAME...               nodes join, new ones or in their next life, and do no more than that
leaf NAME... / reducer NAME...     of nodes that are yet to join: nobody can dial them / they only own chunks
back NAME                   a node joins again under its id, in its next life; then as `join`
return NAME ROUND [WORD]    as `back`, and first of all it says what state its disk has; ROUND -: none
layout NAME WORD [blind]    its trainer builds this model ("layout" is the run's); blind: and cannot evaluate it
blind NAME...               of nodes that are yet to join: their trainers cannot evaluate
state NAME... ROUND [WORD] [as=ROUND]     they hold that state; WORD: with other bytes than the others; as that one
reached NAME...             they have taken the round's inner steps, and go on
ready NAME... [steps=10] [samples=10] [front=0]    they stopped and can contribute (front: their lease's)
seal NAME... [chunk=0] [word=w] [attempt=1]        they sealed the chunks they own, or that one, or other bytes
                            (round=1, with this and what follows: they speak of another round's reduce)
orphans NAME... [here=0,2] [attempt=1]             of the chunks whose owner is gone they hold these
held NAME... [word=w] [attempt=1]                  they have every sealed chunk, or other bytes
regions NAME... / NAME...   these are near each other, those too; so they report from now on what they hold
reduce                      all members of the attempt seal and hold
commit                      all participants: 10 s, reached, ready, reduce, and they tell their new state
evaluated NAME LOSS [ROUND]
mended NAME CHUNKS [disk]
lost NAME PEER [attempt=1]  NAME's connection to PEER broke
forged NAME PEER [chunk=0] [attempt=1]             the sealed chunk as PEER gave it to NAME is not the ledger's
lacking NAME... [chunks=0,2] [attempt=1]           nobody gave them these sealed chunks as the ledger has them
account NAME [KIND] [data=0] [still=0] [away=0] [clock=0]       what it will answer when it is asked to account for
                            a round, with an incident of that kind; who is not told so has nothing to tell
mum NAME...                 they will not answer
trouble NAME [KIND]         it tells of such incidents when it has every sealed chunk
disconnect NAME... / connect NAME... / leave NAME...
flood NAME...               reports of theirs are refused, as they are too many
silent NAME... / talk NAME...      no heartbeats any more / again
hang NAME... / move NAME...        heartbeats, but no progress / again
phase NAME... WORD                 what its heartbeats say it is doing
pause NAME... [bytes] / resume NAME...     they say that they may take no steps, and take none; bytes: nor exchange
                                   anything / that they may again
earlier COMMAND             COMMAND as a message of the node's earlier life
wait SECONDS                time passes, in ticks of a quarter second; who is connected sends heartbeats
deaf SECONDS                time passes, but not for the coordinator: its process stands still, its disk is full
restart [SECONDS]           the coordinator is started again after a while, with nothing but its journal
members / leases / ledger / view NAME / reason     show what the machine holds

One step takes one sample, a sample is one token. Lines that begin with => are not notes of the machine but what
changed: commits, published records, and the round with its participants and reason, as the command left it.
"""

import struct
from collections.abc import Callable
from typing import Protocol

from atoll.comm.bitmap import bit, bitmap
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import InnerConfig, MembersConfig, ReduceConfig, RoundsConfig, RunConfig
from atoll.comm.digest import digest
from atoll.comm.ids import NodeId, Round
from atoll.comm.incidents import IncidentKind, mask
from atoll.comm.plan import Fence
from atoll.comm.replace import replace
from atoll.coordinator.causes.account import Account, Incident
from atoll.coordinator.service.view import view
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import inquiry, members
from atoll.coordinator.state_machine import leases as data
from atoll.coordinator.state_machine.leases import Lease, Leases
from atoll.coordinator.state_machine.ledger import Ledger, seal_terms
from atoll.coordinator.state_machine.members import Member
from atoll.coordinator.state_machine.state import State
from atoll.coordinator.state_machine.step import step

CONFIG = RunConfig(
    model=ModelConfig(seq_len=1),
    inner=InnerConfig(batch_size=1),
    rounds=RoundsConfig(inner_steps=10, quorum=0.5, grace=0.5, ceiling=2.0, collect=20.0, reduce_timeout=60.0),
    members=MembersConfig(start=2, minimum=2, lease=10.0, reconnect=2.0, stall=30.0),
    reduce=ReduceConfig(block=1, chunk=10),
)
NUMEL = 40  # four chunks
TICK = 0.25  # seconds


class Runner(Protocol):
    said: list[str]

    def do(self, verb: str, args: list[str]) -> None: ...


class Run:
    """The coordinator's machine, and just enough of the world around it to speak to it."""

    def __init__(self) -> None:
        self.config, self.state, self.now = CONFIG, State(CONFIG), 0.0
        self.journal: list[tuple[float, ev.Event]] = []
        self.quiet, self.hung, self.phases = set[NodeId](), set[NodeId](), dict[NodeId, str]()
        self.paused, self.saving = set[NodeId](), set[NodeId]()
        # names of those that nobody can dial, that have no trainer, and whose trainers cannot evaluate
        self.leaves, self.reducers, self.blind = set[str](), set[str](), set[str]()
        self.lives_ago = 0
        self.accounts, self.mum = dict[NodeId, Account](), set[NodeId]()
        self.troubles: dict[NodeId, int] = {}
        self.near: dict[NodeId, int] = {}  # regions
        self.said: list[str] = []
        self.passing = ""  # what was said of the round at this command and moment
        self.clock: float | None = None  # seconds; when the wait began whose notes are dated
        self.feed(ev.Started(1))

    def feed(self, event: ev.Event) -> None:
        before = self.state
        self.state, effects = step(before, event, self.now)
        if not isinstance(event, ev.Heartbeat) and (effects or self.state != before):
            self.journal.append((self.now, event))
        for effect in effects:
            self.say(told(effect, self.name))
        pending = self.state.pending
        if self.state.committed != before.committed and pending is not None:
            parts = (f"{self.name(n)} {weight:g}" for n, weight in pending.contributors.items())
            self.say(f"=> round {pending.round} committed: {', '.join(parts)} samples; {pending.reason}")
        if (line := self.round()) != self.round(before):
            if self.passing and self.said[-1:] == [self.passing]:
                self.said.pop()  # the round went on from there at once
            self.say(f"=> {line}")
            self.passing = self.said[-1]
        self.answer()

    def answer(self) -> None:
        """Whoever is asked for an account of a round gives one at once."""
        inquiry = self.state.inquiry
        for node in sorted(inquiry.asked - inquiry.accounts.keys()) if inquiry is not None else ():
            member = self.state.members.here.get(node)
            if inquiry is None or inquiry.closed or member is None or not member.connected or node in self.mum:
                continue
            account = self.accounts.get(node, Account())
            return self.feed(ev.RoundAccounted(node, member.life, inquiry.seen.round, account))

    def say(self, line: str) -> None:
        self.said.append(line if self.clock is None else f"[{self.now - self.clock:g} s] {line}")

    def round(self, state: State | None = None) -> str:
        r = (state or self.state).round
        names = "".join(f" {self.name(n)}" for n in r.participants)
        return f"round {r.number} {r.phase}{names}: {r.reason}"

    def member(self, node: NodeId) -> Member:
        members = self.state.members
        return members.here.get(node) or members.departed[node]

    def name(self, node: NodeId) -> str:
        return self.state.name(node)

    @property
    def known(self) -> tuple[Member, ...]:
        return (*self.state.members.here.values(), *self.state.members.departed.values())

    def node(self, name: str) -> NodeId:
        return next(m.node for m in self.known if m.name == name)

    def who(self, name: str) -> tuple[NodeId, int]:
        """The node, and the life that it speaks for."""
        node = self.node(name)
        return node, self.member(node).life - self.lives_ago

    def fence(self, options: dict[str, str]) -> Fence:
        assert self.state.round.plan is not None, "no attempt is in force"
        fence = self.state.round.plan.fence
        attempt, round_ = int(options.get("attempt", fence.attempt)), int(options.get("round", fence.round))
        return fence._replace(attempt=attempt, round=Round(round_))

    def do(self, verb: str, args: list[str]) -> None:
        self.passing = ""
        words = [a for a in args if "=" not in a]
        options = dict(a.split("=") for a in args if "=" in a)
        if verb in ("wait", "restart"):
            self.clock = self.now
        match verb:
            case "set":
                self.set(*words)
            case "begin":
                self.set("members.start", str(len(words)))
                for name in words:
                    self.join(name, NodeId(f"n{self.state.members.next_id}"), 1)
                self.do("state", [*words, "0"])
                self.said = self.said[-1:]
            case "reducing":
                self.do("begin", words)
                self.steps()
                self.said = self.said[-1:]
            case "commit":
                participants = self.steps()
                self.do("reduce", [])
                self.do("state", [*participants, str(self.state.committed)])
            case "join":
                for name in words:
                    self.join(name, NodeId(f"n{self.state.members.next_id}"), 1)
            case "leaf" | "reducer" | "blind":
                {"leaf": self.leaves, "reducer": self.reducers, "blind": self.blind}[verb].update(words)
            case "knock":
                for name in words:
                    known = [m for m in self.known if m.name == name]
                    node = known[0].node if known else NodeId(f"n{self.state.members.next_id}")
                    life = known[0].life + 1 if known else 1
                    self.feed(ev.Joined(node, life, name, f"{name}:1", f"session of {name}"))
            case "back":
                self.join(words[0], self.node(words[0]), self.member(self.node(words[0])).life + 1)
            case "return":
                node = self.node(words[0])
                self.join(words[0], node, self.member(node).life + 1, [w for w in words[1:] if w != "-"])
            case "earlier":
                self.lives_ago = 1
                self.do(words[0], args[1:])
                self.lives_ago = 0
            case "restart":
                self.restart(float(words[0]) if words else 0.0)
            case "deaf":
                self.now += float(words[0])
                self.feed(ev.HeardNobody(float(words[0])))
            case "wait":
                self.wait(float(words[0]))
            case "reduce" if self.state.round.plan is None:
                self.say("no attempt is in force")
            case "reduce":
                names = [self.name(n) for n in self.state.round.ledger.members]
                for name in names:
                    if any(owner == self.node(name) for owner in self.state.round.ledger.owners):
                        self.do("seal", [name])
                self.do("held", names)
            case "members" | "leases" | "ledger" | "view" | "reason":
                self.said += self.show(verb, words)
            case "regions":
                groups = " ".join(words).split(" / ")
                self.near = {self.node(name): g for g, group in enumerate(groups) for name in group.split()}
            case "silent" | "hang":
                (self.quiet if verb == "silent" else self.hung).update(map(self.node, words))
            case "talk" | "move":
                (self.quiet if verb == "talk" else self.hung).difference_update(map(self.node, words))
            case "account":
                told = {k: float(v) for k, v in options.items()}
                incidents = tuple(Incident(IncidentKind[w.upper()], 1.0) for w in words[1:])
                self.accounts[self.node(words[0])] = Account(**told, incidents=incidents)  # type: ignore[arg-type]
            case "trouble":
                self.troubles[self.node(words[0])] = mask(IncidentKind[word.upper()] for word in words[1:])
            case "mum":
                self.mum.update(map(self.node, words))
            case "pause":
                nodes = {self.node(word) for word in words if word != "bytes"}
                self.paused |= nodes
                self.saving = self.saving | nodes if "bytes" in words else self.saving - nodes
            case "resume":
                self.paused.difference_update(map(self.node, words))
                self.saving &= self.paused
            case "phase":
                self.phases.update(dict.fromkeys(map(self.node, words[:-1]), words[-1]))
            case "seal" if "attempt" not in options and "since" not in options and self.state.round.plan:
                for name in words:
                    ledger, node = self.state.round.ledger, self.node(name)
                    if "chunk" in options:
                        self.seal(name, options)
                        continue
                    for since in sorted({ledger.since[c] for c, o in enumerate(ledger.owners) if o == node}):
                        self.seal(name, {"since": str(since)} | options)
            case "layout" | "evaluated" | "lost" | "forged" | "mended":
                self.feed(self.event(verb, words[0], words[1:], options))
            case "state":
                names = words[: next(i for i, word in enumerate(words) if word.isdigit())]
                for name in names:
                    self.feed(self.event(verb, name, words[len(names) :], options))
            case _:
                for name in words:
                    self.feed(self.event(verb, name, [], options))
        self.clock = None

    def seal(self, name: str, options: dict[str, str]) -> None:
        """An owner seals, and before it relays tell what they summed for it."""
        said = self.event("seal", name, [], options)
        assert isinstance(said, ev.ChunksSealed)
        for relay, sums in sums_of(self.state.round.ledger, said.seals).items():
            if relay in self.state.members.here:
                life = self.state.members.here[relay].life
                self.feed(ev.ChunksSealed(relay, life, said.fence, (), sums=sums))
        self.feed(said)

    def event(self, verb: str, name: str, rest: list[str], options: dict[str, str]) -> ev.Event:
        """What a node says."""
        (node, life), r = self.who(name), self.state.round
        of_reduce = verb in ("seal", "orphans", "held", "lost", "forged", "lacking")
        fence = self.fence(options) if of_reduce else None
        match verb:
            case "layout":
                return ev.LayoutReported(
                    node, life, NUMEL, digest(rest[0].encode()), evaluates=rest[1:] != ["blind"]
                )
            case "state":
                known = [options["as"]] if "as" in options else rest
                return ev.StateReported(node, life, int(rest[0]), digest(" ".join(known).encode()))
            case "reached":
                return ev.StepsReached(node, life, int(options.get("round", r.number)))
            case "ready":
                lease = self.state.leases.by_node.get(node, ())
                front = int(options.get("front", data.front(lease) if lease else 0))
                steps = int(options.get("steps", 10))
                samples = int(options.get("samples", steps))
                round_ = int(options.get("round", r.number))
                return ev.ContributionReady(node, life, round_, ev.Contribution(samples, steps, 2.0, 1.0, front))
            case "seal":
                assert fence is not None
                word = options.get("word", "sealed")
                owned = [c for c, owner in enumerate(r.ledger.owners) if owner == node]
                chunks = [int(options["chunk"])] if "chunk" in options else owned
                if "since" in options:
                    fence = fence._replace(attempt=int(options["since"]))
                    chunks = [c for c in chunks if r.ledger.since[c] == fence.attempt]
                seals = tuple((c, digest(f"{word} {c}".encode()), self.alive()) for c in chunks)
                return ev.ChunksSealed(node, life, fence, seals, norms_of(r.ledger, seals))
            case "orphans":
                assert fence is not None
                told = (int(c) for c in options.get("here", "").split(",") if c)
                return ev.OrphansFound(node, life, fence, tuple((c, r.ledger.sealed[c].digest) for c in told))
            case "held":
                assert fence is not None
                root = r.ledger.root if r.ledger.complete else b""
                root = digest(options["word"].encode()) if "word" in options else root
                measured, proven = self.measured(node), "proven" in options
                seen = tuple((n, 100.0, 100.0) for n in self.near if n != node)
                incidents = self.troubles.get(node, 0)
                told_ = root, 1000, 1000, 0.0, 0.0, *measured, proven, seen, incidents
                return ev.ReduceComplete(node, life, fence, *told_)
            case "lost":
                assert fence is not None
                return ev.PeerUnreachable(node, life, self.node(rest[0]), fence, "connection reset")
            case "forged":
                assert fence is not None
                return ev.ChunkForged(node, life, self.node(rest[0]), fence, int(options.get("chunk", 0)))
            case "lacking":
                assert fence is not None
                return ev.ChunksMissing(node, life, fence, tuple(int(c) for c in options["chunks"].split(",")))
            case "mended":
                return ev.StateRepaired(node, life, self.state.committed, int(rest[0]), True, rest[1:] == ["disk"])
            case "evaluated":
                return ev.LossEvaluated(
                    node, life, int(rest[1]) if rest[1:] else self.state.committed, float(rest[0])
                )
            case "disconnect":
                return ev.Disconnected(node, life)
            case "connect":
                return ev.Connected(node, life)
            case "flood":
                return ev.ReportsRefused(node, life)
            case "leave":
                return ev.Leaving(node, life, "its operator stopped it")
            case _:
                raise ValueError(f"no such command: {verb}")

    def measured(self, node: NodeId) -> tuple[tuple[tuple[NodeId, float], ...], float, float]:
        """Round trips, and what a node sends within its region and to others once it knows them."""
        mine = self.near.get(node)
        trips = ((n, 0.004 if g == mine else 0.1) for n, g in self.near.items() if n != node)
        return tuple(trips), *((100.0, 10.0) if self.state.round.ledger.regions else (0.0, 0.0))

    def alive(self) -> bytes:
        """The places in the plan of those who still take part."""
        entries = self.state.round.ledger.entries
        return bitmap((i for i, e in enumerate(entries) if e.contribution and not e.gone), len(entries))

    def set(self, key: str, value: str) -> None:
        section, name = key.split(".")
        part = getattr(self.config, section)
        part = replace(part, **{name: type(getattr(part, name))(value)})
        self.config = replace(self.config, **{section: part})
        self.state = replace(self.state, config=self.config)

    def steps(self) -> list[str]:
        """All participants take their ten steps in 10 s and contribute them."""
        names = [self.name(n) for n in self.state.round.participants]
        for verb, args in (("wait", ["10"]), ("reached", names), ("ready", names)):
            self.do(verb, args)
        return names

    def join(self, name: str, node: NodeId, life: int, disk: list[str] | None = None) -> None:
        self.quiet.discard(node)
        self.hung.discard(node)
        session = f"session of {name}"
        role = members.REDUCER if name in self.reducers else ""
        self.feed(ev.Joined(node, life, name, f"{name}:1", session, leaf=name in self.leaves, role=role))
        self.feed(ev.Connected(node, life))
        if role:
            return
        if disk:
            self.feed(self.event("state", name, disk, {}))
        self.feed(ev.LayoutReported(node, life, NUMEL, digest(b"layout"), evaluates=name not in self.blind))

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK)):
            self.now, self.passing = self.now + TICK, ""
            for node, m in self.state.members.here.items():
                if m.connected and node not in self.quiet:
                    number = self.state.round.number
                    beat = m.step if node in self.hung | self.paused else (number, m.step[1] + 1)
                    phase = self.phases.get(node, m.phase)
                    says = node in self.paused, node in self.saving
                    self.feed(ev.Heartbeat(node, m.life, phase, *beat, *says))
            limits, awaited = self.state.config.members, self.state.awaited_members
            verdicts = members.judge(self.state.members, limits, awaited, self.now)
            for verdict in (*inquiry.judge(self.state, self.now), *verdicts):
                self.feed(verdict)
            self.feed(ev.Tick())

    def restart(self, away: float) -> None:
        replayed = State(self.config)
        for at, event in self.journal:
            replayed, _ = step(replayed, event, at)
        self.state, self.now = replayed, self.now + away
        self.feed(ev.Started(self.state.incarnation + 1))

    def show(self, what: str, words: list[str]) -> list[str]:
        state, r = self.state, self.state.round
        match what:
            case "members":
                return [shown_member(m) for m in (*state.members.here.values(), *state.members.departed.values())]
            case "leases":
                return [shown_leases(state.leases, self.name)]
            case "ledger":
                owners = (self.shown_owner(r.ledger, c, o) for c, o in enumerate(r.ledger.owners))
                seals = ", ".join(f"{o}{' sealed' if c in r.ledger.sealed else ''}" for c, o in enumerate(owners))
                entered = ", ".join(f"{self.name(n)} {c.samples}" for n, c in r.ledger.contributions.items())
                return [f"contributions: {entered or '-'}; attempt {r.ledger.attempt}, chunks: {seals or '-'}"]
            case "view":
                v = view(state, self.node(words[0]))
                flags = [
                    *(["train"] if v.train.lease else []),
                    *(f for f in ("initialise", "evaluate", "reached", "ready", "closing") if getattr(v, f)),
                    *([f"plan of attempt {v.plan.attempt}"] if v.HasField("plan") else []),
                    *(["the ledger's digests"] if v.ledger else []),
                    *(["finished"] if v.finished else []),
                    *([f"account of round {v.account}"] if v.account else []),
                ]
                return [f"{words[0]} is told: {v.you}; {', '.join(flags) or 'nothing to do'}"]
            case _:
                return [self.round()]

    def shown_owner(self, ledger: Ledger, c: int, owner: NodeId | None) -> str:
        rows = ledger.relays if c in ledger.layered else ()
        relays = ", ".join(
            self.name(ledger.entries[row[c]].node) for row in rows if ledger.entries[row[c]].node != owner
        )
        return f"{c} {self.name(owner) if owner else 'nobody'}{' <- ' if rows else ''}{relays}"


class Desk:
    """The data leases alone: grant NAME COUNT, consume NAME COUNT, release NAME."""

    def __init__(self) -> None:
        self.leases = Leases()
        self.said: list[str] = []

    def do(self, verb: str, args: list[str]) -> None:
        node, count = NodeId(args[0]), int((args[1:] or ["0"])[0])
        try:
            match verb:
                case "grant":
                    self.leases = data.grant(self.leases, node, count)
                case "consume":
                    self.leases = data.consume(self.leases, node, count)
                case "release":
                    self.leases = data.release(self.leases, node)
                case _:
                    raise AssertionError(f"no such command: {verb}")
        except ValueError as error:
            self.said.append(f"refused: {error}")
        self.said.append(f"{verb} {' '.join(args)}: {shown_leases(self.leases, str)}")


def norms_of(ledger: Ledger, seals: tuple[tuple[int, bytes, bytes], ...], norm: float = 0.0) -> tuple[bytes, ...]:
    """The norms that owners tell with these seals: that of each term."""
    terms = (seal_terms(ledger, c, inputs) for c, _, inputs in seals)
    return tuple(struct.pack(f"<{len(a) + len(b)}f", *[norm] * (len(a) + len(b))) for a, b in terms)


def sums_of(
    ledger: Ledger, seals: tuple[tuple[int, bytes, bytes], ...], norm: float = 0.0
) -> dict[NodeId, tuple[tuple[int, bytes, bytes], ...]]:
    """What the relays tell whose regions' means are in these seals: (chunk, inputs, norms)."""
    found = dict[NodeId, tuple[tuple[int, bytes, bytes], ...]]()
    for c, _, inputs in seals:
        direct, relays = seal_terms(ledger, c, inputs)
        for place in relays:
            region = [i for i in range(len(ledger.regions)) if ledger.regions[i] == ledger.regions[place]]
            inside = [i for i in region if i not in direct and bit(inputs, i) and ledger.entries[i].contribution]
            sum_ = (c, bitmap(inside, len(ledger.regions)), struct.pack(f"<{len(inside)}f", *[norm] * len(inside)))
            node = ledger.entries[place].node
            found[node] = (*found.get(node, ()), sum_)
    return found


def shown_leases(leases: Leases, name: Callable[[NodeId], str]) -> str:
    held = "".join(f"{name(n)} {ranges(lease)}; " for n, lease in sorted(leases.by_node.items()))
    return f"{held}free {ranges(leases.free)}; never leased {leases.next}.."


def ranges(lease: Lease) -> str:
    return " ".join(f"{first}..{first + count - 1}" for first, count in lease) or "-"


def shown_member(m: Member) -> str:
    before = "" if m.suspected is None else f" (before: {m.state})"
    return f"{m.name} {m.shown_state}{before}{f': {m.shown_reason}' if m.shown_reason else ''}"


def told(effect: ev.Effect, name: Callable[[NodeId], str]) -> str:
    match effect:
        case ev.Note(sentence):
            return sentence
        case ev.Publish(record):
            return published(record, name)
        case ev.Decision(number, node, evidence=evidence, consequence=consequence, weight=weight):
            return f"=> decision {number}: {name(node)}, {evidence.offence}: {consequence}, weight {weight:g}"


def published(record: ev.CommitRecord, name: Callable[[NodeId], str]) -> str:
    loss = "no validation loss" if record.val_loss is None else f"validation loss {record.val_loss:g}"
    differs = [name(n) for n, d in record.digests.items() if d != record.state_digest]
    same = "the same state everywhere" if record.digests_equal else f"another state on {', '.join(differs)}"
    same = "nobody told its state" if record.digests_equal is None else same
    attempts = f"{record.attempts} attempt{'s' if record.attempts > 1 else ''}"
    blame = f", {record.verdict.kind} {record.verdict.name}".rstrip() if record.verdict is not None else ""
    return f"=> record of round {record.round}: {record.tokens} tokens so far, {attempts}, {loss}, {same}{blame}"


def play(text: str, runner: Runner) -> str:
    """`text` with every expected block replaced by what the machine really says."""
    out = []
    for block in text.strip().split("\n\n"):
        head = block.split("\n----")[0]
        if commands := [line for line in head.splitlines() if not line.startswith("#")]:
            runner.said = []
            for line in commands:
                verb, *args = line.split()
                runner.do(verb, args)
            head = "\n".join([head, "----", *(runner.said or ["ok"])])
        out.append(head)
    return "\n\n".join(out) + "\n"
