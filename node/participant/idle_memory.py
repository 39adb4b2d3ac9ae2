"""Gives a device's memory back that nobody needs while a trainer waits for orders.

torch's allocator keeps what activations have taken, several times the model's own memory, for the next step. A
trainer whose node is paused, or waits for others, leaves it to whoever else uses the device: a first step takes it
again within milliseconds.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

IDLE_SECONDS = 5.0  # without an order, after which the memory is given back; an exchange is often shorter


def release_cached(device: torch.device) -> None:
    """Give back what torch's allocator keeps of the device without using it. Parameters, moments and gradients
    stay."""
    if device.type == "cuda":
        with torch.cuda.device(device):  # a thread's own, which is the first one otherwise
            torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


@contextmanager
def released_when_idle(
    device: torch.device,
    release: Callable[[torch.device], None] = release_cached,
    after: float = IDLE_SECONDS,
) -> Iterator[None]:
    """Release the device's memory once the context has lasted for `after` seconds: in a thread, since who waits in
    it may wait in a collective."""
    if device.type == "cpu":
        yield
        return
    timer = threading.Timer(after, release, (device,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
