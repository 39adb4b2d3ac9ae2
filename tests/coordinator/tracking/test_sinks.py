"""Every sink goes on where it really ended: rounds that a killed process wrote are there once, and none is
missing."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import wandb_log
import wandb_server
from watched_runs import record

from atoll.comm.config.run import WandbMode
from atoll.comm.log import LogSetup
from atoll.coordinator.tracking.figures import row
from atoll.coordinator.tracking.json_lines import FILE, JsonLines
from atoll.coordinator.tracking.messages import SinkSpec
from atoll.coordinator.tracking.sink import SinkKind
from atoll.coordinator.tracking.tensorboard import FOLDER, TensorBoard

Row = dict[str, Any]
# A process that writes the rounds after those that are there up to argument 3, and then ends as argument 4 says.
WRITER = """
import os, sys, time
import msgspec
from watched_runs import record
from atoll.comm.config.run import RunConfig
from atoll.coordinator.tracking.figures import row
from atoll.coordinator.tracking.messages import SinkSpec
from atoll.coordinator.tracking.writer import open_sink

spec, last, ending = msgspec.json.decode(sys.argv[1], type=SinkSpec), int(sys.argv[2]), sys.argv[3]
sink = open_sink(spec, RunConfig(name="reef"))
print(sink.last, flush=True)
for number in range(sink.last + 1, last + 1):
    sink.write(row(record(number)))
sink.flush()
if ending == "closed":
    sink.close()
else:
    time.sleep(float(ending))  # in which a library writes what it has
    os.kill(os.getpid(), 9)
"""


def write(spec: SinkSpec, last: int, ending: str) -> int:
    """The round that a process of its own found at the end of what was there before it."""
    command = [sys.executable, "-P", "-c", WRITER, msgspec.json.encode(spec).decode(), str(last), ending]
    # Not with the service of a wandb that this process has: there a run would outlive its killed writer.
    usual = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    environment = usual | {"PYTHONPATH": str(Path(wandb_log.__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == (0 if ending == "closed" else -9), done.stderr
    return int(done.stdout)


def json_lines(folder: Path) -> list[Row]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def tensorboard_rows(folder: Path) -> list[Row]:
    """All events of the folder as TensorBoard reads them: file after file, each up to where it is damaged."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    def masked(data: bytes) -> int:
        crc: int = crc32c(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    rows = []
    for file in sorted((folder / FOLDER).iterdir()):
        data = file.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            body = data[12 : 12 + length]
            assert int.from_bytes(data[8:12], "little") == masked(data[:8])
            assert int.from_bytes(data[12 + length : 16 + length], "little") == masked(body)
            event = Event.FromString(body)
            if event.summary.value:
                assert event.wall_time == record(event.step).committed_at
                rows.append({value.tag: value.simple_value for value in event.summary.value})
            data = data[16 + length :]
    return rows


def offline_rows(folder: Path) -> list[Row]:
    return [row for rows in wandb_log.rows(folder / "wandb") for row in rows]


SINKS = [
    pytest.param(SinkKind.JSONL, json_lines, id="jsonl"),
    pytest.param(SinkKind.TENSORBOARD, tensorboard_rows, id="tensorboard"),
    pytest.param(SinkKind.WANDB, offline_rows, id="wandb offline", marks=pytest.mark.chaos),
    pytest.param(SinkKind.WANDB, None, id="wandb online", marks=pytest.mark.chaos),
]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "read"), SINKS)
def test_rounds_are_there_once_after_three_processes_one_of_them_killed(
    kind: SinkKind, read: Callable[[Path], list[Row]] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with wandb_server.serving() as server:
        if read is None:
            for name, value in server.environment().items():
                monkeypatch.setenv(name, value)
        mode = WandbMode.OFFLINE if read is not None else WandbMode.ONLINE
        spec = SinkSpec(kind, str(tmp_path), "reef", "", LogSetup("writer"), "ree5f001", mode)
        assert write(spec, 3, "closed") == 0
        assert write(spec, 7, "0" if kind is SinkKind.JSONL else "3.0") == 3
        there = write(spec, 9, "closed")
        found = read(tmp_path) if read is not None else server.run.history

    assert 3 <= there <= 7
    assert [int(row["round"]) for row in found] == list(range(1, 10))
    for number, made in enumerate(found, 1):
        expected = row(record(number))
        expected.pop("committed_at")
        assert {name: made[name] for name in expected} == pytest.approx(expected, rel=1e-6), number


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_line_that_was_cut_short_is_written_again(cut: int, tmp_path: Path) -> None:
    path = tmp_path / FILE
    first = JsonLines(path)
    for number in (1, 2, 3):
        first.write(row(record(number)))
    first.close()
    os.truncate(path, path.stat().st_size - cut)
    again = JsonLines(path)
    assert again.last == 2
    again.write(row(record(3)))
    again.close()
    assert [made["round"] for made in json_lines(tmp_path)] == [1, 2, 3]


def test_lines_that_the_disk_lost_are_written_again(tmp_path: Path) -> None:
    path = tmp_path / FILE
    path.write_bytes(b'{"round":1}\n' + bytes(100) + b"\n" + bytes(5))
    again = JsonLines(path)
    assert again.last == 1
    again.close()
    assert path.read_bytes() == b'{"round":1}\n'


def test_a_loss_that_is_no_number_is_null_in_a_line(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / FILE)
    sink.write(
        {"round": 1, "tokens": 10, "committed_at": 0.5, "loss/train": float("nan"), "loss/val": float("inf")}
    )
    sink.close()
    assert (tmp_path / FILE).read_text() == (
        '{"round":1,"tokens":10,"committed_at":0.5,"loss/train":null,"loss/val":null}\n'
    )


@pytest.mark.parametrize("cut", [1, 5, 100])
def test_an_event_that_was_cut_short_is_written_again(cut: int, tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    first = TensorBoard(folder)
    for number in (1, 2, 3):
        first.write(row(record(number)))
    first.close()
    (file,) = folder.iterdir()
    os.truncate(file, file.stat().st_size - cut)
    again = TensorBoard(folder)
    assert again.last == 2
    again.write(row(record(3)))
    again.close()
    assert [made["round"] for made in tensorboard_rows(tmp_path)] == [1, 2, 3]
