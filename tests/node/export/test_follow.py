"""A job beside a node exports each Nth round once, however often it is killed."""

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from states import RUN, Node, filled

from atoll.comm.config.run import RoundsConfig
from atoll.comm.errors import ConfigError, Unreachable
from atoll.node.checkpoint.run_manifest import RunManifest
from atoll.node.export.folder import FolderExporter
from atoll.node.export.follow import Follower, due_rounds, missed_rounds
from atoll.node.export.weights import read_facts

ENDING = RunManifest(replace(RUN, rounds=RoundsConfig(total=9)))


def follower(node: Node, out: Path, said: list[str], every: int = 2, keep: int = 0) -> Follower:
    return Follower(node.state_dir, "", out, every, keep, FolderExporter(node.state_dir), said.append)


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir()) if out.is_dir() else []


def committing(node: Node, *rounds: int) -> Callable[[float], bool]:
    """A wait, in each of which the node commits one of the rounds; behind the last it ends the job."""
    left: Iterator[int] = iter(rounds)

    def wait(_: float) -> bool:
        if (round_ := next(left, None)) is not None:
            asyncio.run(node.commit(round_))
        return round_ is None

    return wait


def test_each_nth_round_is_exported_and_the_last_and_then_the_job_ends(tmp_path: Path) -> None:
    node, said = filled(tmp_path / "node", 1, about=ENDING), list[str]()
    digests = dict[int, str]()

    def wait(seconds: float) -> bool:
        assert 0 < seconds < 60
        round_ = max(digests, default=1) + 1
        asyncio.run(node.commit(round_))
        digests[round_] = node.outer.finalize().hex()
        return False

    follower(node, tmp_path / "out", said).follow(wait)
    assert names(tmp_path / "out") == [f"round-{r:06d}" for r in (2, 4, 6, 8, 9)]
    for r in (2, 4, 6, 8, 9):
        facts = read_facts(tmp_path / "out" / f"round-{r:06d}" / "model.safetensors")
        assert (facts["round"], facts["state_digest"]) == (str(r), digests[r])
    assert sum("no tokenizer" in sentence for sentence in said) == 1


def test_a_job_that_is_started_again_does_nothing_twice_and_keeps_the_newest(tmp_path: Path) -> None:
    node, out, said = filled(tmp_path / "node", 4), tmp_path / "out", list[str]()
    assert not follower(node, out, said, keep=2).look()
    made = [path.stat().st_mtime_ns for path in sorted(out.iterdir())]
    assert names(out)[-1] == "round-000004"
    assert not follower(node, out, said, keep=2).look()
    assert [path.stat().st_mtime_ns for path in sorted(out.iterdir())] == made
    asyncio.run(node.commit(5, 6))
    (out / "notes").mkdir()
    follower(node, out, said, keep=2).look()
    assert names(out) == ["notes", "round-000004", "round-000006"]


def test_a_job_that_is_killed_half_way_leaves_whole_folders_only(tmp_path: Path) -> None:
    node, out = filled(tmp_path / "node", 2), tmp_path / "out"
    program = (
        "import os, sys\n"
        "import atoll.node.export.folder as folder\n"
        "folder._configs = lambda *_: os._exit(9)\n"  # when the weights are written
        "from atoll.node.export.command import export\n"
        "export(sys.argv[1:])\n"
    )
    command = [sys.executable, "-P", "-c", program, str(node.state_dir), "--out", str(out), "--every", "2"]
    assert subprocess.run(command, timeout=60).returncode == 9
    [half] = names(out)
    assert half.startswith("round-000002.") and half.endswith(".new")
    follower(node, out, []).look()
    assert names(out) == ["round-000002"] and load_file(out / "round-000002" / "model.safetensors")


def test_rounds_that_the_disk_has_no_more_are_named_and_left_out(tmp_path: Path) -> None:
    node, out, said = filled(tmp_path / "node", 2), tmp_path / "out", list[str]()
    follower(node, out, said).look()
    asyncio.run(node.commit(*range(3, 21)))
    late = follower(node, out, said)
    late.look()
    rounds = [int(name.removeprefix("round-")) for name in names(out)]
    assert rounds[0] == 2 and rounds[-1] == 20 and 4 not in rounds
    missing = ", ".join(str(r) for r in range(4, 20, 2) if r not in rounds)
    assert f"rounds {missing} are no longer on the node's disk, and are left out" in said


def test_a_node_that_has_only_begun_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "node" / "outer").mkdir(parents=True)
    said = list[str]()
    job = Follower(tmp_path / "node", "", tmp_path / "out", 1, 0, FolderExporter(tmp_path / "node"), said.append)
    assert not job.look() and not job.look()
    assert len(said) == 1 and "there is no snapshot" in said[0]
    node = filled(tmp_path / "node", 1)
    job.follow(committing(node, 2))
    assert names(tmp_path / "out") == ["round-000001", "round-000002"]
    shutil.rmtree(tmp_path / "node")
    with pytest.raises(ConfigError, match="there is no state directory"):
        job.look()


def test_a_folder_with_exports_of_another_run_is_refused(tmp_path: Path) -> None:
    one, other = filled(tmp_path / "one", 2), filled(tmp_path / "other", 2, mark=b"o" * 16)
    follower(one, tmp_path / "out", []).look()
    with pytest.raises(ConfigError, match="exports of another run"):
        follower(other, tmp_path / "out", []).look()


@pytest.mark.parametrize("content", ["notes.txt", "model.safetensors", ""])
def test_what_is_no_export_is_neither_counted_nor_removed(tmp_path: Path, content: str) -> None:
    node, theirs = filled(tmp_path / "node", 8), tmp_path / "out" / "round-000001"
    theirs.mkdir(parents=True)
    if content:
        (theirs / content).write_bytes(b"theirs")
    with pytest.raises(ConfigError, match="round-000001 .*give --out another folder"):
        follower(node, tmp_path / "out", [], keep=1).look()
    assert names(tmp_path / "out") == ["round-000001"] and len(list(theirs.iterdir())) == bool(content)


def test_a_folder_of_checkpoints_is_left_alone(tmp_path: Path) -> None:
    node, out = filled(tmp_path / "node", 4), tmp_path / "out"
    (out / "round-000000000002").mkdir(parents=True)  # as a run's store has them
    assert not follower(node, out, [], keep=1).look()
    assert names(out) == ["round-000000000002", "round-000004"]


def test_what_a_killed_job_has_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, out = filled(tmp_path / "node", 4), tmp_path / "out"
    (out / "round-000002.0123abcd.new").mkdir(parents=True)  # of which it was removed
    follower(node, out, [], keep=1).look()
    assert names(out) == ["round-000004"]


def test_each_trouble_is_said_once_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, out, said = filled(tmp_path / "node", 2), tmp_path / "out", list[str]()
    follower(node, out, []).look()
    asyncio.run(node.commit(*range(3, 21)))
    left = itertools.count(1 << 20, -(1 << 16))
    job = follower(node, out, said)
    job.exporter = FolderExporter(node.state_dir, room=lambda _: next(left))
    monkeypatch.setattr("atoll.node.export.folder.SMALL_FILES_BYTES", 1 << 40)
    job.look()
    assert any("no longer on the node's disk" in line for line in said)
    assert any("the disk has 1.0 MB for it" in line for line in said)
    count = len(said)
    job.look()
    job.look()
    assert len(said) == count
    monkeypatch.undo()
    job.exporter, job.keep = FolderExporter(node.state_dir), 1
    monkeypatch.setattr("atoll.node.export.follow.remove_folder", lambda path: os.rmdir(path))
    job.look()
    assert sum("cannot be removed: Directory not empty" in line for line in said) > 0


def test_what_cannot_be_sent_is_said_once_and_sent_later(tmp_path: Path) -> None:
    node, said, sent = filled(tmp_path / "node", 2, about=ENDING), list[str](), list[tuple[int, str]]()
    away = True

    def publish(run: str, round_: int, folder: Path) -> None:
        if away:
            raise Unreachable("the Hub is away")
        sent.append((round_, folder.name))

    job = follower(node, tmp_path / "out", said)
    job.publish = publish
    assert not job.look() and not job.look()
    assert said.count("the Hub is away") == 1 and not sent
    away = False
    job.look()
    job.look()
    assert sent == [(2, "round-000002")]
    again = follower(node, tmp_path / "out", said)
    again.publish = publish
    again.look()
    assert len(sent) == 2, "after a start nobody knows; the Hub has it, and takes nothing twice"


def test_a_run_without_an_end_is_over_when_the_coordinator_says_so(tmp_path: Path) -> None:
    node, said = filled(tmp_path / "node", 3), list[str]()
    job = follower(node, tmp_path / "out", said)

    def unknown(_: int) -> bool:
        raise Unreachable("no page")

    job.finished = unknown
    assert not job.look() and "no page" in said
    job.finished = lambda last: last == 3
    assert job.look() and names(tmp_path / "out") == ["round-000002", "round-000003"]


@pytest.mark.parametrize(
    "done, last, expected", [(None, None, [120]), (120, None, []), (110, None, [120]), (120, 123, [123])]
)
def test_which_rounds_are_due(done: int | None, last: int | None, expected: list[int]) -> None:
    assert due_rounds(range(116, 124), 10, done, last) == expected
    assert missed_rounds(range(116, 124), 10, 95) == [100, 110]
    assert missed_rounds(range(116, 124), 10, 110) == missed_rounds([], 10, 110) == []
