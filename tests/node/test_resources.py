"""What this machine lacks is said before anything is started."""

from pathlib import Path

import pytest

from atoll.comm.errors import ConfigError
from atoll.node.resources import check_congestion

KERNEL = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def test_a_congestion_control_that_the_kernel_lacks_is_refused_with_those_it_has() -> None:
    offered = KERNEL.read_text().split()
    check_congestion("")
    check_congestion(offered[0])
    with pytest.raises(ConfigError, match=f"congestion=warp: this machine's kernel offers {offered[0]}"):
        check_congestion("warp")
