"""The flat vector, against a gathered state dict, on real ranks of several sizes and placements."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_processes import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from atoll.comm.errors import ConfigError
from atoll.node.participant.flat_vector import (
    ParameterBlock,
    ShardedParameters,
    layout_of,
    local_block,
    map_vector,
    trainable,
)
from atoll.node.participant.rank_group import RankGroup

ALONE = RankGroup(0, 1)


def awkward() -> nn.Module:
    """Shapes that do not divide evenly: 5 rows, 7 and 1, a bias of one element, a kernel."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1), nn.Conv1d(2, 7, 3))
    return numbered(model)


def numbered(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + 1000.0 * (number + 1))
    return model


def reference(model: nn.Module) -> Tensor:
    """All trainable parameters, sorted by name, row-major."""
    return torch.cat([p.detach().reshape(-1) for _, p in sorted(model.named_parameters()) if p.requires_grad])


def fsdp(model: nn.Module, size: int) -> list[nn.Module]:
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    return [model]


def hybrid(model: nn.Module, size: int) -> list[nn.Module]:
    """Sharded over two ranks, copied over the others."""
    fully_shard(model, mesh=init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("copies", "shards")))
    return [model]


def tensor_parallel(model: nn.Module, size: int) -> list[nn.Module]:
    """Columns and rows over two ranks, and what each has over the others."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    return [model]


def columns(model: nn.Module, size: int) -> list[nn.Module]:
    """The second dimension is shared out, vectors are copied."""
    mesh = init_device_mesh("cpu", (size,))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = Shard(1) if parameter.ndim > 1 else Replicate()
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.data, mesh, [placement])))
    return [model]


def pipeline(model: nn.Module, size: int) -> list[nn.Module]:
    """Each rank has some layers, under the names that they have in the whole model."""
    for i in range(3):
        if i % size != dist.get_rank():
            del model._modules[str(i)]
    return [model]


def copies(model: nn.Module, size: int) -> list[nn.Module]:
    """Every rank has the whole model, as plain tensors."""
    return [model]


def local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def written_and_read(folder: Path, share: Callable[[nn.Module, int], list[nn.Module]]) -> None:
    expected = reference(awkward())
    parts, ranks = share(awkward(), dist.get_world_size()), RankGroup.of_world()
    parameters = ShardedParameters(parts, ranks)
    assert parameters.layout == layout_of(awkward())
    flat = map_vector(folder / "flat", parameters.layout.numel)
    parameters.write(flat)
    dist.barrier()
    assert torch.equal(flat, expected)
    dist.barrier()
    assert sum(ranks.total(*parameters.squared_distances(flat))) == 0
    other = expected + torch.arange(expected.numel()) % 3
    far = ranks.total(*parameters.squared_distances(other))
    assert np.isclose(sum(far), float((expected - other).square().sum()))
    before = parameters.copy()
    dist.barrier()
    if ranks.rank == 0:
        flat.mul_(-1)
    dist.barrier()
    parameters.read(flat)
    again = parameters.copy()
    assert all(torch.equal(a, -b) for a, b in zip(again, before, strict=True))
    parameters.restore(before)
    parameters.adopt(flat, before, lambda mine, theirs, was, scratch: mine.add_(theirs))
    assert all(not local(p).any() for p in trainable(parts).values())


@pytest.mark.parametrize(
    ("share", "size"),
    [(fsdp, 1), (fsdp, 2), (fsdp, 3), (hybrid, 4), (tensor_parallel, 4), (columns, 2), (pipeline, 2), (copies, 2)],
)
def test_ranks_of_any_number_and_placement_write_and_read_the_same_vector(
    share: Callable[[nn.Module, int], list[nn.Module]], size: int, tmp_path: Path
) -> None:
    np.zeros(reference(awkward()).numel(), np.float32).tofile(tmp_path / "flat")
    on_ranks(size, tmp_path, written_and_read, share)


def test_a_plain_model_is_written_and_read_whole() -> None:
    model, layout = awkward(), layout_of(awkward())
    flat = torch.zeros(layout.numel)
    ShardedParameters([model], ALONE).write(flat)
    assert torch.equal(flat, reference(model))
    assert local_block(model.get_parameter("0.weight")) == ParameterBlock((0, 0), (5, 3))
    other = awkward()
    nn.init.zeros_(other.get_parameter("0.weight"))
    ShardedParameters([other], ALONE).read(flat)
    assert torch.equal(reference(other), flat)


def test_names_are_sorted_and_offsets_follow_one_another() -> None:
    layout = layout_of(awkward())
    assert [slot.name for slot in layout.slots] == sorted(slot.name for slot in layout.slots)
    sizes = [int(np.prod(slot.shape)) for slot in layout.slots]
    assert [slot.offset for slot in layout.slots] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert layout.numel == sum(sizes)


def test_tied_parameters_count_once_and_frozen_ones_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    assert layout_of(model).numel == 16


@pytest.mark.long
def test_compiled_and_wrapped_models_have_the_names_of_bare_ones() -> None:
    compiled = torch.compile(awkward())
    assert isinstance(compiled, nn.Module)
    assert layout_of(compiled) == layout_of(awkward())
    inside = awkward()
    wrapped: Any = torch.compile(inside.get_submodule("1"))
    inside.register_module("1", wrapped)
    assert layout_of(inside) == layout_of(awkward())


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        ShardedParameters([awkward().requires_grad_(False)], ALONE)


def test_parameters_must_keep_their_shapes() -> None:
    model = awkward()
    parameters = ShardedParameters([model], ALONE)
    model.get_submodule("0").weight = nn.Parameter(torch.zeros(5, 4))
    with pytest.raises(ConfigError, match=r"0.weight had the shape \(5, 3\) when .* has \(5, 4\) now"):
        parameters.copy()


def test_a_mapped_vector_is_shared_and_must_be_large_enough(tmp_path: Path) -> None:
    np.zeros(8, np.float32).tofile(tmp_path / "flat")
    map_vector(tmp_path / "flat", 8)[3] = 2.5
    assert np.fromfile(tmp_path / "flat", np.float32)[3] == 2.5
    with pytest.raises(ValueError, match="length"):
        map_vector(tmp_path / "flat", 9)
    with pytest.raises(FileNotFoundError):
        map_vector(tmp_path / "absent", 8)
