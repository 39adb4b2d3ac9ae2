"""The layout of a run's flat vector as its config has it, before any member has told one. Pure, and without torch.

The node's side is `atoll.node.outer.layout`; both follow the same order, which a test compares. The service
refuses members that report another layout than the config's; where the config does not say it (a script, a
plugin, another engine), members agree on it (`beginning`), within `max_parameters`.
"""

import hashlib
from typing import NamedTuple

import msgspec

from atoll.comm.config.engine import Engine
from atoll.comm.config.outer import FragmentsConfig, PatternName
from atoll.comm.config.parameters import decoder_shapes
from atoll.comm.config.run import RunConfig
from atoll.outer_opt.fragments import Fragment, balanced, strided, whole
from atoll.outer_opt.tensors import Tensor, with_offsets

MAX_UNKNOWN_PARAMETERS = 1 << 37  # of a model that the config does not say: 1.6 TB on each node
MAX_LAYERS = 4096  # of a decoder whose layout is worth computing: no machine trains a deeper one


class RunLayout(NamedTuple):
    """What a member reports of its flat vector."""

    numel: int
    digest: bytes  # over names and shapes, in order
    fragments: tuple[int, ...]  # elements of each, if they take turns


def config_layout(config: RunConfig) -> RunLayout | None:
    """The layout that the config says; None: only the nodes' own code knows it."""
    if not config.decoder or config.own_models or config.model.layers > MAX_LAYERS:
        return None
    shapes = sorted(decoder_shapes(config.model).items())
    tensors = with_offsets(shapes)
    fragments = _divided(config.fragments, tensors) if config.fragments.stagger else whole(tensors)
    order = [(tensor.name, tensor.shape) for fragment in fragments for tensor in fragment.tensors]
    sizes = tuple(fragment.numel for fragment in fragments) if len(fragments) > 1 else ()
    return RunLayout(sum(tensor.numel for tensor in tensors), layout_digest(order), sizes)


class LayoutRule:
    """What the config lets members report of their model."""

    def __init__(self, config: RunConfig) -> None:
        self._layout, self._limit = config_layout(config), max_parameters(config)

    def refusal(self, told: RunLayout) -> str:
        """The sentence that refuses a member with this layout; empty: the config does not speak against it."""
        known = self._layout
        if known is not None and told != known:
            return (
                f"your model has {told.numel:,} parameters in layout {told.digest.hex()[:8]}, the run's config "
                f"says {known.numel:,} in layout {known.digest.hex()[:8]}: nodes may train models of their own "
                "only where the run's operator has set security.own_models=true"
            )
        if told.numel > self._limit:
            return f"your model has {told.numel:,} parameters, and this run takes {self._limit:,} at most"
        return ""


def layout_digest(order: list[tuple[str, tuple[int, ...]]]) -> bytes:
    """The digest of a flat vector's names and shapes, as nodes report it."""
    return hashlib.blake2b(msgspec.json.encode(order), digest_size=16).digest()


def max_parameters(config: RunConfig) -> int:
    """The largest number of parameters that a member of the run may report."""
    if config.engine is Engine.BUILTIN and not config.model.plugin and not config.own_models:
        return config.model.n_params
    return MAX_UNKNOWN_PARAMETERS


def _divided(config: FragmentsConfig, tensors: tuple[Tensor, ...]) -> tuple[Fragment, ...]:
    if config.count == 1:
        return whole(tensors)
    return (balanced if config.pattern is PatternName.BALANCED else strided)(tensors, config.count)
