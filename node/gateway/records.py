"""The record by which a run's coordinator is found: its form, its signature, and which of two is the newer. Pure.

    magic            4 bytes
    certificate      2 bytes of length, then DER: the coordinator's, whose SHA-256 is the pin in the join URL
    signature        64 bytes, by the certificate's key, of the body
    body             the rest: `CoordinatorRecord` as JSON

Whoever knows the pin needs to trust nobody else: not who stored the record, nor who hands it on. An old record is
as well signed as a new one; so whoever has seen one takes only newer ones, by incarnation and sequence.
"""

import hashlib
from collections import OrderedDict
from typing import NamedTuple

import msgspec

from atoll.comm.errors import ConfigError
from atoll.comm.ids import Pin, PublicKey
from atoll.comm.invite import split_host_port
from atoll.comm.peer_names import peer_of_host
from atoll.comm.rate_limits import RateLimit
from atoll.comm.signatures import SIGNATURE_BYTES, PrivateKey, sign, verify
from atoll.comm.strangers import StrangerLimits, Strangers
from atoll.comm.transport.certificates import pin_of

MAGIC = b"AGR1"
MAX_RECORD_BYTES = 4096
MAX_RECORDS = 4096  # of all runs, that a gateway keeps for others
MAX_RECORDS_OF_NETWORK = 64  # of these, that came from one network: certificates are free, addresses are not
MAX_OWN_RUNS = 256  # of which a gateway was asked for the record by who is beside it
MAX_TEXT = 255  # characters of a run's name, an address, a host
LIFE_SECONDS = 900  # for which a record is kept by others, at most; it is published more often
CLOCK_SECONDS = 60  # by which clocks may differ
_PURPOSE = b"atoll coordinator record 1"
_LENGTH = slice(4, 6)


class BadRecord(Exception):
    """The bytes are no record, or not one of the run that is looked for."""


class CoordinatorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the coordinator of a run is."""

    run: str
    address: str  # host:port as nodes may dial it; empty: it cannot be dialled
    gateway: str  # host of the peer through which it is reached (`peer_names`)
    incarnation: int  # of the coordinator
    sequence: int  # of the record within it
    expires: int  # seconds since 1970


class SignedRecord(NamedTuple):
    """A record with the pin of the certificate whose key signed it."""

    pin: Pin
    record: CoordinatorRecord


def record_key(run: str, pin: Pin) -> bytes:
    """The key under which a run's record is published: 32 bytes."""
    return hashlib.sha256(b"\0".join((_PURPOSE, pin.encode(), run.encode()))).digest()


def record_place(key: bytes) -> bytes:
    """The place of a key in the DHT, 20 bytes: its nodes next to which the record is kept."""
    return hashlib.sha1(key, usedforsecurity=False).digest()


def write_record(record: CoordinatorRecord, certificate: bytes, key: PrivateKey) -> bytes:
    """The record's bytes, signed by the key of the certificate (DER). Raises `ConfigError` where they are too
    many."""
    body = msgspec.json.encode(record)
    length = len(certificate).to_bytes(2, "big")
    data = MAGIC + length + certificate + sign(key, _PURPOSE, body) + body
    if len(data) > MAX_RECORD_BYTES:
        raise ConfigError(f"the run's record has {len(data)} bytes, {MAX_RECORD_BYTES} at most: shorten its name")
    return data


def open_record(data: bytes) -> SignedRecord:
    """The record in these bytes, and the pin for which it is true. Raises `BadRecord`."""
    if len(data) > MAX_RECORD_BYTES or data[:4] != MAGIC:
        raise BadRecord("it is no record")
    at = _LENGTH.stop + int.from_bytes(data[_LENGTH], "big")
    certificate, signature, body = (
        data[_LENGTH.stop : at],
        data[at:][:SIGNATURE_BYTES],
        data[at:][SIGNATURE_BYTES:],
    )
    if not verify(_public_key(certificate), signature, _PURPOSE, body):
        raise BadRecord("its signature is not by the key of its certificate")
    try:
        record = msgspec.json.decode(body, type=CoordinatorRecord)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRecord(f"it is no record ({error})") from None
    _check(record)
    return SignedRecord(pin_of(certificate), record)


def read_record(data: bytes, run: str, pin: Pin) -> CoordinatorRecord:
    """The record of the run with this pin. Raises `BadRecord` if it is none, or another's."""
    signed = open_record(data)
    if signed.pin != pin or signed.record.run != run:
        raise BadRecord("it is another run's, or somebody forged it: its certificate or name differ")
    return signed.record


def is_newer(found: CoordinatorRecord, held: CoordinatorRecord | None) -> bool:
    """Whether a record says more than the one that was held before it."""
    return held is None or (found.incarnation, found.sequence) > (held.incarnation, held.sequence)


def next_record(last: CoordinatorRecord | None, now: CoordinatorRecord) -> CoordinatorRecord | None:
    """The record to publish after `last`: `now`, with a sequence that others take for newer; None where the
    coordinator has begun again elsewhere."""
    if last is None:
        return now
    if now.incarnation < last.incarnation:
        return None
    later = last.sequence + 1 if now.incarnation == last.incarnation else 0
    return msgspec.structs.replace(now, sequence=max(now.sequence, later))


class NewestRecords:
    """The newest record that was seen of each run: a coordinator that is no more, and whose gateway still says
    where it was, does not take the place of the one after it.

    Whoever has a key can sign records of runs that it makes up. So what comes to be kept is counted by the network
    that it comes from: each has few places, where all are taken the network that has the most makes room, and the
    runs that this gateway was asked for itself lose theirs to nobody.
    """

    def __init__(self, most: int = MAX_RECORDS, of_network: int = MAX_RECORDS_OF_NETWORK) -> None:
        self._strangers = Strangers[bytes](StrangerLimits(most, of_network, RateLimit(1, 1)))  # places, by network
        self._own: OrderedDict[bytes, None] = (
            OrderedDict()
        )  # places of this gateway's runs, the last asked for last
        self._seen: OrderedDict[bytes, CoordinatorRecord] = OrderedDict()  # by their places
        self._most = most

    def favour(self, place: bytes) -> None:
        """Lose the record at this place to no others': this gateway's own daemon or coordinator asked for it."""
        self._own[place] = None
        self._own.move_to_end(place)
        if len(self._own) > MAX_OWN_RUNS:
            self._own.popitem(last=False)
        self._strangers.leave(place)

    def keep(self, place: bytes, network: str, now: float) -> bytes | None:
        """Count an admitted record, which a peer from this network brought to be kept at `now` (seconds since
        1970); returns the place whose record gives way to it, if one has to. It stays the network's that brought
        it first: else who brings another's would have it among its own."""
        if place in self._own:
            return None
        brought = self._strangers.leave(place)
        if len(self._strangers) >= self._most:
            for over in [p for p, r in self._seen.items() if r.expires < now and p != place]:
                self._strangers.leave(over)
        displaced = self._strangers.admit(place, brought or network, 0.0, charge=False).displaced
        if displaced is not None:
            self._seen.pop(displaced, None)
        return displaced

    def admit(self, data: bytes, place: bytes, expires: float, now: float) -> bool:
        """Whether these bytes may be kept at a place, or taken from there: a run's own record, for as long as it
        says, and none that is older than one before."""
        try:
            pin, record = open_record(data)
        except BadRecord:
            return False
        at_home = record_place(record_key(record.run, pin)) == place
        if not at_home or expires != record.expires or record.expires - now > LIFE_SECONDS + CLOCK_SECONDS:
            return False
        seen = self._seen.get(place)
        if seen is not None and is_newer(seen, record):
            return False
        self._seen[place] = record
        self._seen.move_to_end(place)
        if len(self._seen) > self._most + MAX_OWN_RUNS:
            idle = (p for p in self._seen if p not in self._own and p not in self._strangers and p != place)
            self._seen.pop(next(idle, next(iter(self._seen))))
        return True


def _check(record: CoordinatorRecord) -> None:
    if max(map(len, (record.run, record.address, record.gateway))) > MAX_TEXT or not record.run:
        raise BadRecord("a text in it is too long, or its run has no name")
    if not all(0 <= n < 1 << 53 for n in (record.incarnation, record.sequence, record.expires)):
        raise BadRecord("a number in it is out of range")
    try:
        if record.address:
            split_host_port(record.address, "the address")
        peer_of_host(record.gateway)
    except (ConfigError, ValueError) as error:
        raise BadRecord(str(error)) from None


def _public_key(certificate: bytes) -> PublicKey:
    """The key of a certificate (DER) of this software's kind. Raises `BadRecord`."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
    from cryptography.x509 import InvalidVersion, load_der_x509_certificate

    try:
        key = load_der_x509_certificate(certificate).public_key()
    except (InvalidVersion, TypeError, UnsupportedAlgorithm, ValueError):
        raise BadRecord("it has no certificate") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise BadRecord("its certificate's key is not one of the curve P-256")
    return PublicKey(key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint))
