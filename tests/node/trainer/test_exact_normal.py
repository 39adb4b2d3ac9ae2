"""Initial values are normal, and the same bits on every machine."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from atoll.node.trainer.exact_normal import PART, exact_normal

STATE_0 = """
import hashlib
from atoll.comm.config.model import ModelConfig
from atoll.node.trainer.model import build, init_parameters
model = build(ModelConfig(vocab_size=64, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48))
init_parameters(model, 3)
values = b"".join(p.detach().numpy().tobytes() for _, p in sorted(model.named_parameters()))
print(hashlib.sha256(values).hexdigest())
"""


def test_the_numbers_are_normal_and_independent_of_each_other() -> None:
    x = exact_normal(1 << 20, 0.02, 7).astype(np.float64) / 0.02
    assert abs(x.mean()) < 0.005 and abs(x.std() - 1) < 0.005
    assert abs((x**4).mean() - 3) < 0.05 and 4 < abs(x).max() < 4.4
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.005
    assert abs(np.corrcoef(x, exact_normal(1 << 20, 0.02, 8))[0, 1]) < 0.005


@pytest.mark.parametrize("count", [1, 3, 1000, PART + 5])
def test_more_numbers_of_a_seed_begin_like_fewer(count: int) -> None:
    assert exact_normal(count, 0.02, 7)[:1000].tolist() == exact_normal(1000, 0.02, 7)[:count].tolist()


def test_the_bits_are_known() -> None:
    found = hashlib.sha256(exact_normal(100_003, 0.02, 7).astype("<f4").tobytes()).hexdigest()
    assert found == "c76a2491598b6f2e7f562cb24bb8882af2082cfe2451f170db524983954c49bd"


@pytest.mark.long
@pytest.mark.parametrize("instructions", [pytest.param("default", marks=pytest.mark.chaos), "avx2"])
def test_a_models_first_state_is_the_same_whatever_instructions_torch_has(instructions: str) -> None:
    def made(capability: str) -> str:
        command = [sys.executable, "-P", "-c", STATE_0]
        environment = {"ATEN_CPU_CAPABILITY": capability} if capability else {}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert made(instructions) == made("")
