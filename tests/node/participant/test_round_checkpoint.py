"""What is trained of a round outlives the trainer: real trainers that are killed, the rules in this process."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from trainers import DEADLINE, launched, small

from atoll.comm.config.run import CheckpointConfig, InnerConfig, OptimizerName
from atoll.node import trainer_channel
from atoll.node.participant.flat_vector import ShardedParameters
from atoll.node.participant.lr_rewarm import Rewarming
from atoll.node.participant.optimizer_files import ROUND, OptimizerFiles
from atoll.node.participant.rank_group import RankGroup
from atoll.node.participant.round_checkpoint import RoundCheckpoint, RoundPosition
from atoll.node.participant.round_copies import DAY, DISK_BYTES_PER_DAY, RoundCopies
from atoll.node.participant.tensor_writer import TensorWriter
from atoll.node.participant.training_cursor import TrainingCursor
from atoll.node.participant.training_tensors import TrainingTensors
from atoll.node.trainer_channel import Train

RUN = small(
    inner=InnerConfig(optimizer=OptimizerName.ADAMW, batch_size=4, warmup_tokens=512),
    checkpoint=CheckpointConfig(every=1),
)
ALONE = RankGroup(0, 1)
ORDER = Train(2, 100, 1, 100, 1000, 1, ((400, 400),), state="5e")


def position(folder: Path) -> RoundPosition:
    files = OptimizerFiles(folder, prefix=ROUND)
    return msgspec.json.decode(files.position(files.rounds[0]), type=RoundPosition)


@pytest.mark.long
def test_a_trainer_killed_at_step_80_of_100_loses_the_steps_since_its_last_copy_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks; the one that comes back has one."""
    folder = tmp_path / "moments"
    rounds, moments = OptimizerFiles(folder, prefix=ROUND), OptimizerFiles(folder)
    first = Train(1, 8, 1, 8, 0, 1, ((0, 32),), state="a0")

    async def story() -> None:
        async with launched(tmp_path / "steady", RUN) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(1), trainer_channel.Initialised)
            await node.ask(first, trainer_channel.Ready)
            steady = await node.ask(ORDER, trainer_channel.Ready)
            anchor, whole = node.anchor.copy(), node.local.copy()
        async with launched(tmp_path / "before", RUN, 2, moments=str(folder), copy_interval=0.0) as node:
            await node.attach()
            node.anchor[:] = anchor
            await node.ask(first, trainer_channel.Ready)
            await node.stop()  # it finishes what it writes
        assert moments.rounds == [1]
        with monkeypatch.context() as environment:
            environment.setenv("ATOLL_FAULTS", "trainer.step@81=crash")
            async with launched(tmp_path / "killed", RUN, 2, moments=str(folder), copy_interval=0.01) as node:
                await node.attach()
                node.anchor[:] = anchor
                node.end.send(ORDER)
                await asyncio.wait_for(node.process.wait(), DEADLINE)
        saved = position(folder)
        assert saved.round == 2 and 0 < saved.steps <= 80
        async with launched(tmp_path / "back", RUN, moments=str(folder)) as node:
            await node.attach()
            node.anchor[:] = anchor
            ready = await node.ask(ORDER, trainer_channel.Ready)
            assert (
                node.told[0]
                == f"goes on with round 2 behind inner step {saved.steps}, which is on this node's disk"
            )
            assert (ready.steps, ready.samples, ready.skipped) == (100, 400, 0)
            assert abs(ready.loss - steady.loss) < 1e-4
            assert np.linalg.norm(node.local - whole) < 1e-4 * np.linalg.norm(whole - anchor)
        assert rounds.rounds and moments.rounds[-1] == 1, "a round that is trained anew has the moments before it"
        other = msgspec.structs.replace(ORDER, state="0f")  # another anchor
        async with launched(tmp_path / "elsewhere", RUN, moments=str(folder)) as node:
            await node.attach()
            node.anchor[:] = anchor
            ready = await node.ask(other, trainer_channel.Ready)
            assert ready.steps == 100
            assert node.told[0] == "goes on with the inner optimizer's moments of round 1"
            assert np.linalg.norm(node.local - whole) < 1e-4 * np.linalg.norm(whole - anchor)
        assert not rounds.rounds

    asyncio.run(story())


@dataclass
class Life:
    """One life of a trainer of six weights, in this process."""

    folder: Path
    order: Train = ORDER
    limit: float = 0.0
    interval: float = 1e-9
    fragments: int = 1
    memory: str = ""  # folder
    now: float = 0.0  # seconds, of the disk's clock
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(3, 2, bias=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.files = OptimizerFiles(self.folder, self.limit, prefix=ROUND)
        self.writer = TensorWriter(ALONE, torch.device("cpu"))
        self.copies = RoundCopies(ALONE, self.files, lambda: self.now)
        self.checkpoint = RoundCheckpoint(
            TrainingTensors(ShardedParameters([self.model], ALONE), [self.optimizer], ALONE),
            *(ALONE, self.writer, self.copies, self.interval, self.fragments, self.told.append),
        )
        self.checkpoint.attach(self.memory)
        self.cursor = TrainingCursor(RUN, self.order)
        self.began = self.checkpoint.begin(self.cursor)
        self.rewarming = self.began.rewarming if self.began is not None else Rewarming()

    def step(self, skipped: bool = False) -> None:
        self.model(torch.ones(3)).sum().backward()
        self.writer.copied.wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.cursor.count_step(2.0 + self.cursor.steps, skipped, 0.1)
        self.rewarming.next_factor()
        self.checkpoint.save_if_due(self.cursor, self.checkpoint.due, self.rewarming)

    def steps(self, count: int) -> "Life":
        """Take so many, each with a copy that is finished."""
        for _ in range(count):
            self.step()
            self.writer.wait()
            self.checkpoint._next_at, self.now = 0.0, self.now + 1.0
        return self

    @property
    def weights(self) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self.model.weight.detach().numpy().copy()
        return found

    def end(self) -> None:
        self.writer.close()


def test_the_next_life_has_parameters_moments_and_the_count_of_steps(tmp_path: Path) -> None:
    first = Life(tmp_path).steps(2)
    first.step(skipped=True)
    first.end()
    second = Life(tmp_path)
    assert second.began and np.array_equal(second.weights, first.weights)
    cursor = second.cursor
    assert (cursor.steps, cursor.skipped_steps, cursor.moving_steps, cursor.loss_sum) == (3, 1, 2, 5.0)
    for life in (first, second):
        life.checkpoint._interval = 0.0
        life.step()
    assert np.array_equal(second.weights, first.weights), "the moments are the same"
    assert second.files.rounds == [3], "one copy stays"
    second.end()


def test_the_next_life_has_the_rise_of_the_learning_rate(tmp_path: Path) -> None:
    first = Life(tmp_path)
    first.rewarming = Rewarming(steps=9)
    first.steps(2).end()
    second = Life(tmp_path)
    assert (second.rewarming.steps, second.rewarming.steps_taken) == (9, 2)
    assert second.rewarming.next_factor() == 0.3
    second.end()


def test_a_copy_of_which_two_trainers_died_is_deleted_and_one_that_was_told_to_end_did_not_die(
    tmp_path: Path,
) -> None:
    Life(tmp_path).steps(1).end()
    for _ in range(3):
        life = Life(tmp_path)
        assert life.began
        life.checkpoint.end_reading()
        life.end()
    for _ in range(2):
        life = Life(tmp_path)
        assert life.began
        life.end()
    again = Life(tmp_path)
    assert not again.began and not again.files.rounds and not again.cursor.steps
    assert again.told == [
        "what is kept of a round is what the last 2 trainers died of that began with it: it is not used"
    ]
    again.end()


@pytest.mark.parametrize(
    "other",
    [
        msgspec.structs.replace(ORDER, round=3),
        msgspec.structs.replace(ORDER, lease=((404, 400),)),
        msgspec.structs.replace(ORDER, lease=((400, 4),)),  # too short for two steps
        msgspec.structs.replace(ORDER, state="5f"),
        msgspec.structs.replace(ORDER, state=""),
        msgspec.structs.replace(ORDER, resume=True),
    ],
)
def test_what_is_of_another_order_is_deleted(other: Train, tmp_path: Path) -> None:
    Life(tmp_path).steps(2).end()
    fresh = Life(tmp_path, other)
    assert not fresh.began and not fresh.cursor.steps and not fresh.files.rounds
    fresh.end()


def test_what_the_disk_damaged_is_not_used_and_the_log_says_so(tmp_path: Path) -> None:
    first = Life(tmp_path).steps(1)
    first.end()
    path = first.files.path(1) / "position.json"
    path.write_bytes(path.read_bytes().replace(b'"steps":1', b'"steps":9'))
    again = Life(tmp_path)
    assert not again.began and not again.files.rounds
    assert again.told == [
        "what is kept of a round is damaged: position.json is not as it was written: it is not used"
    ]
    again.end()


@pytest.mark.parametrize(
    "order, fragments, kept",
    [
        (ORDER, 1, True),
        (msgspec.structs.replace(ORDER, resume=True), 1, False),
        (msgspec.structs.replace(ORDER, continues=True), 1, True),
        (msgspec.structs.replace(ORDER, continues=True), 3, False),
    ],
)
def test_only_what_a_node_could_go_on_with_is_kept(
    order: Train, fragments: int, kept: bool, tmp_path: Path
) -> None:
    life = Life(tmp_path, order, fragments=fragments).steps(1)
    assert bool(life.files.rounds) is kept
    life.end()


def test_nothing_is_kept_ahead_of_a_commit_nor_before_the_state_is_taken_nor_at_the_end(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.cursor.ahead = True
    life.steps(1)
    life.cursor.ahead, life.cursor.state_due = False, True
    life.steps(1)
    life.cursor.state_due, life.cursor.steps = False, 99
    life.steps(1)
    assert not life.files.rounds
    life.cursor.steps = 5
    life.steps(1)
    assert life.files.rounds == [1]
    life.checkpoint.forget()
    assert not life.files.rounds
    life.end()


def test_a_disk_without_room_is_said_once_and_costs_nothing_else(tmp_path: Path) -> None:
    life = Life(tmp_path, limit=10.0).steps(3)
    assert life.cursor.steps == 3 and not life.files.rounds
    (sentence,) = life.told
    assert sentence.startswith("what is trained of round 2 is not kept, a crash would cost it: disk= leaves")
    life.end()


def test_a_machine_without_memory_for_a_copy_says_so_once_and_copies_again_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path)
    with monkeypatch.context() as machine:
        machine.setattr("atoll.node.preflight.available", lambda: 100 << 20)
        life.steps(2)
    assert not life.files.rounds
    (sentence,) = life.told
    assert sentence.endswith("a crash would cost it: there is no memory for a copy of them")
    life.steps(1)
    assert life.files.rounds and len(life.told) == 1
    life.end()


def test_copies_have_their_interval_and_writing_takes_a_fifth_of_the_time(tmp_path: Path) -> None:
    life = Life(tmp_path, interval=1000.0)
    assert not life.checkpoint.due
    life.steps(1)
    assert not life.files.rounds
    life.step()  # now it is due
    life.writer.wait()
    assert life.files.rounds == [1] and not life.checkpoint.due
    life.end()
    none = Life(tmp_path / "none", interval=0.0).steps(2)
    assert not none.files.rounds
    none.end()


def test_copies_are_in_memory_where_it_has_room_and_else_so_rarely_on_the_disk_that_it_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, disk = tmp_path / "shared", tmp_path / "disk"
    shared.mkdir()
    in_memory = OptimizerFiles(shared, prefix=ROUND)
    life = Life(disk, memory=str(shared)).steps(2)
    assert in_memory.rounds == [2] and not life.files.rounds
    with monkeypatch.context() as machine:
        machine.setattr("atoll.node.participant.round_copies.memory_room", lambda folder: 50)
        life.copies.attach(shared)
        life.steps(1)
        assert life.files.rounds == [3] and not in_memory.rounds, "the newest is the only one"
        life.now = 0.0
        seconds = DAY * (3 * 6 * 4 + 4) / DISK_BYTES_PER_DAY  # parameters, two moments, the count of steps
        life.now = 1.999 * seconds
        life.copies._disk_from = 2 * seconds
        life.steps(1)
        assert life.files.rounds == [3]
        life.now, life.copies._disk_from = 2 * seconds, 2 * seconds
        life.step()
        life.writer.wait()
        assert life.files.rounds == [4]
        assert life.copies._disk_from == pytest.approx(3 * seconds)
    life.copies.attach(shared)
    life.checkpoint._next_at = 0.0
    life.steps(1).end()
    assert in_memory.rounds == [5] and not life.files.rounds
    back = Life(disk, memory=str(shared))
    assert back.began and back.cursor.steps == 6 and np.array_equal(back.weights, life.weights)
    assert back.told == ["goes on with round 2 behind inner step 6, which is in this node's memory"]
    back.checkpoint.forget()
    assert not in_memory.rounds
    back.end()


def test_a_folder_in_memory_that_its_daemon_has_removed_is_not_made_again(tmp_path: Path) -> None:
    life = Life(tmp_path / "disk", memory=str(tmp_path / "gone")).steps(1)
    assert life.files.rounds == [1] and not (tmp_path / "gone").exists()
    life.end()


def test_moments_have_the_room_that_a_rounds_copy_takes(tmp_path: Path) -> None:
    life = Life(tmp_path).steps(1)
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    moments = OptimizerFiles(tmp_path, limit=size + 100, expendable=life.files)
    moments.begin(1, 90)
    assert life.files.rounds == [1]
    moments.begin(2, 200)
    assert not life.files.rounds
    life.end()
