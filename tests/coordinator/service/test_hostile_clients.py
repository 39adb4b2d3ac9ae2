"""A member that reports whatever the edge lets through neither ends the coordinator nor leaves it a state that it
cannot show, or read from its journal again."""

from collections.abc import Sequence
from random import Random

import pytest
from honest_member import CONFIG, asked_of, key_of, receipt, said_by, sum_of

from atoll.comm.ids import NodeId
from atoll.comm.plan import Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.service import validation, view
from atoll.coordinator.service.journaled_machine import decode, encode
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.events import Publish
from atoll.coordinator.state_machine.leases import front
from atoll.coordinator.state_machine.members import VERIFIER
from atoll.coordinator.state_machine.state import State
from atoll.coordinator.state_machine.step import step

HOSTILE, WATCHER = NodeId("n4"), NodeId("n5")  # the verifier
ODD = [0, 1, 2, 3, 7, (1 << 32) - 1]
LARGE = [*ODD, (1 << 53), (1 << 63), (1 << 64) - 1]


def hostile(rng: Random, state: State) -> pb.ReportRequest:
    """Anything, more often than not about what is under way."""
    r, ledger = state.round, state.round.ledger
    now = r.plan.fence if r.plan is not None else Fence(state.incarnation, state.epoch, r.number, ledger.attempt)  # type: ignore[arg-type]
    digests = [sum_of("state 0"), sum_of("x"), state.digest or sum_of("y"), sum_of(rng.random())]

    def about(usual: int, odd: Sequence[int] = LARGE) -> int:
        return usual if rng.random() < 0.7 else rng.choice(odd)

    fence = pb.Fence(
        incarnation=now.incarnation,
        epoch=about(now.epoch),
        round=about(now.round),
        attempt=about(now.attempt, ODD),
    )
    chunks = [pb.Seal(chunk=rng.choice([*range(4), *ODD]), digest=rng.choice(digests)) for _ in range(3)]
    for seal in chunks:
        seal.inputs = rng.choice([b"", b"\xff", b"\x02", bytes(2048), b"\xff" * 2048])
    lease = state.leases.by_node.get(HOSTILE)
    ready = pb.ContributionReady(
        steps=rng.choice(ODD),
        samples=rng.choice([1, 4, 1 << 53]),
        loss=rng.choice([-1e6, 0.0, 1e6]),
        delta_norm=rng.choice([0.0, 5e-324, 1e30]),
        front=about(front(lease) if lease else 0),
    )
    held = pb.ReduceComplete(
        digest=rng.choice(digests), bytes_up=rng.choice(LARGE), rate_up=rng.choice([0.0, 5e-324, 1e15])
    )
    held.round_trips.add(node_id=rng.choice(["n1", "n99", "ghost"]), seconds=rng.choice([0.0, 1e-300, 3600.0]))
    lost = pb.PeerUnreachable(node_id=rng.choice(["n1", "n2", HOSTILE, "n99", "ghost", ""]), reason="it; hung\n")
    if (asked := asked_of(state, HOSTILE)) and rng.random() < 0.5:
        audit, now = asked[0], now._replace(attempt=asked[0].since)
        fence, given = pb.Fence(**now._asdict()), receipt(state, asked[0])
        found = pb.AuditReported(chunk=audit.chunk, digest=rng.choice([b"", audit.digest, *digests]))
        found.receipts.extend(
            rng.sample([given.pack(), given.pack()[:-1], b"", bytes(500)], rng.choice([0, 1, 2]))
        )
        found.silent.extend(rng.choice([[], [], [0], [3, 900]]))
        found.shown = rng.choice([b"", b"", given.records[0].pack(), bytes(84)])
        found.relay = rng.choice([0, 0, 1, 9, (1 << 32) - 1])
        return pb.ReportRequest(fence=fence, audit_reported=found)
    return rng.choice(
        [
            pb.ReportRequest(
                fence=fence, layout_reported=pb.LayoutReported(numel=rng.choice([40, 1 << 42]), digest=digests[0])
            ),
            pb.ReportRequest(
                fence=fence, state_reported=pb.StateReported(round=about(state.committed), digest=digests[2])
            ),
            pb.ReportRequest(
                fence=fence, state_repaired=pb.StateRepaired(round=rng.choice(LARGE), chunks=rng.choice(ODD))
            ),
            pb.ReportRequest(fence=fence, steps_reached=pb.StepsReached()),
            pb.ReportRequest(fence=fence, contribution_ready=ready),
            pb.ReportRequest(fence=fence, chunks_sealed=pb.ChunksSealed(seals=chunks)),
            pb.ReportRequest(fence=fence, orphans_found=pb.OrphansFound(here=chunks)),
            pb.ReportRequest(fence=fence, reduce_complete=held),
            pb.ReportRequest(fence=fence, loss_evaluated=pb.LossEvaluated(round=about(state.committed), loss=1e6)),
            pb.ReportRequest(fence=fence, peer_unreachable=lost),
            pb.ReportRequest(
                fence=fence, chunk_forged=pb.ChunkForged(node_id=lost.node_id, chunk=rng.choice(ODD))
            ),
            pb.ReportRequest(
                fence=fence, seal_outsized=pb.SealOutsized(chunk=rng.choice(ODD), digest=bytes(16), times=2.5)
            ),
            pb.ReportRequest(
                fence=fence, chunks_missing=pb.ChunksMissing(chunks=rng.choice([b"", b"\x02", b"\xff" * 40]))
            ),
        ]
    )


def enters(node: NodeId, life: int) -> ev.Joined:
    role = VERIFIER if node == WATCHER else ""
    return ev.Joined(node, life, f"node {node}", f"h{node}:1", f"s{node}", role=role, key=key_of(node).public)


@pytest.mark.parametrize("seed", range(5))
def test_no_report_ends_the_coordinator_or_the_run(seed: int) -> None:
    rng, now, committed = Random(seed), 0.0, 0
    audited = set[int]()  # rounds
    state = step(State(CONFIG), ev.Started(1, b"nonce"), now)[0]
    for node in map(NodeId, ("n1", "n2", "n3", HOSTILE, WATCHER)):
        for joined in (enters(node, 1), ev.Connected(node, 1)):
            state = step(state, joined, now)[0]
        state = step(state, ev.LayoutReported(node, 1, 40, sum_of("layout")), now)[0]
    for _ in range(600):
        now += rng.choice([0.0, 0.01, 0.3])
        node = rng.choice([*state.members.here, HOSTILE])
        event: ev.Event | None = ev.Tick()
        if node not in state.members.here:
            life = state.members.departed[node].life + 1
            state = step(state, enters(node, life), now)[0]
            event = ev.Connected(node, life)
        elif node != HOSTILE or rng.random() < 0.3:
            event = said_by(state, node)
        else:
            try:
                event = validation.event(node, state.members.here[node].life, hostile(rng, state))
            except ValueError:
                continue
        state, effects = step(state, event or ev.Tick(), now)
        committed += sum(isinstance(effect, Publish) and not effect.record.void for effect in effects)
        audited.update([state.round.number] if state.round.audits else [])
        for member in state.members.here:
            view.view(state, member)
    assert decode(encode(state), CONFIG) == state
    assert committed >= 3, state.round.reason
    assert audited
