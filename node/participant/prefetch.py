"""Batches of the run's data, prepared in a thread while the training loop computes with earlier ones.

The loop says which samples follow (`expect`) and takes batch after batch by its samples' indices (`take`). The
thread decides on nothing but time: a batch that was prepared for other samples is dropped, and one that was not
prepared is made in the loop. Used by the participant, for the run's own data and torch's collation alone: a
dataset or a collation of a script's is called in the loop, since it may not be made for threads.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from atoll.node.participant.batches import RunTokens, Share, collated
from atoll.node.participant.rank_group import RankGroup

BATCHES_AHEAD = 8  # at the beginning of a group of blocks each of them is read from the disk in turn
WAIT_SECONDS = 1.0  # between two words of a loop that waits
CLOSE_SECONDS = 5.0  # for the thread to end; one that a store keeps longer ends with the process


class _OutOfOrder(Exception):
    """What the thread prepares is not expected any more."""


@dataclass(frozen=True)
class _Prepared:
    """A batch, or the error that came of making it."""

    indices: list[int]
    batch: Any = None
    error: Exception | None = None


class BatchPrefetcher:
    """One rank's batches of the run's data, up to `BATCHES_AHEAD` of them made before they are asked for."""

    def __init__(
        self,
        data: RunTokens,
        ranks: RankGroup,
        share: Share,
        device: torch.device,
        collate: Callable[[list[Any]], Any] = collated,
        tell: Callable[[str], None] = lambda sentence: None,
        waiting: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """`device`: that the batches are going to; for CUDA they are in pinned memory. `tell` takes sentences on
        the data, in any thread; `waiting` is called in the loop's, every second in which it waits for data, with
        what keeps them from coming."""
        self.data, self._ranks, self._share = data, ranks, share
        self._collate, self._waiting = collate, waiting
        self.ranks_behind = True  # whether any rank `is_behind`, by what all of them know
        self._device = device if device.type == "cuda" and collate is collated else None
        self._changed = threading.Condition()
        self._ready = deque[_Prepared]()
        self._plan: Iterator[list[int]] | None = None  # this rank's batches that are not begun; None: no more
        self._order = 0  # the number of times that what is expected has changed
        self._over = False
        self._thread: threading.Thread | None = None
        self._thread_order = 0  # of the batch that the thread makes
        data.listen(tell, self._while_waiting)
        if collate is collated:
            self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
            self._thread.start()

    @property
    def is_behind(self) -> bool:
        """Whether no batch is ready: the loop may have to wait for the next one."""
        return not self._ready

    def expect(self, coming: Callable[[], Iterator[list[int]]]) -> None:
        """Prepare from now on the batches that each call of `coming` iterates over, which are of all ranks, in
        their order. What was prepared before is dropped."""
        self.data.expect(coming(), self._share)
        self.ranks_behind = True
        with self._changed:
            self._drop()
            if self._thread is not None and not self._over:
                self._plan = (batch[self._share.of(len(batch))] for batch in coming())

    def take(self, indices: list[int]) -> Any:
        """The batch of these samples, once every rank has its own where `ranks_behind`: a rank that waited for
        another's data in the midst of a step would be taken for hung. Raises what came of making it:
        `ResourceError` where a sample cannot be read."""
        batch = self._batch_of(indices)
        if self.ranks_behind:
            self._ranks.meet(lambda: self._waiting(self.data.trouble), WAIT_SECONDS)
        return batch

    def close(self) -> None:
        """End the thread; batches are made in the loop from then on."""
        with self._changed:
            self._over = True
            self._drop()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def _batch_of(self, indices: list[int]) -> Any:
        found = self._next_ready()
        if found is not None and found.indices == indices:
            if found.error is not None:
                raise found.error
            return found.batch
        with self._changed:
            self._drop()
        return self._made(indices, self._order)

    def _next_ready(self) -> _Prepared | None:
        """The oldest batch that is ready, once there is one; None: none is coming."""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._ready or self._plan is None, WAIT_SECONDS):
                    found = self._ready.popleft() if self._ready else None
                    self._changed.notify_all()
                    return found
            self._waiting(self.data.trouble)

    def _drop(self) -> None:
        """Forget what is ready and what is expected; the lock is the caller's."""
        self._order += 1
        self._plan = None
        self._ready.clear()
        self._changed.notify_all()

    def _made(self, indices: list[int], order: int) -> Any:
        samples = list[Any]()
        for index in indices:
            if order != self._order:
                raise _OutOfOrder
            samples.append(self.data[index])
        batch = self._collate(samples)
        if self._device is not None:
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return batch

    def _while_waiting(self, trouble: str) -> None:
        """Called every second by the thread, this one's or the loop's, that waits for a sample."""
        if threading.current_thread() is not self._thread:
            self._waiting(trouble)
        elif self._thread_order != self._order:
            raise _OutOfOrder

    # The thread

    def _work(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # else pinned memory would be that of the first one's context
        while (indices := self._next_indices()) is not None:
            try:
                prepared = _Prepared(indices, self._made(indices, self._thread_order))
            except _OutOfOrder:
                continue
            except Exception as error:  # raised in the loop, which comes to it
                prepared = _Prepared(indices, error=error)
            with self._changed:
                if self._thread_order == self._order:
                    self._ready.append(prepared)
                    self._plan = self._plan if prepared.error is None else None
                    self._changed.notify_all()
            del prepared

    def _next_indices(self) -> list[int] | None:
        """The samples of the next batch to make, once there is room for it; None: it is over."""
        with self._changed:
            while not self._over:
                if self._plan is not None and len(self._ready) < BATCHES_AHEAD:
                    self._thread_order = self._order
                    if (indices := next(self._plan, None)) is not None:
                        return indices
                    self._plan = None
                    self._changed.notify_all()
                else:
                    self._changed.wait()
            return None
