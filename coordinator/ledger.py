"""The chunk ledger of one attempt: which chunk is sealed with which digest. Pure. The first seal wins."""

import hashlib
from dataclasses import dataclass, field, replace

from atoll.comm.ids import NodeId


@dataclass(frozen=True, slots=True)
class Ledger:
    owners: tuple[NodeId, ...] = ()  # of each chunk
    sealed: dict[int, bytes] = field(default_factory=dict)  # chunk -> digest of its sealed bytes

    @property
    def complete(self) -> bool:
        return len(self.sealed) == len(self.owners)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Of all chunks in order; only of a complete ledger."""
        return tuple(self.sealed[c] for c in range(len(self.owners)))

    @property
    def root(self) -> bytes:
        """One digest over all sealed chunks, as `atoll.comm.digest.root` has it."""
        return hashlib.blake2b(b"".join(self.digests), digest_size=16).digest()


def seal(ledger: Ledger, node: NodeId, chunk: int, digest: bytes) -> Ledger:
    """Enter a seal; one from a node that does not own the chunk, or a second one, changes nothing."""
    if not 0 <= chunk < len(ledger.owners) or ledger.owners[chunk] != node or chunk in ledger.sealed:
        return ledger
    return replace(ledger, sealed=ledger.sealed | {chunk: digest})


def assign(chunks: int, members: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    """Owners of the chunks: equal shares, in turn."""
    return tuple(members[c % len(members)] for c in range(chunks))
