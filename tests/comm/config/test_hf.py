"""What a run may say of a model of transformers', and where its config.json comes from."""

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.comm.config.engine import Engine
from atoll.comm.config.hf import read_config
from atoll.comm.config.load import load_run, to_yaml
from atoll.comm.config.run import RunConfig, from_json, to_json
from atoll.comm.errors import ConfigError, ResourceError

DEMO = Path(__file__).parents[3] / "configs" / "demo.yaml"
CONTENT = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 512}
LORA = ("hf.lora.rank=8", "hf.base=hf://org/name", f"hf.digest={'0a' * 16}")


def folder_with(folder: Path, **changes: Any) -> Path:
    """A folder with a config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONTENT, **changes}, indent=2))
    return folder


def load(folder: Path, *overrides: str) -> RunConfig:
    return load_run(DEMO, ("engine=hf", f"hf.config={folder}", *overrides))


def test_a_folder_in_the_config_is_read_once_and_nodes_get_its_content(tmp_path: Path) -> None:
    run = load(folder_with(tmp_path))
    assert run.engine is Engine.HF and run.hf.content == CONTENT and run.model.vocab_size == 512
    assert load(tmp_path / "config.json") == run and from_json(to_json(run)) == run
    (tmp_path / "run.yaml").write_text(to_yaml(run))
    (tmp_path / "config.json").unlink()
    assert load_run(tmp_path / "run.yaml") == run


def test_the_config_of_the_base_is_the_models_where_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[str, str, str | None]]()

    def fetch(name: str, file: str, revision: str | None) -> str:
        asked.append((name, file, revision))
        return str(folder_with(tmp_path) / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    for revision in ("../../../.ssh/x", "/etc/x", "a/../b", "-x", "a//b"):
        with pytest.raises(ConfigError, match="write hf://org/name, or hf://org/name@revision"):
            load_run(DEMO, ("engine=hf", *LORA, f"hf.base=hf://org/name@{revision}"))
    assert load_run(DEMO, ("engine=hf", *LORA, "hf.base=hf://org/name@refs/pr/1-x.y")).hf.base
    run = load_run(DEMO, ("engine=hf", *LORA, "hf.base=hf://org/name@v1"))
    assert run.hf.content == CONTENT and asked[-1:] == [("org/name", "config.json", "v1")]

    def fail(name: str, file: str, revision: str | None) -> str:
        raise OSError("401 Client Error\nand more")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    with pytest.raises(
        ResourceError,
        match=r"hf://org/name: cannot fetch its config.json \(OSError: 401 Client E",
    ):
        load_run(DEMO, ("engine=hf", *LORA))


def test_what_chooses_an_implementation_is_left_out(tmp_path: Path) -> None:
    kernels = {"attn_implementation": "someone/kernel", "experts_implementation": "x", "_attn_implementation": "y"}
    within = {"text_config": {"_experts_implementation": "z", "vocab_size": 600}}
    folder_with(tmp_path, **kernels, **within, vocab_size=None)
    run = load(tmp_path)
    assert run.hf.content == {**CONTENT, "vocab_size": None, "text_config": {"vocab_size": 600}}
    assert run.model.vocab_size == 600


@pytest.mark.parametrize(
    ("changes", "overrides", "sentence"),
    [
        ({"auto_map": {"AutoModel": "x.Y"}}, (), "Qwen2ForCausalLM, which is built by code of its own repository"),
        ({"text_config": {"auto_map": {}}}, (), "a node never runs that"),
        ({"num_hidden_layers": 10**9}, (), "hf.config has num_hidden_layers=1000000000: 1024 are the most"),
        ({"text_config": {"n_layer": 2000}}, (), "hf.config has n_layer=2000"),
        ({"model_type": None}, (), "hf.config has no model_type"),
        ({"quantization_config": {"bits": 4}}, (), "of a quantised Qwen2ForCausalLM"),
        (
            {"max_position_embeddings": 64},
            ("model.seq_len=65",),
            "seq_len is 65, and hf.config's Qwen2F.* has 64 po",
        ),
        ({}, ("data.kind=script",), "engine is hf, which trains on the run's text"),
        ({}, ("hf.lora.rank=-1",), r"hf.lora.rank is -1: it must be 0 \(every parameter"),
        ({}, ("hf.lora.alpha=0",), "hf.lora.alpha is 0"),
        ({}, ("hf.lora.dropout=1",), "hf.lora.dropout is 1"),
        ({}, ("hf.lora.targets=['.*']",), r"hf.lora.targets has '.\*': write the last parts of a module's name"),
        ({}, ("hf.base=/data",), "hf.lora.rank is 0: without adapters every parameter is trained"),
        ({}, ("hf.lora.rank=8",), "hf.base is empty: name the frozen weights"),
        (
            {},
            (*LORA, "hf.base=s3://bucket/name"),
            "hf.base is 's3://bucket/name': write a folder, or hf://org/name",
        ),
        ({}, (*LORA, "hf.base=hf://name"), "hf.base is 'hf://name': write a folder"),
        ({}, (*LORA, "hf.digest=''"), "hf_weights digest hf://org/name` prints it"),
        ({}, (*LORA, "hf.dtype=fp8"), "config key 'hf.dtype'"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    changes: dict[str, Any], overrides: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(folder_with(tmp_path, **changes), *overrides)


def test_a_config_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine is hf and hf.config is empty: give a model's folder"):
        load_run(DEMO, ("engine=hf",))
    with pytest.raises(ConfigError, match=r"hf.config=.*: there is no folder with a config.json"):
        read_config(str(tmp_path / "gone" / "config.json"))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="it is not a model's config.json: it is not an object"):
        read_config(str(tmp_path))
    run = load_run(DEMO, ("engine=hf", f"hf.config={folder_with(tmp_path)}"))
    deep = json.dumps({**CONTENT, "a": json.loads("[" * 400 + "]" * 400)})
    for text, wrong in (
        ("{", "Expecting"),
        ("[1]", "not an object"),
        ("[" * 100_000, "recursion|depth"),
        (deep, "more than 32"),
    ):
        run.hf.config = text
        with pytest.raises(ConfigError, match=f"hf.config is not the content of a config.json: .*({wrong})"):
            from_json(to_json(run))
    run.hf.config, run.model.vocab_size = json.dumps(CONTENT), 513
    with pytest.raises(ConfigError, match="model.vocab_size is 513, and hf.config's Qwen2ForCausalLM has 512"):
        from_json(to_json(run))
    run.hf.config = " " * (1 << 21)
    with pytest.raises(ConfigError, match="more than 1,048,576 characters"):
        from_json(to_json(run))
