"""What this machine lacks is said before anything is started."""

from pathlib import Path

import pytest

from atoll.comm.config.run import CodecName, ReduceConfig, RunConfig
from atoll.comm.errors import ConfigError, ResourceError
from atoll.node import preflight
from atoll.node.preflight import check_congestion, check_memory

KERNEL = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def test_a_congestion_control_that_the_kernel_lacks_is_refused_with_those_it_has() -> None:
    offered = KERNEL.read_text().split()
    check_congestion("")
    check_congestion(offered[0])
    with pytest.raises(ConfigError, match=f"congestion=warp: this machine's kernel offers {offered[0]}"):
        check_congestion("warp")


@pytest.mark.parametrize(("codec", "each"), [(CodecName.INT8, 30), (CodecName.FP32, 36)])
def test_a_model_that_does_not_fit_is_refused_by_what_its_wire_needs_too(
    codec: CodecName, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunConfig(reduce=ReduceConfig(codec=codec))
    need = each * run.model.n_params + preflight.PROCESS_BYTES
    monkeypatch.setattr(preflight, "available", lambda: need + 200_000)
    check_memory(run, on_gpu=False)
    monkeypatch.setattr(preflight, "available", lambda: need - 200_000)
    check_memory(run, on_gpu=True)
    with pytest.raises(ResourceError, match="needs about"):
        check_memory(run, on_gpu=False)
