"""Nothing that a node sends gets past the edge unless it makes sense."""

import math
import struct
from dataclasses import fields
from typing import Any

import pytest
from hostile import messages
from hypothesis import given
from hypothesis import strategies as st

from atoll.comm.errors import ConfigError
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.incidents import IncidentKind
from atoll.comm.plan import Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.causes.account import Account, Incident, LinkAccount
from atoll.coordinator.service import validation
from atoll.coordinator.state_machine import events as ev

ADA, DIGEST = NodeId("n1"), b"d" * 16
FENCE = pb.Fence(incarnation=2, epoch=3, round=4, attempt=5)
MINE = Fence(Incarnation(2), Epoch(3), Round(4), 5)


def event(**report: Any) -> ev.Event:
    return validation.event(ADA, 7, pb.ReportRequest(fence=FENCE, **report))


def test_every_report_becomes_its_event() -> None:
    ready = pb.ContributionReady(steps=9, samples=36, loss=2.5, delta_norm=0.5, front=40)
    assert event(layout_reported=pb.LayoutReported(numel=5, digest=DIGEST)) == ev.LayoutReported(ADA, 7, 5, DIGEST)
    blind = pb.LayoutReported(numel=5, digest=DIGEST, no_evaluation=True)
    assert event(layout_reported=blind) == ev.LayoutReported(ADA, 7, 5, DIGEST, evaluates=False)
    assert event(state_reported=pb.StateReported(round=8, digest=DIGEST)) == ev.StateReported(ADA, 7, 8, DIGEST)
    assert event(steps_reached=pb.StepsReached()) == ev.StepsReached(ADA, 7, 4)
    assert event(contribution_ready=ready) == ev.ContributionReady(ADA, 7, 4, ev.Contribution(36, 9, 2.5, 0.5, 40))
    ready.skipped = 35
    claimed = ev.Contribution(36, 9, 2.5, 0.5, 40, skipped=35)
    assert event(contribution_ready=ready) == ev.ContributionReady(ADA, 7, 4, claimed) and claimed.claimed == 1
    seals = pb.ChunksSealed(seals=[pb.Seal(chunk=3, digest=DIGEST, inputs=b"\x05")])
    assert event(chunks_sealed=seals) == ev.ChunksSealed(ADA, 7, MINE, ((3, DIGEST, b"\x05"),))
    forged = pb.ChunkForged(node_id="n2", chunk=5)
    assert event(chunk_forged=forged) == ev.ChunkForged(ADA, 7, NodeId("n2"), MINE, 5)
    vast = pb.SealOutsized(chunk=5, digest=DIGEST, times=1e100)
    assert event(seal_outsized=vast) == ev.SealOutsized(ADA, 7, MINE, 5, DIGEST, 1e100)
    assert event(chunks_missing=pb.ChunksMissing(chunks=b"\x05\x01")) == ev.ChunksMissing(ADA, 7, MINE, (0, 2, 8))
    told = pb.Seal(chunk=3, digest=DIGEST, inputs=b"\x05", norms=[2.0, 0.0], dots=[-2.0, 0.0], reference=4.0)
    norms, dots = struct.pack("<2f", 2.0, 0.0), struct.pack("<3f", 4.0, -2.0, 0.0)
    expected: tuple[Any, ...] = (((3, DIGEST, b"\x05"),), (norms,), ((3, b"\x05", norms),), (dots,), (dots,))
    found = event(chunks_sealed=pb.ChunksSealed(seals=[told], sums=[told]))
    assert found == ev.ChunksSealed(ADA, 7, MINE, *expected)
    orphans = pb.OrphansFound(here=[pb.Seal(chunk=3, digest=DIGEST)])
    assert event(orphans_found=orphans) == ev.OrphansFound(ADA, 7, MINE, ((3, DIGEST),))
    held = pb.ReduceComplete(digest=DIGEST, bytes_up=1, bytes_down=2, rate_up=3.0, rate_down=4.0)
    held.seen.add(node_id="n3", up=7.0, down=0.5)
    held.round_trips.add(node_id="n2", seconds=0.1)
    held.rate_inside, held.rate_outside = 5.0, 6.0
    trips = ((NodeId("n2"), 0.1),)
    measured = 3.0, 4.0, trips, 5.0, 6.0, False, ((NodeId("n3"), 7.0, 0.0),)
    assert event(reduce_complete=held) == ev.ReduceComplete(ADA, 7, MINE, DIGEST, 1, 2, *measured)
    assert event(loss_evaluated=pb.LossEvaluated(round=8, loss=3.0)) == ev.LossEvaluated(ADA, 7, 8, 3.0)
    wrote = pb.LossEvaluated(round=8, loss=3.0, prompt="if\tx:\n", text="\x1b[2J\u202ey" + 4000 * "z")
    passage = ev.Passage(ADA, "if\tx:\n", "[2Jy" + 1994 * "z")
    assert event(loss_evaluated=wrote) == ev.LossEvaluated(ADA, 7, 8, 3.0, passage)
    lost = pb.PeerUnreachable(node_id="n2", reason="reset\x1b[31m\n")
    assert event(peer_unreachable=lost) == ev.PeerUnreachable(ADA, 7, NodeId("n2"), MINE, "reset[31m")
    assert event(leave=pb.Leave(reason="bye", incidents=4)) == ev.Leaving(ADA, 7, "bye", 4)
    audit = pb.AuditReported(chunk=3, digest=DIGEST, receipts=[b"r", b"s"], silent=[2], shown=b"x", relay=1)
    found = ev.AuditReported(ADA, 7, MINE, 3, DIGEST, (b"r", b"s"), (2,), b"x", 0)
    assert event(audit_reported=audit) == found
    assert event(audit_reported=pb.AuditReported(chunk=3)) == ev.AuditReported(ADA, 7, MINE, 3)
    alike = pb.Likeness(cosine=0.5, ratio=2.0)
    replay = pb.ReplayReported(node_id="n3", shown=True, work=alike, others=[alike] * 20)
    likeness, said = ev.Likeness(0.5, 2.0), (ADA, 7, MINE.round, NodeId("n3"), True)
    assert event(replay_reported=replay) == ev.ReplayReported(*said, likeness, (likeness,) * 16)
    assert event(replay_reported=pb.ReplayReported(node_id="n3", shown=True)) == ev.ReplayReported(*said)
    told_of = pb.RoundAccount(steps=3, computing=1.5, data=0.5, still=2.0, paused=4.0, away=8.0, clock=-0.25)
    told_of.sent, told_of.received, told_of.limit_up, told_of.limit_down = 5, 1 << 60, 125_000, 0.5
    told_of.incidents.add(kind=10, age=1.5, node_id="n2", value=-9)
    told_of.incidents.add(kind=31)  # of a newer version
    link = {"busy": 0.5, "usual": 8.0, "rtt": 0.25, "queue": 0.125, "mute": 3.0, "deaf": 1.0}
    for _ in range(40):
        told_of.links.add(node_id="n3", sent=1, received=2, segments=4, resent=1 << 60, **link)
    lost_one = Incident(IncidentKind.STATE_DIFFERED, 1.5, NodeId("n2"), -9.0)
    path = LinkAccount(NodeId("n3"), 1, 2, 0.5, 8.0, 4, 1 << 50, 0.25, 0.125, 3.0, 1.0)
    account = Account(3, 1.5, 0.5, 2.0, 4.0, 8.0, -0.25, (lost_one,), (path,) * 16, 5, 1 << 50, 125_000)
    assert event(round_account=told_of) == ev.RoundAccounted(ADA, 7, 4, account)


def test_a_rate_that_no_link_has_is_not_known() -> None:
    """Its share of all links would be too small for a number, and divided by."""
    held = pb.ReduceComplete(digest=DIGEST, rate_up=5e-324, rate_down=0.9, rate_inside=1e-300, rate_outside=1e-9)
    assert event(reduce_complete=held) == event(reduce_complete=pb.ReduceComplete(digest=DIGEST))


def sealed(**terms: Any) -> pb.ChunksSealed:
    return pb.ChunksSealed(seals=[pb.Seal(chunk=1, digest=DIGEST, inputs=b"\x03", **terms)])


@pytest.mark.parametrize(
    "report",
    [
        {},
        {"layout_reported": pb.LayoutReported(numel=0, digest=DIGEST)},
        {"layout_reported": pb.LayoutReported(numel=1 << 43, digest=DIGEST)},
        {"state_reported": pb.StateReported(round=1, digest=b"short")},
        {"contribution_ready": pb.ContributionReady(samples=0, loss=1.0, delta_norm=1.0)},
        {"contribution_ready": pb.ContributionReady(samples=1 << 60, loss=1.0, delta_norm=1.0)},
        {"contribution_ready": pb.ContributionReady(samples=1, loss=math.nan, delta_norm=1.0)},
        {"contribution_ready": pb.ContributionReady(samples=1, loss=1.0, delta_norm=math.inf)},
        {"contribution_ready": pb.ContributionReady(samples=1, loss=1.0, delta_norm=-1.0)},
        {"contribution_ready": pb.ContributionReady(samples=1, loss=1.0, delta_norm=1.0, damping=1.5)},
        {"contribution_ready": pb.ContributionReady(samples=4, loss=1.0, delta_norm=1.0, skipped=4)},
        {"contribution_ready": pb.ContributionReady(samples=4, loss=1.0, delta_norm=1.0, skipped=5)},
        {"chunks_sealed": pb.ChunksSealed(seals=[pb.Seal(chunk=1, digest=b"")])},
        {"chunks_sealed": sealed(norms=[1.0, 1.0], dots=[0.5], reference=1.0)},
        {"chunks_sealed": sealed(norms=[1.0], dots=[0.5] * 2, reference=1.0)},
        {"chunks_sealed": sealed(dots=[0.5], reference=1.0)},
        {"chunks_sealed": sealed(norms=[1.0] * 16385, dots=[0.5] * 16385, reference=1.0)},
        {"chunks_sealed": sealed(norms=[1.0], dots=[1.001], reference=1.0)},
        {"chunks_sealed": sealed(norms=[1.0], dots=[-1.001], reference=1.0)},
        {"chunks_sealed": sealed(norms=[1.0], dots=[math.nan], reference=1.0)},
        {"chunks_sealed": sealed(norms=[1.0], dots=[0.5])},
        {"chunks_sealed": sealed(norms=[1.0], dots=[0.5], reference=-1.0)},
        {"chunks_sealed": sealed(norms=[1.0], dots=[0.5], reference=math.inf)},
        {"chunks_sealed": sealed(norms=[1.0], dots=[0.5], reference=math.nan)},
        {"chunks_sealed": pb.ChunksSealed(sums=[pb.Seal(digest=DIGEST, norms=[1.0], dots=[2.0], reference=1.0)])},
        {"reduce_complete": pb.ReduceComplete(digest=b"x" * 17)},
        {"reduce_complete": pb.ReduceComplete(digest=DIGEST, rate_up=float("nan"))},
        {"reduce_complete": pb.ReduceComplete(digest=DIGEST, rate_inside=-1.0)},
        {"reduce_complete": pb.ReduceComplete(digest=DIGEST, rate_outside=math.inf)},
        {"orphans_found": pb.OrphansFound(here=[pb.Seal(chunk=1, digest=b"")])},
        {
            "reduce_complete": pb.ReduceComplete(
                digest=DIGEST, round_trips=[pb.RoundTrip(node_id="ghost", seconds=0.1)]
            )
        },
        {"seal_outsized": pb.SealOutsized(chunk=1, digest=DIGEST, times=math.inf)},
        {"seal_outsized": pb.SealOutsized(chunk=1, digest=DIGEST, times=math.nan)},
        {"seal_outsized": pb.SealOutsized(chunk=1, times=3.0)},
        {"audit_reported": pb.AuditReported(digest=b"short")},
        {"replay_reported": pb.ReplayReported(node_id="nobody")},
        {"replay_reported": pb.ReplayReported(node_id="n3", work=pb.Likeness(cosine=1.5))},
        {"replay_reported": pb.ReplayReported(node_id="n3", others=[pb.Likeness(ratio=float("nan"))])},
        {"audit_reported": pb.AuditReported(silent=[1 << 20])},
        {"audit_reported": pb.AuditReported(receipts=[b""] * 16385)},
        {"audit_reported": pb.AuditReported(receipts=[bytes(1 << 20)] * 3, shown=b"x")},
        {"loss_evaluated": pb.LossEvaluated(round=1, loss=-math.inf)},
        {"peer_unreachable": pb.PeerUnreachable(node_id="ghost", reason="reset")},
        {"peer_unreachable": pb.PeerUnreachable(node_id="", reason="reset")},
        {"chunk_forged": pb.ChunkForged(node_id="ghost", chunk=0)},
        {"round_account": pb.RoundAccount(still=-1.0)},
        {"round_account": pb.RoundAccount(data=math.nan)},
        {"round_account": pb.RoundAccount(clock=math.inf)},
        {"round_account": pb.RoundAccount(limit_up=-1.0)},
        {"round_account": pb.RoundAccount(limit_down=math.inf)},
        {"round_account": pb.RoundAccount(incidents=[pb.Incident(kind=1, age=-1.0)])},
        {"round_account": pb.RoundAccount(incidents=[pb.Incident(kind=1, value=math.nan)])},
        {"round_account": pb.RoundAccount(incidents=[pb.Incident(kind=1, node_id="ghost")])},
        {"round_account": pb.RoundAccount(links=[pb.LinkAccount(node_id="")])},
        {"round_account": pb.RoundAccount(links=[pb.LinkAccount(node_id="n2", busy=math.nan)])},
        {"round_account": pb.RoundAccount(links=[pb.LinkAccount(node_id="n2", usual=-1.0)])},
        {"round_account": pb.RoundAccount(links=[pb.LinkAccount(node_id="n2", mute=1e9)])},
        {"peer_unreachable": pb.PeerUnreachable(node_id="n-1", reason="reset")},
        {"peer_unreachable": pb.PeerUnreachable(node_id="n\u0663", reason="reset")},
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(report: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must|update"):
        event(**report)


def test_a_missing_host_is_the_one_that_the_connection_came_from() -> None:
    assert validation.address(":4700", "ipv4:10.1.2.3:5555") == "10.1.2.3:4700"
    assert validation.address("0.0.0.0:4700", "ipv6:%5Bfe80::1%5D:5555") == "[fe80::1]:4700"
    assert validation.address("reef.example.org:4700", "ipv4:10.1.2.3:5555") == "reef.example.org:4700"


@pytest.mark.parametrize(
    "asked", ["", "4700", "host:", "host:0", "host:70000", "a b:1", "x" * 300 + ":1", "$(ls):1"]
)
def test_an_address_that_nobody_can_dial_is_refused(asked: str) -> None:
    with pytest.raises((ValueError, ConfigError)):
        validation.address(asked, "ipv4:10.1.2.3:5555")


def test_a_node_of_an_encrypted_run_has_a_pin_and_of_another_none() -> None:
    assert validation.pin("a" * 52, tls=True) == "a" * 52
    assert validation.pin("a" * 52, tls=False) == validation.pin("", tls=False) == ""
    for bad in ("", "a" * 51, "A" * 52, "1" * 52, "a" * 10_000):
        with pytest.raises(ValueError, match="this run is encrypted"):
            validation.pin(bad, tls=True)


def test_numbers_of_a_heartbeat_are_finite_and_its_words_printable() -> None:
    beat = pb.HeartbeatRequest(phase="in\nner" + "x" * 99, tokens_per_s=math.nan, loss=math.inf, bytes_up=3)
    assert validation.vitals(beat).tokens_per_s == validation.vitals(beat).loss == 0.0
    assert (
        validation.heartbeat(ADA, 1, beat).phase.startswith("innerx")
        and len(validation.heartbeat(ADA, 1, beat).phase) < 21
    )


@pytest.mark.parametrize("saves", [False, True])
def test_a_heartbeat_says_whether_its_node_saves_bytes_whatever_its_pause_is(saves: bool) -> None:
    for pause in (0, 4, 1 << 31):
        heard = validation.heartbeat(ADA, 1, pb.HeartbeatRequest(pause=pause, saves_bytes=saves))
        assert (heard.paused, heard.saves_bytes) == (pause > 0, saves)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0, 1e31])
def test_a_trainers_figure_that_cannot_be_is_not_known(wrong: float) -> None:
    shares: dict[str, Any] = {"mfu": 0.4, "data_wait": 0.02}
    right: dict[str, Any] = {"tokens_per_s": 1e6, "gradient_norm": 0.7, "learning_rate": 4e-4, **shares}
    known = validation.vitals(pb.HeartbeatRequest(**right, device_bytes=7, trainer_rss_bytes=9))
    assert {name: getattr(known, name) for name in right} == pytest.approx(right)
    assert (known.device_bytes, known.trainer_rss_bytes) == (7, 9)
    cases: list[tuple[str, Any]] = [(name, wrong) for name in right] + [(name, 1.1) for name in shares]
    for name, value in (*cases, ("device_bytes", 1 << 63)):
        told: dict[str, Any] = {name: value}
        assert getattr(validation.vitals(pb.HeartbeatRequest(**told)), name) == 0


def test_a_nodes_own_secret_is_long_or_not_taken() -> None:
    assert validation.secret("a" * 32) == validation.secret("a" * 32 + ".9") == "a" * 32
    for weak in ("", "a" * 31, "a" * 65, "A" * 32, "z" * 40):
        assert validation.secret(weak) == ""


def finite(value: object) -> bool:
    """All numbers in it, however deep."""
    match value:
        case float():
            return math.isfinite(value)
        case tuple():
            return all(map(finite, value))
        case _:
            return True


@given(messages(pb.ReportRequest))
def test_any_report_is_an_event_of_finite_numbers_or_refused_with_a_sentence(request: pb.ReportRequest) -> None:
    try:
        found = validation.event(ADA, 7, request)
    except ValueError as error:
        assert len(str(error)) > 10
        return
    values = [getattr(found, name) for name in found.__struct_fields__]
    assert all(map(finite, values)), found
    assert all(text.isprintable() and len(text) <= 255 for text in values if isinstance(text, str))


@given(messages(pb.HeartbeatRequest))
def test_any_heartbeat_is_heard(beat: pb.HeartbeatRequest) -> None:
    heard, vitals = validation.heartbeat(ADA, 1, beat), validation.vitals(beat)
    assert all(0 < s < 1e10 for s in validation.unanswered(beat).values())
    assert heard.phase.isprintable() and len(heard.phase) <= 20
    assert all(finite(getattr(vitals, field.name)) for field in fields(vitals))
    assert 0 <= vitals.mfu <= 1 and 0 <= vitals.data_wait <= 1


@given(st.text(max_size=60), st.text(max_size=60))
def test_any_address_can_be_dialled_or_is_refused_with_a_sentence(asked: str, peer: str) -> None:
    try:
        found = validation.address(asked, peer)
    except (ValueError, ConfigError) as error:
        assert len(str(error)) > 10
    else:
        assert validation.address(found, peer) == found
