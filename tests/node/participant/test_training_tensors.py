"""What an optimizer keeps, whoever made it: it is restored as it was, or not written at all."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_processes import on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from atoll.comm.config.run import InnerConfig
from atoll.node.participant.flat_vector import ShardedParameters
from atoll.node.participant.lr_rewarm import Rewarming
from atoll.node.participant.optimizer_checkpoint import OptimizerCheckpoint
from atoll.node.participant.optimizer_files import ROUND, OptimizerFiles, UnusableMoments
from atoll.node.participant.rank_group import RankGroup
from atoll.node.participant.round_checkpoint import RoundCheckpoint
from atoll.node.participant.round_copies import RoundCopies
from atoll.node.participant.tensor_writer import TensorWriter
from atoll.node.participant.training_cursor import TrainingCursor
from atoll.node.participant.training_tensors import TrainingTensors, Unstorable
from atoll.node.trainer_channel import Train

ALONE = RankGroup(0, 1)
ORDER = Train(2, 100, 1, 100, 1000, 1, ((400, 400),), state="5e")


class Counted(torch.optim.Optimizer):
    """Momentum that is corrected by plain counts, as DeepSpeed's and apex's optimizers have them, and a norm for
    each row, as Adafactor has it."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.1, "beta": 0.5})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, scale=1.0, seen=False, sum=torch.zeros_like(parameter))
                    state["rows"] = torch.zeros(len(parameter))
                state["step"] += 1
                state["scale"] /= 3.0
                state["seen"] = True
                state["sum"] += parameter.grad
                state["rows"] += parameter.grad.square().sum(1)
                step = state["sum"] / (1 - group["beta"] ** (state["step"] + group["step"])) + state["scale"]
                parameter.data -= group["lr"] * step / (1 + state["rows"].sqrt()).unsqueeze(1)


class Trained:
    """A model of six weights and what keeps its state."""

    def __init__(
        self,
        folder: Path,
        make: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = Counted,
        device: str = "cpu",
    ) -> None:
        """`device`: that the writer takes it for."""
        torch.manual_seed(3)
        self.model = nn.Linear(3, 2, bias=False)
        self.optimizer, self.told = make(self.model.parameters()), list[str]()
        self.tensors = TrainingTensors(ShardedParameters([self.model], ALONE), [self.optimizer], ALONE)
        self.writer, self.files = TensorWriter(ALONE, torch.device(device)), OptimizerFiles(folder)
        self.moments = OptimizerCheckpoint(
            self.tensors, ALONE, InnerConfig(), self.writer, self.files, 1, self.told.append
        )

    def step(self) -> np.ndarray[Any, Any]:
        self.model(torch.tensor([1.0, 2.0, 3.0])).square().sum().backward()
        self.writer.copied.wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.model.weight.detach().numpy().copy()


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_plain_numbers_and_tensors_of_other_shapes_are_restored_as_they_were(device: str, tmp_path: Path) -> None:
    first = Trained(tmp_path, device=device)
    for _ in range(2):
        first.step()
    first.moments.save_if_due(1)
    first.writer.wait()
    second = Trained(tmp_path)
    second.model.weight.data.copy_(first.model.weight.data)
    second.moments.restore(ORDER)
    assert second.told == ["goes on with the inner optimizer's moments of round 1"]
    (was,), (state,) = first.optimizer.state.values(), second.optimizer.state.values()
    assert {key: type(value) for key, value in state.items()} == {key: type(value) for key, value in was.items()}
    assert state["step"] == 2 and state["scale"] == 1 / 9 and second.optimizer.param_groups[0]["step"] == 2
    assert np.array_equal(first.step(), second.step()) and np.array_equal(first.step(), second.step())
    second.moments.reset()
    assert "step" not in second.optimizer.param_groups[0] and not second.optimizer.state
    for life in (first, second):
        life.moments.close()


class Listed(Counted):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["history"] = [1, 2]


def test_state_that_could_not_be_restored_is_not_written_and_that_is_said_once(tmp_path: Path) -> None:
    life = Trained(tmp_path, Listed)
    for round_ in (1, 2):
        life.step()
        life.moments.save_if_due(round_)
        life.writer.wait()
    assert life.told == [
        "the inner optimizer's moments of round 1 are not kept on disk: history is neither a tensor nor a number "
        "but of type list"
    ]
    assert not life.files.rounds and not list(tmp_path.iterdir())
    life.moments.close()


def test_state_of_what_is_no_parameter_cannot_be_restored(tmp_path: Path) -> None:
    """As of a flat copy of all parameters."""
    life = Trained(tmp_path, torch.optim.AdamW)
    life.step()
    flat = nn.Parameter(torch.zeros(6))
    life.optimizer.state[flat] = {"exp_avg": torch.zeros(6)}
    with pytest.raises(Unstorable, match="AdamW has state of what is no parameter of the model"):
        life.tensors.optimizer_state()
    life.moments.close()


def stored(*shape: int) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(), torch.Size(shape), [])


def test_what_an_optimizer_has_no_place_for_is_unusable(tmp_path: Path) -> None:
    life = Trained(tmp_path, torch.optim.AdamW)
    for key, reason in (("weight.step@complex", "no known kind"), ("<group 1>.step@int", "more groups")):
        with pytest.raises(UnusableMoments, match=reason):
            life.tensors.zeros_like_stored({key: stored()})
    life.optimizer.param_groups[0]["params"] = []
    with pytest.raises(UnusableMoments, match="an optimizer that had weight, which now none has"):
        life.tensors.zeros_like_stored({"weight.exp_avg": stored(2, 3)})
    life.moments.close()


@pytest.mark.parametrize("capturable, device", [(False, "cpu"), (True, "meta")])
def test_a_count_of_steps_is_on_the_device_where_the_optimizer_has_it(capturable: bool, device: str) -> None:
    """`meta` is in a GPU's place."""
    model = nn.Linear(3, 2, bias=False, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), capturable=capturable)
    tensors = TrainingTensors(ShardedParameters([model], ALONE), [optimizer], ALONE)
    tensors.load({"weight.step": torch.tensor(7.0), "weight.exp_avg": torch.zeros(2, 3)})
    (state,) = optimizer.state.values()
    assert state["step"].device.type == device and state["exp_avg"].device.type == "meta"


def test_what_an_optimizer_has_in_host_memory_stays_there() -> None:
    model = nn.Linear(3, 2, bias=False, device="meta")
    optimizer = Counted(model.parameters())
    optimizer.state[model.weight].update(norm=torch.tensor(2.0), sum=torch.zeros(2, 3, device="meta"))
    tensors = TrainingTensors(ShardedParameters([model], ALONE), [optimizer], ALONE)
    found = tensors.optimizer_state()
    assert set(found) == {"weight.norm@host", "weight.sum"}
    optimizer.state.clear()
    tensors.load({key: torch.zeros(value.shape) for key, value in found.items()})
    (state,) = optimizer.state.values()
    assert (state["norm"].device.type, state["sum"].device.type) == ("cpu", "meta")


def test_moments_wait_for_a_copy_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy stands still in the middle until the moments are asked for."""
    life = Trained(tmp_path, torch.optim.AdamW)
    copies = RoundCopies(ALONE, OptimizerFiles(tmp_path, prefix=ROUND))
    rounds = RoundCheckpoint(life.tensors, ALONE, life.writer, copies, 1.0, 1, life.told.append)
    cursor = TrainingCursor(cast(Any, None), ORDER)
    monkeypatch.setattr(TrainingCursor, "is_complete", False)
    cursor.count_step(2.0, False, 0.1)
    life.step()
    asked, finish = threading.Event(), OptimizerFiles.finish

    def slow(files: OptimizerFiles, *what: Any) -> None:
        assert asked.wait(60)
        finish(files, *what)

    monkeypatch.setattr(OptimizerFiles, "finish", slow)
    rounds.save_if_due(cursor, True, Rewarming())
    life.moments.save_if_due(1)
    assert not life.writer.copied.is_set(), "no step before the moments are copied, too"
    asked.set()
    life.writer.wait()
    assert life.writer.copied.is_set() and life.files.rounds == [1] and not life.told
    life.moments.close()


def test_moments_since_a_round_that_is_in_doubt_are_given_up_for_those_before(tmp_path: Path) -> None:
    life = Trained(tmp_path, torch.optim.AdamW)
    for round_ in (1, 2):
        life.step()
        life.moments.save_if_due(round_)
        life.writer.wait()
    life.moments.discard(2)
    assert life.files.rounds == [1] and not life.optimizer.state
    life.moments.restore(ORDER)
    (state,) = life.optimizer.state.values()
    assert state["step"] == 1 and life.told == ["goes on with the inner optimizer's moments of round 1"]
    life.moments.save_if_due(2)
    life.moments.close()
    assert life.files.rounds == [2, 1]


def frozen_rank(folder: Path) -> None:
    """Two stages of a pipeline, of which the first is frozen and has no optimizer."""
    rank = dist.get_rank()
    for life in range(2):
        ranks = RankGroup.of_world()
        torch.manual_seed(3)
        model = nn.ModuleDict({str(rank): nn.Linear(3, 2, bias=False).requires_grad_(rank == 1)})
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1)] if rank else []
        tensors = TrainingTensors(ShardedParameters([model], ranks), optimizers, ranks)
        writer, files, told = (
            TensorWriter(ranks, torch.device("cpu")),
            OptimizerFiles(folder),
            list[str](),
        )
        moments = OptimizerCheckpoint(tensors, ranks, InnerConfig(), writer, files, 1, told.append)
        moments.restore(ORDER)
        for optimizer in optimizers:
            model["1"](torch.ones(3)).sum().backward()
            optimizer.step()
            assert all(state["step"] == life + 1 for state in optimizer.state.values())
        moments.save_if_due(life + 1)
        writer.wait()
        ranks.barrier()
        assert files.rounds == [[1], [2, 1]][life]
        if rank == 0:
            beginnings = "begins round 2 without", "goes on with the inner optimizer's moments of round 1"
            assert told[0].startswith(beginnings[life]) and len(told) == 1
        moments.close()


def test_a_rank_that_is_frozen_takes_part_when_the_others_write_and_read(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, frozen_rank)
    assert OptimizerFiles(tmp_path).rounds == [2, 1]


def test_what_two_trainers_died_of_is_not_read_a_third_time(tmp_path: Path) -> None:
    first = Trained(tmp_path, torch.optim.AdamW)
    first.step()
    first.moments.save_if_due(1)
    first.moments.close()

    def life(*, through_a_round: bool = False) -> str:
        trained = Trained(tmp_path, torch.optim.AdamW)
        trained.moments.restore(ORDER)
        if through_a_round:
            trained.step()
            trained.moments.save_if_due(1)
        trained.moments.close()
        return trained.told[0]

    goes_on = "goes on with the inner optimizer's moments of round 1"
    assert [life(), life(through_a_round=True), life(), life()] == [goes_on] * 4
    assert life() == (
        "begins round 2 without the inner optimizer's moments (those of round 1 are what the last 2 trainers died "
        "of that began with it): the learning rate rises over 25 inner steps"
    )
