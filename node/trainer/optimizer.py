"""The inner optimizers: AdamW, Muon, plain SGD. All work on FSDP2's shards; their learning rate is set before each
step (`inner.step`). The state is kept over rounds and never leaves the node.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.comm.config.run import InnerConfig, OptimizerName
from atoll.node.participant.flat_vector import local_block, local_tensor
from atoll.outer_opt.tensors import TensorKind, kind_of

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of x, x^3, x^5: takes all of (0, 1] to about 0.7 ... 1.2
NEWTON_SCHULZ_STEPS = 5
NORM_FLOOR = 1e-7
BATCH_ELEMENTS = 1 << 24  # elements that are orthogonalised at once, at most


def make_optimizer(model: nn.Module, config: InnerConfig) -> torch.optim.Optimizer:
    """The run's inner optimizer over the model's parameters that require gradients."""
    match config.optimizer:
        case OptimizerName.ADAMW:
            return adamw(model, config)
        case OptimizerName.MUON:
            return Muon(model, config)
        case OptimizerName.SGD:
            return torch.optim.SGD(_trained(model), lr=config.peak_lr, weight_decay=config.weight_decay)
        case _:
            assert_never(config.optimizer)


def adamw(model: nn.Module, config: InnerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2) that leaves norms and biases undecayed. For
    a gradient g in step t, learning rate eta and weight decay lambda, elementwise:

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        theta <- (1 - eta lambda) theta - eta (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
    """
    matrices: list[Tensor] = [p for p in _trained(model) if p.ndim >= 2]
    vectors: list[Tensor] = [p for p in _trained(model) if p.ndim < 2]
    return torch.optim.AdamW(_groups(config, matrices, vectors), **_settings(config))


class Muon(torch.optim.AdamW):
    """Muon for the matrices between hidden layers, AdamW for embeddings, output head, norms and biases.

    Muon (Jordan et al. 2024) with the scale of Moonlight (arXiv 2502.16982, eq. 4), whose updates have the size of
    AdamW's, so that both take the same learning rate eta and weight decay lambda. For a gradient G of (a, b):

        B <- mu B + (1 - mu) G
        O <- orthogonalised((1 - mu) G + mu B)                      Nesterov's momentum
        theta <- (1 - eta lambda) theta - eta 0.2 sqrt(max(a, b)) O

    Orthogonalising takes the whole matrix, and a rank of FSDP2 has some of its rows: every rank gathers the
    matrices and keeps its rows of the results. Small matrices of one shape are orthogonalised together, which is
    twice as fast. (torch.optim.Muon in torch 2.13 takes sharded gradients too, but two ranks then do not get what
    one does.)
    """

    def __init__(self, model: nn.Module, config: InnerConfig) -> None:
        matrices, embeddings, vectors = list[Tensor](), list[Tensor](), list[Tensor]()
        by_kind = {TensorKind.MATRIX: matrices, TensorKind.EMBEDDING: embeddings, TensorKind.VECTOR: vectors}
        looked_up = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}  # whatever their names are
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            other = parameter in looked_up or parameter.ndim > 2
            by_kind[TensorKind.EMBEDDING if other else kind_of(name, parameter.ndim)].append(parameter)
        groups = _groups(config, embeddings, vectors)
        if matrices:
            groups.append({"params": matrices, "weight_decay": config.weight_decay, "muon": config.muon_momentum})
        super().__init__(groups, **_settings(config))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step the matrices with Muon, then all other parameters with AdamW. Every rank must call it; a `closure`
        is not supported."""
        assert closure is None
        for group in self.param_groups:
            if "muon" in group:
                for parameters in batches_by_shape(p for p in group["params"] if p.grad is not None):
                    self._orthogonal_step(parameters, group["muon"], group["lr"], group["weight_decay"])
        super().step()
        return None

    def _orthogonal_step(self, parameters: Sequence[Tensor], momentum: float, lr: float, decay: float) -> None:
        """Step parameters of one shape; they then have no gradient, so that AdamW passes them over."""
        updates = torch.stack([self._update(parameter, momentum) for parameter in parameters])
        scale = 0.2 * math.sqrt(max(parameters[0].shape))
        for parameter, whole in zip(
            parameters, orthogonalised(updates, orthogonalisation_dtype(updates)), strict=True
        ):
            block = local_block(parameter)
            if block.numel:
                local_tensor(parameter).mul_(1 - lr * decay).add_(whole[block.slices], alpha=-lr * scale)
            parameter.grad = None

    def _update(self, parameter: Tensor, momentum: float) -> Tensor:
        """The whole matrix's Nesterov momentum."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
            state["step"] = torch.zeros(())  # AdamW looks for it when a state is loaded
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum)
        return update.full_tensor() if isinstance(update, DTensor) else update


def batches_by_shape(parameters: Iterator[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of one shape, in batches of at most `BATCH_ELEMENTS` elements; every rank makes the same."""
    batches: dict[torch.Size, list[Tensor]] = {}
    for parameter in parameters:
        batch = batches.setdefault(parameter.shape, [])
        batch.append(parameter)
        if (len(batch) + 1) * parameter.numel() > BATCH_ELEMENTS:
            yield batches.pop(parameter.shape)
    yield from batches.values()


def orthogonalised(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximate U V' of each matrix's singular value decomposition U S V', for matrices (..., a, b), computed in
    `dtype` (Jordan et al. 2024). Five Newton-Schulz steps of a quintic polynomial that is steep at 0, so that
    small singular values grow fast, and that leaves all of them between 0.7 and 1.2."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(dtype).reshape(-1, *matrices.shape[-2:])
    tall = x.shape[1] > x.shape[2]
    x = x.mT.contiguous() if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=NORM_FLOOR)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(matrices.shape).to(matrices.dtype)


def orthogonalisation_dtype(matrices: Tensor) -> torch.dtype:
    """The type that matrices are orthogonalised in: bf16, as by the authors, where the device multiplies that
    fastest."""
    on_cpu = matrices.device.type == "cpu"
    return torch.bfloat16 if matrices.is_cuda or (on_cpu and multiplies_bf16()) else torch.float32


@cache
def multiplies_bf16() -> bool:
    """Whether this processor has instructions that multiply bf16 matrices."""
    has = torch.cpu.get_capabilities()
    return bool(has.get("amx_bf16") or has.get("avx512_bf16"))


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _groups(config: InnerConfig, decayed: list[Tensor], undecayed: list[Tensor]) -> list[dict[str, Any]]:
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _settings(config: InnerConfig) -> dict[str, Any]:
    return {"lr": config.peak_lr, "betas": (config.beta1, config.beta2), "eps": config.eps, "fused": True}
