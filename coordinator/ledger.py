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


def seal(ledger: Ledger, node: NodeId, seals: tuple[tuple[int, bytes], ...]) -> Ledger:
    """Enter (chunk, digest) seals; one of a chunk that the node does not own, or a second one, changes nothing."""
    sealed = dict(ledger.sealed)
    for chunk, digest in seals:
        if 0 <= chunk < len(ledger.owners) and ledger.owners[chunk] == node:
            sealed.setdefault(chunk, digest)
    return replace(ledger, sealed=sealed)


def assign(chunks: int, members: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    """Owners of the chunks: equal shares, in turn."""
    return tuple(members[c % len(members)] for c in range(chunks))
