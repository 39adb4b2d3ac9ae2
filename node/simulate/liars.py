"""Lies that members of a simulated run tell in place of their deltas, or of the chunks that they seal."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from atoll.comm.errors import ConfigError
from atoll.outer_opt.arrays import norm

F32 = NDArray[np.float32]
SEAL_NOISE = 3.0  # standard deviations of the mean, which a liar's seal is off by


class LieKind(StrEnum):
    """The kinds of lies; SIZED have a number behind a colon."""

    FLIP = "flip"  # so many times its delta, in the other direction
    NOISE = "noise"  # normal noise, so many times as long as its delta
    ZEROS = "zeros"
    REPLAY = "replay"  # what it sent in its first round, in each
    COPY = "copy"  # an honest member's delta
    NAN = "nan"  # bytes that decode to no numbers
    WEIGHT = "weight"  # its delta, and so many times the samples that are behind it
    SEAL = "seal"  # its delta; as an owner it seals noise in this share of all chunks, of those that it owns


SIZED = {LieKind.FLIP: 10.0, LieKind.NOISE: 1e4, LieKind.WEIGHT: 8.0, LieKind.SEAL: 0.125}
TRAINING = {LieKind.FLIP, LieKind.NOISE, LieKind.REPLAY, LieKind.WEIGHT, LieKind.SEAL}  # others need no delta


@dataclass(frozen=True)
class Lie:
    """A lie, as `--liar` names it."""

    kind: LieKind
    size: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}:{self.size:g}" if self.kind in SIZED else str(self.kind)


def parsed(text: str) -> Lie:
    """The lie that a word such as flip:10 names. Raises `ConfigError`."""
    name, colon, number = text.partition(":")
    if name not in list(LieKind):
        raise ConfigError(f"--liar is {text!r}: choose one of {', '.join(LieKind)}, such as flip:10")
    kind = LieKind(name)
    if bool(colon) and kind not in SIZED:
        raise ConfigError(f"--liar is {text!r}: {kind} has no number")
    try:
        size = float(number) if colon else SIZED.get(kind, 0.0)
    except ValueError:
        size = -1.0
    if not (isfinite(size) and (size > 0 or kind not in SIZED)) or (kind is LieKind.SEAL and size > 1):
        raise ConfigError(f"--liar is {text!r}: give {kind} a number above 0, such as {SIZED[kind]:g}")
    return Lie(kind, size)


class Liar:
    """A member that tells one lie, in every round."""

    def __init__(self, lie: Lie, seed: Sequence[int]) -> None:
        self.lie = lie
        self._random = np.random.default_rng(seed)
        self._first: dict[int, F32] = {}  # by fragment: the delta that it sent first

    @property
    def claim(self) -> float:
        """The times that it claims the samples which are behind its delta."""
        return self.lie.size if self.lie.kind is LieKind.WEIGHT else 1.0

    def delta(self, fragment: int, delta: F32, others: Sequence[F32]) -> F32:
        """What it sends, (numel,), in place of its `delta` of a fragment. `others`: the honest members' deltas
        that it has seen in this round."""
        match self.lie.kind:
            case LieKind.FLIP:
                return np.float32(-self.lie.size) * delta
            case LieKind.NOISE:
                noise = self._random.standard_normal(delta.size, np.float32)
                noise *= np.float32(self.lie.size * norm(delta) / norm(noise))
                return noise
            case LieKind.ZEROS:
                return np.zeros_like(delta)
            case LieKind.REPLAY:
                return self._first.setdefault(fragment, delta.copy())
            case LieKind.COPY:
                return others[0].copy() if others else delta
            case LieKind.NAN:
                return np.full_like(delta, np.nan)
            case _:
                return delta

    def seal(self, mean: F32) -> F32:
        """What it seals in place of a chunk's mean (n,)."""
        noise = self._random.standard_normal(mean.size, np.float32)
        return mean + np.float32(SEAL_NOISE * float(mean.std())) * noise
