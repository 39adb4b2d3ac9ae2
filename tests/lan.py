"""Network namespaces on a bridge, which stand for machines of a private network. They take root."""

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

BRIDGE, HERE = "atoll-lan", "10.77.93.254"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def remove(*, links: Iterable[str], spaces: Iterable[str]) -> None:
    """Remove what is there of these: at the end, and at the start what a run left that was killed."""
    for words in (*(("link", "del", link) for link in links), *(("netns", "del", space) for space in spaces)):
        subprocess.run(["ip", *words], check=False, capture_output=True)


@dataclass(frozen=True)
class Machine:
    """A network namespace on the bridge."""

    number: int

    @property
    def name(self) -> str:
        return f"atoll-m{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.93.{self.number}"

    @property
    def through(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    @property
    def link(self) -> str:
        return f"{self.name}-h"

    def make(self) -> None:
        ip("netns", "add", self.name)
        ip("link", "add", self.link, "type", "veth", "peer", "name", "lan", "netns", self.name)
        ip("link", "set", self.link, "master", BRIDGE, "up")
        for words in (("address", "add", f"{self.address}/24", "dev", "lan"), ("link", "set", "lan", "up")):
            ip("-n", self.name, *words)
        ip("-n", self.name, "link", "set", "lo", "up")


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines that reach each other, and this one at `HERE`."""
    both = first, second = Machine(1), Machine(2)

    def clear() -> None:
        remove(links=[*(machine.link for machine in both), BRIDGE], spaces=[machine.name for machine in both])

    clear()
    ip("link", "add", BRIDGE, "type", "bridge")
    ip("address", "add", f"{HERE}/24", "dev", BRIDGE)
    ip("link", "set", BRIDGE, "up")
    try:
        first.make()
        second.make()
        yield first, second
    finally:
        clear()
