"""Fragments of a flat vector, and when they are due."""

import numpy as np
import pytest
import torch

from atoll.outer_opt.fragments import Fragment, balanced, first_due_steps, strided, whole
from atoll.outer_opt.tensors import Tensor, TensorKind, with_offsets


def model(layers: int = 12, dim: int = 8) -> tuple[Tensor, ...]:
    layout: dict[str, tuple[int, ...]] = {"embedding.weight": (64, dim), "norm.weight": (dim,)}
    for i in range(layers):
        layout[f"blocks.{i}.attention.query.weight"] = (dim, dim)
        layout[f"blocks.{i}.ffn.up.weight"] = (3 * dim, dim)
        layout[f"blocks.{i}.norm.weight"] = (dim,)
    return with_offsets(sorted(layout.items()))


SCHEMES = {"whole": whole(model()), "strided": strided(model(), 4), "balanced": balanced(model(), 5)}


@pytest.mark.parametrize("fragments", SCHEMES.values(), ids=SCHEMES)
def test_every_element_is_in_one_fragment(fragments: tuple[Fragment, ...]) -> None:
    numel = sum(tensor.numel for tensor in model())
    flat, back = np.arange(numel, dtype=np.float32), np.full(numel, -1, np.float32)
    for fragment in fragments:
        part = np.empty(fragment.numel, np.float32)
        fragment.gather(flat, part)
        fragment.scatter(part, back)
    assert sum(fragment.numel for fragment in fragments) == numel
    assert back.tobytes() == flat.tobytes()


def test_gather_and_scatter_do_the_same_with_torch() -> None:
    fragment = strided(model(), 4)[1]
    flat = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    part, torch_part = np.empty(fragment.numel, np.float32), torch.empty(fragment.numel)
    fragment.gather(flat, part)
    fragment.gather(torch.from_numpy(flat), torch_part)
    assert part.tobytes() == torch_part.numpy().tobytes()


def test_the_whole_model_is_one_span() -> None:
    (fragment,) = whole(model())
    assert fragment.spans == (slice(0, fragment.numel),)


def test_strided_layers_are_far_apart() -> None:
    for p, fragment in enumerate(strided(model(), 4)):
        assert {t.layer for t in fragment.tensors if t.layer is not None} == {p, p + 4, p + 8}


def test_what_is_no_layer_goes_the_largest_first_where_there_is_least() -> None:
    layout = [("a", (1,)), ("blocks.0.w", (10,)), ("blocks.1.w", (11,)), ("c", (4,)), ("b", (4,)), ("d", (6,))]
    names = [{t.name for t in fragment.tensors} for fragment in strided(with_offsets(layout), 2)]
    # 10 and 11; then d: 16 and 11; b, before c by its name: 16 and 15; c: 16 and 19; a: 17 and 19
    assert names == [{"blocks.0.w", "d", "a"}, {"blocks.1.w", "b", "c"}]
    sizes = [(f"blocks.{i}.w", (10,)) for i in range(3)] + [("y", (5,)), ("x", (5,)), ("z", (7,))]
    found = [[t.name for t in f.tensors if t.layer is None] for f in strided(with_offsets(sizes), 3)]
    assert found == [["z"], ["x"], ["y"]], "of the same size by their names"


def test_balanced_fragments_are_within_four_thirds_of_even() -> None:
    sizes = [fragment.numel for fragment in balanced(model(layers=40), 6)]
    assert max(sizes) <= 4 / 3 * sum(sizes) / 6
    assert balanced(model(), 5) == balanced(model(), 5)


def test_more_fragments_than_there_is_to_divide() -> None:
    assert len(balanced(with_offsets([("a", (3,)), ("b", (4,))]), 7)) == 2
    assert len(strided(model(layers=2), 9)) == 4  # two layers, the embedding, the last norm


def test_fragments_take_turns_within_a_round() -> None:
    assert first_due_steps(4, 100) == (25, 50, 75, 100)
    assert first_due_steps(3, 10) == (4, 7, 10)
    assert first_due_steps(1, 30) == (30,)
    assert first_due_steps(4, 100, staggered=False) == (100,) * 4
    assert min(first_due_steps(24, 8)) == 1


def test_tensors_have_kinds_and_layers() -> None:
    found = {t.name: (t.kind, t.layer) for t in model(layers=11)}
    assert found["embedding.weight"] == (TensorKind.EMBEDDING, None)
    assert found["norm.weight"] == (TensorKind.VECTOR, None)
    assert found["blocks.10.ffn.up.weight"] == (TensorKind.MATRIX, 10)
    assert found["blocks.3.norm.weight"] == (TensorKind.VECTOR, 3)
    kinds = {
        n: t.kind
        for n in ("lm_head.weight", "wte", "attention.head_proj.weight")
        for t in with_offsets([(n, (4, 4))])
    }
    assert list(kinds.values()) == [TensorKind.EMBEDDING, TensorKind.EMBEDDING, TensorKind.EMBEDDING]
