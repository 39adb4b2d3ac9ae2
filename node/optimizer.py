"""The inner optimizers: AdamW, Muon, plain SGD. All work on FSDP2's shards; their learning rate is set before each
step (`inner.step`). The state is kept over rounds and never leaves the node.
"""

import math
from collections.abc import Callable
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.comm.config import InnerConfig, OptimizerName
from atoll.node.flat import local_interval, local_tensor
from atoll.outer_opt.tensors import Kind, kind_of

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of x, x^3, x^5: takes all of (0, 1] to about 0.7 ... 1.2
ITERATIONS = 5
SMALL = 1e-7


def make(model: nn.Module, config: InnerConfig) -> torch.optim.Optimizer:
    """The run's inner optimizer over the model's parameters."""
    match config.optimizer:
        case OptimizerName.ADAMW:
            return adamw(model, config)
        case OptimizerName.MUON:
            return Muon(model, config)
        case OptimizerName.SGD:
            return torch.optim.SGD(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
        case _:
            assert_never(config.optimizer)


def adamw(model: nn.Module, config: InnerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) that leaves norms and biases undecayed."""
    matrices: list[Tensor] = [p for p in model.parameters() if p.ndim >= 2]
    vectors: list[Tensor] = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(_groups(config, matrices, vectors), **_settings(config))


class Muon(torch.optim.AdamW):
    """Muon for the matrices between hidden layers, AdamW for embeddings, output head, norms and biases.

    Muon (Jordan et al. 2024) with the scale of Moonlight (arXiv 2502.16982, eq. 4), whose updates have the size of
    AdamW's, so that both take the same learning rate eta and weight decay lambda. For a gradient G of (a, b):

        B <- mu B + (1 - mu) G
        O <- orthogonalised((1 - mu) G + mu B)                      Nesterov's momentum
        theta <- (1 - eta lambda) theta - eta 0.2 sqrt(max(a, b)) O

    Orthogonalising takes the whole matrix, and a rank of FSDP2 has some of its rows: every rank gathers the
    matrices one at a time and keeps its rows of the result. (torch.optim.Muon in torch 2.13 takes sharded
    gradients too, but two ranks then do not get what one does.)
    """

    def __init__(self, model: nn.Module, config: InnerConfig) -> None:
        matrices, embeddings, vectors = list[Tensor](), list[Tensor](), list[Tensor]()
        of = {Kind.MATRIX: matrices, Kind.EMBEDDING: embeddings, Kind.VECTOR: vectors}
        looked_up = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}  # whatever their names are
        for name, parameter in model.named_parameters():
            other = parameter in looked_up or parameter.ndim > 2
            of[Kind.EMBEDDING if other else kind_of(name, parameter.ndim)].append(parameter)
        groups = _groups(config, embeddings, vectors)
        if matrices:
            groups.append({"params": matrices, "weight_decay": config.weight_decay, "muon": config.muon_momentum})
        super().__init__(groups, **_settings(config))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"] if "muon" in group else ():
                if parameter.grad is not None:
                    self._orthogonal_step(parameter, group["muon"], group["lr"], group["weight_decay"])
                    parameter.grad = None  # AdamW passes it over
        super().step()
        return None

    def _orthogonal_step(self, parameter: Tensor, momentum: float, lr: float, decay: float) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
            state["step"] = torch.zeros(())  # AdamW looks for it when a state is loaded
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum)
        whole = orthogonalised(update.full_tensor() if isinstance(update, DTensor) else update)
        start, stop = local_interval(parameter)
        if stop > start:
            local = local_tensor(parameter)
            mine = whole.reshape(-1)[start:stop].view_as(local)
            local.mul_(1 - lr * decay).add_(mine, alpha=-lr * 0.2 * math.sqrt(max(parameter.shape)))


def orthogonalised(matrix: Tensor) -> Tensor:
    """About U V' of the matrix's U S V': five Newton-Schulz steps of a polynomial that is steep at 0, so that
    small singular values grow fast, and that leaves all of them between 0.7 and 1.2. In bf16 on a GPU."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=SMALL)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


def _groups(config: InnerConfig, decayed: list[Tensor], undecayed: list[Tensor]) -> list[dict[str, Any]]:
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _settings(config: InnerConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps, "fused": True}
