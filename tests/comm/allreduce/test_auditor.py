"""Audits of sealed chunks over loopback TCP: members that fetch what went into a chunk find who lied about it."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from reduce_members import (
    CHUNKS,
    CODEC,
    ENCODED,
    GATHERED,
    SPARSE,
    SPARSE_CODEC,
    VECTORS,
    Member,
    encode,
    fleet,
    name,
    plan_for,
    reducing,
    reference,
    run,
)

from atoll.comm.allreduce import evidence_requests, merge_executor
from atoll.comm.allreduce.auditor import AuditFinding, Auditor, AuditOrder
from atoll.comm.allreduce.input_signer import InputSigner, with_signature
from atoll.comm.allreduce.sealing import SealFormat, mean_of
from atoll.comm.byte_view import U8, Octets
from atoll.comm.codecs.codec import Codec
from atoll.comm.digest import digest
from atoll.comm.ids import NodeId
from atoll.comm.plan import InvalidPlan, Plan
from atoll.comm.receipts import SALT_BYTES, sign_input, unpack_receipt, unpack_record
from atoll.comm.signatures import PrivateKey
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.fetch_client import FetchClient, FetchItem
from atoll.comm.transport.frames import FrameKind

SALT = b"s" * SALT_BYTES
KEYS = [PrivateKey.generate() for _ in range(6)]
MEAN = mean_of(CODEC)
SECONDS = 10.0


def signed_plan(planes: Sequence[DataPlane], leaves: Sequence[int] = (), **rest: Any) -> Plan:
    plan = plan_for(planes, salt=SALT, **rest)
    members = [
        replace(m, key=KEYS[i].public, leaf=i in leaves, address="" if i in leaves else m.address)
        for i, m in enumerate(plan.members)
    ]
    return replace(plan, members=tuple(members))


def with_norms(plan: Plan, norm: float = 100.0) -> Plan:
    """The plan of a run that clips, in which all tell this norm; inf: that does not."""
    return replace(plan, members=tuple(replace(m, norm=norm) for m in plan.members))


def signing(
    planes: Sequence[DataPlane], plan: Plan, payloads: Sequence[Sequence[U8]] = ENCODED, **rest: Any
) -> list[Member]:
    return [Member(p, payloads[i], plan, signer=InputSigner(KEYS[i]), **rest) for i, p in enumerate(planes)]


async def audited(
    member: Member,
    plan: Plan,
    c: int,
    inputs: Sequence[int],
    codec: Codec = CODEC,
    sealing: SealFormat = MEAN,
    seconds: float = SECONDS,
) -> AuditFinding:
    auditor = Auditor(member.plane, member.plane.node, codec, CHUNKS, sealing)
    return await auditor.audit(AuditOrder(c, plan.since[c] if plan.since else 1, tuple(inputs), seconds), plan)


@pytest.mark.parametrize("c", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("norm", [math.inf, 100.0])
def test_an_auditor_recomputes_what_an_honest_owner_sealed_and_the_norms_that_it_told(c: int, norm: float) -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            plan = signed_plan(planes, weights=[1.0, 2.5, 0.0, 3.0])
            plan = with_norms(plan, norm)
            members = signing(planes, plan)
            members[2] = await without_delta(members[2], plan)
            async with reducing(*members):
                await members[0].holds_all()
                sealed = members[0].reduction.result.digests[c]
                for member in members:
                    found = await audited(member, plan, c, [0, 1, 3])
                    assert found.digest == sealed
                    assert norm < math.inf or sealed == digest(reference(c, [0, 1, 3], [1.0, 2.5, 3.0]))
                    assert found.norms == members[plan.owners[c]].reports.seals[c][1].norms
                    assert len(found.norms) == (3 if norm < math.inf else 0)
                    (receipt,) = map(unpack_receipt, found.receipts)
                    assert receipt.mean == sealed and [r.place for r in receipt.records] == [0, 1, 3]

    run(body())


async def without_delta(member: Member, plan: Plan) -> Member:
    await member.stop()
    return Member(member.plane, None, plan, signer=InputSigner(KEYS[2]))


def test_a_verifier_that_is_no_member_gets_what_was_contributed_as_the_receipt_has_it() -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            *three, outside = planes
            plan = replace(signed_plan(three), verifiers=frozenset({outside.node}))
            members = signing(three, plan)
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                asked = AuditOrder(4, 1, (0, 2), SECONDS)
                auditor = Auditor(outside, outside.node, CODEC, CHUNKS, MEAN)
                found = await auditor.contributions(asked, plan)
                assert {p: bytes(payload) for p, payload in found.items()} == {
                    p: bytes(ENCODED[p][4]) for p in (0, 2)
                }
                with pytest.raises(InvalidPlan):
                    await auditor.contributions(replace(asked, inputs=(0, 3)), plan)
                for member in members:
                    for node, may in ((outside.node, True), (NodeId("nobody"), False)):
                        given = await member.reduction.evidence(node, FrameKind.GET_INPUT, 4)
                        assert (given is not None) is may
                    member.reduction.replan(replace(plan, attempt=2, verifiers=frozenset()))
                assert not await auditor.contributions(replace(asked, seconds=1.0), plan)

    run(body())


def test_an_auditor_recomputes_what_was_only_gathered() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = with_norms(signed_plan(planes))
            members = signing(planes, plan, SPARSE, codec=SPARSE_CODEC, sealing=GATHERED)
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                found = await audited(members[0], plan, 4, range(3), SPARSE_CODEC, GATHERED)
                assert found.digest == members[0].reduction.result.digests[4]
                assert found.norms == members[plan.owners[4]].reports.seals[4][1].norms != ()

    run(body())


def liar(monkeypatch: pytest.MonkeyPatch, victim: bytes, value: float = -12345.0) -> None:
    """Every member that seals what would have this digest seals another mean in its place."""
    honest = merge_executor.seal_chunk

    def forge(
        codec: Codec | None, sealing: SealFormat, c: int, terms: Any, length: float, numel: int, out: U8
    ) -> tuple[bytes, tuple[float, ...]]:
        found, norms = honest(codec, sealing, c, terms, length, numel, out)
        if found == victim:
            CODEC.encode(np.full(numel, value, np.float32), out)
            found = digest(out)
        return found, norms

    monkeypatch.setattr(merge_executor, "seal_chunk", forge)


def test_an_owner_that_seals_something_else_is_found_out_by_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            plan = signed_plan(planes)
            right = digest(reference(5, range(4), [1.0] * 4))
            liar(monkeypatch, right)
            members = signing(planes, plan)
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                sealed = members[0].reduction.result
                out = np.empty(CHUNKS.size(5), np.float32)
                CODEC.decode(sealed.chunks[5], out)
                assert np.allclose(out, -12345, rtol=0.01) and sealed.digests[5] != right
                for i in (0, 2, 3):  # the others' roots are all equal to its
                    assert members[i].reduction.result.digests == sealed.digests
                    found = await audited(members[i], plan, 5, range(4))
                    assert found.digest == right != sealed.digests[5]
                    assert unpack_receipt(found.receipts[0]).signed_by(KEYS[1].public, SALT, 5, 1, 1)

    run(body())


def test_a_contributor_that_shows_other_bytes_than_it_sent_convicts_itself() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = signed_plan(planes, owners=[0] * 10)
            members = signing(planes, plan)
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                evidence = members[2].reduction._evidence
                evidence._signer = InputSigner(KEYS[2])  # which forgets what it signed
                evidence._records.clear()
                evidence._encoded = members[2].vector_of(encode(VECTORS[5]))
                for i in (0, 1):
                    found = await audited(members[i], plan, 3, range(3))
                    shown, sent = unpack_record(found.shown), unpack_receipt(found.receipts[0]).records[2]
                    assert found.digest == b"" and shown.place == sent.place == 2
                    assert shown.digest == digest(ENCODED[5][3]) and sent.digest == digest(ENCODED[2][3])
                    for record in (shown, sent):
                        assert record.signed_by(KEYS[2].public, SALT, 3)

    run(body())


def test_an_honest_node_whose_memory_changed_signs_nothing_and_is_only_silent() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = signed_plan(planes, owners=[0] * 10)
            members = signing(planes, plan)
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                members[2].reduction._evidence._encoded = members[2].vector_of(encode(VECTORS[5]))
                found = await audited(members[1], plan, 3, range(3))
                assert found.silent == (2,) and not found.shown and not found.digest

    run(body())


def test_what_is_shown_to_an_auditor_stays_while_it_is_on_its_way_and_the_chunk_is_sealed() -> None:
    """An answer over a slow link is read from the member's memory long after it was given."""

    async def body() -> None:
        async with fleet(3) as planes:
            plan = signed_plan(planes)
            members = signing(planes, plan)
            async with reducing(*members):
                asker = NodeId(plan.members[0].node)
                shown = []
                for c in range(CHUNKS.count):
                    answer = await members[1].reduction.evidence(asker, FrameKind.GET_INPUT, c)
                    assert answer is not None
                    shown.append((answer, bytes(answer)))
                for member in members:
                    await member.holds_all()
                buffers = planes[1].peers.buffers
                for _ in range(len(buffers)):  # others use again what is free
                    buffers.take(1, 1).base.fill(0)  # type: ignore[union-attr]
                assert all(bytes(answer) == before for answer, before in shown)

    run(body())


def test_audits_travel_over_the_links_of_the_reduce_and_beyond_a_share_over_connections_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            plan = signed_plan(planes)
            members = signing(planes, plan)
            dialled = list[FetchItem]()
            fetch = FetchClient.fetch

            async def counted(client: FetchClient, item: FetchItem, *rest: Any) -> bytes:
                dialled.append(item)
                return await fetch(client, item, *rest)

            monkeypatch.setattr(FetchClient, "fetch", counted)
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                auditor, sealed = members[0], members[0].reduction.result.digests
                assert [(await audited(auditor, plan, c, range(4))).digest for c in range(10)] == list(sealed)
                assert not dialled
                for _ in range(evidence_requests.MAX_ANSWERS // 10):
                    for c in range(10):
                        assert (await audited(auditor, plan, c, range(4))).digest == sealed[c]
                assert dialled
                for member in members[1:]:  # it counts for each by itself
                    dialled.clear()
                    assert (await audited(member, plan, 5, range(4))).digest == sealed[5]
                    assert not dialled

    run(body())


def test_an_audit_asks_again_over_the_next_link_when_one_breaks() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = signed_plan(planes)
            members = signing(planes, plan)
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                answer, asked = members[2].reduction.evidence, 0

                async def breaks(node: NodeId, kind: FrameKind, c: int) -> Octets | None:
                    nonlocal asked
                    asked += 1
                    if asked == 1:
                        members[2].plane.peers.drop(node)
                        await asyncio.get_running_loop().create_future()
                    return await answer(node, kind, c)

                members[2].reduction.evidence = breaks  # type: ignore[method-assign]
                owned = plan.owners.index(1)
                found = await audited(members[0], plan, owned, range(3))
                assert found.digest == members[0].reduction.result.digests[owned] and asked > 1

    run(body())


def test_who_does_not_answer_is_named_in_time() -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            plan = signed_plan(planes, owners=[0, 1, 2, 3] * 2 + [0, 1])
            members = signing(planes, plan)
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                members[3].reduction._evidence._signer = None  # it has nothing to say
                assert (await audited(members[1], plan, 0, range(4))).silent == (3,)
                assert (await audited(members[1], plan, 3, range(4))).silent == (3,)
                await planes[3].close()
                assert (await audited(members[2], plan, 0, range(4), seconds=2.0)).silent == (3,)

    run(body())


def test_an_owner_that_leaves_an_input_out_of_its_receipt_is_found_out() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = signed_plan(planes, owners=[0] * 10)
            members = signing(planes, plan)
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                merged = members[0].reduction._evidence._merged
                since, records, own, mean = merged[3]
                merged[3] = since, records[:1], own, mean
                found = await audited(members[1], plan, 3, range(3))
                assert not found.digest and not found.silent
                assert [r.place for r in unpack_receipt(found.receipts[0]).records] == [0, 1]

    run(body())


def test_a_contribution_whose_signature_is_not_its_senders_is_refused_and_its_sender_named() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = signed_plan(planes, owners=[0] * 10)
            members = [
                Member(p, ENCODED[i], plan, signer=InputSigner(KEYS[5 if i == 2 else i]))
                for i, p in enumerate(planes)
            ]
            async with reducing(*members):
                await members[0].reports.until(lambda reports: bool(reports.blamed))
                node, sentence = members[0].reports.blamed[0]
                assert node == name(2) and "its signature is not of these bytes" in sentence
                assert not members[0].reports.seals

    run(body())


def test_a_leaf_shows_its_contribution_over_a_connection_that_it_opens() -> None:
    async def body() -> None:
        async with fleet(3) as planes:
            plan = signed_plan(planes, leaves=[2], owners=[0, 1] * 5)
            members = signing(planes, plan)
            async with reducing(*members):
                await members[0].holds_all()
                await members[1].holds_all()
                planes[2].offering.offer_to([(name(1), planes[1].address, planes[1].pin)])
                found = await audited(members[1], plan, 0, range(3))
                assert found.digest == members[0].reduction.result.digests[0]

    run(body())


OWNERS, RELAYS = [0, 1, 3, 4, 0, 1, 3, 4, 0, 1], {0: 3, 1: 4, 3: 0, 4: 1}  # of places 0 to 2, and 3 to 4
LEVELS: dict[str, Any] = {
    "owners": OWNERS,
    "regions": (0, 0, 0, 1, 1),
    "relays": (tuple(o if o < 3 else RELAYS[o] for o in OWNERS), tuple(o if o > 2 else RELAYS[o] for o in OWNERS)),
    "layered": frozenset(range(10)),
}


def test_in_two_levels_means_are_recomputed_region_by_region_and_a_lying_relay_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with fleet(5) as planes:
            plan = with_norms(signed_plan(planes, **LEVELS))
            members = signing(planes, plan)
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                sealed = members[0].reduction.result.digests
                for c in range(4):
                    for member in members:
                        found = await audited(member, plan, c, range(5))
                        assert found.digest == sealed[c] and len(found.receipts) == 2
                        assert found.norms == members[plan.owners[c]].reports.seals[c][1].norms != ()
                        relay = RELAYS[plan.owners[c]]
                        assert found.sums == ((relay, members[relay].reports.sums[c].norms),) != ((relay, ()),)
            relayed = digest(reference(1, [3, 4], [1.0] * 2))
        async with fleet(5) as planes:
            plan = signed_plan(planes, **LEVELS)
            liar(monkeypatch, relayed)
            members = signing(planes, plan)
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                found = await audited(members[2], plan, 1, range(5))
                assert found.relay == 4 and not found.digest

    run(body())


def test_a_relay_is_named_that_signed_a_mean_of_what_cannot_be_merged() -> None:
    """It and who contributed that lie together: the owner got a mean like any other."""

    async def body() -> None:
        async with fleet(5) as planes:
            plan = signed_plan(planes, **LEVELS)
            members = signing(planes, plan)
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                unusable = ENCODED[3][1].copy()
                unusable[:] = 0xFF  # scales that are no numbers
                contributor, relay = members[3].reduction._evidence, members[4].reduction._evidence
                record = sign_input(KEYS[3], SALT, 1, 3, digest(unusable))

                async def input_(plan: Plan, kind: FrameKind, c: int) -> Octets | None:
                    return with_signature(unusable, record.signature)

                contributor.answer = input_  # type: ignore[method-assign]
                since, _, own, mean = relay._merged[1]
                relay._merged[1] = since, (record,), own, mean
                found = await audited(members[2], plan, 1, range(5))
                assert found.relay == 4 and not found.digest and len(found.receipts) == 2

    run(body())


def test_who_is_no_relay_is_not_asked_for_a_receipt_of_what_an_owner_says_that_it_summed() -> None:
    """The two lie together: nobody else could tell the other's silence from an auditor's slander."""

    async def body() -> None:
        async with fleet(4) as planes:
            plan = signed_plan(planes)
            members = signing(planes, plan)
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                owner = members[0].reduction._evidence
                since, records, own, mean = owner._merged[0]
                summed = sign_input(KEYS[1], SALT, 0, 1, digest(b"a sum"), (1, 3))
                owner._merged[0] = since, (summed, records[1]), own, mean
                found = await audited(members[2], plan, 0, range(4))
                assert not found.digest and not found.silent and len(found.receipts) == 1

    run(body())


@pytest.mark.long
def test_a_receipt_is_not_taken_that_is_larger_than_any_of_its_inputs() -> None:
    """Whoever audits would have to report it, and the coordinator refuse that."""

    async def body() -> None:
        async with fleet(3) as planes:
            plan = signed_plan(planes, owners=[0] * 10)
            members = signing(planes, plan)
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                inflated = sign_input(KEYS[0], SALT, 3, 0, b"d" * 16, tuple(range(1000)))
                merged = members[0].reduction._evidence._merged
                since, _, _, mean = merged[3]
                merged[3] = since, (inflated,), False, mean
                found = await audited(members[1], plan, 3, range(3))
                assert found.silent == (0,) and not found.receipts

    run(body())


def test_the_others_inputs_come_while_the_owner_looks_for_its_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with fleet(4) as planes:
            plan = signed_plan(planes)
            members = signing(planes, plan)
            async with reducing(*members):
                for member in members:
                    await member.holds_all()
                asked = asyncio.Event()
                answer, look = members[3].reduction.evidence, members[1].reduction.evidence

                async def input_(node: NodeId, kind: FrameKind, c: int) -> Octets | None:
                    asked.set()
                    return await answer(node, kind, c)

                async def receipt(node: NodeId, kind: FrameKind, c: int) -> Octets | None:
                    await asked.wait()
                    return await look(node, kind, c)

                monkeypatch.setattr(members[3].reduction, "evidence", input_)
                monkeypatch.setattr(members[1].reduction, "evidence", receipt)
                assert plan.owners[5] == 1
                found = await audited(members[0], plan, 5, range(4))
                assert found.digest == members[0].reduction.result.digests[5] and not found.silent

    run(body())
