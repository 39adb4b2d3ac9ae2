"""The order in which the parameters lie in the flat vector: by name, and where fragments take turns, fragment
after fragment, so that each is one interval of it. Trainer and daemon follow it alike. No torch."""

from collections.abc import Sequence

from atoll.comm.chunks import Chunks
from atoll.comm.config.run import RunConfig
from atoll.node.outer.method import exchanged_fragments
from atoll.outer_opt.fragments import Fragment, whole
from atoll.outer_opt.tensors import Tensor, with_offsets

Shapes = Sequence[tuple[str, tuple[int, ...]]]  # (name, shape) of each parameter


def flat_order(config: RunConfig, shapes: Shapes) -> list[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the parameters, given in any order, in the order of the flat vector."""
    return [(t.name, t.shape) for fragment in _fragments(config, shapes) for t in fragment.tensors]


def fragments_and_chunks(config: RunConfig, shapes: Shapes) -> tuple[tuple[Fragment, ...], Chunks]:
    """The fragments of a flat vector whose parameters lie in the order of `flat_order`, each one interval of it;
    and its chunks. Raises `ValueError` for another order."""
    rest, found = list(with_offsets(shapes)), list[Fragment]()
    fragments = _fragments(config, shapes)
    if len(fragments) == 1:
        (model,) = whole(rest)
        return (model,), Chunks(model.numel, config.reduce.chunk)
    for fragment in fragments:
        tensors: list[Tensor] = [rest.pop(0) for _ in fragment.tensors]
        if [t.name for t in tensors] != [t.name for t in fragment.tensors]:
            raise ValueError("the parameters do not lie fragment after fragment")
        found.append(Fragment(tuple(tensors)))
    sizes = tuple(fragment.numel for fragment in found)
    return tuple(found), Chunks(sum(sizes), config.reduce.chunk, sizes)


def _fragments(config: RunConfig, shapes: Shapes) -> tuple[Fragment, ...]:
    return exchanged_fragments(config, with_offsets(sorted(shapes)))
