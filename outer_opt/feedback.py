"""Error feedback: what a lossy wire left out of a delta is added to the next one.

Seide et al. 2014 and Karimireddy et al. 2019 (arXiv 1901.09847, algorithm 2) with a decay, which makes it a
momentum of what is not sent yet (SparseLoCo, arXiv 2508.15706, algorithm 1):

    x <- beta e + delta          what is encoded
    e <- x - decoded(x)          on commit of a round that used it

The second line waits for the commit: a round that is aborted, or that left this node out, used nothing of x.
The node then keeps its progress, so the next delta holds this one, and e stays what it was. No learning rate is
in e: the rule multiplies by it once, after the mean.
"""

from dataclasses import dataclass

from atoll.outer_opt.arrays import Array, scaled


@dataclass(frozen=True)
class ErrorFeedback:
    """Error feedback with decay beta (Karimireddy et al. 2019, algorithm 2; SparseLoCo, algorithm 1). The residual
    e (n,) is the caller's, zeros before the first round."""

    decay: float  # beta; 1 loses nothing ever, 0 is no feedback

    def offer(self, residual: Array, delta: Array, out: Array) -> None:
        """Write beta e + delta, which is to be encoded, into `out` (n,). Nothing else changes: it can be done
        again."""
        scaled(residual, self.decay, out)
        out += delta

    def commit(self, residual: Array, offered: Array, sent: Array) -> None:
        """Move e to `offered - sent` once the round that used it is committed; `sent` (n,) is what the bytes
        decode to."""
        residual[...] = offered
        residual -= sent
