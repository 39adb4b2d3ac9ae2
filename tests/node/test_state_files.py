"""The list of what a node writes has the names under which each room writes them. (`tests/e2e/conftest.py`
compares it with what real nodes wrote.)"""

from pathlib import Path

import pytest

from atoll.comm.files import atomic_write
from atoll.comm.transport import certificates
from atoll.node.checkpoint import run_manifest
from atoll.node.daemon import control_socket, state_dir
from atoll.node.daemon.trainer_log import TrainerLog
from atoll.node.data.cache import BlockCache
from atoll.node.gateway import client
from atoll.node.manners import byte_account, limits
from atoll.node.service import detach, join_command
from atoll.node.state_files import CACHE_FILES, RUN, STATE_FILES, contents


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


ID = "0123456789abcdef" * 2


def test_what_each_room_writes_is_on_the_list(tmp_path: Path) -> None:
    certificates.load_or_make(tmp_path)
    trainer_log, log = TrainerLog(tmp_path, limit=0), tmp_path / detach.LOG_FILE
    with trainer_log.open() as out:
        out.write(b"...")
    trainer_log.bound()
    spec = Path(state_dir.TRAINER_SPEC)
    make(tmp_path, control_socket.NAME, byte_account.NAME, limits.NAME, join_command.URL_FILE, str(spec))
    make(tmp_path, f"{spec.with_suffix('.launch')}/group", str(spec.with_name("flight-record-0")))
    make(tmp_path, str(log), f"{log}.1", str(log.with_stem("node-gateway")), f"{client.FOLDER}/identity")
    run = tmp_path / "outer" / ID
    make(tmp_path, f"outer/{ID}/snapshot-000000000001.safetensors", str(run_manifest.path_of(run)))
    with state_dir.exclusive(tmp_path):
        found = contents(tmp_path, STATE_FILES)
    assert found.others == [] and len(found.files) >= 14
    assert {path.relative_to(tmp_path).as_posix() for path in found.whole} == {"trainer.launch", f"outer/{ID}"}
    found.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_on_the_list(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "blocks", 1 << 20)
    with cache.claimed(bytes(16)):
        cache.write(bytes(16), b"a block")
    make(tmp_path, f"blocks/00/{ID}.new", "micro_batch.json")
    found = contents(tmp_path, CACHE_FILES)
    assert found.others == [] and len(found.files) == 5
    found.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        *(
            "notes.txt",
            "session.bak",
            "logs/nginx.log",
            "outer/space.jpg",
            "outer/0123/a",
            "cache/thumbnails/a.png",
        ),
        *(
            "inner/moments/a",
            "vectors/logo.svg",
            "vectors/atoll-logo/a.svg",
            "trainer.json/a",
            "session/a",
            "outer",
        ),
    ],
)
def test_what_is_not_on_the_list_stays_where_it_is(name: str, tmp_path: Path) -> None:
    make(tmp_path, "lock", f"inner/{ID}/moments-000000000003/manifest.json", "logs/node.log.2", name)
    found = contents(tmp_path, STATE_FILES)
    [other] = found.others
    assert (tmp_path / name).is_relative_to(other)
    found.remove()
    left = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert left == [tmp_path / name]


def test_what_was_being_written_when_a_node_was_killed_is_on_the_list(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), atomic_write(tmp_path / "session", None):
        (new,) = tmp_path.glob("session.*.new")
        (tmp_path / "a").hardlink_to(new)
        raise RuntimeError("killed")
    (tmp_path / "a").rename(new)
    make(tmp_path, f"session.{'g' * 8}.new")
    found = contents(tmp_path, STATE_FILES)
    assert found.files == [new] and len(found.others) == 1


def test_what_a_link_leads_to_is_not_looked_at(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    make(elsewhere, f"{ID}/residual", "lock")
    (folder := tmp_path / "node").mkdir()
    for name in ("outer", "logs", "inner"):
        (folder / name).symlink_to(elsewhere)
    (folder / "lock").symlink_to(elsewhere / "lock")
    found = contents(folder, STATE_FILES)
    found.remove()
    assert list(folder.iterdir()) == [] and len(list(elsewhere.rglob("*"))) == 3


def test_a_runs_folders_are_named_by_its_id() -> None:
    assert sum(f"/{RUN}" in pattern for pattern in STATE_FILES) == 3
