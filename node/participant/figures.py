"""The figures of a trainer's progress: speed, model FLOPs utilisation, memory, and time spent waiting for data.

Used by the participant between two steps; nothing here may cost a step more than a few microseconds.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from atoll.comm.accelerators import peak_flops
from atoll.comm.config.round_time import flops_per_token, tokens_per_step
from atoll.comm.config.run import RunConfig

REPORT_INTERVAL = 0.25  # seconds between two progress reports, at least
MEMORY_INTERVAL = 1.0  # seconds between two looks at a rank's memory, at least
PARAMETER_FLOPS = 6  # a parameter and token: a product and a sum, forward once and backward twice


@dataclass(frozen=True)
class Speed:
    """The speed of the steps since the last report."""

    tokens_per_s: float
    mfu: float  # share of the cards' peak, 0 to 1; 0: not known
    data_wait: float  # share of the time in which the loop waited for its data


@dataclass
class StepMeter:
    """The time of a node's steps, loading included; what lies between them (hand-overs, evaluations, waiting for
    the daemon) does not count."""

    step_tokens: int
    token_flops: float  # floating-point operations of the model for one token
    peak: float | None  # FLOP/s of all cards of the node; None: not known
    clock: Callable[[], float] = time.monotonic
    last: float = 0.0  # seconds, of the last step
    _begun: float = 0.0
    _reported: float = -math.inf
    _tokens: int = 0
    _seconds: float = 0.0
    _loading: float = 0.0

    @classmethod
    def of(
        cls, run: RunConfig, numel: int, device: torch.device, ranks: int, token_flops: float | None = None
    ) -> "StepMeter":
        """The meter of a node whose model has `numel` parameters, and whose ranks have such a card each. Where
        `token_flops` does not say it, a model that is not the config's counts without its attention: how that is
        built is not known."""
        if token_flops is None:
            own = numel == run.model.n_params
            token_flops = flops_per_token(run.model) if own else float(PARAMETER_FLOPS * numel)
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        return cls(tokens_per_step(run), token_flops, None if peak is None else ranks * peak)

    def begin(self) -> None:
        """Begin a step, whose data is about to be loaded."""
        self._begun = self.clock()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count the time of the context as waiting for data."""
        begun = self.clock()
        yield
        self._loading += self.clock() - begun

    def end(self) -> Speed | None:
        """End the step; returns the speed since the last report, None when it is too early for another."""
        now = self.clock()
        self.last = now - self._begun
        self._seconds, self._tokens = self._seconds + self.last, self._tokens + self.step_tokens
        if now - self._reported < REPORT_INTERVAL:
            return None
        seconds = max(self._seconds, 1e-9)
        pace = self._tokens / seconds
        mfu = pace * self.token_flops / self.peak if self.peak else 0.0
        speed = Speed(pace, mfu, min(1.0, self._loading / seconds))
        self._reported, self._tokens, self._seconds, self._loading = now, 0, 0.0, 0.0
        return speed


class RankMemory:
    """The memory of one rank: on its device at peak, and of its process on the host. Looked at now and then."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._device, self._process, self.clock = device, psutil.Process(), clock
        self._looked, self._found = -math.inf, (0, 0)

    def bytes(self) -> tuple[int, int]:
        """Bytes on the device, the most there were at a time (0: it has no memory of its own); and the process's
        resident set."""
        now = self.clock()
        if now - self._looked >= MEMORY_INTERVAL:
            on_gpu = self._device.type == "cuda"
            peak = torch.cuda.max_memory_allocated(self._device) if on_gpu else 0
            self._looked, self._found = now, (peak, self._process.memory_info().rss)
        return self._found
