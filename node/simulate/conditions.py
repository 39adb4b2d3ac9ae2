"""Conditions of a simulated run: how fast its nodes and links are, who fails, what gets lost."""

from dataclasses import dataclass

from atoll.comm.errors import ConfigError
from atoll.node.simulate.liars import parsed


@dataclass(frozen=True)
class Conditions:
    """The conditions of a run, the same for every method that is compared."""

    nodes: int
    steps: int  # inner steps of a node on average: the run ends when that many tokens are trained on
    speeds: tuple[float, ...] = ()  # of each node, in units of the fastest; empty: all 1
    step_seconds: float = 1.0  # of an inner step at speed 1
    bandwidth: float = 0.0  # Mbit/s of each node, each way; 0: as much as is needed
    latency: float = 0.0  # seconds that every exchange takes besides
    drop: float = 0.0  # probability that a contribution does not count
    churn: int = 0  # every so many rounds a node is killed, and half as long after each one joins; 0: none
    liars: int = 0  # nodes that lie: the last ones
    lie: str = ""  # which one they tell (`liars.parsed`)
    defence: bool = True  # whether the run does anything about it

    def speed(self, node: int) -> float:
        """The inner steps that a node takes a second."""
        return (self.speeds[node % len(self.speeds)] if self.speeds else 1.0) / self.step_seconds

    def liar(self, node: int) -> bool:
        """Whether the node of this number lies."""
        return node >= self.nodes - self.liars

    def check(self) -> None:
        """Raise `ConfigError` with a sentence, in the words of the command's options, for values without a
        meaning."""
        for name, value, holds, must in (
            ("--nodes", self.nodes, 1 <= self.nodes <= 1024, "in 1 ... 1024"),
            ("--steps", self.steps, self.steps >= 1, "at least 1"),
            ("--step-seconds", self.step_seconds, 0 < self.step_seconds < 1e6, "above 0"),
            ("--bandwidth", self.bandwidth, 0 <= self.bandwidth < 1e9, "0 (no limit) or Mbit/s"),
            ("--latency", self.latency, 0 <= self.latency < 1e6, "0 or more seconds"),
            ("--drop", self.drop, 0 <= self.drop < 1, "in [0, 1)"),
            ("--churn", self.churn, self.churn >= 0, "0 (none) or a number of rounds"),
            ("--liars", self.liars, 0 <= self.liars < self.nodes, "0 or more, and fewer than --nodes"),
        ):
            if not holds:
                raise ConfigError(f"{name} is {value:g}: it must be {must}")
        if self.lie and not self.liars:
            raise ConfigError(f"--liar is {self.lie}: say with --liars how many nodes do it")
        if self.liars and not self.lie:
            raise ConfigError(f"--liars is {self.liars}: say with --liar what they do, such as flip:10")
        if self.lie:
            parsed(self.lie)
        for speed in self.speeds:
            if not 0 < speed <= 1000:
                raise ConfigError(f"--speeds holds {speed:g}: speeds must be above 0, such as 1,1,0.8,0.5")
        if self.speeds and len(self.speeds) != self.nodes:
            raise ConfigError(
                f"--speeds has {len(self.speeds)} numbers for --nodes {self.nodes}: give one for each"
            )
