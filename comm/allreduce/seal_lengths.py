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
        self._owner: dict[int, int] = {}  # by chunk
        self._found: set[int] = set()  # places of owners

    def take(self, c: int, owner: int, square: float, longest: float) -> tuple[int, float] | None:
        """Take in that the member at place `owner` sealed chunk `c` of this squared norm, in the place of who did
        before; `longest`: norm of the round's longest delta, inf where nobody knows. Returns what is too long,
        once for an owner in each attempt, if its chunks now are: the largest of them, and how many times `longest`
        they are together."""
        self.forget(c)
        self._owner[c] = owner
        self._squares.setdefault(owner, {})[c] = square
        return None if owner in self._found else self._too_long(owner, longest)

    def forget(self, c: int) -> None:
        """Chunk `c` is not sealed any more."""
        if (owner := self._owner.pop(c, None)) is not None:
            del self._squares[owner][c]

    def begin_attempt(self, longest: float) -> list[tuple[int, float]]:
        """Everything that is too long, once more: what was told of it may have come to nothing, as with somebody
        that was put out all its inputs were void."""
        self._found.clear()
        found = (self._too_long(owner, longest) for owner in self._squares)
        return [each for each in found if each is not None]

    def _too_long(self, owner: int, longest: float) -> tuple[int, float] | None:
        mine = self._squares[owner]
        length = math.sqrt(math.fsum(mine.values()))
        if length <= SLACK * longest:
            return None
        self._found.add(owner)
        return max(mine, key=mine.__getitem__), length / max(longest, length / MAX_TIMES)
