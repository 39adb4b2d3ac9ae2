"""The chunk ledger of one round: who contributed, and which chunk is sealed with which digest. Pure.

    contribute (any member, once) --> open attempt 1 --> seal every chunk --> commit
                                          |   ^
                                          +---+  a member of the attempt is lost: reopened as attempt 2, 3, ...

Contributions outlive attempts: members keep what they encoded until the round is over. Within an attempt the
first seal of a chunk wins, and only its owner can seal it.
"""

import hashlib
from dataclasses import dataclass, field, replace

from atoll.comm.ids import NodeId


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one member's delta stands for."""

    samples: int  # from the front of its lease, earlier rounds' uncommitted ones included
    steps: int  # inner steps of this round
    loss: float  # mean over this round's steps
    norm: float  # l2, of the delta


@dataclass(frozen=True, slots=True)
class Ledger:
    contributions: dict[NodeId, Contribution] = field(default_factory=dict)
    attempt: int = 0  # 0: none was opened yet
    members: tuple[NodeId, ...] = ()  # of the attempt, in the order in which contributions are summed
    owners: tuple[NodeId, ...] = ()  # of each chunk
    sealed: dict[int, bytes] = field(default_factory=dict)  # chunk -> digest of its sealed bytes

    @property
    def complete(self) -> bool:
        return self.attempt > 0 and len(self.sealed) == len(self.owners)

    @property
    def root(self) -> bytes:
        """One digest over all sealed chunks, as `atoll.comm.digest.root` has it; only of a complete ledger."""
        digests = b"".join(self.sealed[c] for c in range(len(self.owners)))
        return hashlib.blake2b(digests, digest_size=16).digest()

    @property
    def unsealed(self) -> tuple[int, ...]:
        return tuple(c for c in range(len(self.owners)) if c not in self.sealed)


def contribute(ledger: Ledger, node: NodeId, contribution: Contribution) -> Ledger:
    """Enter a member's contribution; the first one counts."""
    if node in ledger.contributions:
        return ledger
    return replace(ledger, contributions=ledger.contributions | {node: contribution})


def withdraw(ledger: Ledger, node: NodeId) -> Ledger:
    """The member is gone or has lost what it encoded; an attempt that it is part of cannot end."""
    return replace(ledger, contributions={n: c for n, c in ledger.contributions.items() if n != node})


def reopen(ledger: Ledger, members: tuple[NodeId, ...], chunks: int) -> Ledger:
    """Open the next attempt among `members`, who all contributed: equal shares of the chunks, in turn."""
    owners = tuple(members[c % len(members)] for c in range(chunks))
    return Ledger(ledger.contributions, ledger.attempt + 1, members, owners)


def seal(ledger: Ledger, node: NodeId, seals: tuple[tuple[int, bytes], ...]) -> Ledger:
    """Enter (chunk, digest) seals; one of a chunk that the node does not own, or a second one, changes nothing."""
    sealed = dict(ledger.sealed)
    for chunk, digest in seals:
        if 0 <= chunk < len(ledger.owners) and ledger.owners[chunk] == node:
            sealed.setdefault(chunk, digest)
    return replace(ledger, sealed=sealed)


def weights(ledger: Ledger, sample: int) -> dict[NodeId, float]:
    """Of the attempt's members: the tokens behind each contribution, at `sample` tokens a sample."""
    return {
        n: float(ledger.contributions[n].samples * sample) for n in ledger.members if n in ledger.contributions
    }
