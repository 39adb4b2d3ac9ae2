"""A run whose engine is hf: nodes with the frozen weights train adapters, and one that has others is refused."""

import asyncio
from pathlib import Path

import psutil
import pytest
from e2e.harness import ROOT, Run, until
from hf_models import tiny_qwen
from trainers import launched

from atoll.comm.config.load import load_run
from atoll.node import trainer_channel as channel
from atoll.node.engines.hf_weights import BaseWeights

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ROUNDS, STEPS, BATCH, SEQ_LEN = 6, 20, 4, 32
SECONDS = 300.0  # a trainer needs many to load transformers where the machine is busy


def settings(base: Path) -> tuple[str, ...]:
    """Overrides of the demo's run, for adapters in the model of a folder; rounds of exactly so many steps."""
    weights = (f"hf.base={base}", f"hf.digest={BaseWeights.open(base).digest()}", "hf.lora.rank=8")
    rounds = (f"rounds.inner_steps={STEPS}", f"rounds.total={ROUNDS}", "rounds.ceiling=1", "rounds.quorum=1")
    inner = ("inner.optimizer=adamw", "inner.lr=0.003", "inner.warmup_tokens=512", f"inner.batch_size={BATCH}")
    data = (f"model.seq_len={SEQ_LEN}", "data.val_batches=4")
    outer = ("outer.lr=1", "outer.momentum=0")
    return ("engine=hf", *weights, *rounds, *inner, *data, *outer, "members.start=2", "wandb.mode=disabled")


async def alone(folder: Path, overrides: tuple[str, ...]) -> tuple[float, float]:
    """The validation loss before and after the run's steps, of one process that takes the batches of both
    nodes."""
    run = load_run(
        ROOT / "configs" / "demo.yaml", (*overrides, f"inner.batch_size={2 * BATCH}", "data.val_batches=2")
    )
    steps = ROUNDS * STEPS
    async with launched(folder, run, files=True) as node:
        await node.attach()
        await node.ask(channel.Initialise(run.seed), channel.Initialised)
        before = await node.ask(channel.Evaluate(0), channel.Evaluated)
        order = channel.Train(1, steps, 1, steps, 0, 1, ((0, 2 * BATCH * steps),))
        await node.ask(order, channel.Ready)
        node.anchor[:] = node.local
        after = await node.ask(channel.Evaluate(1), channel.Evaluated)
        await node.stop()
        return before.loss, after.loss


@pytest.mark.chaos
def test_two_nodes_train_adapters_as_one_process_does_through_the_death_of_a_trainer(
    run: Run, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    # Weights this large let adapters steer what a model says that has learned nothing.
    tiny_qwen(tmp_path / "base", **sizes, initializer_range=0.1)
    tiny_qwen(tmp_path / "other", **sizes, initializer_range=0.2)
    overrides = settings(tmp_path / "base")
    run.start(*overrides)
    url = run.invite(3)
    wrong = run.join(url, "wrong", f"base={tmp_path / 'other'}")
    assert wrong.wait(SECONDS) != 0
    assert "are not those of this run: their digest is" in run.log("wrong")
    one, two = run.join(url, "one", "files=true"), run.join(url, "two", f"base={tmp_path / 'base'}", "ranks=2")
    until("the first commit", lambda: run.committed() >= 1, SECONDS)
    for process in psutil.Process(two.pid).children(recursive=True):
        process.kill()
    assert one.wait(SECONDS) == 0 and two.wait(60) == 0
    records = run.rounds()
    assert [r["round"] for r in records] == list(range(1, ROUNDS + 1))
    assert all(r["digests_equal"] and len(r["contributors"]) == 2 for r in records)
    assert records[-1]["tokens"] == 2 * ROUNDS * STEPS * BATCH * SEQ_LEN
    assert "the trainer died" in run.log("two")
    before, after = asyncio.run(alone(tmp_path / "alone", overrides))
    print(f"alone {before:.4f} to {after:.4f}, two nodes {records[-1]['val_loss']:.4f}")
    assert after < 0.85 * before
    assert records[-1]["val_loss"] == pytest.approx(after, rel=0.01)


@pytest.mark.parametrize(
    "adapters", [pytest.param(True, id="adapters", marks=pytest.mark.chaos), pytest.param(False, id="whole")]
)
def test_a_run_begins_with_what_peft_or_transformers_wrote(adapters: bool, run: Run, tmp_path: Path) -> None:
    import peft

    model = tiny_qwen(tmp_path / "base", hidden_size=64, intermediate_size=128)
    overrides, begin = settings(tmp_path / "base"), tmp_path / "base"
    if adapters:
        targets = ("q_proj", "v_proj")
        config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=list(targets), task_type="CAUSAL_LM")
        begin = tmp_path / "adapters"
        peft.get_peft_model(model, config).save_pretrained(begin)
        overrides = (*overrides, f"hf.lora.targets=[{','.join(targets)}]")
    else:
        hf = ("hf.base=''", "hf.digest=''", "hf.lora.rank=0", f"hf.config={begin}")
        overrides = (*overrides, *hf)
    run.start(*overrides, f"init_from={begin}", "rounds.total=1", "rounds.inner_steps=1", "members.start=1")
    node = run.join(run.invite(1), "one", "files=true")
    assert node.wait(SECONDS) == 0
    name = "adapter_model.safetensors" if adapters else "model.safetensors"
    assert f"state 0 is the weights in {begin / name}" in run.log("one")
    assert [record["round"] for record in run.rounds()] == [1]
