"""The wandb run of a run: one for its whole life, online with a server of ours, offline by its files, and after a
sync; what it shows beside its rows; and a server that is away."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import wandb_log
import wandb_server
from wandb_server import WandbServer
from watched_runs import WatchedRun, record

from atoll.comm.config.run import RunConfig, WandbMode
from atoll.comm.ids import NodeId
from atoll.coordinator.server import save_wandb_view
from atoll.coordinator.tracking import tracker, wandb_file
from atoll.coordinator.tracking.view import SECTIONS

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key and no settings of the person who runs the tests; and nobody waits long."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(tracker, "MIN_PAUSE", 0.1)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with wandb_server.serving() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@dataclass
class Stall:
    title: str = "no round is committed"
    sentence: str = "no round is committed since 400 s"
    on: bool = True


def run_of(folder: Path, mode: WandbMode = WandbMode.ONLINE) -> WatchedRun:
    config = RunConfig(name="reef")
    config.wandb.mode = mode
    return WatchedRun(folder / "state", config)


def sync(folder: Path, *options: str) -> None:
    """`wandb sync` of all that is under the folder."""
    command = [str(Path(sys.executable).parent / "wandb"), "sync", "--yes", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "ERROR" not in done.stderr, done.stderr


def has(server: WandbServer, rounds: int) -> bool:
    return bool(server.runs) and len(server.run.lines.get(wandb_server.HISTORY, {})) == rounds


def test_three_coordinators_one_of_whose_writers_is_killed_make_one_run_with_each_round_once(
    tmp_path: Path, server: WandbServer
) -> None:
    run = run_of(tmp_path)
    run.config.wandb.group, run.config.wandb.tags, run.config.wandb.notes = "seas", ["coral", "blue"], "a test"

    async def kill() -> None:
        os.kill(run.tracker.process_ids[0], signal.SIGKILL)
        run.commit(2)
        await run.until(lambda: has(server, 7))

    run.serve(3, lambda: has(server, 3))
    run.serve(2, lambda: has(server, 5), kill)
    run.config.wandb.notes = "another word"
    run.serve(2, lambda: has(server, 9))

    made = server.run
    assert made.rounds == list(range(1, 10))
    assert [row["_step"] for row in made.history] == list(range(1, 10))
    assert [row["_timestamp"] for row in made.history] == [record(k).committed_at for k in range(1, 10)]
    assert made.axes == {"round": "", "tokens": "", "*": "round", "loss/*": "tokens"}
    facts = {name: made.facts[name] for name in ("displayName", "groupName", "tags", "notes", "project")}
    expected = {"displayName": "reef", "groupName": "seas", "tags": ["coral", "blue"], "project": "atoll"}
    assert facts == expected | {"notes": "another word"}
    assert made.config["rounds"]["inner_steps"] == 100 and made.config["atoll"]["version"]
    losses = [record(k).train_loss for k in range(1, 10)]
    assert made.summary["best/loss_train"] == min(losses)
    assert made.summary["best/loss_train_round"] == 1 + losses.index(min(losses))
    assert made.summary["best/loss_val"] == made.summary["loss/val"] == 4 + 1 / 9
    assert made.summary["loss/train"] == losses[-1] and made.summary["round"] == 9
    table = json.loads(made.files[made.summary["events"]["path"]])
    assert table["columns"] == ["time", "round", "node", "name", "event"]
    assert [(row[1], row[4]) for row in table["data"]] == [
        (k, f"round {k} is about to close") for k in range(1, 10)
    ]
    assert {(row[2], row[3]) for row in table["data"]} == {("n1", record(9).names[NodeId("n1")])}
    assert made.exits == [0, 0, 0]


def test_the_death_of_wandbs_own_process_costs_no_row(tmp_path: Path, server: WandbServer) -> None:
    run = run_of(tmp_path)

    async def kill() -> None:
        (core,) = psutil.Process(run.tracker.process_ids[0]).children(recursive=True)
        core.kill()
        run.commit(3)
        await run.until(lambda: has(server, 5))

    run.serve(2, lambda: has(server, 2), kill)
    assert server.run.rounds == [1, 2, 3, 4, 5]


def test_an_alert_reaches_wandb(tmp_path: Path, server: WandbServer) -> None:
    run = run_of(tmp_path)

    async def tell() -> None:
        run.tracker.alert(Stall())
        await run.until(lambda: server.run.alerts)

    run.serve(1, lambda: has(server, 1), tell)
    (alert,) = server.run.alerts
    assert (alert["title"], alert["severity"]) == ("no round is committed", "ERROR")
    assert alert["text"] == "no round is committed since 400 s"


def test_a_server_that_does_not_answer_gets_all_when_it_does(tmp_path: Path, server: WandbServer) -> None:
    run = run_of(tmp_path)

    async def be_away() -> None:
        server.answering.clear()
        run.commit(5)
        await run.until(server.asked.is_set)
        server.answering.set()
        await run.until(lambda: has(server, 7))

    run.serve(2, lambda: has(server, 2), be_away)
    assert server.run.rounds == list(range(1, 8))


@pytest.mark.chaos
def test_a_server_that_is_away_when_the_coordinator_starts_gets_all_later(
    tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    run = run_of(tmp_path)
    server.answering.clear()

    async def come_back() -> None:
        first = run.tracker.process_ids
        await run.until(lambda: run.tracker.process_ids != first)  # it gave up, and another one tries
        server.answering.set()
        await run.until(lambda: has(server, 4))

    run.serve(4, server.asked.is_set, come_back)
    assert server.run.rounds == [1, 2, 3, 4]


@pytest.mark.chaos
def test_a_coordinator_ends_though_the_server_does_not_answer_and_the_next_one_sends_the_rest(
    tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "CLOSE_SECONDS", 3.0)
    run = run_of(tmp_path)

    async def be_away() -> None:
        server.answering.clear()
        run.commit(3)
        await run.until(server.asked.is_set)

    run.serve(2, lambda: has(server, 2), be_away)
    server.answering.set()
    run.serve(1, lambda: has(server, 6))
    assert server.run.rounds == [1, 2, 3, 4, 5, 6]


@pytest.mark.chaos
@pytest.mark.parametrize("torn", [0, 50])
def test_what_was_written_offline_is_one_run_after_a_sync(torn: int, tmp_path: Path, server: WandbServer) -> None:
    run = run_of(tmp_path, WandbMode.OFFLINE)
    folder = run.state_dir / "wandb"

    def written(rounds: int) -> bool:
        return sum(map(len, wandb_log.rows(folder))) >= rounds

    async def kill() -> None:
        os.kill(run.tracker.process_ids[0], signal.SIGKILL)

    run.serve(3, lambda: written(3))
    run.serve(3, lambda: written(6), kill)
    file = wandb_log.files(folder)[-1]
    os.truncate(file, file.stat().st_size - torn)
    run.serve(2, lambda: [made["round"] for rows in wandb_log.rows(folder) for made in rows] == list(range(1, 9)))
    assert {file.name for file in wandb_log.files(folder)} == {wandb_log.files(folder)[0].name}, "one run"
    sync(run.state_dir)
    assert server.run.rounds == list(range(1, 9))
    run.serve(2, lambda: written(10))
    sync(run.state_dir)
    sync(run.state_dir)
    assert server.run.rounds == list(range(1, 11))
    assert server.run.summary["best/loss_val"] == 4 + 1 / 10


@pytest.mark.chaos
def test_a_run_that_goes_online_needs_no_sync_of_what_was_before(tmp_path: Path, server: WandbServer) -> None:
    run = run_of(tmp_path, WandbMode.OFFLINE)
    run.serve(3, lambda: sum(map(len, wandb_log.rows(run.state_dir / "wandb"))) == 3)
    run.config.wandb.mode = WandbMode.ONLINE
    run.serve(2, lambda: has(server, 5))
    sync(run.state_dir)
    assert server.run.rounds == [1, 2, 3, 4, 5]


def test_a_file_that_was_just_begun_keeps_no_sync_from_the_others(tmp_path: Path, server: WandbServer) -> None:
    run = run_of(tmp_path, WandbMode.OFFLINE)
    run.serve(2, lambda: sum(map(len, wandb_log.rows(run.state_dir / "wandb"))) == 2)
    (file,) = wandb_log.files(run.state_dir / "wandb")
    os.truncate(file, wandb_file.HEADER)
    run.serve(1, lambda: sum(map(len, wandb_log.rows(run.state_dir / "wandb"))) == 3)
    sync(run.state_dir)
    assert server.run.rounds == [1, 2, 3]


def test_wandbs_own_id_is_kept_and_the_environments_goes_first(
    tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "mine0001")
    run = run_of(tmp_path)
    run.serve(1, lambda: has(server, 1))
    monkeypatch.delenv("WANDB_RUN_ID")
    run.serve(1, lambda: has(server, 2))
    assert list(server.runs) == ["mine0001"]


def test_a_checkpoint_in_the_store_becomes_an_artifact_that_refers_to_it(
    tmp_path: Path, server: WandbServer
) -> None:
    run, store = run_of(tmp_path), tmp_path / "store"
    run.config.wandb.artifacts, run.config.checkpoint.remote = True, store.as_uri()
    folders = {}
    for number, digest in (
        (2, record(2).state_digest),
        (3, "00" * 16),
    ):  # the second is of another run of the name
        folder = store / f"reef-{number}a2b3c4d" / f"round-{number:012d}"
        folder.mkdir(parents=True)
        said = {"run": "reef", "round": number, "tokens": 10, "state_digest": digest}
        (folder / "checkpoint.json").write_text(json.dumps(said))
        (folder / "model.safetensors").write_bytes(bytes(1000))
        folders[number] = folder.as_uri()

    async def wait() -> None:
        await run.until(lambda: any(a["type"] == "model" and "committed" in a for a in server.run.artifacts))

    run.serve(3, lambda: has(server, 3), wait)
    (artifact,) = [a for a in server.run.artifacts if a["type"] == "model"]
    assert artifact["name"] == "checkpoint"
    references = [entry["ref"] for entry in artifact["manifest"]["contents"].values()]
    assert {reference.rpartition("/")[0] for reference in references} == {folders[2]}
    assert {alias["alias"] for alias in artifact["said"]["aliases"]} == {"latest", "round-2"}
    assert json.loads(artifact["said"]["metadata"])["state_digest"] == record(2).state_digest
    assert not any("safetensors" in name for name in server.run.files)


def test_a_view_of_the_run_is_saved_once_and_shows_what_is_logged(
    tmp_path: Path, server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "ree5f001")
    run = run_of(tmp_path)
    run.serve(1, lambda: has(server, 1))
    url = save_wandb_view(run.state_dir)
    assert save_wandb_view(run.state_dir) == url and url.startswith(f"{server.url}/{wandb_server.ENTITY}/atoll")
    (view,) = server.views.values()
    assert view["displayName"] == "reef (Atoll)"
    section = json.loads(view["spec"])["section"]
    assert "ree5f001" in json.dumps(section["runSets"])
    sections = section["panelBankConfig"]["sections"]
    named = [s["name"] for s in sections if s["panels"]]
    assert named == [*(s.title for s in SECTIONS), "Events"]
    loss = sections[0]["panels"][0]["config"]
    assert (loss["xAxis"], loss["metrics"]) == ("tokens", ["loss/train", "loss/val"])
    assert [panel["viewType"] for panel in sections[-1]["panels"]] == ["Weave"]
