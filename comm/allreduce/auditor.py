"""The audit of a sealed chunk: a member fetches what went into it from those who contributed it, and the receipt
of its owner, and recomputes the sealed bytes by the code that seals (`merge_executor.seal_chunk`).

    owner          --receipt--> signed by it, and each record by who contributed: else the receipt does not hold
    contributors   --input---> of the digest in the receipt: else who signed both lied
    all of them    --seal-----> the digest, which the coordinator compares with the ledger's

A chunk that was reduced in two levels has a receipt of each relay, too, and a region's mean that is recomputed.
What an auditor says is believed as far as others can see that it is true
(`atoll.coordinator.state_machine.audit`).
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.comm.allreduce.effects import MergeChunk, SumRegion
from atoll.comm.allreduce.inbox import ContributionInbox
from atoll.comm.allreduce.merge_executor import PendingMerge, seal_chunk
from atoll.comm.allreduce.reduce_evidence import split_input
from atoll.comm.allreduce.sealing import SealFormat, UnusableContribution, mean_of
from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import Codec, Malformed
from atoll.comm.digest import digest
from atoll.comm.ids import NO_PIN, NodeId
from atoll.comm.plan import NOBODY, InvalidPlan, Plan
from atoll.comm.receipts import InputRecord, MalformedReceipt, Receipt, receipt_bytes, unpack_receipt
from atoll.comm.signatures import SIGNATURE_BYTES
from atoll.comm.transport.data_plane import DataPlane
from atoll.comm.transport.fetch_client import DonorLost, FetchClient, FetchItem, NotAvailable
from atoll.comm.workers import workers

log = logging.getLogger("atoll.allreduce")
RECEIPT_SHARE = 0.3  # share of an audit's time that a receipt may take
ANSWER_SHARE = 0.9  # share of it after which what is not there yet will not come


@dataclass(frozen=True)
class AuditOrder:
    """What the coordinator wants to know of a sealed chunk."""

    chunk: int
    since: int  # the attempt in which it got its owner
    inputs: tuple[int, ...]  # places of those whose contributions are in it
    seconds: float  # for the answer


@dataclass(frozen=True)
class AuditFinding:
    """What an auditor found."""

    chunk: int
    since: int
    digest: bytes = b""  # of what the inputs come to; empty: it cannot be told, or they come to nothing
    receipts: tuple[bytes, ...] = ()  # the owner's, then its relays', as they came
    silent: tuple[int, ...] = ()  # places of those who did not give what was asked
    shown: bytes = b""  # of a contribution that differs from the receipt's: its record, signed by its sender
    relay: int | None = None  # place of a relay whose mean is not what its inputs come to, if to anything
    norms: tuple[float, ...] = ()  # l2 norms of what the owner merged, as its seal has them; none: not looked at
    sums: tuple[tuple[int, tuple[float, ...]], ...] = ()  # those of what relays averaged: place, norms


class _Silent(Exception):
    """The member at this place gives nothing that it can be held to."""

    def __init__(self, place: int) -> None:
        self.place = place


class _OtherInput(Exception):
    """A member signed another content than the receipt's."""

    def __init__(self, record: InputRecord) -> None:
        self.record = record


class _Unsound(Exception):
    """The receipts show that their signer lied."""


class Auditor:
    """One member's audits."""

    def __init__(self, plane: DataPlane, me: NodeId, codec: Codec, chunks: Chunks, sealing: SealFormat) -> None:
        """`chunks`: of the fragment that the round exchanges; `sealing`: its format of sealed bytes."""
        self._plane, self._me, self._codec, self._chunks, self._sealing = plane, me, codec, chunks, sealing

    async def audit(self, order: AuditOrder, plan: Plan) -> AuditFinding:
        """Recompute a chunk under the newest plan of its round, which has all places of the order's inputs.
        Returns in time, whatever the others do. Raises `InvalidPlan` if the order is not for such a plan."""
        self._check(order, plan)
        audit = _ChunkAudit(self._plane, self._me, self._codec, self._chunks, self._sealing, order, plan)
        return await audit.finding()

    async def contributions(self, order: AuditOrder, plan: Plan) -> dict[int, U8]:
        """The contributions to a chunk of the places in `order.inputs`, by place, as they are in the owner's
        receipt. Who is missing gave nothing, or something else than it had sent; nobody is there where the owner
        gives no receipt. Returns in time, whatever the others do. Raises `InvalidPlan` as `audit`."""
        self._check(order, plan)
        audit = _ChunkAudit(self._plane, self._me, self._codec, self._chunks, self._sealing, order, plan)
        return await audit.contributions()

    def _check(self, order: AuditOrder, plan: Plan) -> None:
        owned = order.chunk < min(len(plan.owners), self._chunks.count) and plan.owners[order.chunk] != NOBODY
        if not owned or not plan.salt or max(order.inputs, default=len(plan.members)) >= len(plan.members):
            raise InvalidPlan(f"{plan}: it is not one under which chunk {order.chunk} can be audited")


class _ChunkAudit:
    def __init__(
        self,
        plane: DataPlane,
        me: NodeId,
        codec: Codec,
        chunks: Chunks,
        sealing: SealFormat,
        order: AuditOrder,
        plan: Plan,
    ) -> None:
        self._plane, self._me, self._codec, self._chunks, self._sealing = plane, me, codec, chunks, sealing
        self._order, self._plan = order, plan
        self._receipts: list[bytes] = []
        self._region_norms: dict[int, tuple[float, ...]] = {}  # by the place of its relay
        self._early: dict[int, asyncio.Task[bytes]] = {}  # inputs that are fetched before a receipt asks, by place
        self._clock = asyncio.get_running_loop().time
        self._until = self._clock() + ANSWER_SHARE * order.seconds

    async def finding(self) -> AuditFinding:
        c, since = self._order.chunk, self._order.since
        try:
            found, norms, relay = await self._recompute()
            sums = tuple(self._region_norms.items()) if norms else ()
            return AuditFinding(c, since, found, tuple(self._receipts), relay=relay, norms=norms, sums=sums)
        except _Silent as silent:
            return AuditFinding(c, since, b"", tuple(self._receipts), (silent.place,))
        except _OtherInput as other:
            return AuditFinding(c, since, b"", tuple(self._receipts), shown=other.record.pack())
        except (_Unsound, UnusableContribution):
            return AuditFinding(c, since, b"", tuple(self._receipts))
        finally:
            for task in self._early.values():
                task.cancel()
            await asyncio.gather(*self._early.values(), return_exceptions=True)

    async def contributions(self) -> dict[int, U8]:
        """What the order's places contributed, of those who show it."""
        try:
            receipt = await self._receipt(self._plan.owners[self._order.chunk], self._plan.members)
        except (_Silent, _Unsound):
            return {}
        records = [r for r in receipt.records if r.place in self._order.inputs and not r.inputs]
        found = await asyncio.gather(*map(self._input, records))
        shown = zip(records, found, strict=True)
        return {record.place: input_ for record, input_ in shown if not isinstance(input_, Exception)}

    async def _recompute(self) -> tuple[bytes, tuple[float, ...], int | None]:
        """The digest of what the inputs come to, and their norms; or the place of a relay whose sum is wrong."""
        order, plan, c = self._order, self._plan, self._order.chunk
        owner = plan.owners[c]
        if c not in plan.layered:  # all contributed to the owner itself: their inputs come while its receipt does
            others = (place for place in order.inputs if place != owner)  # of whom nobody is asked twice at once
            self._early = {place: asyncio.create_task(self._fetch_input(place)) for place in others}
        receipt = await self._receipt(owner, order.inputs)
        sums: list[tuple[int, tuple[int, ...]]] = []
        payloads: dict[int, U8] = {}
        direct = [record for record in receipt.records if not record.inputs]
        self._check_places(receipt, order.inputs)
        for record in receipt.records:
            if record.inputs:
                mean = await self._region_mean(record)
                if mean is None or digest(mean) != record.digest:
                    return b"", (), record.place
                payloads[record.place] = mean
                sums.append((record.place, record.inputs))
        payloads |= await self._inputs(direct)
        merge = MergeChunk(c, order.since, order.inputs, tuple(sums))
        sealed, norms = await self._sealed(merge, payloads, self._sealing)
        return digest(sealed), norms, None

    async def _region_mean(self, record: InputRecord) -> U8 | None:
        """A region's mean, recomputed from what its members contributed; None: they have none, as one of them is
        nothing that can be merged, and its relay should have refused it."""
        if not self._plan.relays_for(self._order.chunk, record.place):
            raise _Unsound
        receipt = await self._receipt(record.place, record.inputs)
        self._check_places(receipt, record.inputs)
        if receipt.mean != record.digest or any(r.inputs for r in receipt.records):
            raise _Unsound
        payloads = await self._inputs(receipt.records)
        order = SumRegion(self._order.chunk, self._order.since, record.inputs)
        try:
            mean, norms = await self._sealed(order, payloads, mean_of(self._codec))
        except UnusableContribution:
            return None
        self._region_norms[record.place] = norms
        return mean

    async def _sealed(
        self, order: MergeChunk | SumRegion, payloads: dict[int, U8], sealing: SealFormat
    ) -> tuple[U8, tuple[float, ...]]:
        """The bytes that a member makes of these inputs, by the code with which it does, and the inputs' norms if
        it tells those. Raises `UnusableContribution`."""
        c, plan, inbox = order.chunk, self._plan, ContributionInbox[U8](NodeId(""))
        for place, payload in payloads.items():
            inbox.put(c, place, payload)
        merge = PendingMerge(order, plan, inbox.begin(order, plan))
        terms = [(term.place, payloads[term.place], term.share) for term in merge.terms]
        numel, measured = self._chunks.size(c), self._codec if plan.looks_at_norms else None
        out = np.empty(sealing.size(numel, len(terms)), np.uint8)
        work = measured, sealing, c, terms, plan.length, numel, out
        try:
            _, norms = await asyncio.get_running_loop().run_in_executor(workers(), seal_chunk, *work)
        except Malformed as error:  # shares that cannot be
            raise UnusableContribution(-1, str(error)) from None
        return out, norms

    # What others have

    async def _receipt(self, place: int, inputs: Sequence[object]) -> Receipt:
        """The receipt of the member at `place`, signed by it, whose records are each signed by their places'
        members. What is larger than any of so many inputs is none: it would have to be reported."""
        plan, order, c = self._plan, self._order, self._order.chunk
        key = plan.members[place].key
        data = await self._fetch(place, FetchItem.RECEIPT, receipt_bytes(len(inputs)))
        try:
            receipt = unpack_receipt(data)
        except MalformedReceipt:
            raise _Silent(place) from None
        if not receipt.signed_by(key, plan.salt, c, order.since, place):
            raise _Silent(place)
        self._receipts.append(data)
        for record in receipt.records:
            known = record.place < len(plan.members)
            if not known or not record.signed_by(plan.members[record.place].key, plan.salt, c):
                raise _Unsound
        return receipt

    def _check_places(self, receipt: Receipt, inputs: tuple[int, ...]) -> None:
        if sorted(places_of(receipt)) != sorted(inputs):
            raise _Unsound

    async def _inputs(self, records: Sequence[InputRecord]) -> dict[int, U8]:
        """The contributions that the records are of, by place."""
        async with asyncio.TaskGroup() as group:
            tasks = {record.place: group.create_task(self._input(record)) for record in records}
        found = {place: task.result() for place, task in tasks.items()}
        for outcome in found.values():  # proof before silence
            if isinstance(outcome, _OtherInput):
                raise outcome
        for outcome in found.values():
            if isinstance(outcome, _Silent):
                raise outcome
        return {place: outcome for place, outcome in found.items() if not isinstance(outcome, Exception)}

    async def _input(self, record: InputRecord) -> U8 | _Silent | _OtherInput:
        early = self._early.get(record.place)
        try:
            data = await (self._fetch_input(record.place) if early is None else early)
        except _Silent as silent:
            return silent
        payload, signature = split_input(data)
        found = digest(payload)
        if found == record.digest:
            return payload
        shown, key = InputRecord(record.place, found, signature), self._plan.members[record.place].key
        signed = shown.signed_by(key, self._plan.salt, self._order.chunk)
        return _OtherInput(shown) if signed else _Silent(record.place)

    async def _fetch_input(self, place: int) -> bytes:
        """The contribution of the member at `place`, its signature behind it. Raises `_Silent`."""
        size = self._codec.size(self._chunks.size(self._order.chunk)) + SIGNATURE_BYTES
        return await self._fetch(place, FetchItem.INPUT, size)

    async def _fetch(self, place: int, item: FetchItem, size: int) -> bytes:
        """What the member at `place` has: of so many bytes, or a receipt of at most so many. Raises `_Silent`."""
        member, plan, c = self._plan.members[place], self._plan, self._order.chunk
        if member.node == self._me:
            own = await self._plane.peers.evidence(self._me, item.value, plan.round, c)
            if own is None:
                raise _Silent(place)
            return bytes(own)
        seconds, receipt = max(self._until - self._clock(), 0.0), item is FetchItem.RECEIPT
        if receipt:
            seconds = min(seconds, RECEIPT_SHARE * self._order.seconds)
        until = self._clock() + seconds
        try:
            async with asyncio.timeout(seconds):  # over the links that the reduce has, if it has some
                found = await self._plane.peers.ask(
                    member.node, item.value, plan.round, c, size, exact=not receipt
                )
        except TimeoutError:
            log.info(f"round {plan.round}, audit of chunk {c}: {member.node} does not answer")
            raise _Silent(place) from None
        if found is not None:
            return bytes(found)
        seconds = max(until - self._clock(), 0.0)
        address, pin = ("", NO_PIN) if member.leaf else (member.address, member.pin)
        try:
            async with FetchClient(self._plane, member.node, address, pin, any_leaf=False) as client:
                fits = (lambda length: length <= size) if receipt else None
                return await client.fetch(item, plan.round, c, size, seconds, fits)
        except (DonorLost, NotAvailable) as error:
            log.info(f"round {plan.round}, audit of chunk {c}: {member.node} shows nothing: {error}")
            raise _Silent(place) from None


def places_of(receipt: Receipt) -> list[int]:
    """The places whose contributions a receipt's mean is made of."""
    return [place for record in receipt.records for place in (record.inputs or (record.place,))]
