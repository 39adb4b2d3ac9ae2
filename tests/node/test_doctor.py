"""`atoll doctor` on this machine, and beside coordinators that are there, or not."""

import asyncio
import json
import math
import re
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from control_nodes import Coordinator, coordinator

from atoll.comm import extras
from atoll.comm.config.data import DataConfig, DataKind
from atoll.comm.config.load import load_dataclass
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.round_time import exchanged_bytes
from atoll.comm.config.run import RunConfig
from atoll.comm.ids import NO_PIN, Pin
from atoll.comm.invite import Invite
from atoll.comm.rate_limits import RateLimit
from atoll.comm.transport.certificates import load_or_make
from atoll.coordinator.service import checkup
from atoll.node import devices
from atoll.node.checks.check import Check
from atoll.node.checks.reach import Listening, Unreached, clock_check, reached_otherwise
from atoll.node.config import NodeConfig
from atoll.node.control.checkup import RunSight
from atoll.node.daemon.state_dir import save_session
from atoll.node.doctor import coordinator_checks, doctor

RUN = RunConfig(name="reef")
PIN = "a" * 52


def asked(tmp: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and what was found."""
    done = CliRunner().invoke(doctor, [*words, "--json", "--state-dir", str(tmp / "node")])
    return done.exit_code, json.loads(done.stdout) if done.stdout else {}


def named(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in found["checks"] if c["name"] == name)


def test_all_is_well_on_a_machine_that_runs_these_tests_and_nothing_is_left(tmp_path: Path) -> None:
    code, found = asked(tmp_path)
    assert code == 0 and found["ok"], found
    assert all(c.keys() == {"name", "ok", "found", "remedy"} for c in found["checks"])
    names = ["python", "packages", "cores", "memory", "gpu", "compiler", "disk", "descriptors"]
    assert [c["name"] for c in found["checks"]] == names
    assert list(tmp_path.iterdir()) == []


def test_it_says_the_same_to_people(tmp_path: Path) -> None:
    done = CliRunner().invoke(doctor, ["--state-dir", str(tmp_path / "node")])
    assert done.exit_code == 0 and "  ok  python       3." in done.output


def test_what_is_lacking_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "node").write_text("a file where a folder should be")
    monkeypatch.setattr("atoll.node.checks.machine.available", lambda: 1 << 20)
    monkeypatch.setattr("atoll.node.checks.machine.has_compiler", lambda: False)
    code, found = asked(tmp_path, "compile=true")
    assert code == 3 and not found["ok"]
    for name, remedy in (("memory", "free some"), ("compiler", "install g++"), ("disk", "--state-dir")):
        check = named(found, name)
        assert not check["ok"] and remedy in check["remedy"], check


@pytest.mark.parametrize("driver", [True, False])
def test_a_gpu_that_torch_cannot_use_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: bool
) -> None:
    monkeypatch.setattr("atoll.node.checks.machine.has_gpu_driver", lambda: driver)
    monkeypatch.setattr("atoll.node.checks.machine.torch_has_gpus", lambda: False)
    code, found = asked(tmp_path)
    assert named(found, "gpu")["ok"] is not driver and code == (3 if driver else 0)
    assert ("CUDA build" in named(found, "gpu")["remedy"]) is driver
    code, found = asked(tmp_path, "device=cpu")
    assert code == 0 and "not asked for" in named(found, "gpu")["found"]
    assert asked(tmp_path, "device=cuda")[0] == 3


def test_gpus_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.node.checks.machine.gpus", lambda: (devices.Gpu("NVIDIA H100", 80 * 10**9),) * 2)
    assert named(asked(tmp_path)[1], "gpu")["found"] == "NVIDIA H100 (80 GB), NVIDIA H100 (80 GB)"


async def looked(
    c: Coordinator, folder: Path, *overrides: str, pin: Pin = NO_PIN, **options: Any
) -> tuple[dict[str, Check], int]:
    """What is found of a coordinator, by its name, and how often somebody joined meanwhile."""
    invite, config = Invite(c.address, "reef", c.token, pin), load_dataclass(NodeConfig, None, overrides)
    before = c.event_loop.state.members.next_id
    checks = coordinator_checks(invite, config, folder / "node", Listening(**options))
    found = {check.name: check async for check in checks}
    return found, c.event_loop.state.members.next_id - before


def beside(
    folder: Path, story: Callable[[Coordinator], Awaitable[None]], run: RunConfig = RUN, encrypted: bool = True
) -> None:
    async def told() -> None:
        async with coordinator(folder, run, load_or_make(folder) if encrypted else None) as c:
            await story(c)

    asyncio.run(told())


NAMES = ["coordinator", "invite", "clock", "settings", "data", "model", "state", "reads", "writes", "talks to"]


def test_of_apples_gpu_it_is_said_that_torch_decides_and_that_nobody_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found = asked(tmp_path, "device=mps")
    assert code == 2 and "device=mps is a Mac's GPU" in named(found, "gpu")["found"]
    monkeypatch.setattr("atoll.node.checks.machine.has_gpu_driver", lambda: False)
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    gpu = named(asked(tmp_path)[1], "gpu")
    assert gpu["ok"] and "if torch can use it" in gpu["found"] and "not tested on real hardware" in gpu["remedy"]
    assert named(asked(tmp_path, "device=mps")[1], "gpu")["found"] == "Apple's (device=mps)"
    code, found = asked(tmp_path, "device=mps", "ranks=2")
    assert code == 2 and "leave out bf16=" in named(found, "gpu")["remedy"]


def test_a_coordinator_says_all_there_is_to_know_and_the_invite_stays_whole(tmp_path: Path) -> None:
    async def story(c: Coordinator) -> None:
        c.token = c.journal.issue_token("one", 1, math.inf)
        found, joined = await looked(c, tmp_path, pin=load_or_make(tmp_path).pin)
        assert list(found) == [*NAMES, "reach", "rates", "exchange"] and all(check.ok for check in found.values())
        assert f"{c.address} answers in" in found["coordinator"].found
        assert "of a private network" in found["reach"].remedy and "127.0.0.1:" in found["reach"].found
        assert re.fullmatch(r"[\d.,]+ Mbit/s up, [\d.,]+ Mbit/s down, to and from.*", found["rates"].found)
        assert "0.8 MB each way after 100 inner steps, less than a second here" in found["exchange"].found
        assert f"{RUN.model.n_params:,} parameters" in found["model"].found
        assert str(tmp_path / "node") in found["writes"].found and c.address in found["talks to"].found
        assert joined == 0 and not (tmp_path / "node").exists()
        assert c.journal.invites()[-1].left == 1

    beside(tmp_path, story)


def test_what_the_run_needs_and_this_machine_lacks_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "atoll.node.checks.needs.shutil.disk_usage", lambda folder: shutil._ntuple_diskusage(2, 2, 0)
    )

    async def story(c: Coordinator) -> None:
        found, _ = await looked(c, tmp_path, "device=cpu", "titan=[--a.b=1]", "congestion=warp")
        wrong = {name: check.remedy for name, check in found.items() if not check.ok}
        assert "durable=false" in wrong["state"] and "kernel offers" in wrong["settings"]
        assert "free some" in wrong["model"] and "data=FOLDER" in wrong["data"]
        assert {check.exit_code for check in found.values() if not check.ok} <= {2, 3}

    run = RunConfig(
        name="reef",
        model=ModelConfig(dim=1 << 13, layers=64, ffn_dim=1 << 15),
        data=DataConfig(kind=DataKind.BYTES),
    )
    beside(tmp_path, story, run, encrypted=False)


def test_who_cannot_be_dialled_is_told_so_and_what_to_give(tmp_path: Path) -> None:
    async def story(c: Coordinator) -> None:
        with socket.socket() as nobody:  # bound, and nobody listens
            nobody.bind(("127.0.0.1", 0))
            there = f"127.0.0.1:{nobody.getsockname()[1]}"
            found, _ = await looked(c, tmp_path, advertise=there)
            assert not found["reach"].ok and "--leaf" in found["reach"].remedy and there in found["reach"].found
            found, _ = await looked(c, tmp_path, listen="192.0.2.1:4710")
            assert not found["reach"].ok and "--listen" in found["reach"].remedy
        found, _ = await looked(c, tmp_path, leaf=True)
        assert found["reach"].ok and "--leaf" in found["reach"].found

    beside(tmp_path, story, encrypted=False)


def test_a_cap_of_the_volunteer_is_what_its_link_has_and_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "ALL_MEASURED", RateLimit(1e-9, 0))  # it measures with nobody

    async def story(c: Coordinator) -> None:
        found, _ = await looked(c, tmp_path, "upload=0.5", "download=8")
        assert (
            found["rates"].found == "0.5 Mbit/s up (as set), 8.0 Mbit/s down (as set), to and from the coordinator"
        )
        size = exchanged_bytes(RUN, 2)
        assert f"about {size / 62500:.0f} s here" in found["exchange"].found
        found, _ = await looked(c, tmp_path, "upload=0.5")
        assert found["rates"].ok and "not measured" in found["rates"].found and "exchange" not in found

    beside(tmp_path, story, encrypted=False)


def test_an_invite_that_is_used_up_is_said_and_who_came_with_it_may_ask(tmp_path: Path) -> None:
    async def story(c: Coordinator) -> None:
        c.token = c.journal.issue_token("one", 1, math.inf)
        ada = c.node()
        await ada.join()
        found, _ = await looked(c, tmp_path)
        assert list(found) == ["invite"] and "used up" in found["invite"].found and found["invite"].exit_code == 5
        (tmp_path / "node").mkdir()
        invite = Invite(c.address, "reef", c.token)
        save_session(tmp_path / "node" / "session", invite, ada.session, "ada")
        found, _ = await looked(c, tmp_path)
        assert found["invite"].ok and "this node has joined run reef" in found["invite"].found

    beside(tmp_path, story, encrypted=False)


@pytest.mark.parametrize(
    ("ahead", "ok", "remedy"), [(1.0, True, ""), (-5.0, True, "gateway"), (4000.0, False, "set it")]
)
def test_a_clock_that_is_wrong_is_told_for_what_it_is_needed(ahead: float, ok: bool, remedy: str) -> None:
    found = clock_check(RunSight(RUN, 1, "127.0.0.1", "", True, 0.2, ahead))
    assert found.ok is ok and remedy in found.remedy and bool(found.remedy) is bool(remedy)
    assert ("ahead of" if ahead > 0 else "behind") in found.found


@pytest.mark.parametrize("installed", [True, False])
def test_a_machine_that_nobody_can_dial_does_where_the_run_has_gateways(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "installed", lambda package: installed)
    sight = RunSight(RUN, 1, "203.0.113.7", "", False, 0.2, 0.0)
    for check in (
        Check("reach", True, "the coordinator dialled it"),
        Check("reach", False, "not its own", "--leaf"),
    ):
        assert reached_otherwise(check, replace(sight, gateways=("/ip4/...",))) is check
    unreached = Unreached("reach", False, "peers cannot dial this machine", "forward a port")
    assert reached_otherwise(unreached, sight) is unreached
    found = reached_otherwise(unreached, replace(sight, gateways=("/ip4/...",)))
    assert found.ok and ("gateways will pass on" in found.found) is installed
    assert ('".[p2p]"' in found.remedy) is not installed


def test_a_command_says_so_too(tmp_path: Path) -> None:
    """As a process, beside a coordinator that has its own."""

    async def story(c: Coordinator) -> None:
        url = f"atoll://{c.token}:{load_or_make(tmp_path).pin}@{c.address}/reef"
        words = ("doctor", url, "--json", "--state-dir", str(tmp_path / "node"))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "atoll.comm.cli", *words, stdout=pipe)
        said, _ = await process.communicate()
        found = json.loads(said)
        assert process.returncode == 0 and found["ok"], found
        assert [check["name"] for check in found["checks"]][-3:] == ["reach", "rates", "exchange"]

    beside(tmp_path, story)


def test_a_coordinator_that_is_not_there_is_unreachable(tmp_path: Path) -> None:
    with socket.socket() as sock:  # bound, and nobody listens
        sock.bind(("127.0.0.1", 0))
        code, found = asked(tmp_path, f"atoll://token@127.0.0.1:{sock.getsockname()[1]}/run")
    assert code == 4 and "no coordinator answers" in named(found, "coordinator")["found"]
    assert [c["name"] for c in found["checks"]][-1] == "coordinator"


def test_a_coordinator_without_the_urls_certificate_is_refused(tmp_path: Path) -> None:
    async def story(c: Coordinator) -> None:
        found, _ = await looked(c, tmp_path, pin=Pin(PIN))
        assert list(found) == ["coordinator"] and found["coordinator"].exit_code == 5
        assert "does not speak TLS" in found["coordinator"].found

    beside(tmp_path, story, encrypted=False)


def test_wrong_words_are_refused_before_anything_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("atoll://token@127.0.0.1:1/run")
    assert asked(tmp_path, f"@{tmp_path / 'url'}")[0] == 4
    assert asked(tmp_path, f"@{tmp_path / 'url'}", "device=cpu")[0] == 4
    for words in (["http://x"], ["divice=cpu"], [f"@{tmp_path / 'none'}"]):
        assert asked(tmp_path, *words) == (1, {})
