"""The participant API as a script has it: processes of scripts, with the test in the daemon's place."""

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainers import DEADLINE, Node, launched, order, small

from atoll.comm.config.data import DataConfig, DataKind
from atoll.comm.config.run import InnerConfig, MembersConfig, OptimizerName, RunConfig
from atoll.node import trainer_channel as channel
from atoll.node.participant.lr_schedule import learning_rate

BEGINNING = """
import json, os, sys
import torch
from torch import nn
from atoll.node.participant import participate

torch.manual_seed(0)

class Numbers:
    def __init__(self, count=10):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return index

def tell(said):
    with open(sys.argv[1], "w") as file:
        json.dump(said, file)
"""
# SGD at a constant rate: what a step does can be written down.
FLAT = InnerConfig(OptimizerName.SGD, lr=0.125, min_lr=0.125, warmup_tokens=0, batch_size=4)


@asynccontextmanager
async def script(
    folder: Path, text: str, run: RunConfig, *arguments: str, through: tuple[str, ...] = (sys.executable,)
) -> AsyncIterator[Node]:
    """A script that begins with `BEGINNING` and takes part; what it tells is in `folder/said`."""
    file = folder.with_suffix(".py")
    file.write_text(BEGINNING + text)
    command = (*through, str(file), str(folder / "said"), *arguments)
    async with launched(folder, run, command=command) as node:
        yield node


def said(folder: Path) -> Any:
    return json.loads((folder / "said").read_text())


def test_a_loop_has_the_runs_samples_and_learning_rate_and_may_be_left_for_another(tmp_path: Path) -> None:
    text = """
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=7.0)
seen, rates, rounds = [], [], []
def take(run):
    rates.append([run.learning_rate, optimizer.param_groups[0]["lr"]])
    rounds.append(run.round)
    loss = model(torch.ones(3)).sum()
    loss.backward()
    run.step(loss)
with participate(model, optimizer) as run:
    for batch in run.batches(Numbers(), collate=lambda samples: {"numbers": samples}):
        seen.append(batch["numbers"])
        take(run)
        if len(seen) == 3:
            break
    for indices in run.samples():
        seen.append(indices)
        take(run)
tell([seen, rates, rounds, [run.rank, run.ranks, run.config.seed]])
"""
    inner = InnerConfig(OptimizerName.SGD, lr=0.5, warmup_tokens=1000, decay_tokens=5000, batch_size=4)
    run = small(inner=inner)

    async def story() -> None:
        async with script(tmp_path / "node", text, run) as node:
            hello = await node.attach()
            assert (hello.numel, hello.ranks, hello.evaluates) == (4, 1, False)
            await node.ask(channel.Initialise(0), channel.Initialised)
            start = node.anchor.copy()
            ready = await node.ask(order(1, 4, tokens=700, fleet=2), channel.Ready)
            assert (ready.steps, ready.samples) == (4, 16)
            assert np.abs(node.local - start).max() > 0.1
            await node.ask(order(2, 1, tokens=9000, first=40), channel.Ready)
            await node.stop()

    asyncio.run(story())
    seen, rates, rounds, me = said(tmp_path / "node")
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [12, 13, 14, 15], [40, 41, 42, 43]]
    clock = [700 + step * 4 * run.model.seq_len * 2 for step in range(4)] + [9000]
    assert rates == [[learning_rate(inner, tokens)] * 2 for tokens in clock]
    assert rounds == [1, 1, 1, 1, 2] and me == [0, 1, 5]


@pytest.mark.long
def test_an_engine_that_steps_by_itself_does_what_step_does(tmp_path: Path) -> None:
    text = """
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
with participate(model, optimizer) as run:
    for batch in run.batches(Numbers(1000)):
        loss = (model(torch.randn(4, 8, generator=torch.Generator().manual_seed(int(batch[0])))) ** 2).mean()
        loss.backward()
        if sys.argv[2] == "step":
            run.step(loss)
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.config.inner.clip)
        run.before_step()
        optimizer.step()
        optimizer.zero_grad()
        run.stepped(loss)
"""

    async def trained(how: str) -> tuple[channel.Ready, Any]:
        async with script(tmp_path / how, text, small(), how) as node:
            await node.attach()
            await node.ask(channel.Initialise(0), channel.Initialised)
            ready = await node.ask(order(1, 5, tokens=600), channel.Ready)
            moved = node.local - node.anchor
            await node.stop()
            return ready, moved

    async def both() -> None:
        (one, a), (two, b) = await asyncio.gather(trained("step"), trained("stepped"))
        assert np.abs(a).max() > 1e-4 and np.abs(a - b).max() < 1e-6
        assert math.isclose(one.loss, two.loss, rel_tol=1e-6) and one.samples == two.samples == 20

    asyncio.run(both())


@pytest.mark.long
def test_batches_without_a_token_to_learn_are_no_steps_and_count(tmp_path: Path) -> None:
    """Their mean loss is NaN, as torch's cross-entropy has it, and so is their gradient."""
    text = """
class Masked(Numbers):
    def __getitem__(self, index):
        return {"labels": torch.tensor([index % 7 if index // 4 in (1, 3) else -100])}
model = nn.Linear(1, 7)
optimizer = torch.optim.AdamW(model.parameters())
before = []
with participate(model, optimizer) as run:
    for batch in run.batches(Masked(1000)):
        labels = batch["labels"].flatten()
        before.append(float(model.weight.detach().sum()))
        loss = nn.functional.cross_entropy(model(torch.ones(4, 1)), labels)
        loss.backward()
        run.step(loss)
tell(before)
"""

    async def story() -> None:
        async with script(tmp_path / "node", text, small()) as node:
            await node.attach()
            await node.ask(channel.Initialise(0), channel.Initialised)
            ready = await node.ask(order(1, 8, tokens=600), channel.Ready)
            assert (ready.steps, ready.samples, ready.skipped) == (8, 32, 0)
            assert 0.5 < ready.loss < 4.0, "of the two batches that were learned"
            await node.stop()

    asyncio.run(story())
    before = said(tmp_path / "node")
    assert before[0] == before[1] != before[2] == before[3] != before[4] == before[-1]


# A thread of gloo's may abort an interpreter that ends meanwhile (pytorch/pytorch#179291).
END_OF_RANK = """
import os
dist.destroy_process_group()
os._exit(0)
"""

UNEQUAL = (
    """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
class Labelled(Numbers):
    def __getitem__(self, index):
        learned = index % 4 < 2 or sys.argv[2] == "pieces" and index % 4 == 2
        return {"labels": torch.tensor([index % 7 if learned else -100])}
def masked_mean(logits, labels):
    mask = labels != -100
    losses = nn.functional.cross_entropy(logits, labels.clamp(min=0), reduction="none")
    return (losses * mask).sum() / mask.sum()  # 0/0, and so is its gradient
loss_of = masked_mean if sys.argv[2] == "masked" else nn.functional.cross_entropy
pieces = 2 if sys.argv[2] == "pieces" else 1
model = nn.Linear(1, 7)
wrapped = DistributedDataParallel(model)
with participate(model, torch.optim.AdamW(model.parameters())) as run:
    for batch in run.batches(Labelled(1000)):
        total = 0.0
        for labels in batch["labels"].flatten().chunk(pieces):
            loss = loss_of(wrapped(torch.ones(len(labels), 1)), labels) / pieces
            loss.backward()
            total += loss.detach()
        run.step(total)
"""
    + END_OF_RANK
)


@pytest.mark.parametrize(
    "how",
    [pytest.param("mean", marks=pytest.mark.chaos), pytest.param("masked", marks=pytest.mark.chaos), "pieces"],
)
@pytest.mark.long
def test_a_rank_without_a_token_to_learn_costs_no_step_but_where_its_gradient_is_not_finite_and_is_named_then(
    how: str, tmp_path: Path
) -> None:
    """Of each batch the last two samples are rank 1's. torch's mean over no label is NaN, its gradient 0."""

    async def story() -> None:
        async with script(tmp_path / "node", UNEQUAL, small(), how, through=TORCHRUN) as node:
            await node.attach()
            await node.ask(channel.Initialise(0), channel.Initialised)
            if how == "masked":
                bad = await node.ask(order(1, 8, tokens=600), channel.BadArithmetic)
                named = "rank 1 had no token to learn, and a loss of nan: the mean over nothing is 0/0, and so is"
                assert bad.sentence.startswith(f"the gradients of 3 steps in a row were not finite: {named}")
                assert node.told[1].startswith(f"the gradient of a step is not finite: {named}")
            else:
                ready = await node.ask(order(1, 8, tokens=600), channel.Ready)
                assert (ready.steps, ready.samples, ready.skipped) == (8, 32, 0)
                assert np.abs(node.local - node.anchor).max() > 1e-4
                if how == "mean":
                    assert 0.5 < ready.loss < 2.0 and len(node.told) == 1, "0 of rank 1, and the mean of both"
                else:
                    _, line = node.told  # it begins without the optimizer's moments
                    assert line.startswith("the loss of rank 1 is nan, and the gradient is finite: where a piece")
            await node.stop()

    asyncio.run(story())


@pytest.mark.long
def test_frozen_and_tied_parameters_several_optimizers_and_a_gradient_that_is_not_finite(tmp_path: Path) -> None:
    """What requires no gradient is not in the flat vector, what is tied is there once, each optimizer steps, an
    evaluation leaves no trace, and a step whose gradient is not finite none either."""
    text = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Parameter(torch.full((5,), 3.0), requires_grad=False)
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.last = nn.Parameter(torch.ones(8))
        self.second.weight = self.first.weight

model = Model()
optimizers = [torch.optim.SGD([model.first.weight], lr=1.0), torch.optim.SGD([model.last], lr=1.0)]
modes = []
def evaluate():
    modes.append(model.training)
    model.eval()
    return float(model.last.sum())
good, steps = 0, 0
with participate(model, optimizers, evaluate=evaluate, initialise=lambda seed: model.last.data.fill_(seed)) as run:
    for numbers in run.batches(Numbers()):
        modes.append(model.training)
        loss = model.first.weight.sum() + model.last.sum()
        (loss * (float("nan") if steps == 1 else 1.0)).backward()
        good, steps = good + (steps != 1), steps + 1
        run.step(loss)
        assert all(p.grad is None for p in model.parameters())
tell([good, modes, model.frozen.tolist()])
"""

    async def story() -> tuple[float, float]:
        async with script(tmp_path / "node", text, small(inner=FLAT)) as node:
            hello = await node.attach()
            assert hello.evaluates and hello.layout == (("first.weight", (2, 2)), ("last", (8,)))
            await node.ask(channel.Initialise(3), channel.Initialised)
            assert (node.anchor[4:] == 3).all()
            before = await node.ask(channel.Evaluate(0), channel.Evaluated)
            await node.ask(order(1, 3), channel.Ready)
            moved = node.local - node.anchor
            after = await node.ask(channel.Evaluate(0), channel.Evaluated)
            assert before == after and before.loss == 24
            await node.stop()
            assert np.ptp(moved) < 1e-6
            return float(moved[0]), float(moved[-1])

    first, last = asyncio.run(story())
    good, modes, frozen = said(tmp_path / "node")
    step = FLAT.peak_lr * FLAT.clip / math.sqrt(12)  # the gradient is 1 everywhere, and bounded
    assert (
        good >= 2 and math.isclose(-first, good * step, rel_tol=1e-5) and math.isclose(first, last, rel_tol=1e-5)
    )
    assert modes == [True] * len(modes) and len(modes) >= 5 and frozen == [3.0] * 5


RANKS = (
    """
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=7.0)
seen = []
with participate(model, optimizer, data_parallel=(0, 1)) as run:
    for batch in run.batches(Numbers(100)):
        seen.append(batch.tolist())
        loss = model(torch.ones(3)).sum() * (-1) ** (rank if sys.argv[2] == "apart" else 0)
        loss.backward()
        run.step(loss)
sys.argv[1] += str(rank)
tell(seen)
"""
    + END_OF_RANK
)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.long
def test_ranks_that_share_no_batch_have_all_of_it_each(tmp_path: Path) -> None:
    async def story() -> None:
        async with script(tmp_path / "node", RANKS, small(inner=FLAT), "alike", through=TORCHRUN) as node:
            assert (await node.attach()).ranks == 2
            await node.ask(channel.Initialise(0), channel.Initialised)
            ready = await node.ask(order(1, 2), channel.Ready)
            assert ready.samples == 8
            await node.stop()

    asyncio.run(story())
    told = [json.loads((tmp_path / "node" / f"said{rank}").read_text()) for rank in (0, 1)]
    assert told == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2


@pytest.mark.long
def test_ranks_whose_copies_of_the_parameters_went_apart_are_not_ready(tmp_path: Path) -> None:
    async def story() -> None:
        async with script(tmp_path / "node", RANKS, small(inner=FLAT), "apart", through=TORCHRUN) as node:
            await node.attach()
            await node.ask(channel.Initialise(0), channel.Initialised)
            failed = await node.ask(order(1, 2), channel.Failed)
            assert "have copies of the parameters that differ after training" in failed.sentence

    asyncio.run(story())


WAITING = (
    """
import time
import torch.distributed as dist
from atoll.node.participant.batches import RunTokens
dist.init_process_group("gloo")
train = RunTokens.__getitem__
def slowly(self, index):
    while index == 27 and not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
    return train(self, index)
RunTokens.__getitem__ = slowly
model = nn.Linear(3, 1)
with participate(model, torch.optim.SGD(model.parameters(), lr=0.1)) as run:
    for batch in run.batches():
        loss = model(batch["labels"][0, :3].float() / 256).sum()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        run.step(loss)
"""
    + END_OF_RANK
)


@pytest.mark.long
def test_a_rank_that_waits_for_data_is_no_hang_of_those_that_wait_for_it(tmp_path: Path) -> None:
    """Sample 27 is the second rank's, and long in coming: for longer than a step may take."""
    run = small(inner=InnerConfig(batch_size=4), members=MembersConfig(stall=5.0))
    go = tmp_path / "go"

    async def story() -> None:
        async with script(tmp_path / "node", WAITING, run, str(go), through=TORCHRUN) as node:
            assert (await node.attach()).ranks == 2
            await node.ask(channel.Initialise(0), channel.Initialised)
            node.end.send(order(1, 10))
            waits = 0
            while waits < 5:  # a second each; a step's deadline is 3 s
                await node.working()
                waits += node.progress[-1].data_wait == 1.0 and node.progress[-1].tokens_per_s == 0
            go.touch()
            ready = await node.answer(channel.Ready)
            assert (ready.steps, ready.samples) == (10, 40)
            await node.stop()

    asyncio.run(story())


WRONG = """
model = nn.Linear(3, 1)
if sys.argv[2] == "frozen":
    model.requires_grad_(False)
optimizer = torch.optim.SGD(list(nn.Linear(3, 1).parameters()), lr=1.0)
share = (0, 3) if sys.argv[2] == "share" else None
with participate(model, optimizer, data_parallel=share) as run:
    dataset = {"no dataset": None, "empty": Numbers(0)}.get(sys.argv[2], Numbers())
    for batch in run.batches(dataset):
        if sys.argv[2] == "shape":
            model.weight = nn.Parameter(torch.zeros(1, 4))
        if sys.argv[2] != "no step":
            run.step(model(torch.ones(model.weight.shape[1])).sum())
        if sys.argv[2] == "twice":
            run.step(1.0)
"""


@pytest.mark.long
def test_what_a_script_does_wrong_is_said_in_a_sentence(tmp_path: Path) -> None:
    run = small(data=DataConfig(kind=DataKind.SCRIPT))

    async def sentence(what: str) -> str:
        async with script(tmp_path / what, WRONG, run, what) as node:
            if what in ("no step", "shape", "twice"):  # the others never come to where they take orders
                await node.attach()
                node.end.send(channel.Initialise(0))
                node.end.send(order(1, 2))
            while not isinstance(message := await asyncio.wait_for(node.end.receive(), DEADLINE), channel.Failed):
                assert message is not None
            assert await asyncio.wait_for(node.process.wait(), DEADLINE) == 2
            return message.sentence

    async def all_of_them() -> None:
        steps, shape, share, none, empty, frozen, twice = await asyncio.gather(
            *map(sentence, ("no step", "shape", "share", "no dataset", "empty", "frozen", "twice"))
        )
        assert "run.step was called and no batch was out: call it once a batch" in twice
        assert "had not called run.step(loss), or run.stepped(loss), for the last one" in steps
        assert "weight had the shape (1, 3) when this script began to take part, and has (1, 4) now" in shape
        assert "inner.batch_size=4 cannot be divided among ranks=3" in share
        assert "data.kind=script" in none and "run.batches(dataset)" in none
        assert "a dataset without samples" in empty
        assert "no parameter that requires a gradient: there is nothing to train" in frozen

    asyncio.run(all_of_them())


@pytest.mark.long
def test_a_loop_that_ends_by_itself_is_told(tmp_path: Path) -> None:
    text = """
model = nn.Linear(3, 1)
with participate(model, torch.optim.SGD(model.parameters(), lr=1.0)) as run:
    for batch in run.batches(Numbers()):
        run.step(1.0)
        break
print("goes on with something else")
"""

    async def story() -> None:
        async with script(tmp_path / "node", text, small(inner=FLAT)) as node:
            await node.attach()
            await node.ask(channel.Initialise(0), channel.Initialised)
            await node.ask(order(1, 2), channel.LoopLeft)
            assert await asyncio.wait_for(node.end.receive(), DEADLINE) is None
            assert await asyncio.wait_for(node.process.wait(), DEADLINE) == 0

    asyncio.run(story())


@pytest.mark.long
def test_a_script_may_prepare_for_long_before_it_says_that_it_takes_orders(tmp_path: Path) -> None:
    text = """
class Prepared(Numbers):
    def __len__(self):
        run.tell("it is tokenised")
        return self.count
model = nn.Linear(3, 1)
with participate(model, torch.optim.SGD(model.parameters(), lr=1.0)) as run:
    run.tell("it is downloaded")
    for batch in run.batches(Prepared()):
        run.step(model(torch.ones(3)).sum())
"""

    async def story() -> None:
        async with script(tmp_path / "node", text, small(inner=FLAT)) as node:
            heard = [await asyncio.wait_for(node.end.receive(), DEADLINE) for _ in range(4)]
            assert heard[:3] == [
                channel.Preparing(),
                channel.LogLine("it is downloaded"),
                channel.LogLine("it is tokenised"),
            ]
            assert isinstance(heard[3], channel.Hello)
            await node.stop()

    asyncio.run(story())


@pytest.mark.long
def test_a_script_that_no_node_has_started_says_how_to_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATOLL_TRAINER", raising=False)
    (tmp_path / "train.py").write_text(BEGINNING + WRONG)
    done = subprocess.run(
        [sys.executable, "train.py", "said", "alone"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "have a node start it, `atoll node join URL -- python train.py`" in done.stderr
