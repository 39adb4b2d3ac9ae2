"""Blocks of parameters on their way between a node's machines, over the ranks' own process group."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.node.participant.rank_group import RankGroup

MESSAGE_ELEMENTS = 1 << 22  # of one message, about; no more memory is needed besides


class BlockTransfer:
    """Sends and receives blocks, (...) fp32 in host memory, in pieces of bounded size. Both sides must know the
    block's shape."""

    def __init__(self, ranks: RankGroup) -> None:
        self._group = ranks.group

    def send(self, block: Tensor, rank: int) -> None:
        """Send the block to a rank that receives it."""
        for part in _parts(block):
            dist.send(part.to("cpu", torch.float32).contiguous(), rank, group=self._group)

    def receive(self, block: Tensor, rank: int) -> None:
        """Fill the block with what a rank sends."""
        for part in _parts(block):
            message = torch.empty(part.shape)
            dist.recv(message, rank, group=self._group)
            part.copy_(message)


def _parts(block: Tensor) -> Iterator[Tensor]:
    """The block in pieces along its first dimension, and along the next where one row is large."""
    if block.ndim == 0 or block.numel() <= MESSAGE_ELEMENTS:
        yield block
        return
    rows = MESSAGE_ELEMENTS // block[0].numel()
    for part in torch.split(block, max(rows, 1)):
        yield from _parts(part[0]) if rows == 0 else (part,)
