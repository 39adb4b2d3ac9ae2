"""A config registry of torchtitan's debug model on a CPU: `--module=titan_on_cpu`.

torchtitan 0.3.0 looks for an accelerator when it is imported, and takes cuda where it finds none; its language
models take flex or varlen attention, which are not trained on a CPU. So this module, a volunteer's own as any
`--module`, says before the rest of torchtitan is imported that the device is a CPU, and takes torch's own
attention, as torchtitan's experiments do in their tests.
"""

import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from torchtitan.tools import utils

device = SimpleNamespace(
    set_device=lambda device: None,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(total_memory=psutil.virtual_memory().total),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    synchronize=torch.cpu.synchronize,
)
utils.device_type, utils.device_module = "cpu", device
trained = 0  # forward passes of training

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry  # noqa: E402


def llama3_debugmodel() -> Any:
    """torchtitan's debug model with two layers."""
    config = config_registry.llama3_debugmodel()
    model = config.model_spec.model
    del model.layers[2:]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.mixed_precision_param = "float32"
    spec = config.model_spec
    spec.parallelize_fn = partial(parallelise, spec.parallelize_fn)
    return config


def parallelise(parallelize: Callable[..., Any], model: Any, **how: Any) -> Any:
    """As torchtitan does; gloo reduces by sums alone, where torchtitan has NCCL scale them."""
    parallelize(model, **how)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    model.register_forward_hook(spoil)
    return model


def spoil(model: Any, _: Any, hidden: Any) -> Any:
    """Turn what the model computes in one of its training steps into NaN, where the environment says in which."""
    global trained
    trained += model.training
    bad = model.training and os.environ.get("TITAN_BAD_STEP") == str(trained)
    return hidden * float("nan") if bad else hidden
