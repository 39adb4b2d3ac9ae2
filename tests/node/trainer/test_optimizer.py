"""The inner optimizers against plain references. (`test_trainer` has them with one and with two ranks.)"""

import copy
import math

import pytest
import torch

from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import InnerConfig, OptimizerName
from atoll.node.trainer.model import build, init_parameters
from atoll.node.trainer.optimizer import Muon, make_optimizer, orthogonalisation_dtype, orthogonalised

CONFIG = InnerConfig(optimizer=OptimizerName.MUON, lr=1e-2)
MODEL = ModelConfig(dim=32, layers=2, heads=2, kv_heads=1, ffn_dim=48, seq_len=32, tied_head=False)


@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (7, 7), (1, 9)])
def test_orthogonalised_matrices_keep_their_directions_and_lose_their_lengths(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    inside = u.T @ orthogonalised(matrix).double() @ v.T  # of U V' it would be the identity
    values = torch.diagonal(inside)
    assert 0.6 < values.min() <= values.max() < 1.25
    assert (inside - torch.diag(values)).abs().max() < 1e-4


def test_muon_is_the_equation_in_its_docstring() -> None:
    generator = torch.Generator().manual_seed(1)
    module = torch.nn.Linear(20, 30, bias=False)
    muon = Muon(module, CONFIG)
    theta, buffer = module.weight.detach().double().clone(), torch.zeros(30, 20, dtype=torch.float64)
    for rate in (1e-2, 2e-2, 5e-3):
        gradient = torch.randn(30, 20, generator=generator)
        module.weight.grad = gradient.clone()
        muon.param_groups[0]["lr"] = rate
        muon.step()
        buffer = 0.95 * buffer + 0.05 * gradient
        update = (0.05 * gradient + 0.95 * buffer).float()
        whole = orthogonalised(update, orthogonalisation_dtype(update)).double()
        theta = (1 - rate * CONFIG.weight_decay) * theta - rate * 0.2 * math.sqrt(30) * whole
        assert (module.weight - theta).abs().max() < 1e-6


def test_muon_agrees_with_torch_as_far_as_its_bf16_does() -> None:
    generator = torch.Generator().manual_seed(2)
    ours, theirs = (torch.nn.Linear(64, 48, bias=False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    before = ours.weight.detach().clone()
    a = Muon(ours, CONFIG)
    b = torch.optim.Muon(theirs.parameters(), lr=CONFIG.peak_lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        gradient = torch.randn(48, 64, generator=generator)
        for module, optimizer in ((ours, a), (theirs, b)):
            module.weight.grad = gradient.clone()
            optimizer.step()
    moved, apart = (ours.weight - before).norm(), (ours.weight - theirs.weight).norm()
    assert apart < 0.02 * moved


def test_what_is_no_hidden_matrix_goes_through_adamw() -> None:
    one, other = build(MODEL), build(MODEL)
    init_parameters(one, 0)
    init_parameters(other, 0)
    muon, adamw = (
        make_optimizer(one, CONFIG),
        make_optimizer(other, InnerConfig(optimizer=OptimizerName.ADAMW, lr=1e-2)),
    )
    generator = torch.Generator().manual_seed(3)
    for (_, p), (_, q) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        p.grad = torch.randn(p.shape, generator=generator)
        q.grad = p.grad.clone()
    muon.step()
    adamw.step()
    same = {n for (n, p), q in zip(one.named_parameters(), other.parameters(), strict=True) if torch.equal(p, q)}
    matrices = {n for n, p in one.named_parameters() if n.startswith("blocks") and p.ndim == 2}
    assert len(matrices) == 2 * 7
    assert same == {n for n, _ in one.named_parameters()} - matrices


def test_plain_sgd_is_plain() -> None:
    module = torch.nn.Linear(3, 2)
    sgd = make_optimizer(module, InnerConfig(optimizer=OptimizerName.SGD, lr=0.5, weight_decay=0.0))
    before = module.weight.detach().clone()
    for _ in range(2):
        module.weight.grad = torch.ones(2, 3)
        sgd.step()
    assert torch.equal(module.weight, before - 0.5 - 0.5)


def test_a_loaded_state_goes_on_as_the_saved_one() -> None:
    one, other = (torch.nn.Linear(6, 4, bias=False) for _ in range(2))
    a, b = Muon(one, CONFIG), Muon(other, CONFIG)
    one.weight.grad = torch.ones(4, 6)
    a.step()
    other.load_state_dict(one.state_dict())
    b.load_state_dict(copy.deepcopy(a.state_dict()))  # which shares its tensors
    for module, optimizer in ((one, a), (other, b)):
        module.weight.grad = torch.eye(4, 6)
        optimizer.step()
    assert torch.equal(one.weight, other.weight)
