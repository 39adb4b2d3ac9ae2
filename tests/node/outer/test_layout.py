"""The order of the flat vector, which makes each fragment one stretch of it."""

import pytest

from atoll.comm.config.outer import FragmentsConfig, PatternName
from atoll.comm.config.run import ReduceConfig, RunConfig
from atoll.node.outer.layout import flat_order, fragments_and_chunks
from atoll.node.simulate.method import build_method
from atoll.outer_opt.tensors import with_offsets

SHAPES = [(f"blocks.{n}.{name}", shape) for n in range(4) for name, shape in (("a", (3, 5)), ("b", (7,)))]
SHAPES += [("embed.weight", (20, 5)), ("norm.weight", (5,))]


def run(**settings: object) -> RunConfig:
    return RunConfig(fragments=FragmentsConfig(**settings), reduce=ReduceConfig(chunk=16, block=2))  # type: ignore[arg-type]


@pytest.mark.parametrize("pattern", PatternName)
def test_each_fragment_is_one_stretch_of_the_tensors_that_a_simulation_exchanges(pattern: PatternName) -> None:
    config = run(count=3, pattern=pattern)
    order = flat_order(config, SHAPES)
    assert order != sorted(SHAPES) == sorted(order)
    assert order == flat_order(config, order[::-1]), "whatever order the parameters were told in"
    fragments, chunks = fragments_and_chunks(config, order)
    simulated = build_method(config, with_offsets(sorted(SHAPES))).fragments
    assert [[t.name for t in f.tensors] for f in fragments] == [[t.name for t in f.tensors] for f in simulated]
    assert [f.spans for f in fragments] == [(chunks.fragment_slice(p),) for p in range(chunks.fragment_count)]
    assert chunks.fragments == tuple(f.numel for f in simulated)


@pytest.mark.parametrize("settings", [{"count": 1}, {"count": 3, "stagger": False}])
def test_what_does_not_take_turns_is_one_vector_in_the_order_of_names(settings: dict[str, object]) -> None:
    config = run(**settings)
    assert flat_order(config, SHAPES) == sorted(SHAPES)
    (model,), chunks = fragments_and_chunks(config, SHAPES)
    assert [t.name for t in model.tensors] == [name for name, _ in SHAPES]
    assert (chunks.fragment_count, chunks.fragments, chunks.numel) == (1, (), model.numel)


def test_a_vector_in_another_order_is_refused() -> None:
    with pytest.raises(ValueError, match="fragment after fragment"):
        fragments_and_chunks(run(count=3), sorted(SHAPES))
