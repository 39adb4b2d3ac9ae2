"""The flat vector, against a gathered state dict, on real ranks of several sizes."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes

from atoll.node.trainer.flat_vector import layout_of, local_interval, map_vector, read_shards, write_shards


def awkward() -> nn.Module:
    """Shapes that do not divide evenly: 5 rows, 7 and 1, a bias of one element, a kernel."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1), nn.Conv1d(2, 7, 3))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) + 1000.0 * (number + 1))
    return model


def reference(model: nn.Module) -> Tensor:
    """All parameters, sorted by name, row-major."""
    return torch.cat([p.detach().reshape(-1) for _, p in sorted(model.named_parameters())])


def sharded(model: nn.Module) -> list[tuple[str, Any]]:
    """The parameters, which FSDP2 has made DTensors behind the type checker's back."""
    return list(model.named_parameters())


def on_a_rank(rank: int, size: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=size, timeout=timedelta(minutes=1)
    )
    try:
        model, expected = awkward(), reference(awkward())
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        layout = layout_of(model)
        assert layout == layout_of(awkward())
        flat = map_vector(f"{folder}/flat", layout.numel)
        write_shards(model, layout, flat)
        dist.barrier()
        assert torch.equal(flat, expected)
        dist.barrier()
        if rank == 0:
            flat.mul_(-1)
        dist.barrier()
        read_shards(model, layout, flat)
        whole = {name: parameter.detach().full_tensor() for name, parameter in sharded(model)}
        assert all(torch.equal(whole[name], -parameter) for name, parameter in awkward().named_parameters())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_of_any_number_write_and_read_the_same_vector(size: int, tmp_path: Path) -> None:
    np.zeros(reference(awkward()).numel(), np.float32).tofile(tmp_path / "flat")
    start_processes(on_a_rank, (size, str(tmp_path)), nprocs=size, start_method="fork")  # type: ignore[no-untyped-call]


def test_a_plain_model_is_written_and_read_whole() -> None:
    model, layout = awkward(), layout_of(awkward())
    flat = torch.zeros(layout.numel)
    write_shards(model, layout, flat)
    assert torch.equal(flat, reference(model))
    assert local_interval(model.get_parameter("0.weight")) == (0, 15)
    other = awkward()
    nn.init.zeros_(other.get_parameter("0.weight"))
    read_shards(other, layout, flat)
    assert torch.equal(reference(other), flat)


def test_names_are_sorted_and_offsets_follow_one_another() -> None:
    layout = layout_of(awkward())
    assert [slot.name for slot in layout.slots] == sorted(slot.name for slot in layout.slots)
    sizes = [int(np.prod(slot.shape)) for slot in layout.slots]
    assert [slot.offset for slot in layout.slots] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert layout.numel == sum(sizes)


def test_tied_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert layout_of(model).numel == 16


def test_a_mapped_vector_is_shared_and_must_be_large_enough(tmp_path: Path) -> None:
    np.zeros(8, np.float32).tofile(tmp_path / "flat")
    map_vector(tmp_path / "flat", 8)[3] = 2.5
    assert np.fromfile(tmp_path / "flat", np.float32)[3] == 2.5
    with pytest.raises(ValueError, match="length"):
        map_vector(tmp_path / "flat", 9)
    with pytest.raises(FileNotFoundError):
        map_vector(tmp_path / "absent", 8)
