import pytest
import torch
from torch import nn

from atoll.comm.errors import ConfigError
from atoll.node.participant.step_check import StepCheck


def test_a_batch_is_stepped_once_and_not_by_the_script_and_by_run_step() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    guard = StepCheck([optimizer])
    with pytest.raises(ConfigError, match=r"run.step was called and no batch was out"):
        guard.take("run.step", steps_optimizer=True)
    for _ in range(2):
        guard.expect()
        guard.take("run.step", steps_optimizer=True)
        optimizer.step()  # as run.step does
    with pytest.raises(ConfigError, match="call it once a batch"):
        guard.take("run.step", steps_optimizer=True)
    guard.expect()
    optimizer.step()
    guard.take("run.stepped", steps_optimizer=False)
    guard.expect()
    optimizer.step()
    with pytest.raises(ConfigError, match="the script stepped its optimizer and then called run.step"):
        guard.take("run.step", steps_optimizer=True)
