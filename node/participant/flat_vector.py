"""The flat vector: all trainable parameters of a model in one fp32 array, in an order every node agrees on.

Parameters are sorted by name, or where fragments take turns by fragment and name (`atoll.node.outer.layout`), and
laid out row-major, one after the other. However a node's ranks share them (FSDP2, tensor, expert or pipeline
parallel), each rank holds a block of each parameter, or none; it writes and reads its blocks of a memory-mapped
vector by itself: no collective, no gathered copy, and nodes of 1, 2 and 8 GPUs exchange the same vector. Ranks on
other machines send and receive theirs, piece by piece, through rank 0. Called between optimizer steps only (inside
forward and backward FSDP2 may hold unsharded parameters).
"""

import math
import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from atoll.comm.errors import ConfigError
from atoll.node.participant.block_transfer import BlockTransfer
from atoll.node.participant.rank_group import RankGroup
from atoll.outer_opt.overlap import Adopt
from atoll.outer_opt.tensors import Tensor as ParameterSlot
from atoll.outer_opt.tensors import with_offsets

WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")
BLOCK_ELEMENTS = 1 << 20  # elements that are worked on at once where there is need of memory besides

Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # name and shape of each parameter


class ParameterBlock(NamedTuple):
    """The part of a parameter that a rank holds: rows, columns, ... `start` to `stop` in each dimension."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(max(b - a, 0) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """Picks the block out of the whole parameter."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))


Blocks = dict[
    str, tuple[tuple[int, ...], ParameterBlock]
]  # by name: the whole parameter's shape, and a rank's block


@dataclass(frozen=True)
class FlatLayout:
    """The parameters in the order of the flat vector, (numel,) fp32."""

    slots: tuple[ParameterSlot, ...]
    numel: int

    @classmethod
    def of(cls, shapes: Shapes) -> "FlatLayout":
        """The layout of these parameters in this order."""
        slots = with_offsets(shapes)
        return cls(slots, sum(slot.numel for slot in slots))

    @property
    def shapes(self) -> Shapes:
        """Name and shape of each parameter, in the order of the flat vector."""
        return tuple((slot.name, slot.shape) for slot in self.slots)


def parameter_in(flat: Tensor, slot: ParameterSlot) -> Tensor:
    """The parameter in the flat vector, in its own shape."""
    return flat[slot.span].view(slot.shape)


def trainable(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name; tied ones once. Of several parts, stages of a pipeline, each
    parameter must have the name that it has in the whole model. What compilation and other wrappers put into names
    is left out: nodes with and without them train one model."""
    found: dict[str, nn.Parameter] = {}
    for part in parts:
        bare = part.module if isinstance(part, DistributedDataParallel) else part
        for name, parameter in bare.named_parameters():
            if parameter.requires_grad:
                found["".join(WRAPPERS.split(name))] = parameter
    return found


def layout_of(*parts: nn.Module) -> FlatLayout:
    """The layout, by name, of what this process has of a model; sharded parameters with their whole shape."""
    return FlatLayout.of(tuple(sorted((name, tuple(p.shape)) for name, p in trainable(parts).items())))


def map_vector(path: str | Path, numel: int) -> Tensor:
    """The existing file as a (numel,) fp32 tensor that all who map it share. Raises `ValueError` for a shorter
    one."""
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 4 * numel), dtype=torch.float32)


def local_block(parameter: Tensor) -> ParameterBlock:
    """The block of the parameter that this rank holds; it may be empty. Raises `ConfigError` for one that lies in
    several pieces."""
    if not isinstance(parameter, DTensor):
        return ParameterBlock((0,) * parameter.ndim, tuple(parameter.shape))
    chunks = parameter.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local_tensor(parameter).shape):
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} is placed as {parameter.placements} on a mesh of "
            f"{tuple(parameter.device_mesh.shape)}, in pieces that lie apart: shard it evenly"
        )
    start = tuple(chunks[0].offsets)
    return ParameterBlock(start, tuple(a + n for a, n in zip(start, chunks[0].sizes, strict=True)))


def local_tensor(parameter: Tensor) -> Tensor:
    """The local storage of the parameter, this rank's block of it, as a plain tensor."""
    data = parameter.data
    return data.to_local() if isinstance(data, DTensor) else data


def with_doubles(x: Tensor) -> Tensor:
    """The tensor where fp64 can be computed: here, or, as Apple's GPU has none, in host memory."""
    return x.cpu() if x.device.type == "mps" else x


class Piece(NamedTuple):
    """A rank's block of one parameter."""

    slot: int
    block: ParameterBlock
    local: Tensor  # its storage


class ShardedParameters:
    """The trainable parameters of a node's ranks as parts of the flat vector. Every rank makes one at the same
    time; `layout` is then the same on all."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        ranks: RankGroup,
        order: Callable[[Shapes], Shapes] = lambda shapes: shapes,
    ) -> None:
        """`parts`: the model, or the stages of a pipeline that this rank has. `order` gives the parameters' order
        in the flat vector; it gets them sorted by name. Raises `ConfigError` where the ranks' blocks do not make
        up whole parameters."""
        self.parts, self._ranks = tuple(parts), ranks
        mine = trainable(self.parts)
        blocks = {name: (tuple(p.shape), local_block(p)) for name, p in mine.items()}
        everyone = ranks.gather(blocks, Blocks)
        self.layout = FlatLayout.of(order(self._shapes(everyone)))
        owners: dict[tuple[str, ParameterBlock], int] = {}  # the first rank that has a block: others have copies
        for rank, theirs in enumerate(everyone):
            for name, (_, block) in theirs.items():
                owners.setdefault((name, block), rank)
        held = Counter[str]()
        for name, block in owners:
            held[name] += block.numel
        for slot in self.layout.slots:
            if held[slot.name] != slot.numel:
                raise ConfigError(
                    f"this node's ranks hold {held[slot.name]:,} of the {slot.numel:,} elements of {slot.name}: "
                    "each must be on some rank, and ranks must have equal blocks or such as do not overlap"
                )
        self._owned = {name for (name, _), rank in owners.items() if rank == ranks.rank}
        self._transfer = BlockTransfer(ranks)
        self._remote = [  # rank 0's list of what ranks on other machines hold, and whether they own it
            (rank, i, theirs[slot.name][1], owners[slot.name, theirs[slot.name][1]] == rank)
            for rank, theirs in enumerate(everyone)
            if ranks.rank == 0 and ranks.hosts[rank] != ranks.hosts[0]
            for i, slot in enumerate(self.layout.slots)
            if slot.name in theirs and theirs[slot.name][1].numel
        ]
        if not self.layout.numel:
            raise ConfigError("the model has no parameter that requires a gradient: there is nothing to train")

    def _shapes(self, everyone: Sequence[Blocks]) -> Shapes:
        shapes: dict[str, tuple[int, ...]] = {}
        for rank, theirs in enumerate(everyone):
            for name, (shape, _) in theirs.items():
                if shapes.setdefault(name, shape) != shape:
                    raise ConfigError(
                        f"{name} has the shape {shapes[name]} on one of this node's ranks and {shape} on rank "
                        f"{rank}: all must build the same model"
                    )
        return tuple(sorted(shapes.items()))

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters."""
        return next((p.device for p in trainable(self.parts).values()), torch.device("cpu"))

    @torch.no_grad()
    def write(self, flat: Tensor | None) -> None:
        """Copy the ranks' blocks into `flat`, (layout.numel,) fp32; None on another machine than rank 0's. Every
        rank must call it."""
        for piece in self._pieces():
            if self.owns(piece):
                if flat is None:
                    self._transfer.send(piece.local, 0)
                else:
                    self._in(flat, piece).copy_(piece.local)
        for rank, slot, block, owned in self._remote:
            if owned:
                assert flat is not None, "rank 0 has the vectors"
                self._transfer.receive(parameter_in(flat, self.layout.slots[slot])[block.slices], rank)

    @torch.no_grad()
    def read(self, flat: Tensor | None) -> None:
        """Copy the ranks' blocks of `flat`, (layout.numel,) fp32, into the parameters; None on another machine
        than rank 0's. Every rank must call it."""
        for piece, theirs in self._with_vector(flat):
            piece.local.copy_(theirs)

    @torch.no_grad()
    def copy(self, into: list[Tensor] | None = None) -> list[Tensor]:
        """A copy of this rank's blocks, in host memory, one after the other. `into`: an earlier copy, whose memory
        is used again; fresh memory takes longer than the copying."""
        if not into:
            return [piece.local.to("cpu", copy=True) for piece in self._pieces()]
        for copy, piece in zip(into, self._pieces(), strict=True):
            copy.copy_(piece.local)
        return into

    @torch.no_grad()
    def restore(self, copies: list[Tensor]) -> None:
        """Copy `copies`, which `copy` returned, back into the parameters."""
        for piece, copy in zip(self._pieces(), copies, strict=True):
            piece.local.copy_(copy)

    @torch.no_grad()
    def adopt(
        self,
        flat: Tensor | None,
        sent: list[Tensor],
        adopt: Adopt,
        chosen: Callable[[int], bool] = lambda slot: True,
    ) -> None:
        """Take the ranks' blocks of `flat`, (layout.numel,) fp32, in place of `sent`, which the parameters were:
        what `copy` returned then. `chosen(i)`: whether slot i is taken. The arithmetic is done in host memory.
        `flat` is None on another machine than rank 0's. Every rank must call it."""
        for (piece, theirs), was in zip(self._with_vector(flat), sent, strict=True):
            if not chosen(piece.slot):
                continue
            local = piece.local.to("cpu").reshape(-1)  # a view of itself, if it is there
            adopt(local, theirs.reshape(-1), was.reshape(-1), torch.empty_like(local))
            if local.data_ptr() != piece.local.data_ptr():
                piece.local.copy_(local.view(piece.local.shape))

    @torch.no_grad()
    def squared_distances(self, flat: Tensor | None) -> list[float]:
        """The squared l2 norm of each parameter's distance from `flat`, by slot: as far as this rank holds it, and
        no rank before it. The sum over the ranks is of the whole parameters. `flat` is None on another machine
        than rank 0's. Every rank must call it."""
        squares = [0.0] * len(self.layout.slots)
        for piece, theirs in self._with_vector(flat, owned=True):
            local = with_doubles(piece.local)
            square = torch.zeros((), dtype=torch.float64, device=local.device)
            for mine, other in _blocks(local, theirs):
                square += torch.linalg.vector_norm(mine - other.to(mine.device), dtype=torch.float64) ** 2
            squares[piece.slot] = float(square)
        return squares

    @torch.no_grad()
    def copies_distance(self, flat: Tensor | None) -> float:
        """The squared l2 norm of the distance from `flat` of this rank's blocks that a rank before it has, too; 0
        on another machine than rank 0's, where `flat` is None."""
        if flat is None:
            return 0.0
        copies = [piece for piece in self._pieces() if not self.owns(piece)]
        pairs = [(local := with_doubles(piece.local), self._in(flat, piece).to(local.device)) for piece in copies]
        return sum(float(torch.linalg.vector_norm(a - b, dtype=torch.float64)) ** 2 for a, b in pairs)

    def owned_gradients(self) -> list[Tensor]:
        """The gradients' blocks on this rank, without those that a rank before it has, too."""
        mine = trainable(self.parts)
        return [local_tensor(p.grad) for name, p in mine.items() if p.grad is not None and name in self._owned]

    def gradients(self) -> list[Tensor]:
        """The gradients' blocks on this rank."""
        return [local_tensor(p.grad) for p in trainable(self.parts).values() if p.grad is not None]

    def owns(self, piece: Piece) -> bool:
        """Whether this is the first rank that has the piece; others with the same one have copies."""
        return self.layout.slots[piece.slot].name in self._owned

    def _with_vector(self, flat: Tensor | None, owned: bool = False) -> Iterator[tuple[Piece, Tensor]]:
        """This rank's pieces, each beside its part of the flat vector; rank 0 then sends other machines theirs.
        `owned`: only those that no rank before it has."""
        for piece in self._pieces():
            if owned and not self.owns(piece):
                continue
            if flat is not None:
                yield piece, self._in(flat, piece)
            else:
                theirs = torch.empty(piece.local.shape)
                self._transfer.receive(theirs, 0)
                yield piece, theirs
        for rank, slot, block, is_owner in self._remote:
            assert flat is not None, "rank 0 has the vectors"
            if is_owner or not owned:
                self._transfer.send(parameter_in(flat, self.layout.slots[slot])[block.slices], rank)

    def _in(self, flat: Tensor, piece: Piece) -> Tensor:
        """The piece in the flat vector."""
        return parameter_in(flat, self.layout.slots[piece.slot])[piece.block.slices]

    def _pieces(self) -> Iterator[Piece]:
        """This rank's block of each slot that it has one of. Raises `ConfigError` if a parameter is not what it
        was."""
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    # An evaluation leaves the root's parameters gathered; what is written to those copies is lost.
                    module.reshard()
        mine = trainable(self.parts)
        for i, slot in enumerate(self.layout.slots):
            parameter = mine.get(slot.name)
            if parameter is None:
                continue
            if tuple(parameter.shape) != slot.shape:
                raise ConfigError(
                    f"{slot.name} had the shape {slot.shape} when this script began to take part, and has "
                    f"{tuple(parameter.shape)} now: the parameters' shapes must stay"
                )
            block, local = local_block(parameter), local_tensor(parameter)
            if block.numel:
                yield Piece(i, block, local)


def _blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors of one shape, a bounded number of elements at a time."""
    if a.is_contiguous() and b.is_contiguous():
        a, b, rows = a.view(-1), b.view(-1), BLOCK_ELEMENTS
    else:
        rows = max(1, BLOCK_ELEMENTS // a[0].numel())
    return zip(torch.split(a, rows), torch.split(b, rows), strict=True)
