"""The flat vector: all parameters of a model in one fp32 array, in an order every node agrees on.

Parameters are sorted by name, or where fragments take turns by fragment and name (`atoll.node.outer.layout`),
and laid out row-major, one after the other. Under FSDP2's `Shard(0)` a local rank
owns one contiguous interval of each parameter, whatever the number of ranks, so it writes and reads its
intervals of a memory-mapped vector by itself: no collective, no gathered copy, and nodes of 1, 2 and 8 GPUs
exchange the same vector. Called by the trainer, between optimizer steps only (inside forward and backward
FSDP2 may hold unsharded parameters).
"""

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from atoll.outer_opt.overlap import Adopt

BLOCK_ELEMENTS = 1 << 20  # elements that are worked on at once where there is need of memory besides


@dataclass(frozen=True)
class ParameterSlot:
    """One parameter's place."""

    name: str
    shape: tuple[int, ...]
    offset: int  # of its first element in the flat vector


@dataclass(frozen=True)
class FlatLayout:
    """The parameters in the order of the flat vector, (numel,) fp32."""

    slots: tuple[ParameterSlot, ...]
    numel: int


def layout_of(model: nn.Module, order: Sequence[str] = ()) -> FlatLayout:
    """The model's layout, in this order, or by name; tied parameters count once, sharded ones with their whole
    shape."""
    slots, offset, parameters = [], 0, dict(model.named_parameters())
    for name in order or sorted(parameters):
        slots.append(ParameterSlot(name, tuple(parameters[name].shape), offset))
        offset += parameters[name].numel()
    return FlatLayout(tuple(slots), offset)


def shapes_of(layout: FlatLayout) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Name and shape of each parameter, in the order of the flat vector."""
    return tuple((slot.name, slot.shape) for slot in layout.slots)


def map_vector(path: str | Path, numel: int) -> Tensor:
    """The existing file as a (numel,) fp32 tensor that all who map it share. Raises `ValueError` for a shorter
    one."""
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 4 * numel), dtype=torch.float32)


def local_interval(parameter: Tensor) -> tuple[int, int]:
    """The elements [start, stop) of the parameter, row-major, that this rank holds; they may be none."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.numel()
    assert tuple(parameter.placements) == (Shard(0),), parameter.placements
    mesh, rows = parameter.device_mesh, parameter.shape[0]
    # FSDP2 gives every rank ceil(rows / ranks) rows; the last ranks get fewer or none.
    share = -(-rows // mesh.size())
    first = min(mesh.get_local_rank() * share, rows)
    last = min(first + share, rows)
    row = parameter.numel() // rows
    return first * row, last * row


def local_tensor(parameter: Tensor) -> Tensor:
    """The local storage of the parameter, this rank's shard of it, as a plain tensor."""
    data = parameter.data
    return data.to_local() if isinstance(data, DTensor) else data


@torch.no_grad()
def write_shards(model: nn.Module, layout: FlatLayout, flat: Tensor) -> None:
    """Copy this rank's shards into its intervals of `flat`, (layout.numel,) fp32."""
    for interval, shard in _pieces(model, layout):
        flat[interval].copy_(shard.reshape(-1))


@torch.no_grad()
def read_shards(model: nn.Module, layout: FlatLayout, flat: Tensor) -> None:
    """Copy this rank's intervals of `flat`, (layout.numel,) fp32, into its shards."""
    for interval, shard in _pieces(model, layout):
        shard.view(-1).copy_(flat[interval])


@torch.no_grad()
def copy_shards(model: nn.Module, layout: FlatLayout, into: list[Tensor] | None = None) -> list[Tensor]:
    """A copy of this rank's shards, in host memory: fp32, one after the other. `into`: an earlier copy, whose
    memory is used again; fresh memory takes longer than the copying."""
    shards = [shard.reshape(-1) for _, shard in _pieces(model, layout)]
    if not into:
        return [shard.to("cpu", copy=True) for shard in shards]
    for copy, shard in zip(into, shards, strict=True):
        copy.copy_(shard)
    return into


@torch.no_grad()
def restore_shards(model: nn.Module, layout: FlatLayout, shards: list[Tensor]) -> None:
    """Copy `shards`, which `copy_shards` returned, back into this rank's shards."""
    for (_, shard), copy in zip(_pieces(model, layout), shards, strict=True):
        shard.view(-1).copy_(copy)


@torch.no_grad()
def adopt_shards(
    model: nn.Module,
    layout: FlatLayout,
    flat: Tensor,
    sent: list[Tensor],
    adopt: Adopt,
    chosen: Callable[[int], bool] = lambda slot: True,
) -> None:
    """Take this rank's intervals of `flat`, (layout.numel,) fp32, in place of `sent`, which the shards were: what
    `copy_shards` returned then. `chosen(i)`: whether slot i is taken. The arithmetic is done in host memory."""
    for (i, interval, shard), was in zip(_numbered_pieces(model, layout), sent, strict=True):
        if not chosen(i):
            continue
        mine = shard.view(-1)
        local = mine.to("cpu")  # itself, if it is there
        adopt(local, flat[interval], was, torch.empty_like(local))
        if local is not mine:
            mine.copy_(local)


@torch.no_grad()
def squared_distances(model: nn.Module, layout: FlatLayout, flat: Tensor) -> list[float]:
    """The squared l2 norm of each parameter's distance from `flat`, as far as this rank holds it, by slot."""
    squares = [0.0] * len(layout.slots)
    for i, interval, shard in _numbered_pieces(model, layout):
        square = torch.zeros((), dtype=torch.float64, device=shard.device)
        for mine, other in zip(
            torch.split(shard.reshape(-1), BLOCK_ELEMENTS),
            torch.split(flat[interval], BLOCK_ELEMENTS),
            strict=True,
        ):
            square += torch.linalg.vector_norm(mine - other.to(shard.device), dtype=torch.float64) ** 2
        squares[i] = float(square)
    return squares


def _pieces(model: nn.Module, layout: FlatLayout) -> list[tuple[slice, Tensor]]:
    return [(interval, shard) for _, interval, shard in _numbered_pieces(model, layout)]


def _numbered_pieces(model: nn.Module, layout: FlatLayout) -> list[tuple[int, slice, Tensor]]:
    """This rank's part of each slot that it has one of: the slot's number, place in the flat vector, storage."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # An evaluation leaves the root's parameters gathered; what is written to those copies is lost.
            module.reshard()
    parameters, pieces = dict(model.named_parameters()), []
    for i, slot in enumerate(layout.slots):
        parameter = parameters[slot.name]
        start, stop = local_interval(parameter)
        shard = local_tensor(parameter)
        assert shard.numel() == stop - start, slot
        if stop > start:
            pieces.append((i, slice(slot.offset + start, slot.offset + stop), shard))
    return pieces
