"""Who starts a coordinator or a node from a shell that gives few descriptors has as many connections as the
machine allows."""

import resource

import psutil
import pytest
from e2e.harness import Run, until
from few_descriptors import FEW, few_descriptors

from atoll.comm.descriptors import MAX_DESCRIPTORS

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def limit(process: psutil.Process) -> int:
    soft, _ = process.rlimit(psutil.RLIMIT_NOFILE)
    return int(soft)


def test_coordinator_door_and_node_raise_their_limit(run: Run) -> None:
    wanted = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], MAX_DESCRIPTORS)
    assert wanted > FEW, "this machine's hard limit shows nothing"
    with few_descriptors():
        run.start()
        run.join(run.invite(1), "one", "--no-checks")  # which raise it, too
    coordinator = psutil.Process(run.coordinator.pid)
    assert [limit(p) for p in (coordinator, *coordinator.children())] == [wanted] * 2
    until("the node's limit", lambda: limit(psutil.Process(run.nodes["one"].pid)) == wanted)
