"""A node is the same one when it is started again, whatever happened while that was being written down."""

import asyncio
import stat
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from disks import full_disk

from atoll.comm.errors import ResourceError
from atoll.comm.invite import Invite
from atoll.comm.transport.certificates import pin_of
from atoll.node.config import TrainerSpec
from atoll.node.daemon.state_dir import (
    ends_before,
    exclusive,
    load_name,
    load_session,
    save_next_session,
    save_session,
)
from atoll.node.daemon.trainer_supervisor import TrainerSupervisor

INVITE = Invite("127.0.0.1:4700", "run", "token")


def test_a_session_comes_back_for_its_run_alone(tmp_path: Path) -> None:
    save_session(tmp_path / "session", INVITE, "secret.1", "ada")
    save_next_session(tmp_path / "session", INVITE, "secret.2", "ada")
    assert load_session(tmp_path / "session", INVITE) == "secret.2"
    assert load_name(tmp_path / "session", INVITE) == "ada"
    other = Invite("127.0.0.1:4700", "other", "token")
    assert load_session(tmp_path / "session", other) == load_name(tmp_path / "session", other) == ""
    assert stat.S_IMODE((tmp_path / "session").stat().st_mode) == 0o600


def test_a_session_is_the_runs_wherever_its_coordinator_is(tmp_path: Path) -> None:
    session, pin = tmp_path / "session", pin_of(b"a certificate")
    save_session(session, replace(INVITE, pin=pin), "secret.1", "ada")
    assert load_session(session, replace(INVITE, pin=pin, address="203.0.113.7:1")) == "secret.1"
    assert load_session(session, replace(INVITE, pin=pin_of(b"another"))) == ""
    session.write_text("127.0.0.1:4700 run\nsecret.0\nada\n")  # as it was written once
    assert load_session(session, replace(INVITE, pin=pin)) == "secret.0"


def test_a_disk_that_is_full_costs_a_node_neither_its_session_nor_its_life(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = tmp_path / "session"
    save_session(memory, INVITE, "secret.1", "ada")
    with full_disk(), pytest.raises(ResourceError, match=f"cannot write {memory}: "):
        save_session(memory, INVITE, "secret.2", "ada")
    assert load_session(memory, INVITE) == "secret.1"
    with full_disk():
        save_session(memory, INVITE, "secret.1", "ada")
        save_next_session(memory, INVITE, "secret.2", "ada")
    assert load_session(memory, INVITE) == "secret.1" and "cannot write" in caplog.text
    assert list(tmp_path.iterdir()) == [memory]


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"one line", b"a\nb\nc\n", bytes(100)])
def test_a_damaged_session_is_none(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "session").write_bytes(damage)
    assert load_session(tmp_path / "session", INVITE) == ""


def test_a_trainers_settings_that_cannot_be_written_are_said(tmp_path: Path) -> None:
    supervisor = TrainerSupervisor(TrainerSpec(), tmp_path, lambda message: None, lambda: None)
    with full_disk(), pytest.raises(ResourceError, match=f"cannot write {tmp_path}/trainer.json: "):
        asyncio.run(supervisor.run())


def test_the_socket_of_a_killed_daemons_trainer_is_removed_and_nothing_of_others(tmp_path: Path) -> None:
    state = tmp_path / "state"
    ours, shared, named = (tmp_path / name for name in ("atoll-a1", "atoll-b2", "tmp"))
    for folder in (ours, shared, named):
        folder.mkdir()
        (folder / "trainer.sock").touch()
    (shared / "theirs").touch()
    for folder in (ours, shared, named, tmp_path / "atoll-gone"):
        state.mkdir(exist_ok=True)
        (state / "trainer.json").write_bytes(
            msgspec.json.encode(TrainerSpec(channel=str(folder / "trainer.sock")))
        )
        with exclusive(state):
            pass
    assert not ours.exists() and (shared / "theirs").exists() and (named / "trainer.sock").exists()
    (state / "trainer.json").write_bytes(b"{")
    with exclusive(state):
        pass


def test_a_state_directory_has_one_daemon_from_its_first_moment_to_its_last(tmp_path: Path) -> None:
    with exclusive(tmp_path / "state"):
        with (
            pytest.raises(ResourceError, match="another process uses the state directory"),
            exclusive(tmp_path / "state"),
        ):
            pass
    with exclusive(tmp_path / "state"):
        pass


def test_who_is_told_to_end_lets_its_work_come_to_an_end_for_a_moment() -> None:
    async def work(seconds: float) -> None:
        await asyncio.sleep(seconds)
        done.append(seconds)

    async def fails() -> None:
        raise ResourceError("no port")

    async def story() -> None:
        over = asyncio.Event()
        assert await ends_before(over, work(0), 60.0)
        with pytest.raises(ResourceError, match="no port"):
            await ends_before(over, fails(), 60.0)
        over.set()
        assert not await ends_before(over, work(0.01), 60.0)
        assert not await ends_before(over, work(3600), 0.01)

    done = list[float]()
    asyncio.run(asyncio.wait_for(story(), 60))
    assert done == [0, 0.01]
