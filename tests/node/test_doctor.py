"""`atoll doctor` on this machine, and beside coordinators that are there, or not."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from atoll.node import devices
from atoll.node.doctor import doctor

PIN = "a" * 52


def asked(tmp: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and what was found."""
    done = CliRunner().invoke(doctor, [*words, "--json", "--state-dir", str(tmp / "node")])
    return done.exit_code, json.loads(done.stdout) if done.stdout else {}


def named(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in found["checks"] if c["name"] == name)


@contextmanager
def coordinator(serving: bool = True) -> Iterator[str]:
    """Something that answers for its health; its address."""
    server, health = grpc.server(ThreadPoolExecutor(2)), HealthServicer()
    health.set("", HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING)
    add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


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
    monkeypatch.setattr("atoll.node.doctor.available", lambda: 1 << 20)
    monkeypatch.setattr("atoll.node.doctor.has_compiler", lambda: False)
    code, found = asked(tmp_path, "compile=true")
    assert code == 3 and not found["ok"]
    for name, remedy in (("memory", "free some"), ("compiler", "install g++"), ("disk", "--state-dir")):
        check = named(found, name)
        assert not check["ok"] and remedy in check["remedy"], check


@pytest.mark.parametrize("driver", [True, False])
def test_a_gpu_that_torch_cannot_use_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: bool
) -> None:
    monkeypatch.setattr("atoll.node.doctor.has_gpu_driver", lambda: driver)
    monkeypatch.setattr("atoll.node.doctor.torch_has_gpus", lambda: False)
    code, found = asked(tmp_path)
    assert named(found, "gpu")["ok"] is not driver and code == (3 if driver else 0)
    assert ("CUDA build" in named(found, "gpu")["remedy"]) is driver
    code, found = asked(tmp_path, "device=cpu")
    assert code == 0 and "not asked for" in named(found, "gpu")["found"]
    assert asked(tmp_path, "device=cuda")[0] == 3


def test_gpus_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.node.doctor.gpus", lambda: (devices.Gpu("NVIDIA H100", 80 * 10**9),) * 2)
    assert named(asked(tmp_path)[1], "gpu")["found"] == "NVIDIA H100 (80 GB), NVIDIA H100 (80 GB)"


def test_a_coordinator_that_answers_is_timed_and_this_machines_address_is_told(tmp_path: Path) -> None:
    with coordinator() as address:
        code, found = asked(tmp_path, f"atoll://token@{address}/run")
    assert code == 0 and found["ok"]
    assert f"{address} answers in" in named(found, "coordinator")["found"]
    assert named(found, "address")["found"] == "127.0.0.1, of a private network"
    assert "--leaf" in named(found, "address")["remedy"]


def test_a_coordinator_that_does_not_serve_yet_or_is_not_there_is_unreachable(tmp_path: Path) -> None:
    with coordinator(serving=False) as address:
        code, found = asked(tmp_path, f"atoll://token@{address}/run")
        assert code == 4 and "does not serve" in named(found, "coordinator")["found"]
    with socket.socket() as sock:  # bound, and nobody listens
        sock.bind(("127.0.0.1", 0))
        code, found = asked(tmp_path, f"atoll://token@127.0.0.1:{sock.getsockname()[1]}/run")
    assert code == 4 and "no coordinator answers" in named(found, "coordinator")["found"]
    assert [c["name"] for c in found["checks"]][-1] == "coordinator"


def test_a_coordinator_without_the_urls_certificate_is_refused(tmp_path: Path) -> None:
    with coordinator() as address:
        code, found = asked(tmp_path, f"atoll://token:{PIN}@{address}/run")
    assert code == 5 and "does not speak TLS" in named(found, "coordinator")["found"]


def test_wrong_words_are_refused_before_anything_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("atoll://token@127.0.0.1:1/run")
    assert asked(tmp_path, f"@{tmp_path / 'url'}")[0] == 4
    assert asked(tmp_path, f"@{tmp_path / 'url'}", "device=cpu")[0] == 4
    for words in (["http://x"], ["divice=cpu"], [f"@{tmp_path / 'none'}"]):
        assert asked(tmp_path, *words) == (1, {})
