"""Polyak's momentum as the outer rule: m <- mu m + delta; theta <- theta - eta m."""

from dataclasses import dataclass

from atoll.comm.config.outer import OuterConfig
from atoll.outer_opt.arrays import Array, scaled
from atoll.outer_opt.schedule import Constant, Schedule


@dataclass(frozen=True)
class HeavyBall:
    lr: float  # eta
    momentum: float  # mu

    def step(self, anchor: Array, momentum: Array, delta: Array, scratch: Array) -> None:
        momentum *= self.momentum
        momentum += delta
        anchor -= scaled(momentum, self.lr, scratch)


def schedule(outer: OuterConfig) -> Schedule:
    return Constant(HeavyBall(outer.lr, outer.momentum))
