"""A mixture of data sets by weight: which of them a sample index is of, in integers, the same on every machine.

The indices are divided in two again and again: the first data set has the share p/q of them, and the rest is
divided among the others in the same way. Index i is of the first where floor((i + 1) p / q) is one more than
floor(i p / q), which then is the number of those before it: its index within the data set. So whatever range of
indices is looked at, a data set's part of it is its weight's to within one sample for each division before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple


class Draw(NamedTuple):
    """A sample of a mixture."""

    part: int  # the number of the data set
    sample: int  # its index within it


@dataclass(frozen=True)
class Mixture:
    """Shares of the data sets: of data set k `shares[k]` of what those before it leave. The last has all the
    rest."""

    shares: tuple[Fraction, ...]

    @classmethod
    def by_weight(cls, weights: Sequence[float]) -> "Mixture":
        """The mixture of data sets with these weights, above 0 each, taken as the decimal numbers that are
        written: 0.1 is a tenth."""
        exact = [Fraction(repr(weight)) for weight in weights]
        left = list(accumulate(reversed(exact)))[::-1]
        return cls(tuple(weight / rest for weight, rest in zip(exact, left, strict=True)))

    def draw(self, index: int) -> Draw:
        """The data set of sample `index`, and the sample's index within it."""
        for part, share in enumerate(self.shares[:-1]):
            before = index * share.numerator // share.denominator
            if (index + 1) * share.numerator // share.denominator > before:
                return Draw(part, before)
            index -= before
        return Draw(len(self.shares) - 1, index)
