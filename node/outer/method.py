"""Maps a run's config to the pieces of `outer_opt` that carry it out; the only place that knows both. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from atoll.comm.allreduce.sealing import (
    ChunkMerge,
    EncodedSeal,
    GatheredSeal,
    SealFormat,
    Term,
    TimedSeal,
    UnusableContribution,
    WeightedMean,
)
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.codec import Codec, Malformed
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.outer import (
    FragmentsConfig,
    LeftOutName,
    MergeName,
    OuterConfig,
    OverlapConfig,
    PatternName,
    TakeName,
)
from atoll.comm.config.plugin import PluginGroup
from atoll.comm.config.run import CodecName, RunConfig
from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.node.outer.plugin import plugin_schedule
from atoll.node.outer.staleness import StalenessTracker
from atoll.outer_opt.arrays import Array
from atoll.outer_opt.feedback import ErrorFeedback
from atoll.outer_opt.fragments import Fragment, balanced, strided, whole
from atoll.outer_opt.merge import mean, radial
from atoll.outer_opt.nesterov import Nesterov
from atoll.outer_opt.overlap import LEFT_OUT_MIX, Adopt, Mix, rebase, replace
from atoll.outer_opt.robust_merge import TrimmedMean, centered
from atoll.outer_opt.schedule import Constant, DataParallelStart, Ramp, Schedule
from atoll.outer_opt.sgd import Sgd
from atoll.outer_opt.tensors import Tensor, TensorKind

Pieces = list[tuple[TensorKind, slice]]  # what a chunk has of each tensor: its kind, elements of the chunk


def merge_pieces(
    outer: OuterConfig,
    pieces: Pieces,
    deltas: Sequence[Array],
    shares: Sequence[float],
    out: Array,
    scratch: Array,
) -> None:
    """Merge `deltas`, (n,) fp32 each, with the members' `shares` into `out` (n,). `scratch`: (n,).

    Radial merges are made piece by piece, and of matrices only; embeddings, whose rows are hit by few tokens, and
    vectors get a plain mean. Centered ones take the n elements as one vector: real nodes and simulated ones give
    a chunk.
    """
    match outer.merge:
        case MergeName.MEAN:
            mean(deltas, shares, out, scratch)
        case MergeName.RADIAL:
            for kind, span in pieces:
                merge = radial if kind is TensorKind.MATRIX else mean
                merge([delta[span] for delta in deltas], shares, out[span], scratch[span])
        case MergeName.CENTERED:
            centered(deltas, shares, out, scratch)
        case MergeName.TRIMMED:
            TrimmedMean(outer.trim)(deltas, shares, out, scratch)
        case _:
            assert_never(outer.merge)


def outer_schedule(config: RunConfig) -> Schedule:
    """The outer rule of each round; of those at the start that have one inner step: the mean of the parameters.
    Raises `AtollError` where `outer.plugin` is not installed here, or is no such rule."""
    outer, together = config.outer, config.rounds.data_parallel
    schedule: Schedule = Constant(Sgd(outer.lr))
    if (plugin := config.plugin(PluginGroup.OUTER)) is not None:
        schedule = plugin_schedule(plugin, outer)
    elif outer.momentum or outer.decay_end:
        nesterov = Nesterov(outer.lr, outer.momentum)
        schedule = Ramp(nesterov, outer.momentum_warmup, outer.decay_begin, outer.decay_end, outer.final_momentum)
    return DataParallelStart(Sgd(1.0), together, schedule) if together else schedule


def exchanged_fragments(config: RunConfig, tensors: Sequence[Tensor]) -> tuple[Fragment, ...]:
    """The fragments that nodes exchange in turns. Where all are due at once, that is the whole model as one."""
    return divide(config.fragments, tensors) if config.fragments.stagger else whole(tensors)


def seal_format(config: RunConfig, *fragments: Fragment) -> SealFormat:
    """The format of the sealed bytes for chunks of these fragments, that follow one another: how contributions are
    merged and encoded. No fragment: the format for an owner that does not know the model, which is enough where
    deltas are not merged by tensors."""
    codec = make_codec(config.reduce.codec, config.reduce.block, config.reduce.scales)
    merge: ChunkMerge = WeightedMean(codec)
    if config.outer.merge is not MergeName.MEAN:
        assert fragments or config.outer.merge is not MergeName.RADIAL, "radial merges are by tensors"
        pieces = [p for f in fragments for p in chunk_pieces(f, Chunks(f.numel, config.reduce.chunk))]
        merge = DecodedMerge(codec, config.outer, pieces)
    gathers = config.reduce.codec is CodecName.SPARSE
    sealing: SealFormat = GatheredSeal(codec, merge) if gathers else EncodedSeal(codec, merge)
    return TimedSeal(sealing) if config.outer.per_token else sealing


@dataclass(frozen=True)
class DecodedMerge:
    """Contributions to a chunk, all decoded and then merged as the run's config says
    (`atoll.comm.allreduce.sealing.ChunkMerge`)."""

    codec: Codec
    outer: OuterConfig
    pieces: Sequence[Pieces]  # of each chunk; radial merges alone need them

    @property
    def elementwise(self) -> bool:
        return self.outer.merge is MergeName.TRIMMED

    def __call__(self, c: int, terms: Sequence[Term], out: NDArray[np.float32]) -> None:
        deltas = np.empty((len(terms), out.size), np.float32)
        for (place, payload, _), delta in zip(terms, deltas, strict=True):
            try:
                self.codec.decode(payload, delta)
            except Malformed as error:
                raise UnusableContribution(place, str(error)) from None
        shares = [share for _, _, share in terms]
        pieces = self.pieces[c] if self.outer.merge is MergeName.RADIAL else []
        merge_pieces(self.outer, pieces, list(deltas), shares, out, np.empty_like(out))


def chunk_pieces(fragment: Fragment, chunks: Chunks) -> list[Pieces]:
    """The pieces of tensors in each chunk of the fragment: the kind of the tensor, and the slice of the chunk's
    elements that are its."""
    found: list[Pieces] = [[] for _ in range(chunks.count)]
    start = 0
    for tensor in fragment.tensors:
        stop = start + tensor.numel
        for c in range(start // chunks.chunk, -(-stop // chunks.chunk)):
            span = chunks.span(c)
            first, last = max(start, span.start), min(stop, span.stop)
            found[c].append((tensor.kind, slice(first - span.start, last - span.start)))
        start = stop
    return found


def error_feedback(outer: OuterConfig) -> ErrorFeedback | None:
    """The run's error feedback; None: what the wire leaves out is lost."""
    return ErrorFeedback(outer.feedback) if outer.feedback else None


def staleness_tracker(outer: OuterConfig, fragments: int) -> StalenessTracker | None:
    """Make the tracker of how stale left-out work is, where `outer.damping` is on; None: it is off."""
    return StalenessTracker(FragmentSchedule(fragments)) if outer.damping else None


def divide(config: FragmentsConfig, tensors: Sequence[Tensor]) -> tuple[Fragment, ...]:
    """The model's tensors divided into the config's fragments."""
    if config.count == 1:
        return whole(tensors)
    pattern = balanced if config.pattern is PatternName.BALANCED else strided
    return pattern(tensors, config.count)


def anchor_adoption(overlap: OverlapConfig) -> Adopt:
    """The way a node whose contribution a round counted takes the new anchor: mix, rebase or replace."""
    if overlap.take is TakeName.MIX:
        return Mix(overlap.alpha)
    return rebase if overlap.delay else replace


def left_out_adoption(outer: OuterConfig) -> Adopt:
    """The way a node that a round left out takes the round's anchor: mix or rebase."""
    return LEFT_OUT_MIX if outer.left_out is LeftOutName.MIX else rebase
