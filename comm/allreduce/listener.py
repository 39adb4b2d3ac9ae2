"""What a reduction tells the coordinator, through whoever runs it."""

from dataclasses import dataclass
from typing import Protocol

from atoll.comm.ids import NodeId
from atoll.comm.plan import Plan


@dataclass(frozen=True, slots=True)
class SealReport:
    """What an owner reports to the ledger of a chunk that it sealed."""

    chunk: int
    since: int  # the attempt in which it got the chunk
    digest: bytes
    inputs: tuple[int, ...]  # places in the plan of those whose contributions are in it


class ReduceListener(Protocol):
    """To whom a reduction tells what the coordinator must know. Called in the event loop."""

    def sealed(self, plan: Plan, seal: SealReport, more: bool) -> None:
        """This member has sealed a chunk; `more`: others will follow."""

    def orphans(self, plan: Plan, here: tuple[tuple[int, bytes], ...]) -> None:
        """These sealed chunks without an owner, with their digests, are at this member."""

    def lost(self, plan: Plan, node: NodeId, sentence: str) -> None:
        """A member cannot be reached, or does not do its part."""

    def held(self, plan: Plan, root: bytes, proven: bool) -> None:
        """Every sealed chunk is at this member, with digests of this root; `proven`: they are the ledger's."""

    def forged(self, plan: Plan, node: NodeId, chunk: int) -> None:
        """The sealed chunk as `node` gave it is not the ledger's."""

    def lacking(self, plan: Plan, chunks: tuple[int, ...]) -> None:
        """Nobody gave these sealed chunks as the ledger has them."""
