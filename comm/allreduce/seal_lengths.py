"""How long what owners sealed is, as it comes in: no merge is longer than the longest of the deltas it merges.

An owner may seal anything; audits find that in the end, but one chunk of 1e30 would end the model before they do.
All members know from the plan how long each delta is, as the mean takes it, and see what was sealed: each looks
whether

    sum over the chunks that one owner sealed of norm(c)**2 <= (SLACK longest)**2

By the triangle inequality a weighted mean keeps to it with a SLACK of 1, and so does the radial mean; others may
be longer by far only if somebody sees to it, and encoding adds some. Who is beyond is not guilty by that: its
largest chunk is audited before the commit (`atoll.coordinator.state_machine.audit`).
"""

import math

SLACK = 2.0  # times the longest delta
MAX_TIMES = 1e100  # that are told: more where all deltas are zeros


class SealLengths:
    """The squares of the norms of the chunks that others sealed in one round."""

    def __init__(self) -> None:
        self._squares: dict[int, dict[int, float]] = {}  # by owner's place, then by chunk
        self._sums: dict[int, float] = {}  # of them, by owner's place
        self._owner: dict[int, int] = {}  # by chunk
        self._named: dict[int, int] = {}  # by owner's place: the chunk that was named in this attempt

    def take(self, c: int, owner: int, square: float) -> None:
        """Take in that the member at place `owner` sealed chunk `c` of this squared norm, in the place of who did
        before."""
        self.forget(c)
        self._owner[c] = owner
        self._squares.setdefault(owner, {})[c] = square
        self._sums[owner] = self._sums.get(owner, 0.0) + square

    def forget(self, c: int) -> None:
        """Chunk `c` is not sealed any more, at any rate not as it was: if it was named, another may be."""
        if (owner := self._owner.pop(c, None)) is not None:
            del self._squares[owner][c]
            self._sums[owner] = math.fsum(self._squares[owner].values())  # of what is vast no rounding stays
            if self._named.get(owner) == c:
                del self._named[owner]

    def begin_attempt(self) -> None:
        """Name everything once more: what was told of it may have come to nothing, as with somebody that was put
        out all its inputs were void."""
        self._named.clear()

    def too_long(self, longest: float) -> list[tuple[int, float]]:
        """Of each owner whose chunks are too long together, once in an attempt: the largest of them, and how many
        times `longest` they are. `longest`: norm of the round's longest delta, inf where nobody knows."""
        found = []
        for owner, square in self._sums.items():
            length, mine = math.sqrt(square), self._squares[owner]
            if owner in self._named or length <= SLACK * longest:
                continue
            self._named[owner] = c = max(mine, key=mine.__getitem__)
            found.append((c, min(length / longest, MAX_TIMES) if longest else MAX_TIMES))
        return found
