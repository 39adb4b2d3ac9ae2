"""Bad input gets a sentence, a documented exit code and no traceback. Real processes."""

import asyncio
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from data_sets import write_data_set

from atoll.comm.exit_codes import ExitCode
from atoll.comm.invite import parse
from atoll.node.config import NodeConfig
from atoll.node.daemon.reducer import NothingToFetch
from atoll.node.daemon.session import CoordinatorSession
from atoll.node.daemon.state_dir import JoinOptions

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo.yaml"
ATOLL = [sys.executable, "-P", "-m", "atoll.comm.cli"]


def refused(*args: str | Path, code: int) -> str:
    """Run a command that must fail with `code`; return what it said."""
    done = subprocess.run([*ATOLL, *map(str, args)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    return done.stderr


class Coordinator:
    """A real coordinator process on ports the kernel chose."""

    def __init__(self, state_dir: Path, *overrides: str) -> None:
        self.state_dir = state_dir
        ports = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        settings = ["wandb.mode=disabled", "members.start=1", "members.minimum=1", *overrides]
        command = [*ATOLL, "coordinator", "start", str(DEMO), "--state-dir", str(state_dir), *ports, *settings]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        said = ""
        while "nodes join at" not in said:
            line = self.process.stderr.readline()
            assert line, said  # else it has ended
            said += line

    def url(self) -> str:
        command = [*ATOLL, "invite", "--state-dir", str(self.state_dir), "--json"]
        return str(json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["url"])

    def meta(self, key: str) -> str:
        with sqlite3.connect(self.state_dir / "journal.sqlite") as db:
            return str(db.execute("select value from meta where key = ?", (key,)).fetchone()[0])

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(20)


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    service = Coordinator(tmp_path_factory.mktemp("coordinator"))
    yield service
    assert service.stop() == 0


def join(url: str, state_dir: Path, *args: str, code: int) -> str:
    return refused("node", "join", url, "--state-dir", state_dir, "--listen", "127.0.0.1:0", *args, code=code)


def test_an_unknown_config_key_is_named() -> None:
    assert "outer.lrr" in refused("coordinator", "check", DEMO, "outer.lrr=1", code=2)


def test_a_value_of_the_wrong_type_is_named() -> None:
    said = refused("coordinator", "check", DEMO, "rounds.inner_steps=many", code=2)
    assert "inner_steps" in said and "many" in said


def test_a_value_out_of_range_is_named() -> None:
    assert "outer.momentum is 1.5" in refused("coordinator", "check", DEMO, "outer.momentum=1.5", code=2)


def test_a_missing_config_file_is_named() -> None:
    assert "nowhere.yaml" in refused("coordinator", "start", "nowhere.yaml", code=2)


def test_an_interpolation_that_does_not_resolve_is_named() -> None:
    assert "NO_SUCH_VARIABLE_HERE" in refused(
        "coordinator", "check", DEMO, "name=${oc.env:NO_SUCH_VARIABLE_HERE}", code=2
    )


@pytest.mark.parametrize("option", ["--listen", "--http"])
def test_a_port_in_use_is_named_by_the_coordinator(option: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = "--http" if option == "--listen" else "--listen"
        said = refused(
            *("coordinator", "start", DEMO, "--state-dir", tmp_path, "wandb.mode=disabled"),
            *(option, f"127.0.0.1:{port}", other, "127.0.0.1:0"),
            code=3,
        )
    assert f"port {port}" in said and "in use" in said and option in said


def test_a_port_in_use_is_named_by_the_node(coordinator: Coordinator, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = join(coordinator.url(), tmp_path, "--listen", f"127.0.0.1:{port}", code=3)
    assert f"port {port}" in said and "in use" in said


def test_a_wrong_token_is_refused(coordinator: Coordinator, tmp_path: Path) -> None:
    said = join(f"atoll://wrong@{coordinator.meta('address')}/demo", tmp_path, code=5)
    assert "token" in said and "invite" in said


@pytest.mark.long
def test_a_token_is_good_for_as_many_joins_as_it_was_issued_for(coordinator: Coordinator, tmp_path: Path) -> None:
    url = coordinator.url()
    assert "among ranks=3" in join(url, tmp_path, "ranks=3", code=2), "it looks before it joins"
    join(url, tmp_path, "ranks=3", "--no-checks", code=2)  # joins, then finds that a batch of 8 has no third
    assert "used up" in join(url, tmp_path / "another", code=5)


# A peer's fault ends no command of today: this one is made for it.
PEERS_FAULT = """
import click
from atoll.comm import cli
from atoll.comm.errors import PeerError
def fails():
    raise PeerError("n7 sent what is not the sum: it is left out")
cli.cli.get_command = lambda context, name: click.Command(name, callback=fails)
cli.main()
"""
Codes = dict[ExitCode, Callable[[Path, Coordinator], int]]


def ended(*args: str | Path, answer: str = "") -> int:
    command = [*ATOLL, *map(str, args)]
    done = subprocess.run(command, input=answer, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    return done.returncode


def joined(url: str, state_dir: Path, *more: str) -> int:
    return ended("node", "join", url, "--state-dir", state_dir, "--listen", "127.0.0.1:0", *more)


def damaged_data(folder: Path, coordinator: Coordinator) -> int:
    write_data_set(folder / "set")
    shard = next((folder / "set").glob("*.tokens"))
    shard.write_bytes(bytes(shard.stat().st_size))
    return ended("data", "check", folder / "set")


def state_directory_that_is_a_file(folder: Path, coordinator: Coordinator) -> int:
    (folder / "file").touch()
    return joined(coordinator.url(), folder / "file")


def nobody_there(folder: Path, coordinator: Coordinator) -> int:
    return joined("atoll://t@127.0.0.1:9/demo", folder, "--patience", "0.1")


def wrong_token(folder: Path, coordinator: Coordinator) -> int:
    return joined(f"atoll://wrong@{coordinator.meta('address')}/demo", folder)


def key_of_a_member(folder: Path, coordinator: Coordinator) -> int:
    """A copy of a state directory without its session, while the node is connected."""
    options = JoinOptions(folder / "ada", "127.0.0.1:0", "", "ada", 10.0)
    invites = parse(coordinator.url()), coordinator.url()
    (folder / "ada").mkdir()
    (folder / "copy").mkdir()

    async def story() -> int:
        async with CoordinatorSession.opened(invites[0], NodeConfig(), options, NothingToFetch()) as ada:
            await ada.join()
            views = ada.views()
            await anext(views)
            shutil.copy(folder / "ada" / "tls.pem", folder / "copy")
            return await asyncio.to_thread(joined, invites[1], folder / "copy")

    return asyncio.run(story())


def peers_fault(folder: Path, coordinator: Coordinator) -> int:
    return subprocess.run([sys.executable, "-P", "-c", PEERS_FAULT, "fails"], capture_output=True).returncode


def not_answered_with_yes(folder: Path, coordinator: Coordinator) -> int:
    (folder / "session").write_text("127.0.0.1:1 reef\nsecret.1\nada\n")
    return ended("node", "uninstall", "--state-dir", folder, answer="n\n")


ENDINGS: Codes = {
    ExitCode.DONE: lambda folder, coordinator: ended("doctor", coordinator.url(), "--leaf", "--state-dir", folder),
    ExitCode.FAILED: damaged_data,
    ExitCode.CONFIG: lambda folder, coordinator: joined("http://example.org", folder),
    ExitCode.RESOURCE: state_directory_that_is_a_file,
    ExitCode.UNREACHABLE: nobody_there,
    ExitCode.REFUSED: wrong_token,
    ExitCode.PEER: peers_fault,
    ExitCode.NOT_NOW: key_of_a_member,
    ExitCode.INTERRUPTED: not_answered_with_yes,
}


@pytest.mark.long
@pytest.mark.parametrize("code", ExitCode)
def test_each_exit_code_of_the_page_is_that_of_a_process(
    code: ExitCode, coordinator: Coordinator, tmp_path: Path
) -> None:
    assert ENDINGS[code](tmp_path, coordinator) == code


@pytest.mark.long
def test_another_runs_url_is_refused(coordinator: Coordinator, tmp_path: Path) -> None:
    url = coordinator.url().replace("/demo", "/other")
    assert "'other'" in join(url, tmp_path, code=5)


def test_a_url_that_is_none_is_explained(tmp_path: Path) -> None:
    assert "atoll://TOKEN:PIN@HOST:PORT/RUN" in join("http://example.org", tmp_path, code=2)


def test_a_disk_of_less_than_nothing_is_refused(tmp_path: Path) -> None:
    assert "disk is -1" in join("atoll://t@127.0.0.1:9/demo", tmp_path, "disk=-1", code=2)


@pytest.mark.long
def test_an_unreachable_coordinator_is_tried_until_the_patience_ends(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: nobody answers there
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        said = join(f"atoll://t@{address}/demo", tmp_path, "--patience", "3", code=4)
    assert said.count("trying until it answers") == 1
    assert f"no coordinator at {address}" in said.splitlines()[-1]


@pytest.mark.long
def test_an_empty_data_folder_is_named(tmp_path: Path) -> None:
    service = Coordinator(tmp_path / "c", "data.kind=bytes")
    (tmp_path / "texts").mkdir()
    try:
        said = join(service.url(), tmp_path / "n", f"data={tmp_path / 'texts'}", code=3)
    finally:
        service.stop()
    assert str(tmp_path / "texts") in said


def test_a_model_too_large_for_memory_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    service = Coordinator(tmp_path / "c", "model.dim=16384", "model.layers=200", "model.ffn_dim=65536")
    try:
        said = join(service.url(), tmp_path / "n", code=3)
    finally:
        service.stop()
    assert "parameters" in said and "GB" in said


def test_a_second_coordinator_on_the_same_state_is_refused(coordinator: Coordinator) -> None:
    said = refused("coordinator", "start", DEMO, "--state-dir", coordinator.state_dir, code=3)
    assert "another coordinator" in said


def test_a_foreign_file_in_place_of_the_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_text("not a database, and long enough to be looked at" * 50)
    said = refused("coordinator", "start", DEMO, "--state-dir", tmp_path, "--listen", "127.0.0.1:0", code=2)
    assert "not a coordinator's journal" in said


@pytest.mark.long
def test_another_config_on_an_old_state_directory_is_refused(tmp_path: Path) -> None:
    assert Coordinator(tmp_path).stop() == 0
    said = refused("coordinator", "start", DEMO, "--state-dir", tmp_path, "outer.lr=0.1", code=2)
    assert "another config" in said


def test_the_page_answers_and_refuses_a_round_that_is_no_number(coordinator: Coordinator) -> None:
    page = coordinator.meta("http")
    with urllib.request.urlopen(page + "/api/run", timeout=5) as answer:
        assert json.load(answer)["run_id"] == "demo"
    for path in ("/", "/healthz", "/metrics", "/api/rounds?since=0"):
        assert urllib.request.urlopen(page + path, timeout=5).status == 200
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(page + "/api/rounds?since=x", timeout=5)


def test_status_of_a_page_that_is_not_there_is_a_sentence() -> None:
    assert "is it running" in refused("status", "http://127.0.0.1:9", code=4)


def test_the_coordinator_stays_small(coordinator: Coordinator) -> None:
    pages = int(Path(f"/proc/{coordinator.process.pid}/statm").read_text().split()[1])
    assert pages * os.sysconf("SC_PAGE_SIZE") < 120e6
