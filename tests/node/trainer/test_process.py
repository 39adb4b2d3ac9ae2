"""The trainer for real: launchers, ranks, sockets and shared files, with the test in the daemon's place."""

import asyncio
import math
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from trainers import DEADLINE, FAR, Node, launched, order, small

from atoll.comm.config.data import DataConfig, DataKind
from atoll.comm.config.outer import FragmentsConfig, OverlapConfig, TakeName
from atoll.comm.config.run import InnerConfig, OptimizerName, RoundsConfig, RunConfig
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.leases import remaining, samples
from atoll.node import trainer_channel
from atoll.node.config import Device, NodeConfig
from atoll.node.outer.layout import fragments_and_chunks
from atoll.node.participant.training_cursor import TrainingCursor
from atoll.node.trainer.process import LocalRank, choose_device, meet


def watch(pids: list[int]) -> list[int]:
    return [os.pidfd_open(pid) for pid in pids]


def all_end(pidfds: list[int]) -> bool:
    """Whether every watched process ends before the deadline; one that init has yet to reap has ended."""
    ended = [bool(select.select([pidfd], [], [], DEADLINE)[0]) for pidfd in pidfds]
    for pidfd in pidfds:
        os.close(pidfd)
    return all(ended)


def test_one_rank_and_two_ranks_write_the_same_vectors(tmp_path: Path) -> None:
    run = small(inner=InnerConfig(optimizer=OptimizerName.ADAMW, batch_size=4, warmup_tokens=512))
    eight = order(1, 8, tokens=256, fleet=3, first=40)

    async def round_of(
        ranks: int,
    ) -> tuple[trainer_channel.Hello, trainer_channel.Ready, trainer_channel.Evaluated, Node]:
        async with launched(tmp_path / str(ranks), run, ranks) as node:
            hello = await node.attach()
            await node.ask(trainer_channel.Initialise(7), trainer_channel.Initialised)
            ready = await node.ask(eight, trainer_channel.Ready)
            evaluated = await node.ask(trainer_channel.Evaluate(1), trainer_channel.Evaluated)
            return hello, ready, evaluated, node

    async def both() -> None:
        (one, two) = await asyncio.gather(round_of(1), round_of(2))
        assert one[0].layout == two[0].layout
        assert one[0].numel == two[0].numel == small().model.n_params
        assert one[1].steps == two[1].steps == 8
        assert one[1].samples == two[1].samples == 8 * 4
        assert math.isclose(one[1].loss, two[1].loss, abs_tol=1e-5)
        assert math.isclose(one[2].loss, two[2].loss, abs_tol=1e-5)
        assert one[3].anchor.tobytes() == two[3].anchor.tobytes()
        assert np.abs(one[3].anchor).max() > 0
        moved = np.abs(one[3].local - one[3].anchor).max()
        apart = np.abs(one[3].local - two[3].local).max()
        assert moved > 1e-3
        assert apart < 1e-6
        for _, ready, _, node in (one, two):
            assert math.isclose(ready.norm, np.linalg.norm(node.local - node.anchor), rel_tol=1e-5)

    asyncio.run(both())


@pytest.mark.parametrize(
    "optimizer, off",
    [(OptimizerName.MUON, 0.01), pytest.param(OptimizerName.SGD, 1e-4, marks=pytest.mark.chaos)],
)
@pytest.mark.long
def test_other_optimizers_do_the_same_on_one_rank_and_on_two(
    optimizer: OptimizerName, off: float, tmp_path: Path
) -> None:
    """Muon orthogonalises in bf16 where the processor multiplies it: to three digits."""
    run = small(inner=InnerConfig(optimizer=optimizer, batch_size=4, warmup_tokens=512))

    async def trained(ranks: int) -> NDArray[np.float32]:
        async with launched(tmp_path / str(ranks), run, ranks) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(7), trainer_channel.Initialised)
            await node.ask(order(1, 8, tokens=256, fleet=3, first=40), trainer_channel.Ready)
            moved: NDArray[np.float32] = node.local - node.anchor
            return moved

    async def both() -> None:
        one, two = await asyncio.gather(trained(1), trained(2))
        assert np.abs(one).max() > 1e-4
        assert np.linalg.norm(one - two) < off * np.linalg.norm(one)

    asyncio.run(both())


@pytest.mark.parametrize(
    ("count", "ranks", "sentence"),
    [
        (0, 1, "device=cuda but this machine has no CUDA device: set device=cpu, or install"),
        (1, 2, "ranks=2 but this machine has 1 CUDA device: set ranks=1$"),
        (2, 4, "ranks=4 but this machine has 2 CUDA devices: set ranks=2$"),
    ],
)
def test_what_cuda_lacks_is_said(count: int, ranks: int, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    with pytest.raises(ResourceError, match=sentence):
        choose_device(NodeConfig(device=Device.CUDA, ranks=ranks), LocalRank(0, ranks, 0, ranks))


def test_machines_with_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="this node's 2 machines have 12 ranks, 8 of them here: give each machine"
    ):
        meet(LocalRank(4, 12, local_size=8, machines=2), at_daemon=False)


@pytest.mark.long
def test_training_lowers_the_loss_of_the_anchor(tmp_path: Path) -> None:
    async def story() -> None:
        async with launched(tmp_path / "node", small(data=DataConfig(passage_tokens=20))) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            before = await node.ask(trainer_channel.Evaluate(0), trainer_channel.Evaluated)
            ready = await node.ask(order(1, 100), trainer_channel.Ready)
            unmoved = await node.ask(trainer_channel.Evaluate(0), trainer_channel.Evaluated)
            node.anchor[:] = node.local
            after = await node.ask(trainer_channel.Evaluate(1), trainer_channel.Evaluated)
            assert abs(before.loss - math.log(256)) < 0.1  # an untrained model knows nothing
            assert unmoved == before
            assert before.passage is not None and after.passage is not None, "it writes, for people to read"
            assert after.passage.prompt == before.passage.prompt and after.passage.text != before.passage.text
            assert after.loss < before.loss - 1.5
            assert after.loss < ready.loss < before.loss
            node.end.send(trainer_channel.Stop())
            assert await asyncio.wait_for(node.process.wait(), DEADLINE) == 0

    asyncio.run(story())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.long
def test_a_round_starts_from_the_anchor_also_after_an_evaluation(ranks: int, tmp_path: Path) -> None:
    async def story() -> None:
        async with launched(tmp_path / "node", small(), ranks) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            await node.ask(order(1, 2, tokens=1000), trainer_channel.Ready)
            await node.ask(trainer_channel.Evaluate(1), trainer_channel.Evaluated)
            node.anchor[:] = np.random.default_rng(0).normal(0, 0.02, node.anchor.size)
            # At no committed tokens the learning rate is zero: the step changes nothing.
            await node.ask(order(2, 1, first=8), trainer_channel.Ready)
            assert node.local.tobytes() == node.anchor.tobytes()

    asyncio.run(story())


@pytest.mark.long
def test_finish_ends_a_round_early_on_all_ranks(tmp_path: Path) -> None:
    async def story() -> None:
        async with launched(tmp_path / "node", small(), ranks=2) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            node.end.send(order(3, FAR))
            await node.working()
            node.end.send(trainer_channel.Finish(round=2))  # of a round long past: ignored
            ready = await node.ask(trainer_channel.Finish(round=3), trainer_channel.Ready)
            assert ready.round == 3
            assert 1 <= ready.steps < FAR
            assert ready.samples == ready.steps * 4
            # The ranks are still in step: they can take another round.
            again = await node.ask(order(4, 2, first=ready.samples), trainer_channel.Ready)
            assert again.steps == 2

    asyncio.run(story())


@pytest.mark.long
def test_the_floor_the_ceiling_and_the_lease_bound_a_round(tmp_path: Path) -> None:
    async def story() -> None:
        async with launched(tmp_path / "node", small()) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            node.end.send(trainer_channel.Train(1, 2, 4, 6, 0, 1, ((0, 400),)))
            await node.answer(trainer_channel.Reached)  # and it goes on
            ready = await node.answer(trainer_channel.Ready)
            assert (ready.steps, ready.samples) == (6, 24)
            node.end.send(trainer_channel.Train(2, 8, 4, FAR, 0, 1, ((24, 4 * FAR),)))
            ready = await node.ask(trainer_channel.Finish(2), trainer_channel.Ready)
            assert 4 <= ready.steps < FAR
            short = await node.ask(
                trainer_channel.Train(3, 9, 1, FAR, 0, 1, ((0, 8), (40, 4), (80, 3))), trainer_channel.Ready
            )
            assert (short.steps, short.samples) == (3, 12)
            none = await node.ask(trainer_channel.Train(4, 9, 1, FAR, 0, 1, ()), trainer_channel.Ready)
            assert (none.steps, none.samples) == (0, 0)

    asyncio.run(story())


@pytest.mark.long
def test_work_that_was_carried_over_is_trained_on_and_not_repeated(tmp_path: Path) -> None:
    async def story() -> None:
        async with launched(tmp_path / "node", small()) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            await node.ask(order(1, 5, tokens=1000), trainer_channel.Ready)
            node.local[:] += 0.25  # the rebase: the anchor moved meanwhile
            before = node.local.copy()
            resumed = trainer_channel.Train(2, 1, 1, 1, 0, 1, ((20, 4),), resume=True)
            await node.ask(resumed, trainer_channel.Ready)  # with a learning rate of zero
            assert node.local.tobytes() == before.tobytes()
            await node.ask(order(3, 1), trainer_channel.Ready)
            assert node.local.tobytes() == node.anchor.tobytes()

    asyncio.run(story())


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.chaos), 2])
@pytest.mark.long
def test_with_overlap_steps_go_on_and_end_up_on_top_of_the_new_anchor(ranks: int, tmp_path: Path) -> None:
    """As a trainer does that never heard of a commit, moved by what the anchor moved: at a learning rate that
    does not change, and with an optimizer that only sees gradients of nearly the same parameters."""
    inner = InnerConfig(optimizer=OptimizerName.SGD, lr=1e-3, min_lr=1e-3, warmup_tokens=0, batch_size=4)
    overlap = OverlapConfig(delay=4)

    async def trained(folder: str, overlapped: bool) -> NDArray[np.float32]:
        run = small(inner=inner, overlap=overlap if overlapped else OverlapConfig())
        async with launched(tmp_path / folder, run, ranks) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(7), trainer_channel.Initialised)
            start = node.anchor.copy()
            if overlapped:
                ready = await node.ask(trainer_channel.Train(1, 5, 1, 5, 0, 1, ((0, 40),)), trainer_channel.Ready)
                assert ready.ahead and ready.samples == 20
                sent = node.local.copy()
                waits = await node.answer(trainer_channel.Waits)
                assert waits.round == 1  # a round's steps later; the vector that travels is what it was
                assert node.local.tobytes() == sent.tobytes()
                before = await node.ask(trainer_channel.Evaluate(1), trainer_channel.Evaluated)
                assert before == await node.ask(trainer_channel.Evaluate(1), trainer_channel.Evaluated)
                node.anchor[:] = start - np.float32(0.5) * (start - sent)
                order = trainer_channel.Train(2, 5, 1, 5, 0, 1, ((20, 20),), continues=True)
                ready = await node.ask(order, trainer_channel.Ready)
                assert (ready.steps, ready.samples, ready.ahead) == (5, 20, False)  # the lease is at its end
                return np.subtract(node.local, node.anchor)
            await node.ask(trainer_channel.Train(1, 10, 1, 10, 0, 1, ((0, 40),)), trainer_channel.Ready)
            whole = node.local.copy()
            await node.ask(trainer_channel.Train(1, 5, 1, 5, 0, 1, ((0, 40),)), trainer_channel.Ready)
            return np.subtract(whole, node.local)

    async def both() -> None:
        overlapped, plain = await asyncio.gather(trained("a", True), trained("b", False))
        assert np.abs(plain).max() > 1e-4
        assert np.linalg.norm(overlapped - plain) < 1e-2 * np.linalg.norm(plain)

    asyncio.run(both())


@pytest.mark.long
def test_with_overlap_work_that_was_left_out_is_kept_with_what_followed_it(tmp_path: Path) -> None:
    async def story() -> None:
        run = small(inner=InnerConfig(batch_size=4, warmup_tokens=1_000_000), overlap=OverlapConfig(delay=2))
        async with launched(tmp_path / "node", run) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            await node.ask(trainer_channel.Train(1, 3, 1, 3, 1000, 1, ((0, 80),)), trainer_channel.Ready)
            sent = node.local.copy()
            await node.answer(trainer_channel.Waits)
            node.anchor[:] += np.float32(1.0)
            node.local[:] = sent + np.float32(0.25)  # by the daemon: rebased
            resumed = trainer_channel.Train(2, 2, 1, 2, 0, 1, ((12, 40),), resume=True, continues=True)
            await node.ask(resumed, trainer_channel.Ready)
            moved = node.local - sent  # its three steps, at a small learning rate, and the rebase
            assert np.abs(moved - 0.25).max() < 1e-4

    asyncio.run(story())


@pytest.mark.long
def test_a_trainer_that_is_ahead_is_held_after_the_step_at_hand_and_what_it_took_counts(tmp_path: Path) -> None:
    async def story() -> None:
        run = small(inner=InnerConfig(batch_size=4), overlap=OverlapConfig(delay=2))
        async with launched(tmp_path / "node", run) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            node.end.send(trainer_channel.Train(1, 2, 1, FAR, 0, 1, ((0, 4 * FAR),)))
            ready = await node.ask(trainer_channel.Finish(1), trainer_channel.Ready)
            assert ready.ahead
            await node.ask(trainer_channel.Hold(1), trainer_channel.Waits)  # long before it is as far as it may be
            node.end.send(trainer_channel.Train(2, 2, 1, FAR, 0, 1, ((ready.samples, 4 * FAR),), continues=True))
            ready = await node.ask(trainer_channel.Finish(2, rest=True), trainer_channel.Ready)
            assert ready.steps >= 1 and not ready.ahead
            node.end.send(trainer_channel.Train(3, 2, 1, 3, 0, 1, ((0, 400),), duty=0.5))
            assert (await node.answer(trainer_channel.Ready)).steps == 3

    asyncio.run(story())


def test_a_trainer_goes_on_until_it_is_told_of_the_commit_or_has_a_rounds_steps() -> None:
    rounds = RoundsConfig(inner_steps=4, data_parallel=1)
    run = small(inner=InnerConfig(batch_size=4), overlap=OverlapConfig(delay=2), rounds=rounds)
    cursor = TrainingCursor(run, trainer_channel.Train(2, 4, 1, 6, 0, 1, ((0, 400),)), steps=4)
    assert cursor.hand_over().ahead
    assert [cursor.is_stalled for cursor.steps in range(8)] == [False] * 6 + [True] * 2
    cursor.go_on(trainer_channel.Train(3, 4, 1, 6, 0, 1, ((16, 400),)))
    assert [cursor.takes_state for cursor.steps in range(4)] == [False, False, True, True]
    alone = TrainingCursor(run, trainer_channel.Train(1, 1, 1, 1, 0, 1, ((0, 400),)), steps=1)
    assert not alone.hand_over().ahead, "at the start of the run its rounds have one step, and nobody goes ahead"


@pytest.mark.long
def test_of_fragments_that_take_turns_only_the_one_that_was_exchanged_takes_the_new_anchor(tmp_path: Path) -> None:
    """Rounds 1, 2 and 3 exchange the first third, the second, the third; at a learning rate of zero."""

    async def story() -> None:
        inner = InnerConfig(batch_size=4, warmup_tokens=1_000_000, lr=1e-3)
        overlap = OverlapConfig(delay=2, take=TakeName.MIX, alpha=0.25)
        run = small(inner=inner, overlap=overlap, fragments=FragmentsConfig(3))
        async with launched(tmp_path / "node", run) as node:
            hello = await node.attach()
            fragments, chunks = fragments_and_chunks(run, hello.layout)
            assert [chunks.fragment_slice(p) for p in range(3)] == [span for f in fragments for span in f.spans]
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            ready = await node.ask(
                trainer_channel.Train(1, 3, 1, 3, 100_000, 1, ((0, 120),)), trainer_channel.Ready
            )
            first, second, third = (chunks.fragment_slice(p) for p in range(3))
            trained, start = node.local.copy(), node.anchor.copy()
            moved = np.linalg.norm((trained - start)[first])
            assert 0 < moved and math.isclose(ready.norm, moved, rel_tol=1e-5), "the norm is of what is exchanged"
            await node.answer(trainer_channel.Waits)
            node.anchor[:] += np.float32(0.5)  # the trainer may look at the first third only
            await node.ask(
                trainer_channel.Train(2, 2, 1, 2, 0, 1, ((12, 108),), continues=True), trainer_channel.Ready
            )
            mixed = np.float32(0.25) * trained + np.float32(0.75) * node.anchor
            assert np.abs(node.local - mixed)[first].max() < 1e-3
            assert np.abs(node.local - trained)[second].max() < 1e-3 > np.abs(node.local - trained)[third].max()
            await node.answer(trainer_channel.Waits)
            trained = node.local.copy()
            node.local[:] += np.float32(0.125)  # the daemon: rounds were missed, all is on another anchor
            missed = trainer_channel.Train(5, 2, 1, 2, 0, 1, ((20, 100),), continues=True, rebased=True)
            await node.ask(missed, trainer_channel.Ready)
            mixed = np.float32(0.25) * trained + np.float32(0.75) * node.anchor
            assert np.abs(node.local - mixed)[second].max() < 1e-3
            for rebased in (first, third):
                assert np.abs(node.local - trained - 0.125)[rebased].max() < 1e-3
            await node.answer(trainer_channel.Waits)
            before = node.local.copy()
            node.anchor[:] = 7.0
            kept = trainer_channel.Train(6, 1, 1, 1, 0, 1, ((400, 4),), resume=True)
            await node.ask(kept, trainer_channel.Ready)
            assert node.local.tobytes() == before.tobytes()

    asyncio.run(story())


@pytest.mark.long
def test_another_order_ends_what_is_ahead(tmp_path: Path) -> None:
    async def story() -> None:
        async with launched(tmp_path / "node", small(overlap=OverlapConfig(delay=FAR))) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            ready = await node.ask(trainer_channel.Train(1, 2, 1, 2, 0, 1, ((0, 400_000),)), trainer_channel.Ready)
            assert ready.ahead
            node.anchor[:] = np.random.default_rng(0).normal(0, 0.02, node.anchor.size)
            await node.ask(trainer_channel.Train(1, 1, 1, 1, 0, 1, ((800_000, 4),)), trainer_channel.Ready)
            assert node.local.tobytes() == node.anchor.tobytes()  # at no committed tokens the rate is zero

    asyncio.run(story())


@pytest.mark.parametrize("skip", range(10))
def test_samples_come_from_the_front_of_the_lease(skip: int) -> None:
    lease = ((5, 3), (20, 1), (30, 4))
    everything = [5, 6, 7, 20, 30, 31, 32, 33]
    for count in range(10):
        assert samples(lease, skip, count) == everything[skip : skip + count]
        assert samples(remaining(list(lease), skip), 0, count) == everything[skip : skip + count]


@pytest.mark.long
def test_a_trainer_whose_channel_closes_ends_in_the_middle_of_a_round(tmp_path: Path) -> None:
    async def story() -> None:
        async with launched(tmp_path / "node", small(), ranks=2) as node:
            await node.attach()
            await node.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            node.end.send(order(1, FAR))
            await node.working()
            node.end.close()
            assert await asyncio.wait_for(node.process.wait(), DEADLINE) == 0

    asyncio.run(story())


@pytest.mark.long
def test_killing_the_launcher_or_the_daemon_leaves_no_process(tmp_path: Path) -> None:
    # The stand-in for a daemon starts the launcher and waits; the test keeps the channel open all the while,
    # so that nothing but the kernel's parent-death signal can end the ranks.
    daemon = (sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])")

    async def killed(folder: str, through: tuple[str, ...]) -> None:
        async with launched(tmp_path / folder, small(), ranks=2, through=through) as node:
            await node.attach()
            family = node.family()
            assert len(family) == 3 + bool(through)  # daemon, launcher, two ranks
            pidfds = watch(family)
            os.kill(node.process.pid, signal.SIGKILL)
            assert await asyncio.to_thread(all_end, pidfds)

    async def both() -> None:
        await asyncio.gather(killed("launcher", ()), killed("daemon", daemon))

    asyncio.run(both())


@pytest.mark.long
def test_what_a_restart_would_not_cure_is_said_in_a_sentence(tmp_path: Path) -> None:
    async def sentence(folder: str, run: RunConfig, ranks: int = 1, **node: Any) -> str:
        async with launched(tmp_path / folder, run, ranks, **node) as trainer:
            return await trainer.failure()

    async def all_of_them() -> None:
        odd, absent, folder = await asyncio.gather(
            sentence("odd", small(inner=InnerConfig(batch_size=3)), ranks=2),
            sentence("absent", small(), model="no_such_package:build"),
            sentence("folder", small(data=DataConfig(kind=DataKind.BYTES)), data="/no/such/folder"),
        )
        assert "inner.batch_size=3 cannot be divided among ranks=2" in odd
        assert "No module named 'no_such_package'" in absent
        assert "data=/no/such/folder: there is no such folder" in folder

    asyncio.run(all_of_them())


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_what_only_one_rank_fails_of_is_said_too(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_models.py").write_text(
        "import os, torch\n"
        "def build(config):\n"
        f"    assert os.environ['RANK'] != '{rank}', 'not on this rank'\n"
        "    return torch.nn.Linear(2, 2)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def story() -> None:
        async with launched(tmp_path / "node", small(), 2, model="my_models:build") as trainer:
            assert "AssertionError: not on this rank" in await trainer.failure()

    asyncio.run(story())


@pytest.mark.long
def test_bf16_and_your_own_model_train_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without `blocks`, and with a buffer, whose value must survive placing and sharding the model.
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "class Bigram(torch.nn.Module):\n"
        "    def __init__(self, config):\n"
        "        super().__init__()\n"
        "        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)\n"
        "        self.register_buffer('scale', torch.tensor(3.0))\n"
        "    def forward(self, tokens):\n"
        "        return self.table(tokens) * self.scale\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def losses(folder: str, ranks: int, **node: Any) -> tuple[float, float]:
        async with launched(tmp_path / folder, small(), ranks, **node) as trainer:
            await trainer.attach()
            await trainer.ask(trainer_channel.Initialise(0), trainer_channel.Initialised)
            before = await trainer.ask(trainer_channel.Evaluate(0), trainer_channel.Evaluated)
            await trainer.ask(order(1, 40, tokens=1000), trainer_channel.Ready)
            trainer.anchor[:] = trainer.local
            return before.loss, (await trainer.ask(trainer_channel.Evaluate(1), trainer_channel.Evaluated)).loss

    async def both() -> None:
        bf16, own = await asyncio.gather(losses("bf16", 1, bf16=True), losses("own", 2, model="my_models:Bigram"))
        for before, after in (bf16, own):
            assert abs(before - math.log(256)) < 0.1
            assert after < before - 0.2

    asyncio.run(both())


@pytest.mark.long
def test_a_vector_of_another_model_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        async with launched(tmp_path / "node", small()) as node:
            hello = await node.answer(trainer_channel.Hello)
            failed = await node.ask(trainer_channel.Attach("", "", hello.numel + 1), trainer_channel.Failed)
            assert f"{hello.numel + 1} parameters, this node's model {hello.numel}" in failed.sentence

    asyncio.run(story())
