"""The evidence that a member has of its part in a reduce, for auditors: what it contributed, signed, and as an
owner or relay the receipts of what it merged. It lasts as long as the reduce.
"""

import asyncio

import numpy as np

from atoll.comm.allreduce.delta_encoder import EncodedVector
from atoll.comm.allreduce.input_signer import InputSigner, with_signature
from atoll.comm.allreduce.merge_executor import MergedChunk, PendingMerge
from atoll.comm.byte_view import U8, Octets
from atoll.comm.digest import digest
from atoll.comm.ids import NodeId
from atoll.comm.plan import Plan
from atoll.comm.receipts import InputRecord
from atoll.comm.signatures import SIGNATURE_BYTES
from atoll.comm.transport.frames import FrameKind
from atoll.comm.workers import workers

SIGNED_AT_ONCE = 8  # contributions


class ReduceEvidence:
    """The evidence of the member `me`."""

    def __init__(self, me: NodeId, encoded: EncodedVector | None, signer: InputSigner | None) -> None:
        self._me, self._encoded, self._signer = me, encoded, signer
        # By chunk: since which attempt it is this member's to merge, the others' records, whether its own
        # contribution is in it, and the digest of what was made of them.
        self._merged: dict[int, tuple[int, tuple[InputRecord, ...], bool, bytes]] = {}
        self._records: dict[tuple[int, int], InputRecord] = {}  # by place and chunk: of what it contributes

    def merged(self, merge: PendingMerge, made: MergedChunk) -> None:
        """Keep what a merge was made of."""
        own = any(term.payload is None for term in merge.terms)
        if merge.plan.salt:
            self._merged[merge.order.chunk] = merge.order.since, made.records, own, made.digest

    async def contribution(self, plan: Plan, c: int) -> U8 | None:
        """This member's contribution to chunk `c`, with its signature behind it, if the plan has a salt. None: it
        will never be there."""
        payload = await self._encoded.chunk(c) if self._encoded is not None else None
        if payload is None or not plan.salt:
            return payload
        record = await self._own_record(plan, c, payload)
        return with_signature(payload, record.signature if record is not None else bytes(SIGNATURE_BYTES))

    async def answer(self, plan: Plan, kind: FrameKind, c: int) -> Octets | None:
        """Answer an auditor, which is a member: GET_INPUT, GET_RECEIPT; None: it is not here."""
        if not plan.salt or self._signer is None:
            return None
        if kind is FrameKind.GET_INPUT:
            return None if plan.members[plan.index(self._me)].weight == 0 else await self.contribution(plan, c)
        return await self._receipt(plan, c, self._signer)

    async def _own_record(self, plan: Plan, c: int, payload: U8) -> InputRecord | None:
        """The record of this member's contribution to chunk `c`; those that are to follow it are signed as well,
        as to go to another thread costs more than to sign."""
        signer, place = self._signer, plan.index(self._me)
        if signer is None or (record := self._records.get((place, c))) is not None:
            return None if signer is None else record
        encoded = self._encoded
        assert encoded is not None
        due = {c: encoded.digest_of(c)}
        for later in range(c + 1, encoded.ready):
            if len(due) == SIGNED_AT_ONCE:
                break
            found = encoded.digest_of(later)
            known = found is None or (place, later) in self._records
            if found is not None and not known and plan.destination(later, place) != place:
                due[later] = found

        def sign() -> None:
            for chunk, found in due.items():
                record = signer.input(plan.salt, chunk, place, digest(payload) if found is None else found)
                if record is not None:
                    self._records[place, chunk] = record

        await asyncio.get_running_loop().run_in_executor(workers(), sign)
        return self._records.get((place, c))

    async def _receipt(self, plan: Plan, c: int, signer: InputSigner) -> bytes | None:
        if (found := self._merged.get(c)) is None:
            return None
        since, records, own, mean = found
        if own:
            payload = await self._encoded.chunk(c) if self._encoded is not None else None
            record = await self._own_record(plan, c, payload) if payload is not None else None
            if record is None:
                return None
            records = tuple(sorted((*records, record), key=lambda r: r.place))
        place = plan.index(self._me)
        return signer.receipt(plan.salt, c, since, place, records, mean).pack()


def split_input(data: bytes) -> tuple[U8, bytes]:
    """A contribution as an auditor gets it, and the signature behind it."""
    payload = np.frombuffer(data, np.uint8)
    return payload[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
