"""A node whose daemon lies, as a member of `atoll simulate --liars` does.

`main` is the command `atoll`, in whose process deltas are exchanged before they are encoded, or means when they
are sealed. The norm that the node tells is that of what it sends, it audits others honestly, and its trainer is
anybody's.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from atoll.comm.allreduce.delta_encoder import DeltaEncoder
from atoll.comm.allreduce.reduction import Reduction
from atoll.comm.allreduce.sealing import EncodedSeal, Term
from atoll.comm.byte_view import U8
from atoll.comm.chunks import Chunks
from atoll.comm.cli import main as atoll
from atoll.comm.codecs.codec import F32, Codec
from atoll.node.daemon import round as participation
from atoll.node.simulate.liars import Liar, LieKind, parsed

SEED = (23,)


class ForgedSeals:
    """A seal format that seals noise in the first `left` chunks, and is another one's in everything else."""

    def __init__(self, honest: EncodedSeal, liar: Liar, left: int) -> None:
        self._honest, self._liar, self._left = honest, liar, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)

    def seal(self, c: int, terms: Sequence[Term], length: float, numel: int, out: U8) -> None:
        self._honest.seal(c, terms, length, numel, out)
        if self._left > 0:
            self._left -= 1
            mean = np.empty(numel, np.float32)
            self._honest.decode(c, out, mean)
            self._honest.codec.encode(self._liar.seal(mean), out)


def main(word: str) -> None:
    """`atoll`, in a process that tells the lie which `word` names, such as flip:10."""
    lie = parsed(word)
    liar = Liar(lie, SEED)

    def encoder(anchor: F32, local: F32, codec: Codec, *rest: Any) -> DeltaEncoder:
        lied = liar.delta(0, np.asarray(anchor) - np.asarray(local), ())
        return DeltaEncoder(lied, np.zeros_like(lied), codec, *rest)

    def reduction(peers: Any, me: Any, encoded: Any, codec: Codec, chunks: Chunks, *rest: Any) -> Reduction:
        plan, listener, sealing, *others = rest
        forged: Any = ForgedSeals(sealing, liar, round(lie.size * chunks.count))
        return Reduction(peers, me, encoded, codec, chunks, plan, listener, forged, *others)

    exchanged: Any = participation
    if lie.kind is LieKind.SEAL:
        exchanged.Reduction = reduction
    else:
        exchanged.DeltaEncoder = encoder
    atoll()
