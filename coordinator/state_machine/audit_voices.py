"""What an auditor's report comes to: how much of it others can see to be true. Pure.

`audit` calls it for every report that does not simply say that a chunk is well, and once more for the verdict.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from atoll.comm.bitmap import bit, places
from atoll.comm.ids import NodeId, PublicKey
from atoll.comm.receipts import InputRecord, MalformedReceipt, Receipt, unpack_receipt, unpack_record
from atoll.coordinator.state_machine.events import AuditReported
from atoll.coordinator.state_machine.state import Audit, State


class VoiceKind(StrEnum):
    """What an auditor's report comes to."""

    WELL = "well"  # the inputs come to what was sealed
    OTHER = "other"  # they come to something else
    RELAY = "relay"  # a relay's mean is not what its inputs come to
    SILENT = "silent"  # a member did not give what was asked
    UNSOUND = "unsound"  # proof: a signed receipt does not hold
    TWO_INPUTS = "two inputs"  # proof: a member signed two contents
    FALSE = "false"  # it shows by itself that it is not so


@dataclass(frozen=True, slots=True)
class Voice:
    """An auditor's report, as it counts."""

    kind: VoiceKind
    place: int = -1  # of whom it is about; -1: the owner's
    facts: tuple[tuple[str, str], ...] = ()


def parties(state: State, c: int, inputs: bytes) -> set[NodeId] | None:
    """Who has something to show of the chunk; None: one of them takes part no more."""
    ledger = state.round.ledger
    at = [i for i, e in enumerate(ledger.entries) if e.contribution is not None and bit(inputs, i)]
    if c in ledger.layered:
        at += [row[c] for row in ledger.relays]
    if ledger.owners[c] is None or any(ledger.entries[i].gone for i in at):
        return None
    found = {ledger.entries[i].node for i in at} | {n for n in ledger.owners[c : c + 1] if n is not None}
    here = state.members.here
    return found if all(n in here and here[n].key for n in found) else None


def voice_of(state: State, audit: Audit, event: AuditReported) -> Voice:
    """What a report comes to that is not `WELL`."""
    if event.digest == audit.digest:
        return Voice(VoiceKind.WELL)
    receipts = [_receipt(state, audit, data) for data in event.receipts]
    if event.shown:
        return _two_inputs(state, audit, event.shown, [r for r in receipts if r is not None])
    if event.silent:
        known = all(_is_party(state, audit, place) for place in event.silent)
        return Voice(VoiceKind.SILENT, event.silent[0]) if known else Voice(VoiceKind.FALSE)
    owner = _owner_place(state, audit)
    if not receipts or (first := receipts[0]) is None:
        return Voice(VoiceKind.FALSE)
    if not first.signed_by(_key(state, owner), state.round.salt, audit.chunk, audit.since, owner):
        return Voice(VoiceKind.FALSE)
    inputs = places(audit.inputs)
    if (flaw := _flaw(state, audit, first, inputs)) or first.mean != audit.digest:
        fact = flaw or f"it is for {first.mean.hex()}, and {audit.digest.hex()} was sealed"
        return Voice(VoiceKind.UNSOUND, owner, (("receipt", event.receipts[0].hex()), ("flaw", fact)))
    for record_, receipt, data in zip(_sums(first), receipts[1:], event.receipts[1:], strict=False):
        relay = record_.place
        key = _key(state, relay)
        if receipt is None or not receipt.signed_by(key, state.round.salt, audit.chunk, audit.since, relay):
            return Voice(VoiceKind.FALSE)
        flaw = "it is made of other regions' means" if _sums(receipt) else ""
        flaw = flaw or _flaw(state, audit, receipt, record_.inputs)
        if not flaw and receipt.mean != record_.digest:
            flaw = f"it is for {receipt.mean.hex()}, and {record_.digest.hex()} was sent"
        if flaw:
            return Voice(VoiceKind.UNSOUND, relay, (("receipt", data.hex()), ("flaw", flaw)))
        if event.relay == relay:
            return Voice(VoiceKind.RELAY, relay)
    if event.relay is not None:
        return Voice(VoiceKind.FALSE)
    return Voice(VoiceKind.OTHER)


def _sums(receipt: Receipt) -> list[InputRecord]:
    return [record for record in receipt.records if record.inputs]


def _receipt(state: State, audit: Audit, data: bytes) -> Receipt | None:
    try:
        return unpack_receipt(data)
    except MalformedReceipt:
        return None


def _flaw(state: State, audit: Audit, receipt: Receipt, inputs: Sequence[int]) -> str:
    """Why a receipt for these inputs does not hold; empty: it does."""
    salt_, c = state.round.salt, audit.chunk
    said = [place for record in receipt.records for place in (record.inputs or (record.place,))]
    if sorted(said) != sorted(inputs):
        return f"it is for places {sorted(said)}, and {sorted(inputs)} were sealed"
    for record_ in receipt.records:
        if not record_.signed_by(_key(state, record_.place), salt_, c):
            return f"the record of place {record_.place} is not signed by it"
    return ""


def _two_inputs(state: State, audit: Audit, shown: bytes, receipts: Sequence[Receipt]) -> Voice:
    """A content that a contributor shows, and another that it sent: proof, if it signed both."""
    try:
        other = unpack_record(shown)
    except MalformedReceipt:
        return Voice(VoiceKind.FALSE)
    sent = next((r for x in receipts for r in x.records if r.place == other.place and not r.inputs), None)
    if sent is None or other.inputs or sent.digest == other.digest:
        return Voice(VoiceKind.FALSE)
    key, salt_ = _key(state, other.place), state.round.salt
    if not all(record_.signed_by(key, salt_, audit.chunk) for record_ in (sent, other)):
        return Voice(VoiceKind.FALSE)
    facts = (("sent", sent.pack().hex()), ("shown", other.pack().hex()), ("salt", salt_.hex()))
    return Voice(VoiceKind.TWO_INPUTS, other.place, facts)


def two_receipts(state: State, audit: Audit) -> tuple[tuple[str, str], ...] | None:
    """Two receipts for the chunk that its owner signed, if auditors were given such."""
    owner = _owner_place(state, audit)
    found = dict[tuple[object, ...], bytes]()
    different = {event.receipts[0] for event in audit.voices.values() if event.receipts}
    if len(different) < 2:
        return None
    key = _key(state, owner)
    for data in sorted(different):
        receipt = _receipt(state, audit, data)
        if receipt and receipt.signed_by(key, state.round.salt, audit.chunk, audit.since, owner):
            found.setdefault((tuple((r.place, r.digest, r.inputs) for r in receipt.records), receipt.mean), data)
    first, *others = found.values() or (b"",)
    return (("receipt", first.hex()), ("another", others[0].hex())) if others else None


def _is_party(state: State, audit: Audit, place: int) -> bool:
    """Whether the member at this place has something to show of the chunk."""
    entries = state.round.ledger.entries
    known = parties(state, audit.chunk, audit.inputs) or set()
    return place < len(entries) and not entries[place].gone and entries[place].node in known


def _owner_place(state: State, audit: Audit) -> int:
    return next((i for i, e in enumerate(state.round.ledger.entries) if e.node == audit.owner and not e.gone), -1)


def _key(state: State, place: int) -> PublicKey:
    """The key of the member at this place; empty, which verifies nothing, where there is none."""
    entries = state.round.ledger.entries
    if not 0 <= place < len(entries):
        return PublicKey(b"")
    node = entries[place].node
    member = state.members.here.get(node) or state.members.departed.get(node)
    return PublicKey(member.key if member is not None else b"")


def given_alike(state: State, audit: Audit, node: NodeId, other: NodeId) -> bool:
    """Whether an auditor was given the receipt that another one was, or nothing that its owner signed: who was
    given another one was deceived itself."""
    first, second = (audit.voices[n].receipts[:1] for n in (node, other))
    if first == second or not first:
        return True
    owner, receipt = _owner_place(state, audit), _receipt(state, audit, first[0])
    signed = receipt and receipt.signed_by(_key(state, owner), state.round.salt, audit.chunk, audit.since, owner)
    return not signed
