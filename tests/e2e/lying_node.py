"""A node whose daemon lies, as a member of `atoll simulate --liars` does.

`main` is the command `atoll`, in whose process deltas are exchanged before they are encoded, or means when they
are sealed; `install` prepares any process so. The norm that the node tells is that of what it sends, it audits
others honestly, and its trainer is anybody's.
"""

from collections.abc import Callable, Sequence
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


VAST = "vast"  # what it seals first in a round is 1e30 times as long as it is
Forge = Callable[[F32], F32]


class ForgedSeals:
    """A seal format that forges the first `left` chunks, and is another one's in everything else."""

    def __init__(self, honest: EncodedSeal, forge: Forge, left: int) -> None:
        self._honest, self._forge, self._left = honest, forge, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)

    def seal(self, c: int, terms: Sequence[Term], length: float, numel: int, out: U8) -> None:
        self._honest.seal(c, terms, length, numel, out)
        if self._left > 0:
            self._left -= 1
            mean = np.empty(numel, np.float32)
            self._honest.decode(c, out, mean)
            self._honest.codec.encode(self._forge(mean), out)


def install(word: str, lies_now: Callable[[], bool] = lambda: True) -> None:
    """Have the daemon of this process tell the lie that `word` names, such as flip:10, or `VAST`, in the rounds in
    which it `lies_now`."""
    lie = parsed("seal:0.01" if word == VAST else word)
    liar = Liar(lie, SEED)

    def longer(mean: F32) -> F32:
        return mean * np.float32(1e30)

    def encoder(anchor: F32, local: F32, codec: Codec, *rest: Any) -> DeltaEncoder:
        if not lies_now():
            return DeltaEncoder(anchor, local, codec, *rest)
        lied = liar.delta(0, np.asarray(anchor) - np.asarray(local), ())
        return DeltaEncoder(lied, np.zeros_like(lied), codec, *rest)

    def reduction(peers: Any, me: Any, encoded: Any, codec: Codec, chunks: Chunks, *rest: Any) -> Reduction:
        plan, listener, sealing, *others = rest
        forge, count = (longer, 1) if word == VAST else (liar.seal, round(lie.size * chunks.count))
        forged: Any = ForgedSeals(sealing, forge, count) if lies_now() else sealing
        return Reduction(peers, me, encoded, codec, chunks, plan, listener, forged, *others)

    exchanged: Any = participation
    if lie.kind is LieKind.SEAL:
        exchanged.Reduction = reduction
    else:
        exchanged.DeltaEncoder = encoder


def main(word: str) -> None:
    """`atoll`, in a process that tells this lie in every round."""
    install(word)
    atoll()
