"""Run a transcript of one round's observations, and what the verdict on it is.

round NUMBER [inner=6] [collect=0.1] [reduce=1] [commit=0.1] [predicted=1] [attempts=1]    what it took, in seconds
usual [inner=6] [collect=0.1] [reduce=1] [commit=0.1]       what rounds took before; not known unless told
restarted [TIMES] / stalled SECONDS                         the coordinator, in this round
member NAME... [WORD] [reached=6] [contributed=0.1] [sealed=] [complete=] [steps=10] [pace=2] [usual=2] [still=0]
                            a participant, as the coordinator saw it; reached=-: not; WORD: its standing at the end
                            (broke, silent, stalled, left, differed, out); missing: not in the commit; back
broken NAME PEER / forged NAME PEER / differed NAME         who said so of whom; whose state was not the run's
late NAME...                did not finish an attempt in its time
account NAME [steps=] [computing=] [data=] [still=] [paused=] [away=] [clock=]
             [sent=] [received=] [limit_up=] [limit_down=]      what it says of itself
incident NAME KIND [PEER] [age=1] [value=0]                                         and of what happened
link NAME PEER [sent=1e6] [received=1e6] [busy=0.1] [usual=] [segments=1000] [resent=0] [rtt=0.02] [queue=0]
               [mute=0] [deaf=0]                                                    and of its paths
paths NAME... [...]         all of these tell so of their paths to each other; `link` then changes one
verdict                     what the verdict is
slow                        whether the round is slow, beside the rounds that were told by `before`
before [inner=6] [collect=0.1] [reduce=1] [commit=0.1] [times=1]
"""

from atoll.comm.ids import NodeId
from atoll.comm.incidents import IncidentKind
from atoll.comm.replace import replace
from atoll.coordinator.causes.account import Incident, LinkAccount
from atoll.coordinator.causes.observations import MemberSeen, Observations, Standing
from atoll.coordinator.causes.slowness import RoundPace, is_slow, remember
from atoll.coordinator.causes.verdict import verdict

SECONDS = {"inner": 6.0, "collect": 0.1, "reduce": 1.0, "commit": 0.1}
MEMBER = MemberSeen("", reached=6.0, contributed=0.1, steps=10, pace=2.0, usual=2.0)
LINK = LinkAccount(NodeId(""), 10**6, 10**6, busy=0.1, segments=1000, rtt=0.02)


class Run:
    """Observations of one round, as they are told."""

    def __init__(self) -> None:
        self.seen = Observations(1, SECONDS)
        self.paces: tuple[RoundPace, ...] = ()
        self.said: list[str] = []

    def do(self, verb: str, args: list[str]) -> None:
        words = [a for a in args if "=" not in a]
        options = {k: None if v == "-" else float(v) for k, v in (a.split("=") for a in args if "=" in a)}
        numbers = {k: v for k, v in options.items() if v is not None}
        seen = self.seen
        match verb:
            case "round":
                attempts, predicted = int(numbers.pop("attempts", 1)), numbers.pop("predicted", 0.0)
                seconds = SECONDS | numbers
                self.seen = Observations(int(words[0]), seconds, predicted=predicted, attempts=attempts)
            case "usual":
                self.seen = replace(seen, usual=SECONDS | numbers)
            case "restarted":
                self.seen = replace(seen, restarts=int(words[0]) if words else 1)
            case "stalled":
                self.seen = replace(seen, stalled=float(words[0]))
            case "member":
                self.members(words, options)
            case "broken" | "forged":
                pair = self.node(words[0]), self.node(words[1])
                told = {verb: (*getattr(seen, verb), pair)}
                self.seen = replace(seen, **told)  # type: ignore[arg-type]
            case "differed":
                self.seen = replace(seen, differed=seen.differed.union(map(self.node, words)))
            case "late":
                self.seen = replace(seen, late=seen.late.union(map(self.node, words)))
            case "account":
                whole = ("steps", "sent", "received")
                self.account(words[0], **{k: int(v) if k in whole else v for k, v in numbers.items()})
            case "incident":
                kind, peer = IncidentKind[words[1].upper()], self.node(words[2]) if words[2:] else None
                happened = Incident(kind, numbers.get("age", 1.0), peer, numbers.get("value", 0.0))
                node = self.node(words[0])
                self.account(words[0], incidents=(*seen.account(node).incidents, happened))
            case "link":
                self.link(words[0], words[1], numbers)
            case "paths":
                for name in words:
                    for other in words:
                        if other != name:
                            self.link(name, other, numbers)
            case "before":
                times = int(numbers.pop("times", 1))
                for _ in range(times):
                    self.paces = remember(self.paces, RoundPace(**(SECONDS | numbers)))
            case "slow":
                slow = is_slow(RoundPace(**seen.seconds), seen.predicted, self.paces)
                self.said.append("slow" if slow else "as usual")
            case "verdict":
                self.said += shown(seen)
            case _:
                raise AssertionError(f"no such command: {verb}")

    def node(self, name: str) -> NodeId:
        return next(n for n, m in self.seen.members.items() if m.name == name)

    def members(self, words: list[str], options: dict[str, float | None]) -> None:
        standings = {word for word in words if word in {s.value.split()[-1] for s in Standing}}
        standing = next((s for s in Standing if s.value.split()[-1] in standings), Standing.HERE)
        counted = "missing" not in words and standing in (Standing.HERE, Standing.DIFFERED)
        for name in (w for w in words if w not in standings and w not in ("missing", "rests", "back")):
            known = {m.name: n for n, m in self.seen.members.items()}
            node = known.get(name) or NodeId(f"n{len(known) + 1}")
            told = {k: int(v) if k == "steps" and v is not None else v for k, v in options.items()}
            as_seen = {"rests": "rests" in words, "back": "back" in words, "counted": counted}
            member = replace(MEMBER, name=name, standing=standing, **as_seen)
            member = replace(member, **told)  # type: ignore[arg-type]
            self.seen = replace(self.seen, members=self.seen.members | {node: member})

    def account(self, name: str, **told: object) -> None:
        node = self.node(name)
        account = replace(self.seen.account(node), **told)  # type: ignore[arg-type]
        self.seen = replace(self.seen, accounts=self.seen.accounts | {node: account})

    def link(self, name: str, peer: str, numbers: dict[str, float]) -> None:
        node, other = self.node(name), self.node(peer)
        before = self.seen.account(node).link(other) or replace(LINK, peer=other)
        whole = ("sent", "received", "segments", "resent")
        told = {k: int(v) if k in whole else v for k, v in numbers.items()}
        links = tuple(link for link in self.seen.account(node).links if link.peer != other)
        self.account(name, links=(*links, replace(before, **told)))  # type: ignore[arg-type]


def shown(seen: Observations) -> list[str]:
    found = verdict(seen)
    if found is None:
        return ["nothing to explain"]
    who = found.name or "nobody alone"
    who += f" to {found.peer_name}" if found.peer else ""
    took = f"{found.seconds:.1f} of {found.slower:.1f} s" if found.slower else f"{found.seconds:.1f} s"
    return [
        f"=> {found.kind}: {who} ({found.confidence}, {took})",
        f"   {found.sentence}",
        *(f"   besides: {sentence}" for sentence in found.beside),
    ]
