"""What a run may say to torchtitan, and what only a node may."""

from pathlib import Path

import pytest

from atoll.comm.config.engine import Engine
from atoll.comm.config.load import load_run
from atoll.comm.config.run import RunConfig, from_json, to_json
from atoll.comm.errors import ConfigError
from atoll.node.config import NodeConfig, check

DEMO = Path(__file__).parents[3] / "configs" / "demo.yaml"
TITAN = ("engine=torchtitan", "titan.config=llama3_8b", "inner.optimizer=adamw")


def load(*overrides: str) -> RunConfig:
    return load_run(DEMO, (*TITAN, *overrides))


def test_a_run_says_how_torchtitan_computes_its_model() -> None:
    said = ["--training.local_batch_size=2", "activation-checkpoint:full", "--optimizer.implementation=foreach"]
    run = load(f"titan.settings=[{','.join(said)}]")
    assert run.engine is Engine.TORCHTITAN and run.titan.settings == said
    assert from_json(to_json(run)) == run
    load("titan.settings=[--parallelism.no-enable-sequence-parallel]")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("titan.config=''", "titan.config is empty: name one of its configurations"),
        ("titan.config=os.system", "titan.config is 'os.system': write a name of torchtitan's"),
        ("titan.module=torchtitan.models.llama3", "titan.module is 'torchtitan.models.llama3'"),
        ("inner.optimizer=muon", "trains with adamw: set inner.optimizer=adamw"),
        ("data.kind=script", "engine is torchtitan, which trains on the run's text"),
        ("titan.settings=[training.local_batch_size=2]", "write --section.key=value"),
        ("titan.settings=[--override.imports=os.system]", "a run says settings of activation_checkpoint"),
        ("titan.settings=[--dump-folder=/etc]", "a run says settings of"),
        ("titan.settings=[--debug.save-config-file=/etc/passwd]", "a run says settings of"),
        ("titan.settings=[--module=os]", "a run says settings of"),
        ("titan.settings=[--training.seq-len=64]", "model.seq_len says it"),
        ("titan.settings=[--training.max_norm=64]", "inner.clip says it"),
        ("titan.settings=[--parallelism.pipeline_parallel_schedule_csv=/etc/passwd]", "it names a file"),
    ],
)
def test_a_run_names_neither_code_nor_files_nor_what_it_says_elsewhere(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(override)


def test_a_node_says_what_it_likes_in_torchtitans_words() -> None:
    check(NodeConfig(titan=["--module=mine", "--dump_folder=/data", "activation_checkpoint:full"]))
    with pytest.raises(ConfigError, match="titan has 'training.steps=3': write --section.key=value"):
        check(NodeConfig(titan=["training.steps=3"]))
