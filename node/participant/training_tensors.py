"""All that a trainer must have again to go on where it was, as tensors with names: the optimizers' state, and the
parameters. Written and read by `atoll.node.participant.tensor_writer`.

    norm.weight.exp_avg          a tensor of the optimizer's for this parameter, on the parameter's device
    norm.weight.step@host        the same, in host memory while the parameter is not
    norm.weight.step@int         a plain number of the optimizer's for this parameter: int, float or bool
    <group 0>.step@int           a plain number of a parameter group that the optimizer has changed
    norm.weight.parameter        the parameter itself

What is stored can be restored: `TrainingTensors.optimizer_state` raises `Unstorable` for all else. The learning
rate is not among it; it is set before each step.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from atoll.node.participant.flat_vector import ShardedParameters, local_tensor, trainable
from atoll.node.participant.optimizer_files import UnusableMoments
from atoll.node.participant.rank_group import RankGroup

PARAMETER = "parameter"  # the part of a name that says that the tensor is the parameter itself
HOST = "host"  # the mark of a tensor that is in host memory while its parameter is not
NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
NUMBER_MARKS = {kind.__name__: kind for kind in NUMBERS}
GROUP = re.compile(r"<group (\d+)>")
LEARNING_RATES = {"lr", "initial_lr"}  # of a group; the latter is a scheduler's
LARGEST_INT = 1 << 63


class Unstorable(Exception):
    """The state of an optimizer has something that could not be restored; the text says what."""


class TrainingTensors:
    """The optimizers' state and the parameters of one rank under their names."""

    def __init__(self, parameters: ShardedParameters, optimizers: Sequence[Optimizer], ranks: RankGroup) -> None:
        """The optimizers must be as they were made: what changes of their groups' numbers is state."""
        self.parts, self.optimizers, self._several = parameters.parts, tuple(optimizers), ranks.size > 1
        self.kind = "+".join(type(optimizer).__name__ for optimizer in optimizers)
        self.shapes = dict(parameters.layout.shapes)
        self._initial = [numbers_of(group) for group in self._groups]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def _with_initial(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Each group, beside its numbers as they were; of a group that was added later there are none."""
        return list(zip_longest(self._groups, self._initial, fillvalue={}))

    def reset(self) -> None:
        """Have the optimizers forget what they have learnt: their state is empty, their groups as they were."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
        for group, initial in self._with_initial[: len(self._initial)]:
            for key in numbers_of(group).keys() - initial.keys():
                del group[key]
            group.update(initial)

    # What there is

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizers' tensors and numbers, by name. Raises `Unstorable`."""
        names = {id(parameter): name for name, parameter in trainable(self.parts).items()}
        found: dict[str, Tensor] = {}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                if not state:
                    continue
                if (name := names.get(id(parameter))) is None:
                    raise Unstorable(f"{type(optimizer).__name__} has state of what is no parameter of the model")
                for part, value in state.items():
                    mark, tensor = self._stored(part, value, parameter)
                    found[f"{name}.{part}{mark}"] = tensor
        for i, (group, initial) in enumerate(self._with_initial):
            for key, number in numbers_of(group).items():
                if initial.get(key) != number:
                    found[f"<group {i}>.{key}@{type(number).__name__}"] = as_tensor(key, number)
        return found

    def parameter_state(self) -> dict[str, Tensor]:
        """The trainable parameters, by name."""
        return {f"{name}.{PARAMETER}": parameter.data for name, parameter in trainable(self.parts).items()}

    def _stored(self, part: Any, value: Any, parameter: Tensor) -> tuple[str, Tensor]:
        """The mark behind the name of a value of the optimizer's state, and its tensor."""
        if not isinstance(part, str) or not part or "." in part or "@" in part or part == PARAMETER:
            raise Unstorable(f"there is no name for its state {part!r}")
        if type(value) in NUMBERS:
            return f"@{type(value).__name__}", as_tensor(part, value)
        if not isinstance(value, Tensor):
            raise Unstorable(f"{part} is neither a tensor nor a number but of type {type(value).__name__}")
        sharded = isinstance(parameter.data, DTensor)
        like_parameter = value.shape == parameter.shape and isinstance(value, DTensor) == sharded
        alike = not isinstance(value, DTensor) and (not value.ndim or not self._several)  # on all ranks
        if not (like_parameter or alike):
            raise Unstorable(f"{part} has the shape {tuple(value.shape)}, which ranks cannot share out again")
        on_host = value.device.type == "cpu" and parameter.device.type != "cpu"
        return f"@{HOST}" if on_host else "", value

    # What there was

    def zeros_like_stored(self, found: Mapping[str, Any]) -> dict[str, Tensor]:
        """Zeros to load what was `found` into, DCP's metadata by name, sharded as the parameters are here. Raises
        `UnusableMoments`."""
        parameters, zeros = trainable(self.parts), dict[str, Tensor]()
        owned = {id(p) for group in self._groups for p in group["params"]}
        for key, entry in found.items():
            name, _, part = key.rpartition(".")
            parameter, mark = parameters.get(name), part.partition("@")[2]
            if not isinstance(entry, TensorStorageMetadata):
                raise UnusableMoments(f"unreadable: {key} is no tensor")
            if mark not in ("", HOST, *NUMBER_MARKS):
                raise UnusableMoments(f"unreadable: {key} is of no known kind")
            dtype = entry.properties.dtype
            if (group := GROUP.fullmatch(name)) is not None:
                if int(group[1]) < len(self._groups):
                    zeros[key] = torch.zeros((), dtype=dtype)
                elif not self._several:  # else it is of another stage of the pipeline
                    raise UnusableMoments("of an optimizer with more groups of parameters")
                continue
            if parameter is None:  # on another stage of the pipeline; that all are known was checked
                continue
            if part != PARAMETER and id(parameter) not in owned:
                raise UnusableMoments(f"of an optimizer that had {name}, which now none has")
            if entry.size == parameter.shape and not mark:
                zeros[key] = torch.zeros_like(parameter.data, dtype=dtype)
            elif not entry.size or (not self._several and part != PARAMETER):
                zeros[key] = torch.zeros(entry.size, dtype=dtype)
            else:
                raise UnusableMoments(f"of a model with other shapes: {key} has {tuple(entry.size)}")
        return zeros

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load `state`, of names as `optimizer_state` and `parameter_state` give them, into the parameters and the
        optimizers: each tensor to the device where its optimizer has it, numbers as they were."""
        parameters, groups = trainable(self.parts), self._groups
        holders = {id(p): (o, g) for o in self.optimizers for g in o.param_groups for p in g["params"]}
        for key, tensor in state.items():
            name, _, marked = key.rpartition(".")
            part, _, mark = marked.partition("@")
            if (group := GROUP.fullmatch(name)) is not None:
                groups[int(group[1])][part] = tensor.item()
                continue
            parameter = parameters[name]
            if part == PARAMETER:
                local_tensor(parameter).copy_(local_tensor(tensor))
                continue
            optimizer, own_group = holders[id(parameter)]
            if mark in NUMBER_MARKS:
                optimizer.state[parameter][part] = tensor.item()
            else:
                device = state_device(part, tensor, parameter, own_group, mark == HOST)
                optimizer.state[parameter][part] = tensor.to(device)


def state_device(
    part: str, tensor: Tensor, parameter: Tensor, group: Mapping[str, Any], on_host: bool
) -> torch.device:
    """The device on which an optimizer has this tensor of its state. `on_host`: it was in host memory while its
    parameter was not.

    torch's optimizers have their count of steps in host memory unless a kernel reads it (`capturable`, `fused`;
    torch.optim.Optimizer._process_value_according_to_param_policy): on a GPU every step would wait for it."""
    host = torch.device("cpu")
    if part == "step" and not tensor.ndim and not group.keys().isdisjoint(("capturable", "fused")):
        return parameter.device if group.get("capturable") or group.get("fused") else host
    return host if on_host else parameter.device


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The plain numbers of a parameter group, without the learning rate."""
    return {key: value for key, value in group.items() if type(value) in NUMBERS and key not in LEARNING_RATES}


def as_tensor(name: str, number: int | float | bool) -> Tensor:
    """A plain number as a tensor, () int64, float64 or bool, without loss. Raises `Unstorable`."""
    if type(number) is int and not -LARGEST_INT <= number < LARGEST_INT:
        raise Unstorable(f"{name} is a number of more than 64 bits")
    return torch.tensor(number, dtype=NUMBERS[type(number)])
