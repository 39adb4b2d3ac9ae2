"""The operator's commands with named methods."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from atoll.comm.errors import ConfigError
from atoll.coordinator.cli import coordinator

DEMO = str(Path(__file__).resolve().parents[2] / "configs" / "demo.yaml")


def test_a_coordinator_does_not_start_what_nodes_would_ignore(tmp_path: Path) -> None:
    state = tmp_path / "state"
    arguments = ["start", DEMO, "--method", "decoupled", "rounds.data_parallel=10", "--state-dir", str(state)]
    with pytest.raises(
        ConfigError,
        match="rounds.data_parallel=10 with fragments.count=24: only `atoll simulate` carries this out so far",
    ):
        CliRunner().invoke(coordinator, arguments, catch_exceptions=False)
    assert not state.exists()


def test_check_says_which_part_of_the_model_counts_where_torchtitan_has_its_own() -> None:
    titan = "engine=torchtitan", "titan.config=llama3_8b", "inner.optimizer=adamw", "model.vocab_size=512"
    found = CliRunner().invoke(coordinator, ["check", DEMO, *titan], catch_exceptions=False)
    assert "# ok: torchtitan's llama3_8b; of model, only seq_len=" in found.stdout
    assert "and vocab_size=512 count" in found.stdout and " parameters" not in found.stdout


def test_check_says_what_of_a_model_of_transformers_is_trained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 512}')
    arguments = ["check", DEMO, "engine=hf", f"hf.config={tmp_path}"]
    found = CliRunner().invoke(coordinator, arguments, catch_exceptions=False)
    assert (
        "# ok: transformers' qwen2, every parameter; of model, only seq_len=128 and vocab_size=512" in found.stdout
    )
    weights = ["hf.base=hf://org/name", f"hf.digest={'0f' * 16}", "hf.lora.rank=8"]
    found = CliRunner().invoke(coordinator, [*arguments, *weights], catch_exceptions=False)
    assert "# ok: transformers' qwen2, LoRA adapters of rank 8; of model" in found.stdout


def test_check_says_what_is_for_simulations_only() -> None:
    arguments = ["check", DEMO, "--method", "decoupled", "rounds.data_parallel=10"]
    found = CliRunner().invoke(coordinator, arguments, catch_exceptions=False)
    assert "count: 24" in found.stdout
    assert "a coordinator does not carry out rounds.data_parallel=10" in found.stdout
    plain = CliRunner().invoke(coordinator, ["check", DEMO, "--method", "diloco"], catch_exceptions=False)
    assert "codec: fp32" in plain.stdout
    assert "simulate" not in plain.stdout
