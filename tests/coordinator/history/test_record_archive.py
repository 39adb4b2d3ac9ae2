"""Segments of old records: in a folder or a store, read back, copied, shrunk, and refused when spoiled."""

from collections.abc import Sequence
from pathlib import Path

import fsspec
import msgspec
import pytest
from journal_contents import note
from long_runs import long_record

from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.history import record_codec, segment
from atoll.coordinator.history.record_archive import NOTHING_OF_MEMBERS, RecordArchive, copy_missing, shrink
from atoll.coordinator.history.record_codec import BadRecord
from atoll.coordinator.history.record_store import LocalStore, RecordStore, RemoteStore, opened
from atoll.coordinator.history.series import series_row
from atoll.coordinator.state_machine.events import CommitRecord

N = segment.ROUNDS


def records(first: int, last: int, members: int = 3) -> list[CommitRecord]:
    return [long_record(k, members) for k in range(first, last + 1)]


def add(archive: RecordArchive, of: Sequence[CommitRecord]) -> None:
    archive.add("reef", [series_row(r) for r in of], [record_codec.encode(r) for r in of], [note(of[0].round)])


@pytest.fixture(params=["folder", "store"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RecordStore:
    if request.param == "folder":
        return opened(str(tmp_path / "records"))
    fsspec.filesystem("memory").store.clear()
    return opened("memory://records/reef")


def test_what_was_added_is_read_back(store: RecordStore) -> None:
    archive = RecordArchive(store)
    assert archive.spans() == [] and archive.facts() is None and list(archive.records()) == []
    add(archive, records(1, N))
    add(archive, records(N + 1, 2 * N))
    assert archive.spans() == [(1, N), (N + 1, 2 * N)]
    assert list(archive.records()) == records(1, 2 * N)
    assert list(archive.records(N + 5)) == records(N + 6, 2 * N)
    assert archive.read((1, N)).notes == [note(1)]
    rows = [row for block in archive.series() for row in block.tolist()]
    assert [row[0] for row in rows] == list(range(1, 2 * N + 1))
    archive.enter_config("reef", "ab", b'{"name":"reef"}')
    archive.enter_config("reef", "cd", b"{}")
    facts = archive.facts()
    assert facts is not None and facts.configs == {"ab": msgspec.Raw(b'{"name":"reef"}'), "cd": msgspec.Raw(b"{}")}
    archive.enter_owners({NodeId("n1"): "kelp", NodeId("n2"): "coral"})
    archive.enter_owners({NodeId("n2"): "reef keepers"})
    archive.enter_config("reef", "ef", b"{}")
    facts = archive.facts()
    assert facts is not None and len(facts.configs) == 3
    assert facts.owners == {"n1": "kelp", "n2": "reef keepers"}
    with pytest.raises(ConfigError, match="has the records of the run 'reef'"):
        archive.enter_config("atoll", "ab", b"{}")


def test_a_segment_takes_less_than_its_records_do() -> None:
    of = records(1, N, members=200)
    encoded = [record_codec.encode(r) for r in of]
    whole = segment.write("reef", [series_row(r) for r in of], encoded, [])
    assert len(whole) < 0.95 * sum(map(len, encoded))


def test_what_is_in_several_places_is_read_once(tmp_path: Path) -> None:
    here, there = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    add(RecordArchive(here), records(1, N))
    add(RecordArchive(here), records(N + 1, 2 * N))
    assert copy_missing(here, there) == 2 and copy_missing(here, there) == 0
    here.remove(segment.name_of(1, N))
    assert list(RecordArchive(here, there).records()) == records(1, 2 * N)
    with pytest.raises(ResourceError, match="rounds 1 to 128 are gone"):
        RecordArchive(here).read((1, N))


@pytest.mark.long
def test_room_is_kept_to_and_curves_stay(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    archive = RecordArchive(store)
    for block in range(4):
        add(archive, records(block * N + 1, (block + 1) * N, members=30))
    whole, size = list(archive.records()), sum(map(store.size, store.names()))
    curves = [block.tolist() for block in archive.series()]
    shrink(store, 0, most=1)
    found = list(archive.records())
    assert not found[0].bytes_up and found[N:] == whole[N:], "one at a time"
    shrink(store, size)
    assert size // 2 < sum(map(store.size, store.names())) < size
    shrink(store, size * 2 // 3)
    assert sum(map(store.size, store.names())) <= size * 2 // 3
    found = list(archive.records())
    assert [r.round for r in found] == [r.round for r in whole] and found[-N:] == whole[-N:]
    assert found[0].contributors == whole[0].contributors and not found[0].bytes_up and found[0].tokens
    assert str([block.tolist() for block in archive.series()]) == str(curves)
    shrink(store, 0)  # no less than this can be kept
    assert archive.spans() == [(k * N + 1, (k + 1) * N) for k in range(4)]


def test_the_oldest_go_once_they_are_in_the_store(tmp_path: Path) -> None:
    here, there = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    for block in range(3):
        add(RecordArchive(here), records(block * N + 1, (block + 1) * N))
    shrink(here, 0, there)
    assert len(here.names()) == 3  # nothing is there yet
    there.write(here.names()[0], here.read(here.names()[0]))
    shrink(here, 0, there)
    assert RecordArchive(here).spans() == [(N + 1, 2 * N), (2 * N + 1, 3 * N)]
    assert list(RecordArchive(here, there).records()) == records(1, 3 * N)


@pytest.mark.long
@pytest.mark.parametrize("archived", [False, True])
def test_no_segment_is_older_than_is_to_be_kept(tmp_path: Path, archived: bool) -> None:
    here, there = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b") if archived else None
    for block in range(3):
        add(RecordArchive(here), records(block * N + 1, (block + 1) * N))
    whole, size = list(RecordArchive(here).records()), sum(map(here.size, here.names()))
    if there is not None:
        copy_missing(here, there)
    shrink(here, size, there, 1)
    assert list(RecordArchive(here).records()) == whole, "their last rounds are younger"
    for _ in range(2):
        shrink(here, size, there, whole[2 * N].round)
        found = list(RecordArchive(here).records())
        assert found[-N:] == whole[-N:], "what is younger stays as it is"
        assert found[:-N] == ([] if archived else [replace(r, **NOTHING_OF_MEMBERS) for r in whole[:-N]])
    if there is not None:
        assert list(RecordArchive(here, there).records()) == whole
    else:
        assert found[0].contributors and found[0].members and not found[0].spent and not found[0].names


def test_a_spoiled_segment_is_refused_with_a_sentence(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    add(RecordArchive(store), records(1, N))
    [name] = store.names()
    data = store.read(name)
    for at in (0, 8, 10, 60, len(data) // 2, len(data) - 1):
        spoiled = bytearray(data)
        spoiled[at] ^= 0x55
        with pytest.raises(BadRecord):
            segment.read(bytes(spoiled))
    store.write(name, data[:-1])
    with pytest.raises(ResourceError, match="is damaged .* put a copy of it back"):
        list(RecordArchive(store).records())
    shrink(store, 0)  # what is there of it stays
    assert store.read(name) == data[:-1]


def test_a_segment_of_other_rounds_than_it_is_named_for_is_damaged(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    archive = RecordArchive(store)
    add(archive, records(1, N))
    store.write(segment.name_of(N + 1, 2 * N), store.read(segment.name_of(1, N)))
    for look in (archive.records, archive.series):
        with pytest.raises(ResourceError, match="is damaged .it says that it has rounds 1 to 128"):
            list(look())


def test_a_segments_figures_are_of_its_rounds(tmp_path: Path) -> None:
    archive = RecordArchive(store := LocalStore(tmp_path))
    of = records(1, N)
    rows = [(float("nan") if r.round == 5 else r.round, *series_row(r)[1:]) for r in of]
    store.write(segment.name_of(1, N), segment.write("reef", rows, [record_codec.encode(r) for r in of], []))
    with pytest.raises(ResourceError, match="is damaged .its figures are of other rounds"):
        list(archive.series())


@pytest.mark.parametrize(
    "name",
    [
        *("run.json", "rounds-1-2.records", "rounds-000000000001-000000000128.records.new"),
        *(segment.name_of(1, 999_999_999_999), segment.name_of(0, 5), segment.name_of(9, 8)),
    ],
)
def test_other_files_are_no_segments(name: str) -> None:
    assert segment.rounds_of(name) is None


def test_a_store_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        RemoteStore("nowhere://records")
