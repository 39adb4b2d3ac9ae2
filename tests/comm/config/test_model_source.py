"""A run's model may be named: its config.json takes the place of the section, and single keys go over it."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from atoll import configs
from atoll.comm import extras
from atoll.comm.config.load import load_run, to_yaml
from atoll.comm.config.model import RopeType
from atoll.comm.config.run import from_json, to_json
from atoll.comm.errors import ConfigError, ResourceError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 64,
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "llama"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(LLAMA))
    return made


def test_a_folder_takes_the_place_of_the_whole_section(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run = load_run(configs.DEMO, (f"model={folder}",))
    assert (run.model.vocab_size, run.model.dim, run.model.kv_heads, run.model.tied_head) == (500, 64, 2, False)
    assert (run.model.rope_type, run.model.rope_factor, run.model.norm_eps) == (RopeType.LLAMA3, 8.0, 1e-6)
    assert run.model.seq_len == 2048 and "up to 4,096 tokens: model.seq_len is 2,048" in caplog.text
    assert from_json(to_json(run)) == run
    assert load_run(configs.DEMO, (f"model={folder}/config.json",)) == run


def test_single_keys_go_over_it_wherever_they_stand(folder: Path) -> None:
    for overrides in (("model.seq_len=99", f"model={folder}"), (f"model={folder}", "model.seq_len=99")):
        model = load_run(configs.DEMO, (*overrides, "rounds.total=3")).model
        assert (model.seq_len, model.vocab_size) == (99, 500)


def test_a_seq_len_that_a_file_gives_stays_and_is_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model:\n  seq_len: 128\n  dim: 32\n")
    said = list[str]()
    model = load_run(tmp_path / "run.yaml", (f"model={folder}",), tell=said.append).model
    assert (model.seq_len, model.dim) == (128, 64)
    assert said[-1] == f"model.seq_len stays 128, as {tmp_path}/run.yaml says"
    begins = f"init_from={folder} begins with them"
    assert begins in said[1]
    load_run(tmp_path / "run.yaml", (f"model={folder}", f"init_from={folder}"), tell=said.append)
    load_run(tmp_path / "run.yaml", ("engine=hf", f"model={folder}"), tell=said.append)
    assert [begins in line for line in said] == [False, True, False, False, False, True]
    assert load_run(tmp_path / "run.yaml", (f"model={folder}", "model.seq_len=64")).model.seq_len == 64


def test_with_the_engine_of_transformers_it_is_the_config_of_the_run(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | {"model_type": "gpt2", "architectures": ["GPT2"]}))
    with pytest.raises(ConfigError, match=f"model={folder}.*set engine: hf|is of GPT2.*set engine: hf"):
        load_run(configs.DEMO, (f"model={folder}",))
    run = load_run(configs.DEMO, (f"model={folder}", "engine=hf"))
    assert run.hf.architecture == "GPT2" and run.model.vocab_size == 500 and run.model.seq_len == 128
    assert run == load_run(configs.DEMO, ("engine=hf", f"hf.config={folder}"))
    (tmp_path / "run.yaml").write_text(f"engine: hf\nmodel: {folder}\n")
    assert load_run(tmp_path / "run.yaml").hf == run.hf
    with pytest.raises(ConfigError, match="give one of them"):
        load_run(configs.DEMO, (f"model={folder}", "engine=hf", f"hf.config={folder}"))


def test_a_file_may_name_it_and_the_resolved_run_names_it_no_more(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"name: tuned\nmodel: {folder}\n")
    run = load_run(tmp_path / "run.yaml", ("model.seq_len=128",))
    assert (run.model.vocab_size, run.model.seq_len) == (500, 128)
    (tmp_path / "again.yaml").write_text(to_yaml(run))
    assert str(folder) not in to_yaml(run)
    assert load_run(tmp_path / "again.yaml") == run


def test_a_model_of_another_architecture_is_refused_with_its_name(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | {"model_type": "gemma3", "architectures": ["Gemma3"]}))
    with pytest.raises(ConfigError, match=rf"{folder}'s config.json is of Gemma3 .*engine: hf"):
        load_run(configs.DEMO, (f"model={folder}",))


@pytest.mark.parametrize("where", ["absent", "s3://bucket/model", "https://huggingface.co/org/name"])
def test_what_is_no_folder_is_refused(where: str) -> None:
    with pytest.raises(ConfigError, match=f"model={where}: there is no folder with a config.json"):
        load_run(configs.DEMO, (f"model={where}",))


def test_the_hubs_config_json_is_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(repository: str, file: str, revision: str | None) -> str:
        assert (repository, file) == ("org/name", "config.json")
        if revision == "gone":
            raise OSError("404 Client Error\nat some address")
        return str(folder / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    assert load_run(configs.DEMO, ("model=hf://org/name",)) == load_run(configs.DEMO, (f"model={folder}",))
    with pytest.raises(ResourceError, match=r"cannot fetch its config.json \(OSError: 404 Client Error\); give a"):
        load_run(configs.DEMO, ("model=hf://org/name@gone",))
    with pytest.raises(ConfigError, match="write hf://org/name, or hf://org/name@revision"):
        load_run(configs.DEMO, ("model=hf://name",))
    monkeypatch.setattr(extras, "installed", lambda package: False)
    with pytest.raises(ResourceError, match=r"model=hf://org/name needs huggingface_hub, .*\.\[hub\]"):
        load_run(configs.DEMO, ("model=hf://org/name",))


def test_neither_torch_nor_transformers_is_imported_for_it(folder: Path) -> None:
    probe = (
        "import sys; from atoll import configs; from atoll.comm.config.load import load_run; "
        f"load_run(configs.DEMO, ('model={folder}',)); "
        "sys.exit(bool(sys.modules.keys() & {'torch', 'transformers', 'huggingface_hub'}))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", probe], timeout=60).returncode == 0
