"""Validation of what nodes send, where it enters: lengths, ranges, and nothing but finite numbers. Pure.

`rpc` calls it before anything reaches the state machine, which trusts what comes from here. The text of a
`ValueError` is the sentence that the node gets as its answer.
"""

import re
import struct
from dataclasses import dataclass
from math import inf
from urllib.parse import unquote

from atoll.comm.bitmap import places
from atoll.comm.ids import NO_PIN, Epoch, Incarnation, NodeId, Pin, PublicKey, Round, is_pin
from atoll.comm.incidents import kind_of
from atoll.comm.invite import join_host_port, split_host_port
from atoll.comm.pause_reasons import words_of
from atoll.comm.peer_names import is_peer_host, peer_of_host
from atoll.comm.plan import Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.proto.join_proof import is_proven
from atoll.comm.receipts import MAX_FINDING_BYTES
from atoll.comm.signatures import is_public_key
from atoll.coordinator.causes.account import Account, Incident, LinkAccount
from atoll.coordinator.service.goodput import PHASES
from atoll.coordinator.service.telemetry import Vitals
from atoll.coordinator.state_machine import events as ev

DIGEST_BYTES = 16
MAX_LOSS = 1e6  # nats a token; sums of it stay finite
MIN_NORM, MAX_NORM = 2.0**-149, 1e30  # l2, of a delta or a gradient; fp32 has nothing shorter but 0
DOT_LENIENCY = 1 + 2.0**-20  # times a norm that a scalar product by a direction may be, for rounding
MAX_TIMES = 1e100  # that a sealed chunk is as long as the longest delta
MAX_TOKENS_PER_S = 1e12  # of a node
MAX_LEARNING_RATE = 1e6
MAX_BYTES = 1 << 50  # memory of a node
MIN_RATE, MAX_RATE = 1.0, 1e15  # bytes a second; what is less says nothing of a link
MAX_ROUND_TRIP = 3600.0  # seconds
MAX_SECONDS = 1e9  # that a node spends in a phase
MAX_ROUND_TRIPS = 256  # members to whom one tells its round trips
MAX_SEEN_RATES = 64  # members of which one tells what it saw
MAX_MEMBER_BITMAP = 2048  # bytes
MAX_CHUNK_BITMAP = 1 << 14  # bytes
MAX_PLACES = 8 * MAX_MEMBER_BITMAP  # of a plan
MAX_LIKENESSES = 16  # of one replay
MAX_PASSAGE = 2000  # characters that a model wrote
MAX_INCIDENTS, MAX_LINKS = 16, 16  # of one account of a round
MAX_ACCOUNT_SECONDS = 1e6
MAX_CLOCK_SECONDS = 1e10  # by which a clock may be off: one that begins in 1970
MAX_INCIDENT_VALUE = 1e12
MAX_PARAMETERS = 1 << 42
MAX_FRAGMENTS = 4096
MAX_SAMPLES = 1 << 53
MAX_TEXT = 255  # characters of an address, a reason, a session
MAX_NAME = 64  # characters of a node's name
MAX_VERSION = 20  # characters
MAX_PHASE = 20  # characters of what a node says it is doing
_NODE = re.compile("n[0-9]{1,18}")
WILDCARD_HOSTS = ("", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Report:
    """The part that reports of all kinds have: whose report it is, and which round and attempt it is about. Its
    methods turn each kind into the state machine's event, and raise `ValueError` for what cannot be."""

    node: NodeId
    life: int  # of the node: the join that its session comes from
    fence: Fence

    def layout_reported(self, m: pb.LayoutReported) -> ev.LayoutReported:
        numel = int(_within("numel", m.numel, 1, MAX_PARAMETERS))
        fragments = tuple(m.fragments)
        if fragments and (len(fragments) > MAX_FRAGMENTS or min(fragments) < 1 or sum(fragments) != numel):
            raise ValueError(f"its {len(fragments)} fragments are not the {numel} parameters of its model")
        evaluates = not m.no_evaluation
        return ev.LayoutReported(self.node, self.life, numel, _digest(m.digest), fragments, evaluates)

    def state_reported(self, m: pb.StateReported) -> ev.StateReported:
        digest = b"" if m.unable and not m.round else _digest(m.digest)
        return ev.StateReported(self.node, self.life, m.round, digest)

    def state_repaired(self, m: pb.StateRepaired) -> ev.StateRepaired:
        return ev.StateRepaired(self.node, self.life, m.round, m.chunks, m.whole, m.disk)

    def steps_reached(self) -> ev.StepsReached:
        return ev.StepsReached(self.node, self.life, self.fence.round)

    def contribution_ready(self, m: pb.ContributionReady) -> ev.ContributionReady:
        """The event of a contribution that can be fetched. Raises `ValueError` where samples, loss, norm or
        damping are out of range, or all samples were skipped: that is no contribution."""
        samples = int(_within("samples", m.samples, 1, MAX_SAMPLES))
        contribution = ev.Contribution(
            samples,
            m.steps,
            _loss(m.loss),
            _norm(m.delta_norm),
            m.front,
            _within("damping", m.damping, 0, 1) or 1.0,
            m.fresh,
            int(_within("skipped", m.skipped, 0, samples - 1)),
        )
        return ev.ContributionReady(self.node, self.life, self.fence.round, contribution)

    def chunks_sealed(self, m: pb.ChunksSealed) -> ev.ChunksSealed:
        seals = tuple((s.chunk, _digest(s.digest), s.inputs[:MAX_MEMBER_BITMAP]) for s in m.seals)
        norms = tuple(map(_norms, m.seals)) if any(s.norms for s in m.seals) else ()
        sums = tuple((s.chunk, s.inputs[:MAX_MEMBER_BITMAP], _norms(s)) for s in m.sums)
        dots = tuple(map(_dots, m.seals)) if any(s.dots for s in m.seals) else ()
        sum_dots = tuple(map(_dots, m.sums)) if any(s.dots for s in m.sums) else ()
        return ev.ChunksSealed(self.node, self.life, self.fence, seals, norms, sums, dots, sum_dots)

    def orphans_found(self, m: pb.OrphansFound) -> ev.OrphansFound:
        found = tuple((s.chunk, _digest(s.digest)) for s in m.here)
        return ev.OrphansFound(self.node, self.life, self.fence, found)

    def reduce_complete(self, m: pb.ReduceComplete) -> ev.ReduceComplete:
        """The event of a reduce that is complete on the node, with its measured rates (bytes a second) and round
        trips (seconds). Raises `ValueError` for a digest, a node, a rate or a time that cannot be."""
        trips = tuple(
            (_node(t.node_id), _within("a round trip", t.seconds, 0, MAX_ROUND_TRIP)) for t in m.round_trips
        )
        return ev.ReduceComplete(
            self.node,
            self.life,
            self.fence,
            _digest(m.digest),
            m.bytes_up,
            m.bytes_down,
            _rate("rate_up", m.rate_up),
            _rate("rate_down", m.rate_down),
            trips[:MAX_ROUND_TRIPS],
            _rate("rate_inside", m.rate_inside),
            _rate("rate_outside", m.rate_outside),
            m.proven,
            tuple(
                (_node(s.node_id), _rate("a seen rate", s.up), _rate("a seen rate", s.down))
                for s in m.seen[:MAX_SEEN_RATES]
            ),
            m.incidents,
        )

    def round_account(self, m: pb.RoundAccount) -> ev.RoundAccounted:
        """The event of a member's account of a round. Raises `ValueError` for a time, a rate or a node that cannot
        be; what is too much is left out, and kinds of incidents that only a newer version knows."""
        told = (_incident(i) for i in m.incidents[:MAX_INCIDENTS])
        account = Account(
            m.steps,
            _seconds("computing", m.computing),
            _seconds("data", m.data),
            _seconds("still", m.still),
            _seconds("paused", m.paused),
            _seconds("away", m.away),
            _within("clock", m.clock, -MAX_CLOCK_SECONDS, MAX_CLOCK_SECONDS),
            tuple(incident for incident in told if incident is not None),
            tuple(map(_link, m.links[:MAX_LINKS])),
            min(m.sent, MAX_BYTES),
            min(m.received, MAX_BYTES),
            _rate("limit_up", m.limit_up),
            _rate("limit_down", m.limit_down),
        )
        return ev.RoundAccounted(self.node, self.life, self.fence.round, account)

    def loss_evaluated(self, m: pb.LossEvaluated) -> ev.LossEvaluated:
        passage = ev.Passage(self.node, _passage(m.prompt), _passage(m.text)) if m.text else None
        return ev.LossEvaluated(self.node, self.life, m.round, _loss(m.loss), passage)

    def peer_unreachable(self, m: pb.PeerUnreachable) -> ev.PeerUnreachable:
        return ev.PeerUnreachable(self.node, self.life, _node(m.node_id), self.fence, text(m.reason))

    def chunk_forged(self, m: pb.ChunkForged) -> ev.ChunkForged:
        return ev.ChunkForged(self.node, self.life, _node(m.node_id), self.fence, m.chunk)

    def chunks_missing(self, m: pb.ChunksMissing) -> ev.ChunksMissing:
        return ev.ChunksMissing(self.node, self.life, self.fence, tuple(places(m.chunks[:MAX_CHUNK_BITMAP])))

    def seal_outsized(self, m: pb.SealOutsized) -> ev.SealOutsized:
        """The event of a seal that is too long. Raises `ValueError` for a length that is no number, or no
        digest."""
        times = _within("times", m.times, 0, MAX_TIMES)
        return ev.SealOutsized(self.node, self.life, self.fence, m.chunk, _digest(m.digest), times)

    def audit_reported(self, m: pb.AuditReported) -> ev.AuditReported:
        """The event of an audit. Raises `ValueError` for what is larger than any receipt, or no digest."""
        digest_ = _digest(m.digest) if m.digest else b""
        if len(m.receipts) > MAX_PLACES or sum(map(len, m.receipts)) + len(m.shown) > MAX_FINDING_BYTES:
            raise ValueError(f"{len(m.receipts)} receipts of an audit are larger than they must be")
        if len(m.silent) > MAX_PLACES or max(m.silent, default=0) >= MAX_PLACES:
            raise ValueError("an audit names places that no plan has: they must be places of the plan")
        relay = m.relay - 1 if m.relay else None
        if len(m.sums) > MAX_PLACES or sum(len(sum_.norms) for sum_ in m.sums) > MAX_PLACES:
            raise ValueError("an audit tells norms of more than all that contributed")
        sums = tuple((sum_.place, _norms(sum_)) for sum_ in m.sums)
        found = digest_, tuple(m.receipts), tuple(m.silent), m.shown, relay, _norms(m), sums, m.busy
        return ev.AuditReported(self.node, self.life, self.fence, m.chunk, *found)

    def replay_reported(self, m: pb.ReplayReported) -> ev.ReplayReported:
        """The event of a verifier's word. Raises `ValueError` for a node or a likeness that cannot be."""
        work = _likeness(m.work) if m.HasField("work") else None
        others = tuple(map(_likeness, m.others[:MAX_LIKENESSES]))
        found = _node(m.node_id), m.shown, work, others
        return ev.ReplayReported(self.node, self.life, self.fence.round, *found)

    def leave(self, m: pb.Leave) -> ev.Leaving:
        return ev.Leaving(self.node, self.life, text(m.reason), m.incidents)


def event(node: NodeId, life: int, request: pb.ReportRequest) -> ev.Event:
    """A report of a member as the event that the state machine takes. Raises `ValueError`."""
    f = request.fence
    report = Report(node, life, Fence(Incarnation(f.incarnation), Epoch(f.epoch), Round(f.round), f.attempt))
    match request.WhichOneof("report"):
        case "layout_reported":
            return report.layout_reported(request.layout_reported)
        case "state_reported":
            return report.state_reported(request.state_reported)
        case "state_repaired":
            return report.state_repaired(request.state_repaired)
        case "steps_reached":
            return report.steps_reached()
        case "contribution_ready":
            return report.contribution_ready(request.contribution_ready)
        case "chunks_sealed":
            return report.chunks_sealed(request.chunks_sealed)
        case "orphans_found":
            return report.orphans_found(request.orphans_found)
        case "reduce_complete":
            return report.reduce_complete(request.reduce_complete)
        case "loss_evaluated":
            return report.loss_evaluated(request.loss_evaluated)
        case "peer_unreachable":
            return report.peer_unreachable(request.peer_unreachable)
        case "chunk_forged":
            return report.chunk_forged(request.chunk_forged)
        case "chunks_missing":
            return report.chunks_missing(request.chunks_missing)
        case "seal_outsized":
            return report.seal_outsized(request.seal_outsized)
        case "audit_reported":
            return report.audit_reported(request.audit_reported)
        case "replay_reported":
            return report.replay_reported(request.replay_reported)
        case "round_account":
            return report.round_account(request.round_account)
        case "leave":
            return report.leave(request.leave)
        case None:
            raise ValueError("the report is empty, or of a kind that this coordinator does not know: update it")


def heartbeat(node: NodeId, life: int, request: pb.HeartbeatRequest) -> ev.Heartbeat:
    """The event of a heartbeat: the node's phase, round and inner step. Nothing in it is refused."""
    phase, paused = text(request.phase[:MAX_PHASE]), request.pause > 0
    saves_bytes = request.saves_bytes
    return ev.Heartbeat(node, life, phase, request.round, request.inner_step, paused, saves_bytes)


def vitals(request: pb.HeartbeatRequest) -> Vitals:
    """The vitals of a heartbeat, for the page; numbers that cannot be become 0, which says that they are not
    known."""
    return Vitals(
        _figure(request.tokens_per_s, MAX_TOKENS_PER_S),
        _figure(request.loss, MAX_LOSS, -MAX_LOSS),
        request.bytes_up,
        request.bytes_down,
        request.rss_bytes,
        text(request.progress),
        text(request.trouble),
        mfu=_figure(request.mfu, 1.0),
        data_wait=_figure(request.data_wait, 1.0),
        gradient_norm=_figure(request.gradient_norm, MAX_NORM),
        learning_rate=_figure(request.learning_rate, MAX_LEARNING_RATE),
        device_bytes=int(_figure(request.device_bytes, MAX_BYTES)),
        trainer_rss_bytes=int(_figure(request.trainer_rss_bytes, MAX_BYTES)),
        pause=words_of(request.pause),
    )


def unanswered(request: pb.HeartbeatRequest) -> dict[str, float]:
    """How the node spent the time since it was last answered: seconds in each phase that has some. Only their
    proportions count; numbers that cannot be are none."""
    told = request.unanswered
    seconds = {phase: _figure(getattr(told, phase), MAX_SECONDS) for phase in PHASES}
    return {phase: spent for phase, spent in seconds.items() if spent}


def _figure(value: float, most: float, least: float = 0.0) -> float:
    """The value if it is in `least` ... `most`; else 0."""
    return value if least <= value <= most else 0.0


def address(asked: str, peer: str) -> str:
    """The data-plane address as others will dial it; a missing host is the one the connection came from. Raises
    `ValueError`, or `ConfigError` where it has no port."""
    host, port = split_host_port(asked[: MAX_TEXT + 1], "the data-plane address")
    if len(asked) > MAX_TEXT or not 0 < port or not all(c.isalnum() or c in ".-:_%" for c in host):
        raise ValueError(f"the data-plane address is {asked[:40]!r}: give HOST:PORT as other nodes can dial it")
    return join_host_port(host_of(peer) if host in WILDCARD_HOSTS else host, port)


def is_behind_gateway(address: str) -> bool:
    """Whether a data-plane address is a peer's, which only gateways find. Raises `ValueError` where it names
    none."""
    host, _ = split_host_port(address, "the data-plane address")
    return is_peer_host(host) and bool(peer_of_host(host))


def pin(asked: str, tls: bool) -> Pin:
    """The pin of the certificate that the node shows to those who dial it; none where the run is not encrypted
    (`tls`). Raises `ValueError`."""
    if tls and not is_pin(asked):
        raise ValueError("this run is encrypted, and the node shows no certificate to its peers: update atoll")
    return Pin(asked) if tls else NO_PIN


def key(request: pb.JoinRequest) -> PublicKey:
    """The public key of the node that asks to join. Raises `ValueError` unless the request proves that the node
    has its secret half."""
    if not is_public_key(request.key):
        raise ValueError("the node names no key of its own: update atoll")
    if not is_proven(request):
        raise ValueError("the request to join is not signed by the key that it names")
    return PublicKey(request.key)


def host_of(peer: str) -> str:
    """The host that a gRPC connection came from, without its port."""
    kind, _, rest = peer.partition(":")
    return unquote(rest).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else "127.0.0.1"


def secret(session: str) -> str:
    """The secret that a new node chose for itself: 32 or more hexadecimal digits; empty if it did not."""
    chosen = session.partition(".")[0]
    return chosen if 32 <= len(chosen) <= 64 and all(c in "0123456789abcdef" for c in chosen) else ""


def text(sent: str) -> str:
    """A node's words as they may be shown: printable, of bounded length."""
    sent = sent[:MAX_TEXT]
    return sent if sent.isprintable() else "".join(c for c in sent if c.isprintable())


def name(sent: str) -> str:
    """A node's name for itself as it may be shown; empty if nothing of it can be."""
    return text(sent)[:MAX_NAME].strip()


def version(sent: str) -> str:
    """A version of a node's software, as it may be shown."""
    return text(sent)[:MAX_VERSION].strip()


def _node(sent: str) -> NodeId:
    """An id as this coordinator gives them."""
    if not _NODE.fullmatch(sent):
        raise ValueError(f"a node is called {text(sent[:40])!r}: it must be one of this run's ids, such as n7")
    return NodeId(sent)


def _digest(sent: bytes) -> bytes:
    if len(sent) != DIGEST_BYTES:
        raise ValueError(f"a digest has {len(sent)} bytes, it must have {DIGEST_BYTES}")
    return sent


def _norms(sent: pb.Seal | pb.AuditReported | pb.RegionNorms) -> bytes:
    """The norms of a sealed chunk's terms, fp32, little-endian, which none is below 0 or not finite."""
    norms = sent.norms[: 8 * MAX_MEMBER_BITMAP]
    if norms and not (min(norms) >= 0 and sum(norms) < inf):  # nor is one of them NaN
        raise ValueError("a norm is negative, or not finite")
    return struct.pack(f"<{len(norms)}f", *norms)


def _dots(sent: pb.Seal) -> bytes:
    """The reference's norm and a seal's dots, fp32, little-endian: one of each term that a norm is told of, none
    of them longer than the term. Raises `ValueError` for others."""
    if not sent.dots:
        return b""
    count = len(sent.dots)
    if count != len(sent.norms) or count > 8 * MAX_MEMBER_BITMAP or not 0 < sent.reference < inf:
        raise ValueError(f"{count} dots in chunk {sent.chunk}: there must be one of each norm, along something")
    if not all(abs(dot) <= norm * DOT_LENIENCY for dot, norm in zip(sent.dots, sent.norms, strict=True)):
        raise ValueError(f"a dot in chunk {sent.chunk} is not a number: it must be no longer than its term")
    return struct.pack(f"<{1 + count}f", sent.reference, *sent.dots)


def _likeness(sent: pb.Likeness) -> ev.Likeness:
    return ev.Likeness(_within("cosine", sent.cosine, -1, 1), _within("ratio", sent.ratio, 0, MAX_NORM))


def _incident(sent: pb.Incident) -> Incident | None:
    value = _within("an incident's value", sent.value, -MAX_INCIDENT_VALUE, MAX_INCIDENT_VALUE)
    kind, peer = kind_of(sent.kind), _node(sent.node_id) if sent.node_id else None
    return None if kind is None else Incident(kind, _seconds("an incident's age", sent.age), peer, value)


def _link(sent: pb.LinkAccount) -> LinkAccount:
    seconds = (_seconds(f"a link's {name}", getattr(sent, name)) for name in ("rtt", "queue", "mute", "deaf"))
    segments = min(sent.segments, MAX_BYTES), min(sent.resent, MAX_BYTES)
    sizes = min(sent.sent, MAX_BYTES), min(sent.received, MAX_BYTES)
    rate = _rate("a link's usual rate", sent.usual)
    return LinkAccount(
        _node(sent.node_id), *sizes, _seconds("a link's busy", sent.busy), rate, *segments, *seconds
    )


def _seconds(what: str, value: float) -> float:
    return _within(what, value, 0, MAX_ACCOUNT_SECONDS)


def _passage(text: str) -> str:
    """A model's words as they may be shown: of bounded length, nothing that moves a cursor but to a new line."""
    return "".join(c for c in text[:MAX_PASSAGE] if c.isprintable() or c in "\n\t")


def _loss(value: float) -> float:
    return _within("loss", value, -MAX_LOSS, MAX_LOSS)


def _norm(value: float) -> float:
    """The l2 of a delta; 0 for what no delta that is not 0 is as short as: others are clipped by it."""
    return value if _within("delta_norm", value, 0, MAX_NORM) >= MIN_NORM else 0.0


def _rate(what: str, value: float) -> float:
    """Bytes a second; 0: not known."""
    return value if _within(what, value, 0, MAX_RATE) >= MIN_RATE else 0.0


def _within(what: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:  # nor is NaN
        raise ValueError(f"{what} is {value:g}: it must be from {low:g} to {high:g}")
    return value
