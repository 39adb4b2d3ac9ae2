"""What nodes send, checked where it enters: lengths, ranges, and nothing but finite numbers. Pure.

A `ValueError` here is the sentence that the node gets as its answer.
"""

import re
from math import isfinite
from urllib.parse import unquote

from atoll.comm.bitmap import places
from atoll.comm.ids import NO_PIN, Epoch, Incarnation, NodeId, Pin, Round, is_pin
from atoll.comm.invite import join_host_port, split_host_port
from atoll.comm.plan import Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.service.telemetry import Vitals
from atoll.coordinator.state_machine import events as ev

DIGEST = 16  # bytes
MOST_LOSS = 1e6  # nats a token; sums of it stay finite
MOST_NORM = 1e30
LEAST_RATE, MOST_RATE = 1.0, 1e15  # bytes a second; what is less says nothing of a link
MOST_TRIP = 3600.0  # seconds
MOST_TRIPS = 256  # members whose round trips are kept of one
MOST_PLACES = 2048  # bytes of a bitmap of members
MOST_CHUNKS = 1 << 14  # bytes of a bitmap of chunks
MOST_PARAMETERS = 1 << 42
MOST_FRAGMENTS = 4096
MOST_SAMPLES = 1 << 53
MOST_TEXT = 255  # characters of an address, a reason, a session
_NODE = re.compile("n[0-9]{1,18}")
ANY_HOST = ("", "0.0.0.0", "::")


def event(node: NodeId, life: int, request: pb.ReportRequest) -> ev.Event:
    """The report as an event."""
    f = request.fence
    fence = Fence(Incarnation(f.incarnation), Epoch(f.epoch), Round(f.round), f.attempt)
    match request.WhichOneof("report"):
        case "layout_reported":
            numel = _within("numel", request.layout_reported.numel, 1, MOST_PARAMETERS)
            return ev.LayoutReported(
                node,
                life,
                int(numel),
                _digest(request.layout_reported.digest),
                _fragments(request.layout_reported),
            )
        case "state_reported":
            return ev.StateReported(
                node, life, request.state_reported.round, _digest(request.state_reported.digest)
            )
        case "state_repaired":
            m = request.state_repaired
            return ev.StateRepaired(node, life, m.round, m.chunks, m.whole, m.disk)
        case "steps_reached":
            return ev.StepsReached(node, life, fence.round)
        case "contribution_ready":
            r = request.contribution_ready
            _within("samples", r.samples, 1, MOST_SAMPLES)
            loss = _within("loss", r.loss, -MOST_LOSS, MOST_LOSS)
            norm = _within("delta_norm", r.delta_norm, 0, MOST_NORM)
            damping = _within("damping", r.damping, 0, 1) or 1.0
            said = r.samples, r.steps, loss, norm, damping, r.fresh
            return ev.ContributionReady(node, life, fence.round, r.front, *said)
        case "chunks_sealed":
            seals = tuple(
                (s.chunk, _digest(s.digest), s.inputs[:MOST_PLACES]) for s in request.chunks_sealed.seals
            )
            return ev.ChunksSealed(node, life, fence, seals)
        case "orphans_found":
            here = tuple((s.chunk, _digest(s.digest)) for s in request.orphans_found.here)
            return ev.OrphansFound(node, life, fence, here)
        case "reduce_complete":
            h = request.reduce_complete
            up = _rate("rate_up", h.rate_up)
            down = _rate("rate_down", h.rate_down)
            rtts = tuple(
                (_node(t.node_id), _within("a round trip", t.seconds, 0, MOST_TRIP)) for t in h.round_trips
            )
            inside = _rate("rate_inside", h.rate_inside)
            outside = _rate("rate_outside", h.rate_outside)
            rates = up, down, rtts[:MOST_TRIPS], inside, outside
            return ev.ReduceComplete(
                node, life, fence, _digest(h.digest), h.bytes_up, h.bytes_down, *rates, h.proven
            )
        case "loss_evaluated":
            loss = _within("loss", request.loss_evaluated.loss, -MOST_LOSS, MOST_LOSS)
            return ev.LossEvaluated(node, life, request.loss_evaluated.round, loss)
        case "peer_unreachable":
            lost = request.peer_unreachable
            return ev.PeerUnreachable(node, life, _node(lost.node_id), fence, text(lost.reason))
        case "chunk_forged":
            return ev.ChunkForged(
                node, life, _node(request.chunk_forged.node_id), fence, request.chunk_forged.chunk
            )
        case "chunks_missing":
            return ev.ChunksMissing(node, life, fence, tuple(places(request.chunks_missing.chunks[:MOST_CHUNKS])))
        case "leave":
            return ev.Leaving(node, life, text(request.leave.reason))
        case _:
            raise ValueError("the report is empty, or of a kind that this coordinator does not know: update it")


def _fragments(layout: pb.LayoutReported) -> tuple[int, ...]:
    sizes = tuple(layout.fragments)
    if sizes and (len(sizes) > MOST_FRAGMENTS or min(sizes) < 1 or sum(sizes) != layout.numel):
        raise ValueError(f"its {len(sizes)} fragments are not the {layout.numel} parameters of its model")
    return sizes


def heard(node: NodeId, life: int, request: pb.HeartbeatRequest) -> ev.Heartbeat:
    return ev.Heartbeat(node, life, text(request.phase[:20]), request.round, request.inner_step)


def vitals(request: pb.HeartbeatRequest) -> Vitals:
    pace, loss = (v if isfinite(v) else 0.0 for v in (request.tokens_per_s, request.loss))
    said = text(request.progress), text(request.trouble)
    return Vitals(pace, loss, request.bytes_up, request.bytes_down, request.rss_bytes, *said)


def address(asked: str, peer: str) -> str:
    """The data-plane address as others will dial it; a missing host is the one the connection came from. Raises
    `ConfigError` too."""
    host, port = split_host_port(asked[: MOST_TEXT + 1], "the data-plane address")
    if len(asked) > MOST_TEXT or not 0 < port or not all(c.isalnum() or c in ".-:_%" for c in host):
        raise ValueError(f"the data-plane address is {asked[:40]!r}: give HOST:PORT as other nodes can dial it")
    return join_host_port(host_of(peer) if host in ANY_HOST else host, port)


def pin(asked: str, tls: bool) -> Pin:
    """Of the certificate that the node shows to those who dial it; `tls`: the run is encrypted."""
    if tls and not is_pin(asked):
        raise ValueError("this run is encrypted, and the node shows no certificate to its peers: update atoll")
    return Pin(asked) if tls else NO_PIN


def host_of(peer: str) -> str:
    """Where a gRPC connection came from."""
    kind, _, rest = peer.partition(":")
    return unquote(rest).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else "127.0.0.1"


def secret(session: str) -> str:
    """The secret that a new node chose for itself: 32 or more hexadecimal digits; empty if it did not."""
    chosen = session.partition(".")[0]
    return chosen if 32 <= len(chosen) <= 64 and all(c in "0123456789abcdef" for c in chosen) else ""


def text(sent: str) -> str:
    """What of a node's words is shown."""
    sent = sent[:MOST_TEXT]
    return sent if sent.isprintable() else "".join(c for c in sent if c.isprintable())


def name(sent: str) -> str:
    return text(sent)[:64].strip()


def _node(sent: str) -> NodeId:
    """An id as this coordinator gives them."""
    if not _NODE.fullmatch(sent):
        raise ValueError(f"a node is called {text(sent[:40])!r}: it must be one of this run's ids, such as n7")
    return NodeId(sent)


def _digest(sent: bytes) -> bytes:
    if len(sent) != DIGEST:
        raise ValueError(f"a digest has {len(sent)} bytes, it must have {DIGEST}")
    return sent


def _rate(what: str, value: float) -> float:
    """Bytes a second; 0: not known."""
    return value if _within(what, value, 0, MOST_RATE) >= LEAST_RATE else 0.0


def _within(what: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:  # nor is NaN
        raise ValueError(f"{what} is {value:g}: it must be from {low:g} to {high:g}")
    return value
