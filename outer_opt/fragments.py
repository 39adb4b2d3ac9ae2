"""Fragments: parts of the flat vector that are exchanged each by itself, so that the network's load is even.

Streaming DiLoCo (arXiv 2501.18512): with fragment p due at inner step t where (t - offset_p) mod H
= 0, each is exchanged every H steps as the whole model would be, and the peak of the bytes is 1/P of it.
A fragment is a flat vector of its own: its tensors one after another, cut into chunks like any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.outer_opt.arrays import Array
from atoll.outer_opt.tensors import Tensor


@dataclass(frozen=True)
class Fragment:
    """A part of the model that is exchanged by itself."""

    tensors: tuple[Tensor, ...]  # by offset

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return sum(tensor.numel for tensor in self.tensors)

    @property
    def spans(self) -> tuple[slice, ...]:
        """The stretches of the model's flat vector that it consists of, ascending; neighbours are joined."""
        found: list[slice] = []
        for tensor in self.tensors:
            if found and found[-1].stop == tensor.offset:
                found[-1] = slice(found[-1].start, tensor.span.stop)
            else:
                found.append(tensor.span)
        return tuple(found)

    def gather(self, flat: Array, out: Array) -> None:
        """Copy the fragment out of the model's flat vector into `out`, (numel,)."""
        start = 0
        for span in self.spans:
            stop = start + span.stop - span.start
            out[start:stop] = flat[span]
            start = stop

    def scatter(self, part: Array, flat: Array) -> None:
        """Copy `part`, (numel,), to its places in the model's flat vector."""
        start = 0
        for span in self.spans:
            stop = start + span.stop - span.start
            flat[span] = part[start:stop]
            start = stop


def whole(tensors: Sequence[Tensor]) -> tuple[Fragment, ...]:
    """The model as one fragment (DiLoCo, arXiv 2311.08105)."""
    return (Fragment(tuple(tensors)),)


def strided(tensors: Sequence[Tensor], count: int) -> tuple[Fragment, ...]:
    """Fragments of which layer l belongs to fragment l mod `count` (Streaming DiLoCo, arXiv 2501.18512), so that
    each has early and late ones. What is no layer goes where there is least by then."""
    parts: list[list[Tensor]] = [[] for _ in range(count)]
    for tensor in tensors:
        if tensor.layer is not None:
            parts[tensor.layer % count].append(tensor)
    for tensor in sorted((t for t in tensors if t.layer is None), key=_largest_first):
        _least(parts).append(tensor)
    return _fragments(parts)


def balanced(tensors: Sequence[Tensor], count: int) -> tuple[Fragment, ...]:
    """Fragments of about the same bytes (Decoupled DiLoCo, arXiv 2604.21428): the largest tensor first, each to
    the fragment that has least; at most 4/3 of the best there is (Graham 1969)."""
    parts: list[list[Tensor]] = [[] for _ in range(count)]
    for tensor in sorted(tensors, key=_largest_first):
        _least(parts).append(tensor)
    return _fragments(parts)


def first_due_steps(count: int, inner_steps: int, staggered: bool = True) -> tuple[int, ...]:
    """The inner steps after which each fragment is due first, (count,): spread evenly over the H steps (Streaming
    DiLoCo, arXiv 2501.18512, the offsets t_p), or all at their end. From then on each is due every `inner_steps`.
    No offset is 0, as there is nothing to exchange before a step."""
    if not staggered:
        return (inner_steps,) * count
    return tuple(max(1, -(-inner_steps * (p + 1) // count)) for p in range(count))


def _largest_first(tensor: Tensor) -> tuple[int, str]:
    return -tensor.numel, tensor.name


def _least(parts: list[list[Tensor]]) -> list[Tensor]:
    return min(parts, key=lambda part: sum(tensor.numel for tensor in part))


def _fragments(parts: list[list[Tensor]]) -> tuple[Fragment, ...]:
    """Those that hold anything: a model may have fewer layers or tensors than fragments were asked for."""
    return tuple(Fragment(tuple(sorted(part, key=lambda t: t.offset))) for part in parts if part)
