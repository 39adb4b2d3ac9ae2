"""Micro-batches that fit: measured, and halved where memory runs out."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from token_batches import batch_of
from torch import Tensor
from trainers import DEADLINE, launched, order, small

from atoll.comm import faults
from atoll.comm.config.run import InnerConfig, OptimizerName, RunConfig
from atoll.node import trainer_channel
from atoll.node.config import Checkpointing, NodeConfig
from atoll.node.data.source import open_source
from atoll.node.participant.batches import RunTokens
from atoll.node.participant.rank_group import RankGroup
from atoll.node.trainer.accumulator import GradientAccumulator
from atoll.node.trainer.loss import validation_loss
from atoll.node.trainer.micro_batch import MicroBatchStore, Record, StepPlan
from atoll.node.trainer.model import build, init_parameters
from atoll.node.trainer.stop_signals import STOP_SIGNALS, on_stop

CPU = torch.device("cpu")
FULL, SELECTIVE = Checkpointing.FULL, Checkpointing.SELECTIVE
Break = Callable[[str], None]


@pytest.fixture
def out_of_memory(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Has micro-batches of these numbers of sequences run out of memory."""

    def injected(sizes: str) -> None:
        faulty = ",".join(f"trainer.micro_batch.{size}=memory" for size in sizes.split())
        monkeypatch.setattr(faults, "FAULTS", faults.parse(faulty))

    return injected


def run_of(batch: int) -> RunConfig:
    return small(inner=InnerConfig(batch_size=batch, warmup_tokens=512))


def accumulator(folder: Path, batch: int, node: NodeConfig | None = None) -> GradientAccumulator:
    run = run_of(batch)
    model = build(run.model)
    init_parameters(model, 0)
    store = MicroBatchStore(folder, batch)
    return GradientAccumulator(model, run, node or NodeConfig(), RankGroup(0, 1), CPU, store)


def gradient(made: GradientAccumulator, batch: int) -> Tensor:
    sequences = torch.randint(256, (batch, 33), generator=torch.Generator().manual_seed(1))
    made.add(batch_of(sequences))
    return torch.cat([p.grad.flatten() for p in made._model.parameters() if p.grad is not None])


def test_a_small_share_is_not_measured(tmp_path: Path) -> None:
    made = accumulator(tmp_path, 256)
    assert made.choose() == "" and made.plan == StepPlan(256)
    assert not (tmp_path / "micro_batch.json").exists()


def test_settings_are_not_measured(tmp_path: Path) -> None:
    made = accumulator(tmp_path, 1024, NodeConfig(micro_batch=3, checkpointing=FULL))
    assert made.choose() == "" and made.plan == StepPlan(3, FULL)


@pytest.mark.long
def test_a_large_share_is_measured_once(tmp_path: Path, out_of_memory: Break) -> None:
    out_of_memory("8")
    made = accumulator(tmp_path, 300)
    state = torch.get_rng_state()
    said = made.choose()
    assert made.plan in [StepPlan(1), StepPlan(2), StepPlan(4)]
    assert f"computes 300 sequences a step in {made.plan}: " in said
    if made.plan == StepPlan(4):
        assert "8 at a time did not fit into memory" in said
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in made._model.parameters())
    again = accumulator(tmp_path, 300)
    assert "as found earlier" in again.choose() and again.plan == made.plan


@pytest.mark.long
def test_a_share_of_which_not_even_one_sequence_fits_is_an_error(tmp_path: Path, out_of_memory: Break) -> None:
    out_of_memory("1")
    made = accumulator(tmp_path, 300)
    with pytest.raises(MemoryError):
        made.choose()


def test_what_a_process_died_of_is_not_tried_again(tmp_path: Path) -> None:
    MicroBatchStore(tmp_path, 300).write(Record(attempt=StepPlan(8)))
    made = accumulator(tmp_path, 300)
    assert "a process that tried micro-batches of 8 sequences did not come back" in made.choose()
    assert made.plan == StepPlan(4)


STOPPED = """
import os, pathlib, signal, sys
import test_accumulator
from atoll.node.trainer import accumulator

def stopped(*_):  # in the middle of the first pass
    os.kill(os.getpid(), number)
    while True:
        signal.pause()

accumulator.accumulate = stopped
made = test_accumulator.accumulator(pathlib.Path(sys.argv[1]), 300)
for number in map(int, sys.argv[2:]):
    if (child := os.fork()) == 0:
        made.choose()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), made._store.read().stops, flush=True)
"""


@pytest.mark.chaos
@pytest.mark.long
def test_a_search_that_is_stopped_by_its_operator_says_nothing_about_memory(tmp_path: Path) -> None:
    def searched(*signals: int) -> list[list[int]]:
        here = Path(__file__)
        done = subprocess.run(
            [sys.executable, "-c", STOPPED, str(tmp_path), *map(str, map(int, signals))],
            env=os.environ | {"PYTHONPATH": os.pathsep.join((str(here.parent), str(here.parents[2])))},
            capture_output=True,
            check=True,
            timeout=DEADLINE,
        )
        return [list(map(int, line.split())) for line in done.stdout.splitlines()]

    store = MicroBatchStore(tmp_path, 300)
    term, kill = signal.SIGTERM, signal.SIGKILL
    assert searched(term, signal.SIGINT, signal.SIGHUP) == [[143, 1], [130, 2], [129, 3]]
    assert store.read() == Record(stops=3)
    assert searched(term) == [[143, 3]]
    assert store.read().attempt == StepPlan(1), "who asks so often has a reason"
    store.write(Record(stops=1))
    assert searched(kill) == [[-9, 1]]
    assert "a process that tried micro-batches of 1 sequence did not" in accumulator(tmp_path, 300).choose()


def test_a_process_outside_of_a_search_is_stopped_as_ever(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with on_stop(lambda: None):
        assert [signal.getsignal(number) for number in STOP_SIGNALS] != before
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_out_of_memory_halves_the_micro_batch_and_the_batch_is_computed_again(
    tmp_path: Path, out_of_memory: Break
) -> None:
    whole = accumulator(tmp_path / "whole", 12)
    whole.choose()
    right = gradient(whole, 12)
    made, told = accumulator(tmp_path, 12), list[str]()
    made.choose()
    made.tell = told.append
    out_of_memory("12 6")
    assert torch.allclose(gradient(made, 12), right, rtol=0, atol=1e-7)
    assert made.plan == StepPlan(3)
    assert [sentence.partition(" (")[0] for sentence in told] == [
        "ran out of memory in micro-batches of 12 sequences",
        "ran out of memory in micro-batches of 6 sequences",
    ]
    assert told[1].endswith("goes on with micro-batches of 3 sequences")
    again = accumulator(tmp_path, 12)
    assert "as found earlier: ran out of memory in micro-batches of 6" in again.choose()
    assert again.plan == StepPlan(3)


def test_the_last_of_several_micro_batches_that_runs_out_leaves_nothing_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = accumulator(tmp_path / "whole", 8)
    whole.choose()
    right = gradient(whole, 8)
    made = accumulator(tmp_path, 8, NodeConfig(micro_batch=4))
    made.choose()
    monkeypatch.setattr(faults, "FAULTS", faults.parse("trainer.micro_batch.4@2=memory"))
    assert torch.allclose(gradient(made, 8), right, rtol=0, atol=1e-7)
    assert made.plan == StepPlan(2)


@pytest.mark.long
def test_one_sequence_that_does_not_fit_is_checkpointed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = accumulator(tmp_path, 2)
    made.choose()
    right = gradient(made, 2)
    made._model.zero_grad()
    monkeypatch.setattr(faults, "FAULTS", faults.parse("trainer.micro_batch.2=memory"))
    gradient(made, 2)
    made._model.zero_grad()
    monkeypatch.setattr(faults, "FAULTS", faults.parse("trainer.micro_batch.1@1=memory"))
    assert torch.allclose(gradient(made, 2), right, rtol=0, atol=1e-7)
    assert made.plan == StepPlan(1, SELECTIVE)
    monkeypatch.setattr(faults, "FAULTS", faults.parse("trainer.micro_batch.1=memory"))
    with pytest.raises(MemoryError):
        gradient(made, 2)
    assert made.plan == StepPlan(1, FULL)


def test_another_error_is_no_lack_of_memory(tmp_path: Path) -> None:
    made = accumulator(tmp_path, 4)
    made.choose()
    with pytest.raises(IndexError):
        made.add(batch_of(torch.full((4, 33), 256)))  # no such token
    assert made.plan == StepPlan(4)


def test_evaluations_are_computed_in_micro_batches_too(tmp_path: Path, out_of_memory: Break) -> None:
    made, run = accumulator(tmp_path, 6), run_of(6)
    made.choose()
    data = RunTokens(open_source(run, NodeConfig(), tmp_path))
    whole = made.validation_loss(data)
    out_of_memory("6")
    gradient(made, 6)
    assert made.plan == StepPlan(3)
    assert abs(made.validation_loss(data) - whole) < 1e-5
    ranks, model = made._ranks, made._model
    assert abs(validation_loss(model, run, data, ranks, CPU, micro_batch=4) - whole) < 1e-5


# With processes


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.long
def test_a_step_of_8_micro_batches_is_a_step_of_one(ranks: int, tmp_path: Path) -> None:
    # Adam divides by what is next to nothing in some elements: there any two orders of summing differ.
    sgd = InnerConfig(optimizer=OptimizerName.SGD, batch_size=8 * ranks, warmup_tokens=512, lr=0.1)

    async def stepped(micro_batch: int) -> NDArray[np.float32]:
        folder = tmp_path / str(micro_batch)
        async with launched(folder, small(inner=sgd), ranks, micro_batch=micro_batch) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(7), trainer_channel.Initialised)
            one = trainer_channel.Train(1, 1, 1, 1, 512, 1, ((40, 8 * ranks),))
            await node.ask(one, trainer_channel.Ready)
            assert np.abs(node.local - node.anchor).max() > 1e-4
            return node.local

    async def both() -> None:
        eight, one = await asyncio.gather(stepped(1), stepped(8))
        assert np.abs(eight - one).max() < 1e-5

    asyncio.run(both())


@pytest.mark.long
def test_a_node_of_one_rank_that_runs_out_of_memory_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_FAULTS", "trainer.micro_batch.4=memory")

    async def story() -> None:
        async with launched(tmp_path / "node", small()) as node:
            hello = await node.attach()
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            ready = await node.ask(order(1, 3, tokens=1000), trainer_channel.Ready)
            assert ready.steps == 3 and np.abs(node.local - node.anchor).max() > 1e-4
            (said,) = [sentence for sentence in node.told if "memory" in sentence]
            assert said.startswith("ran out of memory in micro-batches of 4 sequences (ATOLL_FAULTS has it")
            assert said.endswith("goes on with micro-batches of 2 sequences")
            await node.ask(trainer_channel.Evaluate(1), trainer_channel.Evaluated)
            assert hello.pid in node.family()
            await node.stop()

    asyncio.run(story())


@pytest.mark.chaos
@pytest.mark.long
def test_a_node_of_two_ranks_that_runs_out_of_memory_starts_again_with_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_FAULTS", "trainer.micro_batch.2=memory")

    async def story() -> None:
        async with launched(tmp_path / "node", small(), ranks=2) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            node.end.send(order(1, 3))
            assert await asyncio.wait_for(node.end.receive(), DEADLINE) is None  # and never `Failed`
            assert await asyncio.wait_for(node.process.wait(), DEADLINE) == 1
            assert node.connections.empty()
            anchor = node.anchor.copy()
        async with launched(tmp_path / "node", small(), ranks=2) as node:
            await node.attach()
            node.anchor[:] = anchor
            ready = await node.ask(order(1, 3, tokens=1000), trainer_channel.Ready)
            assert ready.steps == 3
            said = next(sentence for sentence in node.told if "micro-batches" in sentence)
            assert said.startswith("computes 2 sequences a step in micro-batches of 1 sequence, as found earlier")
            assert "ran out of memory in micro-batches of 2 sequences" in said

    asyncio.run(story())


@pytest.mark.chaos
@pytest.mark.long
def test_what_does_not_fit_in_any_way_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_FAULTS", ",".join(f"trainer.micro_batch.{size}=memory" for size in (1, 2, 4)))

    async def story() -> None:
        async with launched(tmp_path / "node", small()) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            failed = await node.ask(order(1, 3), trainer_channel.Failed)
            assert "ran out of memory" in failed.sentence and "checkpointing=full" in failed.sentence
            assert [said.rpartition("goes on with ")[2] for said in node.told] == [
                "micro-batches of 2 sequences",
                "micro-batches of 1 sequence",
                "micro-batches of 1 sequence with selective checkpointing",
                "micro-batches of 1 sequence with full checkpointing",
            ]

    asyncio.run(story())
