"""The ranks of one node, and what they agree on: sums, and texts that all get to know."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

T = TypeVar("T")

# Ranks wait in a collective while the daemon has nothing for them to do; a step's deadline is the watchdog's.
COLLECTIVE_TIMEOUT = timedelta(days=10)


@dataclass(frozen=True)
class RankGroup:
    """The ranks of this node, and which of them this process is."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None  # gloo, of all ranks; None: there is one rank
    hosts: tuple[int, ...] = (0,)  # by rank: the number of the machine that it runs on

    @classmethod
    def of_world(cls) -> "RankGroup":
        """All ranks of torch's default process group, in a group of their own; one rank where there is none."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(0, 1)
        group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        ranks = cls(dist.get_rank(), dist.get_world_size(), group)
        # As torch's elastic launcher says; other launchers (srun, mpirun) have no such number.
        names = ranks.gather(os.environ.get("GROUP_RANK") or socket.gethostname(), str)
        return replace(ranks, hosts=tuple(names.index(name) for name in names))

    @property
    def is_remote(self) -> bool:
        """Whether this rank runs on another machine than rank 0, beside which the daemon is."""
        return self.hosts[self.rank] != self.hosts[0]

    @property
    def is_first_on_host(self) -> bool:
        """Whether no rank before this one runs on its machine."""
        return self.hosts.index(self.hosts[self.rank]) == self.rank

    def another(self) -> "RankGroup":
        """Make a group of the same ranks in a process group that nobody else uses, for another thread. Every rank
        must call it."""
        if self.size == 1:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT))

    def total(self, *values: float) -> list[float]:
        """The sums over all ranks; every rank must call it."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.group)
        return tensor.tolist()

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.total(0.0)

    def meet(self, waiting: Callable[[], None], interval: float = 1.0) -> None:
        """Return when every rank has called it; `waiting` is called every `interval` seconds until then."""
        if self.size == 1:
            return
        arrived = threading.Event()
        work = dist.all_reduce(torch.zeros(1), group=self.group, async_op=True)
        work.get_future().then(lambda _: arrived.set())
        while not arrived.wait(interval):
            waiting()
        work.wait()

    def broadcast(self, data: bytes | None, rank: int = 0) -> bytes:
        """The bytes that `rank` gives, on every rank; of the others `data` is not looked at."""
        if self.size == 1:
            return data or b""
        mine = data or b""
        length = torch.tensor([len(mine)])
        dist.broadcast(length, rank, group=self.group)
        text = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == rank:
            text[:] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else text
        dist.broadcast(text, rank, group=self.group)
        return text.numpy().tobytes()

    def gather(self, mine: Any, kind: type[T]) -> Sequence[T]:
        """Collect what every rank gives, by rank, on every rank; it must be what JSON can say."""
        encoded = msgspec.json.encode(mine)
        return [msgspec.json.decode(self.broadcast(encoded, rank), type=kind) for rank in range(self.size)]
