"""What an auditor's report comes to: how much of it others can see to be true. Pure.

`audit` calls it for every report that does not simply say that a chunk is well, and once more for the verdict. It
goes by the audit as it was opened, and by the salt of the round, which stays: a report comes to the same whenever
it arrives, and whoever has gone by then, so that no auditor answers for what others did meanwhile.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from atoll.comm.bitmap import bit, places
from atoll.comm.ids import NO_KEY, NodeId, PublicKey
from atoll.comm.receipts import (
    InputRecord,
    MalformedReceipt,
    Receipt,
    receipt_bytes,
    unpack_receipt,
    unpack_record,
)
from atoll.coordinator.state_machine.events import AuditReported
from atoll.coordinator.state_machine.state import Audit, Parties, State

LEAST_NORM = 2.0**-126  # what is less has few bits in fp32, and says nothing
NORM_TOLERANCE = 1e-3  # by which a norm may differ from machine to machine: sums of squares in another order


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
    place: int = -1  # of whom it is about; -1: nobody
    facts: tuple[tuple[str, str], ...] = ()


def parties(state: State, c: int, inputs: bytes) -> Parties | None:
    """Who has something to show of the chunk; None: one of them takes part no more."""
    ledger, here = state.round.ledger, state.members.here
    owner = next((i for i, e in enumerate(ledger.entries) if e.node == ledger.owners[c] and not e.gone), None)
    if owner is None:
        return None
    relays = {row[c] for row in ledger.relays} - {owner} if c in ledger.layered else set[int]()
    at = {i for i, e in enumerate(ledger.entries) if e.contribution is not None and bit(inputs, i)}
    entries = {i: ledger.entries[i] for i in sorted(at | relays | {owner})}
    if not all(not e.gone and e.node in here and here[e.node].key for e in entries.values()):
        return None
    return Parties(owner, frozenset(relays), {i: here[e.node].key for i, e in entries.items()})


def is_well(audit: Audit, event: AuditReported) -> bool:
    """Whether the auditor found what was sealed, and the norms that its owner told of what it merged, and relays
    of what they averaged."""
    if event.digest != audit.digest or not all(relay_is_well(audit, event, place) for place in audit.sums):
        return False
    return not (audit.norms and event.norms) or _are_alike(audit.norms, event.norms)  # they are not told by all


def relay_is_well(audit: Audit, event: AuditReported, place: int) -> bool:
    """Whether the auditor found the norms that the relay at this place told of what it averaged, or none."""
    found = dict(event.sums).get(place)
    return found is None or place not in audit.sums or _are_alike(audit.sums[place], found)


def _are_alike(told: bytes, found: bytes) -> bool:
    if len(told) != len(found):
        return False
    both = zip(*(memoryview(norms).cast("f") for norms in (told, found)), strict=True)
    return all(abs(a - b) <= NORM_TOLERANCE * max(a, b) + LEAST_NORM for a, b in both)


def voice_of(audit: Audit, salt: bytes, event: AuditReported) -> Voice:
    """What a report comes to, in a round with this salt."""
    if is_well(audit, event):
        return Voice(VoiceKind.WELL)
    receipts = [_receipt(audit, data) for data in event.receipts]
    if event.shown:
        return _two_inputs(audit, salt, event.shown, [r for r in receipts if r is not None])
    if event.silent:
        known = all(place in audit.parties.keys for place in event.silent)
        return Voice(VoiceKind.SILENT, event.silent[0]) if known else Voice(VoiceKind.FALSE)
    if not receipts or (first := receipts[0]) is None or not _signed(audit, salt, first, audit.parties.owner):
        return Voice(VoiceKind.FALSE)
    inputs = places(audit.inputs)
    if (flaw := _flaw(audit, salt, first, inputs)) or first.mean != audit.digest:
        fact = flaw or f"it is for {first.mean.hex()}, and {audit.digest.hex()} was sealed"
        return Voice(
            VoiceKind.UNSOUND, audit.parties.owner, (("receipt", event.receipts[0].hex()), ("flaw", fact))
        )
    for record_, receipt, data in zip(_sums(first), receipts[1:], event.receipts[1:], strict=False):
        relay = record_.place
        if receipt is None or not _signed(audit, salt, receipt, relay):
            return Voice(VoiceKind.FALSE)
        flaw = "it is made of other regions' means" if _sums(receipt) else ""
        flaw = flaw or _flaw(audit, salt, receipt, record_.inputs)
        if not flaw and receipt.mean != record_.digest:
            flaw = f"it is for {receipt.mean.hex()}, and {record_.digest.hex()} was sent"
        if flaw:
            return Voice(VoiceKind.UNSOUND, relay, (("receipt", data.hex()), ("flaw", flaw)))
        if event.relay == relay or not relay_is_well(audit, event, relay):
            return Voice(VoiceKind.RELAY, relay)
    if event.relay is not None:
        return Voice(VoiceKind.FALSE)
    return Voice(VoiceKind.OTHER, audit.parties.owner)


def _sums(receipt: Receipt) -> list[InputRecord]:
    return [record for record in receipt.records if record.inputs]


def _signed(audit: Audit, salt: bytes, receipt: Receipt, place: int) -> bool:
    """Whether the member at this place signed the receipt."""
    return receipt.signed_by(_key(audit, place), salt, audit.chunk, audit.since, place)


def _key(audit: Audit, place: int) -> PublicKey:
    """The key of the party at this place; `NO_KEY`, which verifies nothing, where there is none."""
    return audit.parties.keys.get(place, NO_KEY)


def _receipt(audit: Audit, data: bytes) -> Receipt | None:
    """The receipt in these bytes; None: there is none, or one of more than what is audited: no auditor takes that,
    and it would be kept as evidence."""
    if len(data) > receipt_bytes(len(places(audit.inputs))):
        return None
    try:
        return unpack_receipt(data)
    except MalformedReceipt:
        return None


def _flaw(audit: Audit, salt: bytes, receipt: Receipt, inputs: Sequence[int]) -> str:
    """Why a receipt for these inputs does not hold; empty: it does."""
    said = [place for record in receipt.records for place in (record.inputs or (record.place,))]
    if sorted(said) != sorted(inputs):
        return f"it is for places {sorted(said)}, and {sorted(inputs)} were sealed"
    for record_ in receipt.records:
        if not record_.signed_by(_key(audit, record_.place), salt, audit.chunk):
            return f"the record of place {record_.place} is not signed by it"
        if record_.inputs and record_.place not in audit.parties.relays:
            return f"it has a mean of place {record_.place}, which sums for no region"
    return ""


def _two_inputs(audit: Audit, salt: bytes, shown: bytes, receipts: Sequence[Receipt]) -> Voice:
    """A content that a contributor shows, and another that it sent: proof, if it signed both."""
    try:
        other = unpack_record(shown)
    except MalformedReceipt:
        return Voice(VoiceKind.FALSE)
    sent = next((r for x in receipts for r in x.records if r.place == other.place and not r.inputs), None)
    if sent is None or other.inputs or sent.digest == other.digest:
        return Voice(VoiceKind.FALSE)
    key = _key(audit, other.place)
    if not all(record_.signed_by(key, salt, audit.chunk) for record_ in (sent, other)):
        return Voice(VoiceKind.FALSE)
    facts = (("sent", sent.pack().hex()), ("shown", other.pack().hex()), ("salt", salt.hex()))
    return Voice(VoiceKind.TWO_INPUTS, other.place, facts)


def two_receipts(audit: Audit, salt: bytes) -> tuple[int, tuple[tuple[str, str], ...]] | None:
    """Two receipts for the chunk that its owner signed, or two that a relay signed for the same mean, if auditors
    were given such: its place, and the facts."""
    if len({event.receipts for event in audit.voices.values()}) < 2:
        return None
    found = dict[tuple[int, bytes], dict[_Content, bytes]]()
    for node in sorted(audit.voices):
        for place, (content, data) in _given(audit, salt, node).items():
            what = place, b"" if place == audit.parties.owner else content[1]
            found.setdefault(what, {}).setdefault(content, data)
    for (place, _), different in found.items():
        if len(different) > 1:
            first, second, *_ = different.values()
            return place, (("receipt", first.hex()), ("another", second.hex()))
    return None


def given_alike(audit: Audit, salt: bytes, node: NodeId, other: NodeId) -> bool:
    """Whether no receipt that an auditor was given differs from the one that another was given: else it was
    deceived itself."""
    first, second = (_given(audit, salt, n) for n in (node, other))
    return all(first[place][0] == second[place][0] for place in first.keys() & second.keys())


def given_by_others(audit: Audit, salt: bytes, node: NodeId, others: Iterable[NodeId]) -> bool:
    """Whether one of the others was given all receipts that an auditor was."""
    mine = {(place, content) for place, (content, _) in _given(audit, salt, node).items()}
    theirs = ({(p, content) for p, (content, _) in _given(audit, salt, other).items()} for other in others)
    return any(mine <= each for each in theirs)


# What a receipt says, whatever the signatures are: its records (place, digest, inputs), and its mean's digest.
_Content = tuple[tuple[tuple[int, bytes, tuple[int, ...]], ...], bytes]


def _given(audit: Audit, salt: bytes, node: NodeId) -> dict[int, tuple[_Content, bytes]]:
    """The receipts that an auditor was given, as far as those signed them who should have, by their places: the
    owner's, and of relays whose means are in it."""
    first, *others = audit.voices[node].receipts or (b"",)
    owner, receipt = audit.parties.owner, _receipt(audit, first)
    if receipt is None or not _signed(audit, salt, receipt, owner):
        return {}
    found = {owner: (_content(receipt), first)}
    for record_, data in zip(_sums(receipt), others, strict=False):
        summed = _receipt(audit, data)
        if summed is None or not _signed(audit, salt, summed, record_.place):
            break
        found[record_.place] = _content(summed), data
    return found


def _content(receipt: Receipt) -> _Content:
    return tuple((r.place, r.digest, tuple(r.inputs)) for r in receipt.records), receipt.mean
