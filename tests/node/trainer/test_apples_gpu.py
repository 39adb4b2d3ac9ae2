"""What is done otherwise on Apple's GPU. No such machine was there: what torch says of its devices is made up, the
arithmetic is that of a CPU."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import InnerConfig, OptimizerName, RunConfig
from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.config import Device, NodeConfig, TrainerSpec
from atoll.node.devices import resolve, suits_mps
from atoll.node.participant.batches import moved
from atoll.node.participant.daemon_link import is_out_of_memory
from atoll.node.participant.flat_vector import ShardedParameters, with_doubles
from atoll.node.participant.gradients import bound_norm, squared_norm
from atoll.node.participant.rank_group import RankGroup
from atoll.node.preflight import check_device
from atoll.node.trainer import optimizer
from atoll.node.trainer.attention_mask import attend, ungrouped
from atoll.node.trainer.launcher import interface_of, rank_command, set_environment
from atoll.node.trainer.loss import accumulate
from atoll.node.trainer.model import build, init_parameters
from atoll.node.trainer.process import LocalRank, choose_device

MPS, CPU = torch.device("mps"), torch.device("cpu")
ALONE = LocalRank(0, 1)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Mac whose torch can use its GPU."""
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.backends.mps.is_built", lambda: True)
    monkeypatch.setattr("atoll.node.devices.torch_has_gpus", lambda: False)  # CUDA's or ROCm's, as may be here
    return monkeypatch


def chosen(node: NodeConfig) -> torch.device:
    """What the daemon settles, the launcher again, and then a rank."""
    settled, _ = resolve(node, 64, [])
    assert resolve(settled, 64, [])[0] == settled
    return choose_device(settled, replace(ALONE, size=settled.ranks, local_size=settled.ranks))


def test_a_mac_trains_on_its_gpu_by_itself_in_fp32(mac: pytest.MonkeyPatch) -> None:
    settled, said = resolve(NodeConfig(), 64, [])
    assert (settled.ranks, settled.bf16, settled.compile) == (1, False, False)
    assert said == "trains in fp32 on Apple's GPU (mps) if torch can use it, else on the processor"
    assert chosen(NodeConfig()) == MPS and chosen(NodeConfig(device=Device.MPS)) == MPS
    assert chosen(NodeConfig(device=Device.CPU)) == CPU
    mac.setattr("torch.backends.mps.is_available", lambda: False)
    assert chosen(NodeConfig()) == CPU


@pytest.mark.parametrize(
    "node",
    [
        *(NodeConfig(ranks=2), NodeConfig(bf16=True), NodeConfig(compile=True)),
        NodeConfig(machines=2, rendezvous="10.0.0.1:29400"),
    ],
)
def test_what_its_gpu_cannot_do_its_processor_does(node: NodeConfig, mac: pytest.MonkeyPatch) -> None:
    assert not suits_mps(node) and resolve(node, 64, [])[0].device is Device.CPU and chosen(node) == CPU
    with pytest.raises(ConfigError, match="device=mps trains in fp32, uncompiled and in one rank"):
        check_device(replace(node, device=Device.MPS))


def test_other_machines_are_no_macs() -> None:
    assert chosen(NodeConfig()) == CPU
    with pytest.raises(ConfigError, match="device=mps is a Mac's GPU, and this machine runs Linux: leave device="):
        check_device(NodeConfig(device=Device.MPS))


@pytest.mark.parametrize(("built", "why"), [(True, "macOS 14 or newer"), (False, "install torch for arm64")])
def test_what_torch_lacks_is_said(built: bool, why: str, mac: pytest.MonkeyPatch) -> None:
    check_device(NodeConfig(device=Device.MPS))
    mac.setattr("torch.backends.mps.is_available", lambda: False)
    mac.setattr("torch.backends.mps.is_built", lambda: built)
    with pytest.raises(ResourceError, match=f"device=mps and torch finds no GPU of Apple's.*{why}"):
        choose_device(NodeConfig(device=Device.MPS), ALONE)


def test_ranks_are_programs_there_for_its_libraries_do_not_survive_a_fork(mac: pytest.MonkeyPatch) -> None:
    for device in (Device.CPU, Device.MPS, Device.AUTO):
        entry, words = rank_command(TrainerSpec(node=NodeConfig(device=device)), "group")
        assert isinstance(entry, str) and words[:2] == ("-m", "atoll.node.trainer.process")
    mac.undo()
    assert callable(rank_command(TrainerSpec(node=NodeConfig(device=Device.CPU)), "group")[0])


def environment(node: NodeConfig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(os, "environ", {})
    set_environment(TrainerSpec(node=replace(node, threads=1)), folder / "trainer.json")
    return dict(os.environ)


def test_the_ranks_meet_on_the_interface_that_has_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment(NodeConfig(), tmp_path, monkeypatch)["GLOO_SOCKET_IFNAME"] == interface_of("127.0.0.1")
    loopback, other = SimpleNamespace(address="127.0.0.1"), SimpleNamespace(address="10.0.0.7")
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"en0": [other], "lo0": [loopback]})
    found = environment(NodeConfig(device=Device.MPS), tmp_path, monkeypatch)
    assert found["GLOO_SOCKET_IFNAME"] == "lo0" and found["PYTORCH_ENABLE_MPS_FALLBACK"] == "1"


class NoDoubles(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What Apple's GPU has no numbers for may not be computed with."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, out)):
            assert not (isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float64, torch.complex128)), func
        return out


@pytest.fixture
def no_doubles() -> Iterator[None]:
    with NoDoubles():  # type: ignore[no-untyped-call]
        yield


@pytest.mark.parametrize("kind", OptimizerName)
@pytest.mark.parametrize("documents", [1, 2])
def test_a_step_is_without_doubles(kind: OptimizerName, documents: int, no_doubles: None) -> None:
    run = RunConfig(model=ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=64, seq_len=32))
    model = build(run.model)
    init_parameters(model, 7)
    steps = optimizer.make_optimizer(model, InnerConfig(optimizer=kind))
    length = run.model.seq_len
    tokens, positions = torch.randint(256, (2, length)), torch.arange(length // documents).repeat(2, documents)
    batch = {"input_ids": tokens, "labels": tokens, "position_ids": positions}
    before = [p.detach().clone() for p in model.parameters()]
    accumulate(model, moved(batch, CPU), 1)
    bound_norm(ShardedParameters([model], RankGroup(0, 1)), 2.0, 1.0)
    steps.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_takes_doubles_is_taken_to_the_processor() -> None:
    x = torch.tensor([3.0, 4.0])
    assert with_doubles(x) is x, "where there are some"
    there = cast(torch.Tensor, SimpleNamespace(device=MPS, cpu=lambda: x))
    assert with_doubles(there) is x
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = x[None]
    assert squared_norm(ShardedParameters([model], RankGroup(0, 1))) == 25.0


def test_keys_without_groups_give_what_groups_give() -> None:
    q, k, v = (torch.randn(2, heads, 5, 8, generator=torch.Generator().manual_seed(3)) for heads in (4, 2, 2))
    torch.testing.assert_close(attend(q, ungrouped(k, 4), ungrouped(v, 4), None), attend(q, k, v, None))


def test_matrices_are_orthogonalised_in_fp32_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "multiplies_bf16", lambda: True)
    on_mps = cast(torch.Tensor, SimpleNamespace(is_cuda=False, device=MPS))
    assert optimizer.orthogonalisation_dtype(on_mps) is torch.float32
    assert optimizer.orthogonalisation_dtype(torch.zeros(1)) is torch.bfloat16


def test_nothing_is_copied_there_behind_the_programs_back() -> None:
    told = dict[str, bool]()

    def to(device: torch.device, non_blocking: bool) -> None:
        told[device.type] = non_blocking

    tensor = cast(torch.Tensor, SimpleNamespace(to=to))
    for device in (MPS, CPU, torch.device("cuda")):
        moved({"input_ids": tensor}, device)
    assert told == {"mps": False, "cpu": False, "cuda": True}


def test_its_words_for_want_of_memory_are_known() -> None:
    said = "MPS backend out of memory (MPS allocated: 8.50 GB, other allocations: 1.00 GB, max allowed: 9.07 GB)"
    assert is_out_of_memory(RuntimeError(said)) and not is_out_of_memory(RuntimeError("MPS backend is odd"))
