"""Validation of what nodes send, where it enters: lengths, ranges, and nothing but finite numbers. Pure.

`rpc` calls it before anything reaches the state machine, which trusts what comes from here. The text of a
`ValueError` is the sentence that the node gets as its answer.
"""

import re
from dataclasses import dataclass
from urllib.parse import unquote

from atoll.comm.bitmap import places
from atoll.comm.ids import NO_PIN, Epoch, Incarnation, NodeId, Pin, Round, is_pin
from atoll.comm.invite import join_host_port, split_host_port
from atoll.comm.plan import Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.service.telemetry import Vitals
from atoll.coordinator.state_machine import events as ev

DIGEST_BYTES = 16
MAX_LOSS = 1e6  # nats a token; sums of it stay finite
MAX_NORM = 1e30  # l2, of a delta or a gradient
MAX_TOKENS_PER_S = 1e12  # of a node
MAX_LEARNING_RATE = 1e6
MAX_BYTES = 1 << 50  # memory of a node
MIN_RATE, MAX_RATE = 1.0, 1e15  # bytes a second; what is less says nothing of a link
MAX_ROUND_TRIP = 3600.0  # seconds
MAX_ROUND_TRIPS = 256  # members to whom one tells its round trips
MAX_MEMBER_BITMAP = 2048  # bytes
MAX_CHUNK_BITMAP = 1 << 14  # bytes
MAX_PARAMETERS = 1 << 42
MAX_FRAGMENTS = 4096
MAX_SAMPLES = 1 << 53
MAX_TEXT = 255  # characters of an address, a reason, a session
MAX_NAME = 64  # characters of a node's name
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
        return ev.StateReported(self.node, self.life, m.round, _digest(m.digest))

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
            _within("delta_norm", m.delta_norm, 0, MAX_NORM),
            m.front,
            _within("damping", m.damping, 0, 1) or 1.0,
            m.fresh,
            int(_within("skipped", m.skipped, 0, samples - 1)),
        )
        return ev.ContributionReady(self.node, self.life, self.fence.round, contribution)

    def chunks_sealed(self, m: pb.ChunksSealed) -> ev.ChunksSealed:
        seals = tuple((s.chunk, _digest(s.digest), s.inputs[:MAX_MEMBER_BITMAP]) for s in m.seals)
        return ev.ChunksSealed(self.node, self.life, self.fence, seals)

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
        )

    def loss_evaluated(self, m: pb.LossEvaluated) -> ev.LossEvaluated:
        return ev.LossEvaluated(self.node, self.life, m.round, _loss(m.loss))

    def peer_unreachable(self, m: pb.PeerUnreachable) -> ev.PeerUnreachable:
        return ev.PeerUnreachable(self.node, self.life, _node(m.node_id), self.fence, text(m.reason))

    def chunk_forged(self, m: pb.ChunkForged) -> ev.ChunkForged:
        return ev.ChunkForged(self.node, self.life, _node(m.node_id), self.fence, m.chunk)

    def chunks_missing(self, m: pb.ChunksMissing) -> ev.ChunksMissing:
        return ev.ChunksMissing(self.node, self.life, self.fence, tuple(places(m.chunks[:MAX_CHUNK_BITMAP])))

    def leave(self, m: pb.Leave) -> ev.Leaving:
        return ev.Leaving(self.node, self.life, text(m.reason))


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
        case "leave":
            return report.leave(request.leave)
        case None:
            raise ValueError("the report is empty, or of a kind that this coordinator does not know: update it")


def heartbeat(node: NodeId, life: int, request: pb.HeartbeatRequest) -> ev.Heartbeat:
    """The event of a heartbeat: the node's phase, round and inner step. Nothing in it is refused."""
    return ev.Heartbeat(node, life, text(request.phase[:MAX_PHASE]), request.round, request.inner_step)


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
    )


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


def pin(asked: str, tls: bool) -> Pin:
    """The pin of the certificate that the node shows to those who dial it; none where the run is not encrypted
    (`tls`). Raises `ValueError`."""
    if tls and not is_pin(asked):
        raise ValueError("this run is encrypted, and the node shows no certificate to its peers: update atoll")
    return Pin(asked) if tls else NO_PIN


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


def _node(sent: str) -> NodeId:
    """An id as this coordinator gives them."""
    if not _NODE.fullmatch(sent):
        raise ValueError(f"a node is called {text(sent[:40])!r}: it must be one of this run's ids, such as n7")
    return NodeId(sent)


def _digest(sent: bytes) -> bytes:
    if len(sent) != DIGEST_BYTES:
        raise ValueError(f"a digest has {len(sent)} bytes, it must have {DIGEST_BYTES}")
    return sent


def _loss(value: float) -> float:
    return _within("loss", value, -MAX_LOSS, MAX_LOSS)


def _rate(what: str, value: float) -> float:
    """Bytes a second; 0: not known."""
    return value if _within(what, value, 0, MAX_RATE) >= MIN_RATE else 0.0


def _within(what: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:  # nor is NaN
        raise ValueError(f"{what} is {value:g}: it must be from {low:g} to {high:g}")
    return value
