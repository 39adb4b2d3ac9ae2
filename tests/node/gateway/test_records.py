"""A coordinator's record is taken from whoever brings it, and from nobody else's key; never an older one."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from atoll.comm.errors import ConfigError
from atoll.comm.ids import Pin
from atoll.comm.peer_names import host_of_peer
from atoll.comm.signatures import PrivateKey
from atoll.comm.transport.certificates import load_or_make, pin_of
from atoll.node.gateway.records import (
    LIFE_SECONDS,
    MAX_OWN_RUNS,
    MAX_RECORD_BYTES,
    BadRecord,
    CoordinatorRecord,
    NewestRecords,
    is_newer,
    next_record,
    open_record,
    read_record,
    record_key,
    record_place,
    write_record,
)

NOW = 2_000_000_000
GATEWAY = host_of_peer(b"\x12\x20" + b"g" * 32)
RECORD = CoordinatorRecord("reef", "203.0.113.7:4700", GATEWAY, 3, 7, NOW + 100)


@dataclass(frozen=True)
class Signer:
    certificate: bytes
    key: PrivateKey

    @property
    def pin(self) -> Pin:
        return pin_of(self.certificate)

    def write(self, record: CoordinatorRecord) -> bytes:
        return write_record(record, self.certificate, self.key)


def signer(folder: Path) -> Signer:
    folder.mkdir()
    made = load_or_make(folder)
    return Signer(made.der, made.signing_key())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Signer, Signer]:
    folder = tmp_path_factory.mktemp("keys")
    return signer(folder / "coordinator"), signer(folder / "forger")


def test_a_record_is_read_by_who_knows_the_run_and_the_pin(two: tuple[Signer, Signer]) -> None:
    coordinator, _ = two
    assert read_record(coordinator.write(RECORD), "reef", coordinator.pin) == RECORD


def test_a_forged_record_is_refused(two: tuple[Signer, Signer]) -> None:
    coordinator, forger = two
    with pytest.raises(BadRecord, match="another run's, or somebody forged it"):
        read_record(forger.write(RECORD), "reef", coordinator.pin)
    with pytest.raises(BadRecord, match="signature"):  # the coordinator's certificate, which everybody has
        read_record(write_record(RECORD, coordinator.certificate, forger.key), "reef", coordinator.pin)
    with pytest.raises(BadRecord, match="another run's"):
        read_record(coordinator.write(RECORD), "atoll", coordinator.pin)


def test_a_record_in_which_any_byte_was_changed_is_refused(two: tuple[Signer, Signer]) -> None:
    coordinator, _ = two
    data = coordinator.write(RECORD)
    for at in range(len(data)):
        with pytest.raises(BadRecord):
            read_record(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "reef", coordinator.pin)
        with pytest.raises(BadRecord):
            open_record(data[:at])


@pytest.mark.parametrize(
    "change",
    [
        {"run": ""},
        {"run": "r" * 256},
        {"address": "203.0.113.7"},
        {"address": "203.0.113.7:66666"},
        {"gateway": ""},
        {"gateway": GATEWAY.upper()},
        {"incarnation": -1},
        {"sequence": 1 << 53},
    ],
)
def test_what_makes_no_sense_is_refused_however_well_it_is_signed(
    two: tuple[Signer, Signer], change: dict[str, object]
) -> None:
    with pytest.raises(BadRecord):
        open_record(two[0].write(msgspec.structs.replace(RECORD, **change)))


def test_what_is_too_long_is_neither_written_nor_read(two: tuple[Signer, Signer]) -> None:
    with pytest.raises(ConfigError, match="4096 at most"):
        two[0].write(msgspec.structs.replace(RECORD, run="r" * MAX_RECORD_BYTES))
    with pytest.raises(BadRecord, match="no record"):
        open_record(two[0].write(RECORD) + bytes(MAX_RECORD_BYTES))


@pytest.mark.parametrize(
    ("incarnation", "sequence", "newer"),
    [(3, 8, True), (4, 0, True), (3, 7, False), (3, 6, False), (2, 99, False)],
)
def test_only_a_newer_record_takes_the_place_of_one(incarnation: int, sequence: int, newer: bool) -> None:
    found = msgspec.structs.replace(RECORD, incarnation=incarnation, sequence=sequence)
    assert is_newer(found, RECORD) is newer and is_newer(found, None)


def test_what_is_published_is_always_newer_than_what_was() -> None:
    again = next_record(RECORD, RECORD)
    assert again is not None and is_newer(again, RECORD) and again.sequence == 8
    later = next_record(RECORD, msgspec.structs.replace(RECORD, incarnation=4, sequence=2))
    assert later is not None and is_newer(later, RECORD) and later.sequence == 2
    assert next_record(None, RECORD) == RECORD
    assert next_record(RECORD, msgspec.structs.replace(RECORD, incarnation=2)) is None


def test_a_gateway_keeps_for_others_what_is_a_runs_own_and_no_longer_than_it_says(
    two: tuple[Signer, Signer],
) -> None:
    coordinator, forger = two
    data, key = coordinator.write(RECORD), record_place(record_key("reef", coordinator.pin))
    assert NewestRecords().admit(data, key, RECORD.expires, NOW)
    assert not NewestRecords().admit(forger.write(RECORD), key, RECORD.expires, NOW)
    assert not NewestRecords().admit(data, record_place(record_key("reef", forger.pin)), RECORD.expires, NOW)
    assert not NewestRecords().admit(data, key, RECORD.expires + 1, NOW)  # an old one may not hide the next
    assert not NewestRecords().admit(data, key, RECORD.expires, NOW - 2 * LIFE_SECONDS)
    assert not NewestRecords().admit(b"", key, RECORD.expires, NOW)


def test_a_gateway_does_not_go_back_to_an_older_record_however_long_it_lasts(two: tuple[Signer, Signer]) -> None:
    coordinator, forger = two
    newest = NewestRecords(most=2)

    def admit(by: Signer, **change: object) -> bool:
        record = msgspec.structs.replace(RECORD, **change)
        return newest.admit(by.write(record), record_place(record_key(record.run, by.pin)), record.expires, NOW)

    assert admit(coordinator) and admit(coordinator)
    assert admit(coordinator, incarnation=4, sequence=0)
    assert not admit(coordinator, sequence=99, expires=NOW + LIFE_SECONDS)
    assert admit(forger, sequence=1)  # a run of its own
    for number in range(MAX_OWN_RUNS + 2):  # what is not seen any more is forgotten
        assert admit(forger, run=f"made up {number}")
    assert admit(coordinator)


def test_records_that_one_network_signs_for_itself_push_nobody_elses_out(two: tuple[Signer, Signer]) -> None:
    coordinator, forger = two
    newest, kept = NewestRecords(most=64, of_network=16), dict[bytes, str]()

    def bring(by: Signer, run: str, network: str, now: float = NOW) -> bytes:
        record, place = msgspec.structs.replace(RECORD, run=run), record_place(record_key(run, by.pin))
        assert newest.admit(by.write(record), place, record.expires, now)
        kept[place] = run
        if (displaced := newest.keep(place, network, now)) is not None:
            del kept[displaced]
        return place

    reef = bring(coordinator, "reef", "203.0.113.0")
    for number in range(50):
        bring(forger, f"made up {number}", "198.51.100.0")
    assert len(kept) == 17 and kept[reef] == "reef"
    for number in range(200):  # from many networks, with a copy of the honest record now and then
        bring(forger, f"more {number}", f"198.51.{number % 5}.0")
        bring(coordinator, "reef", "198.51.100.0")
    assert len(kept) <= 64 and kept[reef] == "reef"
    lagoon = bring(coordinator, "lagoon", "192.0.2.0")  # there is room for who comes late
    assert kept[lagoon] == "lagoon"


def test_the_runs_that_a_gateway_was_asked_for_lose_their_place_to_nobody(two: tuple[Signer, Signer]) -> None:
    coordinator, forger = two
    newest = NewestRecords(most=4, of_network=2)
    own, other = (record_place(record_key("reef", by.pin)) for by in two)
    newest.favour(own)
    assert newest.admit(coordinator.write(RECORD), own, RECORD.expires, NOW)
    assert newest.keep(own, "198.51.100.0", NOW) is None
    assert newest.admit(forger.write(RECORD), other, RECORD.expires, NOW)
    assert newest.keep(other, "198.51.100.0", NOW) is None
    gone = list[bytes]()
    for number in range(10):
        record = msgspec.structs.replace(RECORD, run=f"made up {number}")
        place = record_place(record_key(record.run, forger.pin))
        assert newest.admit(forger.write(record), place, record.expires, NOW)
        gone += filter(None, [newest.keep(place, f"198.51.{number}.0", NOW)])
    assert other in gone and own not in gone
    older = msgspec.structs.replace(RECORD, sequence=1)
    assert not newest.admit(coordinator.write(older), own, older.expires, NOW)  # it is still known
