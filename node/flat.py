"""The flat vector: all parameters of a model in one fp32 array, in an order every node agrees on.

Parameters are sorted by name and laid out row-major, one after the other. Under FSDP2's `Shard(0)` a local
rank owns one contiguous interval of each parameter, whatever the number of ranks, so it writes and reads its
intervals of a memory-mapped vector by itself: no collective, no gathered copy, and nodes of 1, 2 and 8 GPUs
exchange the same vector. Called by the trainer, between optimizer steps only (inside forward and backward
FSDP2 may hold unsharded parameters).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Slot:
    """One parameter's place."""

    name: str
    shape: tuple[int, ...]
    offset: int  # of its first element in the flat vector


@dataclass(frozen=True)
class Layout:
    slots: tuple[Slot, ...]
    numel: int


def layout_of(model: nn.Module) -> Layout:
    """The model's layout; tied parameters count once, sharded ones with their whole shape."""
    slots, offset = [], 0
    for name, parameter in sorted(model.named_parameters()):
        slots.append(Slot(name, tuple(parameter.shape), offset))
        offset += parameter.numel()
    return Layout(tuple(slots), offset)


def map_vector(path: str | Path, numel: int) -> Tensor:
    """The existing file as a (numel,) fp32 tensor; what is written to it, other processes that map it see."""
    mapped: np.memmap[tuple[int], np.dtype[np.float32]] = np.memmap(path, np.float32, "r+", shape=(numel,))
    return torch.from_numpy(mapped)


def local_interval(parameter: Any) -> tuple[int, int]:
    """The elements [start, stop) of the parameter, row-major, that this rank holds; they may be none."""
    if not is_sharded(parameter):
        return 0, parameter.numel()
    mesh, rows = parameter.device_mesh, parameter.shape[0]
    # FSDP2 gives every rank ceil(rows / ranks) rows; the last ranks get fewer or none.
    share = -(-rows // mesh.size())
    first = min(mesh.get_local_rank() * share, rows)
    last = min(first + share, rows)
    row = parameter.numel() // rows
    return first * row, last * row


def is_sharded(parameter: Tensor) -> bool:
    """Whether the parameter is a DTensor; any placement but `Shard(0)` is a bug."""
    placements = getattr(parameter, "placements", None)
    if placements is None:
        return False
    assert len(placements) == 1 and placements[0].is_shard(0), placements
    return True


def local_tensor(parameter: Tensor) -> Tensor:
    """This rank's storage of the parameter as a plain tensor."""
    data: Any = parameter.data
    return cast(Tensor, data.to_local() if is_sharded(parameter) else data)


@torch.no_grad()
def write_shards(model: nn.Module, layout: Layout, flat: Tensor) -> None:
    """Copy this rank's shards into its intervals of `flat`, (layout.numel,) fp32."""
    for interval, shard in _pieces(model, layout):
        flat[interval].copy_(shard.reshape(-1))


@torch.no_grad()
def read_shards(model: nn.Module, layout: Layout, flat: Tensor) -> None:
    """Copy this rank's intervals of `flat`, (layout.numel,) fp32, into its shards."""
    for interval, shard in _pieces(model, layout):
        shard.view(-1).copy_(flat[interval])


def _pieces(model: nn.Module, layout: Layout) -> list[tuple[slice, Tensor]]:
    parameters, pieces = dict(model.named_parameters()), []
    for slot in layout.slots:
        parameter = parameters[slot.name]
        start, stop = local_interval(parameter)
        shard = local_tensor(parameter)
        assert shard.numel() == stop - start, slot
        if stop > start:
            pieces.append((slice(slot.offset + start, slot.offset + stop), shard))
    return pieces
