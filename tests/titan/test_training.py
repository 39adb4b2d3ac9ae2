"""torchtitan's trainer as a node's, launched with the test in the daemon's place; and its configuration alone."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lan import two_machines
from numpy.typing import NDArray
from titan.conftest import HERE
from trainers import DEADLINE, launched, order

from atoll.comm.config.engine import Engine, TitanConfig
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import InnerConfig, OptimizerName, RunConfig
from atoll.comm.errors import ConfigError
from atoll.node import trainer_channel as tc
from atoll.node.config import TrainerSpec
from atoll.node.engines.torchtitan import apply_run, load_config

OWN = "--module=titan_on_cpu"
STEPS = 6


def run_of(
    *settings: str, config: str = "llama3_debugmodel", vocab_size: int = 256, batch_size: int = 4
) -> RunConfig:
    """A run of torchtitan's debug model."""
    return RunConfig(
        seed=5,
        engine=Engine.TORCHTITAN,
        titan=TitanConfig(config=config, settings=list(settings)),
        model=ModelConfig(seq_len=32, vocab_size=vocab_size),
        inner=InnerConfig(optimizer=OptimizerName.ADAMW, lr=1e-3, batch_size=batch_size, warmup_tokens=512),
    )


async def trained(
    folder: Path, anchor: NDArray[np.float32] | None, ranks: int, *settings: str
) -> tuple[NDArray[np.float32], NDArray[np.float32], tc.Ready, list[float]]:
    """What a node of so many ranks makes of the anchor, None: of its own; the anchor; its report; the anchor's
    losses before and after."""
    async with launched(folder, run_of(*settings), ranks, titan=[OWN]) as node:
        await node.attach()
        if anchor is None:
            await node.ask(tc.Initialise(5), tc.Initialised)
        else:
            node.anchor[:] = anchor
        before = await node.ask(tc.Evaluate(0), tc.Evaluated)
        ready = await node.ask(order(1, STEPS), tc.Ready)
        after = await node.ask(tc.Evaluate(1), tc.Evaluated)
        await node.stop()
        return np.array(node.local), np.array(node.anchor), ready, [before.loss, after.loss]


def test_ranks_parallelism_and_micro_batches_do_not_change_what_is_trained(tmp_path: Path) -> None:
    async def story() -> None:
        one, anchor, ready, losses = await trained(tmp_path / "one", None, 1)
        assert ready.steps == STEPS and ready.samples == 4 * STEPS and np.linalg.norm(one - anchor) > 1
        assert losses[0] == losses[1], "training is not seen by an evaluation of the anchor, nor disturbed by it"
        cases: dict[str, tuple[str, ...]] = {
            "sharded": ("--training.local_batch_size=1",),
            "tensor": ("--parallelism.tensor_parallel_degree=2", "activation_checkpoint:full"),
        }
        for name, settings in cases.items():
            other, _, report, theirs = await trained(tmp_path / name, anchor, 2, *settings)
            assert np.allclose(other, one, rtol=0, atol=2e-5), name
            assert report.loss == pytest.approx(ready.loss, abs=1e-4)
            assert theirs[0] == pytest.approx(losses[0], abs=1e-4)

    asyncio.run(story())


@pytest.mark.root
def test_two_machines_train_what_one_does(tmp_path: Path) -> None:
    async def story() -> None:
        one, anchor, _, _ = await trained(tmp_path / "one", None, 1)
        with two_machines() as (first, second):
            host = f"{first.address}:29400"
            words = ("node", "worker", host, "--state-dir", str(tmp_path / "worker"), "device=cpu", "threads=1")
            worker = await asyncio.create_subprocess_exec(
                *second.through, sys.executable, "-P", "-m", "atoll.comm.cli", *words
            )
            own = [OWN, "--parallelism.data_parallel_replicate_degree=2"]
            async with launched(
                tmp_path / "two", run_of(), 1, through=first.through, titan=own, machines=2, rendezvous=host
            ) as node:
                assert (await node.attach()).ranks == 2
                node.anchor[:] = anchor
                await node.ask(order(1, STEPS), tc.Ready)
                assert np.allclose(node.local, one, rtol=0, atol=2e-5)
                await node.stop()
            assert await asyncio.wait_for(worker.wait(), DEADLINE) == 0, "the node has left its run"

    asyncio.run(story())


def test_a_step_that_is_not_finite_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TITAN_BAD_STEP", "3")

    async def story() -> None:
        local, anchor, ready, losses = await trained(tmp_path / "one", None, 1)
        assert ready.steps == STEPS and np.isfinite(local).all() and np.linalg.norm(local - anchor) > 1
        assert losses[0] == losses[1]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("run", "ranks", "sentence"),
    [
        (run_of(config="llama3_9b"), 1, "llama3_9b' not found in torchtitan.models.llama3.config_registry"),
        (run_of(vocab_size=4096), 1, "has embeddings for 2048 tokens"),
        (run_of(batch_size=3), 2, "inner.batch_size=3 cannot be divided among ranks=2"),
        (run_of("--training.nonsense=1"), 1, "Unrecognized options: --training.nonsense=1"),
        (run_of("--parallelism.tensor_parallel_degree=4"), 2, "has ranks=2, and torchtitan's degrees"),
        (
            run_of("--parallelism.pipeline_parallel_degree=2", "--training.disable_cuda_graphs"),
            2,
            "calls pipeline schedules of a torch later than",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(
    run: RunConfig, ranks: int, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    own = [] if "9b" in run.titan.config else [OWN]
    data: Any = None
    with pytest.raises(ConfigError, match=sentence):
        apply_run(load_config(run, own), TrainerSpec(run=run), data, ranks)
