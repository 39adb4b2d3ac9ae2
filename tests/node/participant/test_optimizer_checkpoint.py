"""The inner optimizer's state on disk: real trainers, ended and started again, with other numbers of ranks too."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from trainers import DEADLINE, Node, launched, order, small

from atoll.comm.config.run import CheckpointConfig, InnerConfig, OptimizerName, RunConfig
from atoll.comm.files import DiskFull
from atoll.node import trainer_channel
from atoll.node.checkpoint.disk_budget import DiskBudget
from atoll.node.participant.lr_rewarm import Rewarming
from atoll.node.participant.optimizer_files import MANIFEST, OptimizerFiles, UnusableMoments

F32 = NDArray[np.float32]
SHAPES = {"weight": (3, 2), "bias": (3,)}


def run_of(optimizer: OptimizerName = OptimizerName.ADAMW) -> RunConfig:
    """A run whose trainers keep their moments after every second round."""
    inner = InnerConfig(optimizer=optimizer, batch_size=4, warmup_tokens=512)
    return replace(small(inner=inner), checkpoint=CheckpointConfig(every=2))


async def trained(node: Node, round_: int, files: OptimizerFiles | None = None) -> F32:
    """What eight inner steps from the anchor add to it; its moments are in `files` then."""
    tokens = 1000 if round_ > 1 else 0  # from the second round on the schedule is at its peak
    await node.ask(order(round_, 8, tokens, first=32 * round_), trainer_channel.Ready)
    async with asyncio.timeout(DEADLINE):
        while files is not None and round_ not in files.rounds:
            await asyncio.sleep(0.01)
    moved: F32 = node.local - node.anchor
    return moved


def far(a: F32, b: F32) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer, off",
    [pytest.param(OptimizerName.ADAMW, 1e-4, marks=pytest.mark.chaos), (OptimizerName.MUON, 0.05)],
)
def test_a_node_comes_back_with_another_number_of_ranks_and_its_moments(
    optimizer: OptimizerName, off: float, tmp_path: Path
) -> None:
    """Muon orthogonalises in bf16 where the processor multiplies it: to two digits. Without moments: 0.4 off."""
    run, files = run_of(optimizer), OptimizerFiles(tmp_path / "moments")

    async def story() -> None:
        async with launched(tmp_path / "steady", run, moments=str(tmp_path / "moments")) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(7), trainer_channel.Initialised)
            anchor = node.anchor.copy()
            await trained(node, 1, files)
            two, three, four = await trained(node, 2), await trained(node, 3, files), await trained(node, 4)
            assert not node.told
        assert files.rounds == [3, 1]
        for ranks, expected in (
            (2, {2: two, 3: three}),
            (1, {4: four}),
        ):  # and the fourth from what two ranks wrote
            async with launched(tmp_path / f"on-{ranks}", run, ranks, moments=str(tmp_path / "moments")) as node:
                await node.attach()
                node.anchor[:] = anchor
                for round_, moved in expected.items():
                    assert far(await trained(node, round_), moved) < off
                await node.stop()
                assert node.told == [f"goes on with the inner optimizer's moments of round {min(expected) - 1}"]

    asyncio.run(story())


@pytest.mark.long
def test_what_a_killed_trainer_had_not_finished_or_the_disk_damaged_is_not_used_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = run_of(), tmp_path / "moments"
    files = OptimizerFiles(folder)

    async def story() -> None:
        with monkeypatch.context() as environment:
            environment.setenv("ATOLL_FAULTS", "moments.written@2=crash")
            async with launched(tmp_path / "killed", run, moments=str(folder)) as node:
                await node.attach()
                await node.ask(trainer_channel.Initialise(7), trainer_channel.Initialised)
                anchor = node.anchor.copy()
                await trained(node, 1, files)
                two = await trained(node, 2)
                await trained(node, 3)
                await asyncio.wait_for(node.process.wait(), DEADLINE)
        assert files.rounds == [1] and files.unfinished_path(3).exists()
        async with launched(tmp_path / "back", run, moments=str(folder)) as node:
            await node.attach()
            node.anchor[:] = anchor
            assert far(await trained(node, 2), two) < 1e-6
            await trained(node, 3, files)
            assert node.told == ["goes on with the inner optimizer's moments of round 1"]
        assert files.rounds == [3, 1] and not files.unfinished_path(3).exists()
        flip(next(files.path(3).glob("*.distcp")))
        (files.path(1) / MANIFEST).write_bytes(b"{}")
        async with launched(tmp_path / "again", run, moments=str(folder), disk=1e-6) as node:
            await node.attach()
            node.anchor[:] = anchor
            assert far(await trained(node, 4), two) > 0.01
            await node.stop()
            assert node.told[0] == (
                "begins round 4 without the inner optimizer's moments (those of round 3 are damaged: __0_0.distcp "
                "is not as it was written; those of round 1 are damaged: manifest.json cannot be read (Object "
                "missing required field `format`)): the learning rate rises over 2 inner steps"
            )
            assert "of round 4 are not kept on disk: disk= leaves 0.0 MB for them" in node.told[1]

    asyncio.run(story())


def kept(folder: Path, *rounds: int, limit: float = 0.0) -> OptimizerFiles:
    files = OptimizerFiles(folder, limit)
    for round_ in rounds:
        (files.begin(round_, 100) / "__0_0.distcp").write_bytes(bytes([round_]) * 100)
        files.finish(round_, "adamw", SHAPES)
    return files


def test_the_last_two_stay_and_a_small_disk_gives_the_older_one_up_for_a_new_one(tmp_path: Path) -> None:
    files = kept(tmp_path / "two", 1, 5, 9)
    assert files.rounds == [9, 5]
    each = sum(file.stat().st_size for file in (tmp_path / "two").rglob("*.*")) / 2
    small = kept(tmp_path / "small", 1, 5, limit=2 * each)
    small.begin(9, 100)
    assert small.rounds == [5]
    with pytest.raises(DiskFull, match="disk= leaves"):
        kept(tmp_path / "tiny", 1, 5, limit=each)
    assert OptimizerFiles(tmp_path / "tiny").rounds == [1]


def test_no_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    files = OptimizerFiles(tmp_path, room=lambda _: 1_000_000)
    with pytest.raises(DiskFull, match=r"they take 2\.1 MB, the disk has 1\.0 MB"):
        files.begin(1, 2_000_000)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "optimizer, shapes, why",
    [
        ("muon", SHAPES, "another inner optimizer: adamw, now muon"),
        ("adamw", {**SHAPES, "bias": (4,)}, "other shapes: bias differs"),
        ("adamw", {"weight": (3, 2)}, "other shapes: bias differs"),
    ],
)
def test_moments_of_another_model_or_optimizer_are_refused(
    optimizer: str, shapes: dict[str, tuple[int, ...]], why: str, tmp_path: Path
) -> None:
    files = kept(tmp_path, 3)
    assert files.verify(3, "adamw", SHAPES) == files.path(3)
    with pytest.raises(UnusableMoments, match=why):
        files.verify(3, optimizer, shapes)


@pytest.mark.parametrize("name", ["__0_0.distcp", MANIFEST])
def test_a_flipped_bit_or_a_missing_file_is_found(name: str, tmp_path: Path) -> None:
    files = kept(tmp_path, 3)
    flip(files.path(3) / name)
    with pytest.raises(UnusableMoments, match=f"{name}"):
        files.verify(3, "adamw", SHAPES)
    (files.path(3) / name).unlink()
    with pytest.raises(UnusableMoments, match=f"{name} cannot be read"):
        files.verify(3, "adamw", SHAPES)


def test_the_learning_rate_rises_over_the_steps_that_beta2_asks_for_but_a_quarter_of_a_round() -> None:
    assert Rewarming.without_moments(InnerConfig(beta2=0.95), 1000).steps == 40
    rewarming = Rewarming.without_moments(InnerConfig(beta2=0.999), 12)
    assert [rewarming.next_factor() for _ in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert Rewarming().next_factor() == 1.0


def test_the_outer_state_has_the_disk_first() -> None:
    n, adamw = 1_000_000, OptimizerName.ADAMW
    assert DiskBudget.divide(0.0, n, adamw) == DiskBudget(0.0, 0.0)
    assert DiskBudget.divide(20e6, n, adamw).outer == 20e6
    assert DiskBudget.divide(100e6, n, adamw).inner == pytest.approx(50.8e6)  # moments, and copies of a round
    assert DiskBudget.divide(40e6, n, adamw) == DiskBudget(30e6, 10e6)
    assert DiskBudget.divide(100e6, n, OptimizerName.SGD).inner == pytest.approx(8.4e6)


def test_what_is_being_written_stays_when_the_next_begins_and_what_a_killed_process_left_does_not(
    tmp_path: Path,
) -> None:
    files = OptimizerFiles(tmp_path)
    first, second = files.begin(1, 10), files.begin(2, 10)
    assert first.is_dir() and second.is_dir()
    third = OptimizerFiles(tmp_path).begin(3, 10)
    assert not first.exists() and not second.exists() and third.is_dir()
