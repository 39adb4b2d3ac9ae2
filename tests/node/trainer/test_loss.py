"""The loss and its gradient in pieces: the same as at once, and smaller."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from token_batches import batch_of, masked
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.comm.config.model import ModelConfig
from atoll.node.config import Checkpointing
from atoll.node.data.samples import UNLEARNED
from atoll.node.participant.batches import Batch, learned, pieces
from atoll.node.participant.flat_vector import layout_of
from atoll.node.trainer.checkpointing import ActivationCheckpointing
from atoll.node.trainer.chunked_loss import chunked_cross_entropy, is_large
from atoll.node.trainer.loss import accumulate, next_token_loss
from atoll.node.trainer.model import Decoder, blocks_of, build, init_parameters

SMALL = ModelConfig(vocab_size=256, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, seq_len=16)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every tensor that is made, forward and backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, tuple | list) else [out]
        self.elements = max(self.elements, *(t.numel() for t in found if isinstance(t, Tensor)), 0)
        return out


def head(rows: int = 1000, dim: int = 48, classes: int = 1536) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, dim, generator=generator)
    weight = torch.randn(classes, dim, generator=generator) / 4
    return hidden, weight, torch.randint(classes, (rows,), generator=generator)


def differentiated(loss: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    value = loss(hidden, weight, targets)
    (value * 0.375).backward()
    assert hidden.grad is not None and weight.grad is not None
    return value.detach(), hidden.grad, weight.grad


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("rows", [0, 1, 7, 250, 5000])
def test_the_loss_in_chunks_is_the_loss(rows: int) -> None:
    inputs = head()
    found = differentiated(partial(chunked_cross_entropy, rows=rows), *inputs)
    assert all(apart(one, other) < 1e-6 for one, other in zip(found, differentiated(plain, *inputs), strict=True))


@pytest.mark.parametrize("rows", [1, 7, 250])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.6])
def test_the_loss_in_chunks_leaves_out_what_is_not_learned(rows: int, share: float) -> None:
    hidden, weight, targets = head()
    targets[torch.rand(1000, generator=torch.Generator().manual_seed(1)) >= share] = UNLEARNED
    found = differentiated(partial(chunked_cross_entropy, rows=rows), hidden, weight, targets)
    if not share:
        assert all((part == 0).all() for part in found)
        return
    right = differentiated(plain, hidden, weight, targets)
    assert all(apart(one, other) < 1e-6 for one, other in zip(found, right, strict=True))


def test_the_loss_in_chunks_of_bf16_is_as_good_as_at_once() -> None:
    """Measured by fp32 logits of the same numbers."""
    hidden, weight, targets = head(2048)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    exact = differentiated(plain, hidden.float(), weight.float(), targets)
    found = differentiated(partial(chunked_cross_entropy, rows=64), hidden, weight, targets)
    assert (found[0].dtype, found[1].dtype, found[2].dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert apart(found[0], exact[0]) < 1e-4
    at_once = differentiated(plain, hidden, weight, targets)
    for one, other, right in zip(found[1:], at_once[1:], exact[1:], strict=True):
        assert apart(one, right) < 1.5 * apart(other, right) < 5e-3  # it is rounded twice, not more often


def test_the_loss_in_chunks_never_holds_all_logits() -> None:
    inputs = head()
    with LargestTensor() as at_once:
        differentiated(plain, *inputs)
    assert at_once.elements == 1000 * 1536
    with LargestTensor() as in_chunks:
        differentiated(partial(chunked_cross_entropy, rows=100), *inputs)
    assert in_chunks.elements == 100 * 1536


def test_without_gradients_the_loss_in_chunks_computes_none() -> None:
    hidden, weight, targets = head()
    with torch.no_grad(), CountedOperations() as made:
        loss = chunked_cross_entropy(hidden, weight.requires_grad_(), targets, rows=8)
    assert apart(loss, plain(hidden, weight, targets).detach()) < 1e-6
    assert made.products == 1000 / 8


@pytest.mark.parametrize("tied", [True, False])
def test_the_decoder_is_asked_for_its_loss_where_its_logits_are_large(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(vocab_size=500, dim=16, layers=1, heads=2, kv_heads=2, ffn_dim=32, tied_head=tied)
    generator = torch.Generator().manual_seed(0)
    batch = masked(torch.randint(500, (4, 17), generator=generator), torch.rand(4, 16, generator=generator) < 0.7)
    found = []
    for plain_bytes in (64 << 20, 10_000):
        monkeypatch.setattr("atoll.node.trainer.chunked_loss.PLAIN_BYTES", plain_bytes)
        monkeypatch.setattr("atoll.node.trainer.chunked_loss.MIN_ROWS", 3)
        model = build(config)
        init_parameters(model, 0)
        assert is_large(64, 500) == (plain_bytes == 10_000)
        with LargestTensor() as made:
            loss = next_token_loss(model, batch)
        assert (made.elements == 64 * 500) == (plain_bytes > 10_000)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(
            torch.cat([loss.detach()[None], *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])
        )
    assert len(found[0]) == config.n_params + 1 and apart(*found) < 1e-6


def gradient(model: nn.Module, micro_batch: int) -> Tensor:
    sequences = torch.randint(256, (8, 17), generator=torch.Generator().manual_seed(1))
    accumulate(model, batch_of(sequences), micro_batch)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def initialised() -> nn.Module:
    model = build(SMALL)
    init_parameters(model, 0)
    return model


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 8, 100])
def test_the_gradient_of_micro_batches_is_that_of_the_batch(micro_batch: int) -> None:
    assert apart(gradient(initialised(), micro_batch), gradient(initialised(), 0)) < 1e-6


def learned_unevenly() -> Batch:
    """A batch of which each sample has another number of learned tokens, and the third none."""
    generator = torch.Generator().manual_seed(2)
    learned = (
        torch.rand(8, 16, generator=generator) < torch.tensor([0.9, 0.1, 0.0, 1.0, 0.5, 0.2, 0.7, 0.3])[:, None]
    )
    return masked(torch.randint(256, (8, 17), generator=generator), learned)


@pytest.mark.parametrize("micro_batch", [0, 1, 3])
def test_a_batch_s_loss_is_the_mean_over_its_learned_tokens_whatever_their_number_in_a_micro_batch(
    micro_batch: int,
) -> None:
    batch, model, reference = learned_unevenly(), initialised(), initialised()
    logits, labels = reference(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
    right = F.cross_entropy(logits, labels, ignore_index=UNLEARNED)
    right.backward()  # type: ignore[no-untyped-call]
    loss = accumulate(model, batch, micro_batch)
    assert apart(loss, right.detach()) < 1e-6
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and apart(one.grad, other.grad) < 1e-5


def test_ranks_whose_shares_have_different_numbers_of_learned_tokens_have_the_batch_s_mean() -> None:
    batch, whole = learned_unevenly(), initialised()
    right = accumulate(whole, batch)
    models, losses = [initialised(), initialised()], []
    for model, share in zip(models, pieces(batch, 4), strict=True):
        losses.append(accumulate(model, share, 2, targets=float(learned(batch)) / 2))
    assert apart(sum(losses, torch.tensor(0.0)) / 2, right) < 1e-6
    for one, other, mean in zip(*(model.parameters() for model in (*models, whole)), strict=True):
        assert one.grad is not None and other.grad is not None and mean.grad is not None
        assert apart((one.grad + other.grad) / 2, mean.grad) < 1e-5


def test_a_batch_of_which_nothing_is_learned_has_no_loss_and_no_gradient() -> None:
    model = initialised()
    batch = masked(torch.zeros(4, 17, dtype=torch.int64), torch.zeros(4, 16, dtype=torch.bool))
    for targets in (None, 0.0):
        assert float(accumulate(model, batch, 3, targets=targets)) == 0
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


def test_checkpointing_computes_more_and_changes_nothing() -> None:
    """Of each block's 7 matrix products: selective computes 3 of 7 again and attention never, full all."""
    right = gradient(initialised(), 2)
    counts = {}
    for level in (Checkpointing.NONE, Checkpointing.SELECTIVE, Checkpointing.FULL):
        model = initialised()
        names = layout_of(model)
        checkpointing = ActivationCheckpointing(blocks_of(model))
        checkpointing.set(level)
        assert layout_of(model) == names and isinstance(model, Decoder)
        with CountedOperations() as operations:
            assert apart(gradient(model, 8), right) < 1e-6
        counts[level] = operations
        checkpointing.set(Checkpointing.NONE)
        model.zero_grad()
        with CountedOperations() as operations:
            gradient(model, 8)
        assert operations.products == counts[Checkpointing.NONE].products
    none, selective, full = counts.values()
    assert (none.attentions, selective.attentions, full.attentions) == (2, 2, 4)
    assert none.products < selective.products < full.products


class Noisy(nn.Module):
    """A volunteer's block: dropout, a keyword, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, factor: float) -> tuple[Tensor, Tensor]:
        return F.dropout(self.inside(x), 0.5) * factor, x


class Volunteered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
        self.blocks = nn.ModuleList(Noisy() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.table(tokens)
        for block in self.blocks:
            change, x = block(x, factor=0.5)
            x = x + change
        logits: Tensor = self.head(x)
        return logits


def test_checkpointing_repeats_what_is_random_in_a_volunteers_model() -> None:
    gradients = []
    for level in (Checkpointing.NONE, Checkpointing.SELECTIVE, Checkpointing.FULL):
        torch.manual_seed(0)
        model = Volunteered()
        ActivationCheckpointing(blocks_of(model)).set(level)
        torch.manual_seed(1)
        gradients.append(gradient(model, 4))
    assert gradients[0].norm() > 0 and all(apart(other, gradients[0]) < 1e-6 for other in gradients[1:])


def test_an_evaluation_checkpoints_nothing() -> None:
    model = initialised()
    ActivationCheckpointing(blocks_of(model)).set(Checkpointing.FULL)
    with torch.no_grad(), CountedOperations() as operations:
        next_token_loss(model, batch_of(torch.zeros(1, 17, dtype=torch.int64)))
    assert operations.attentions == 2


class CountedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts matrix products, and attentions in forward passes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = self.attentions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += str(func).startswith("aten.mm.")
        self.attentions += "scaled_dot_product" in str(func) and "backward" not in str(func)
        return func(*args, **(kwargs or {}))
