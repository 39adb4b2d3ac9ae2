"""The order of the flat vector, which makes each fragment one stretch of it."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from atoll.comm.config.outer import FragmentsConfig, PatternName
from atoll.comm.config.run import ReduceConfig, RunConfig
from atoll.comm.errors import ConfigError
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


@st.composite
def models(draw: st.DrawFn) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of some tensors, of layers and of none."""
    names = st.one_of(
        st.from_regex(r"blocks\.[0-9]\.[a-c]", fullmatch=True), st.text("abcz.", min_size=1, max_size=6)
    )
    shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
    return sorted(draw(st.dictionaries(names, shapes, min_size=1, max_size=12)).items())


@given(models(), st.integers(1, 5), st.sampled_from(PatternName), st.booleans())
def test_of_any_model_each_parameter_lies_in_one_fragment_and_one_place(
    shapes: list[tuple[str, tuple[int, ...]]], count: int, pattern: PatternName, stagger: bool
) -> None:
    assume(count <= len(shapes))
    config = run(count=count, pattern=pattern, stagger=stagger)
    try:
        order = flat_order(config, shapes)
    except ConfigError as error:
        assert "fragment" in str(error)  # one of them would be empty
        return
    assert sorted(order) == shapes
    fragments, chunks = fragments_and_chunks(config, order)
    assert [t.name for f in fragments for t in f.tensors] == [name for name, _ in order]
    assert sum((f.spans for f in fragments), ()) == tuple(
        chunks.fragment_slice(p) for p in range(chunks.fragment_count)
    )
    spans = [chunks.span(c) for c in range(chunks.count)]
    assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])] and spans[-1].stop == chunks.numel
    assert chunks.numel == sum(math.prod(shape) for _, shape in shapes)
