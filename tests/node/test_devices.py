"""What a node does with its machine where its settings leave that open."""

import pytest

from atoll.node import devices
from atoll.node.config import Device, NodeConfig
from atoll.node.devices import Gpu, gpus, resolve, visible

H100 = Gpu("NVIDIA H100", 80 << 30)
V100 = Gpu("Tesla V100", 32 << 30, multiplies_bf16=False)


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "has_compiler", lambda: True)


def test_a_machine_with_gpus_uses_them_all_in_bf16_and_compiled() -> None:
    node, said = resolve(NodeConfig(), 64, [H100] * 8)
    assert (node.device, node.ranks, node.bf16, node.compile) == (Device.CUDA, 8, True, True)
    assert said == "trains on 8 of 8 GPUs, in bf16, compiled"


@pytest.mark.parametrize("config", [NodeConfig(), NodeConfig(device=Device.CPU)])
def test_a_machine_without_gpus_uses_its_processor_as_it_is(
    config: NodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "torch_has_gpus", lambda: False)
    node, said = resolve(config, 64, [])
    assert (node.device, node.ranks, node.bf16, node.compile) == (Device.CPU, 1, False, False)
    assert not said


def test_where_no_driver_describes_the_gpus_torch_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_has_gpus", lambda: True)
    node, said = resolve(NodeConfig(), 64, [])
    assert (node.device, node.ranks, node.bf16, node.compile) == (Device.AUTO, 1, False, False)
    assert "no driver describes this machine's GPUs" in said
    assert resolve(NodeConfig(device=Device.CPU), 64, [])[0].device is Device.CPU


def test_a_node_that_is_to_use_its_processor_leaves_the_gpus() -> None:
    node, _ = resolve(NodeConfig(device=Device.CPU, ranks=2, bf16=True), 64, [H100])
    assert (node.device, node.ranks, node.bf16, node.compile) == (Device.CPU, 2, True, False)


@pytest.mark.parametrize(("batch", "count", "ranks"), [(12, 8, 6), (7, 8, 7), (11, 8, 1), (8, 3, 2), (1, 4, 1)])
def test_as_many_gpus_are_used_as_divide_a_batch(batch: int, count: int, ranks: int) -> None:
    node, said = resolve(NodeConfig(), batch, [H100] * count)
    assert node.ranks == ranks
    assert (f"more do not divide inner.batch_size={batch}" in said) == (ranks < count)


def test_a_machine_of_a_node_of_several_uses_all_its_gpus() -> None:
    """A worker does not know the run, nor how many other machines there are."""
    node, _ = resolve(NodeConfig(rendezvous="10.0.0.1:29400"), 12, [H100] * 8)
    assert node.ranks == 8


def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    config = NodeConfig(ranks=3, bf16=False, compile=False)
    node, said = resolve(config, 64, [H100] * 8)
    assert (node.ranks, node.bf16, node.compile) == (3, False, False)
    assert said == "trains on 3 of 8 GPUs, in fp32"
    assert resolve(node, 64, [H100] * 8)[0] == node
    monkeypatch.setattr(devices, "has_compiler", lambda: False)
    assert resolve(NodeConfig(compile=True), 64, [H100])[0].compile
    node, said = resolve(NodeConfig(), 64, [H100])
    assert node.compile is False and said.endswith("not compiled, for want of a C++ compiler")


def test_a_gpu_that_does_not_multiply_bf16_computes_in_fp32() -> None:
    assert resolve(NodeConfig(), 64, [H100, V100])[0].bf16 is False


def test_cuda_that_was_asked_for_is_not_given_up_where_the_driver_says_nothing() -> None:
    node, _ = resolve(NodeConfig(device=Device.CUDA), 64, [])
    assert (node.device, node.ranks) == (Device.CUDA, 1)  # the trainer says what is lacking


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 1 , 7, 0", [1]),
        ("GPU-8a", ["GPU-8a"]),
        ("MIG-1/2", ["MIG-1/2"]),
        ("x", []),
    ],
)
def test_the_environment_says_which_gpus_there_are(wanted: str | None, found: list[int | str]) -> None:
    assert visible(3, wanted) == found


def test_a_torch_for_processors_finds_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_has_gpus", lambda: False)
    assert gpus() == ()


class Driver:
    """The driver's library on a machine with two GPUs, as it is called."""

    memories, capabilities = (80 << 30, 32 << 30), (9, 7)

    def __init__(self, name: str) -> None:
        assert name == "libnvidia-ml.so.1"
        self.open = False

    def nvmlInit_v2(self) -> int:
        self.open = True
        return 0

    def nvmlShutdown(self) -> int:
        assert self.open
        return 0

    def nvmlDeviceGetCount_v2(self, count: object) -> int:
        count._obj.value = 2  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: object) -> int:
        handle._obj.value = index + 1  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetName(self, handle: object, name: object, size: int) -> int:
        name.value = f"GPU {handle.value}".encode()  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: object, memory: object) -> int:
        memory._obj[0] = self.memories[handle.value - 1]  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: object, major: object, minor: object) -> int:
        major._obj.value = self.capabilities[handle.value - 1]  # type: ignore[attr-defined]
        return 0


def test_the_driver_tells_of_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_has_gpus", lambda: True)
    monkeypatch.setattr("ctypes.CDLL", Driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus() == (Gpu("GPU 1", 80 << 30, True), Gpu("GPU 2", 32 << 30, False))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.name for gpu in gpus()] == ["GPU 2"]
