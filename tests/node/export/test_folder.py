"""`atoll export --out FOLDER` writes a model that transformers loads, with its tokenizer and card, or nothing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from data_sets import web_server
from safetensors.torch import load_file, save_file
from states import RUN, TINY, Node, filled, layout_for
from tokenized import END_OF_TEXT, TEXT, data_set, tokenizer_json

from atoll.comm.config.engine import Engine, TitanConfig
from atoll.comm.errors import AtollError, ConfigError, ResourceError
from atoll.node.checkpoint.initial_state import InitialStateLoader
from atoll.node.checkpoint.run_manifest import RunManifest
from atoll.node.checkpoint.saved_run import SavedRun
from atoll.node.export import folder as folders
from atoll.node.export import tokenizer as tokenizers
from atoll.node.export.card import CardFacts
from atoll.node.export.card import card as card_text
from atoll.node.export.command import export, parse_size
from atoll.node.export.folder import FolderExporter, FolderOptions
from atoll.node.export.model_files import ModelFiles, TensorNaming
from atoll.node.export.tokenizer import DataSource
from atoll.node.export.weights import StateFacts, WeightDtype, read_facts, split_into_files, to_bf16
from atoll.node.trainer.model import build, init_parameters

VOCAB = 280
WIDE = replace(TINY, vocab_size=VOCAB, kv_heads=2)


def call(node: Path, out: Path, *arguments: str) -> Result:
    result = CliRunner().invoke(export, [str(node), "--out", str(out), *arguments])
    assert result.exception is None or isinstance(result.exception, AtollError), result.output
    return result


def refusal(node: Path, out: Path, *arguments: str) -> str:
    said = call(node, out, *arguments).exception
    assert isinstance(said, ConfigError | ResourceError)
    return str(said)


def trained(folder: Path) -> tuple[Node, "torch.nn.Module"]:
    """A node with a state whose attention is far from uniform, and the model of it."""
    model = build(WIDE)
    init_parameters(model, seed=1)
    for parameter in model.parameters():
        parameter.data *= 5
    node = Node(folder, RunManifest(replace(RUN, model=WIDE)))
    node.outer.vectors.anchor[:] = torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])
    node.outer.initialise()

    async def keep() -> None:
        node.disk.finalized(0, 0)
        await node.disk.wait_idle()

    asyncio.run(keep())
    return node, model


def test_bf16_is_torchs_rounding() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    halfway = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000  # ties
    x = np.concatenate([bits, halfway, halfway - 1, halfway + 1]).view(np.float32)
    expected = torch.from_numpy(x).to(torch.bfloat16)
    found = torch.from_numpy(to_bf16(x).view(np.int16)).view(torch.bfloat16)
    numbers = ~torch.isnan(expected)
    assert torch.equal(found[numbers].view(torch.int16), expected[numbers].view(torch.int16))
    assert torch.isnan(found[~numbers]).all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_transformers_loads_model_and_tokenizer_from_the_folder(tmp_path: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    node, model = trained(tmp_path / "node")
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json(VOCAB))
    out = tmp_path / "out"
    tokenizer_path = str(tmp_path / "tokenizer.json")
    call(node.state_dir, out, "--dtype", dtype, "--shard-size", "40KB", "--tokenizer", tokenizer_path)
    shards = sorted(out.glob("model-*"))
    assert len(shards) > 1 and all(path.stat().st_size < 40_000 + 4_000 for path in shards)
    theirs, notes = AutoModelForCausalLM.from_pretrained(out, local_files_only=True, output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"] and not notes["mismatched_keys"]
    assert theirs.dtype == (torch.float32 if dtype == "fp32" else torch.bfloat16)
    if dtype == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16).float()
    tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
    encoded = tokenizer(TEXT, return_tensors="pt").input_ids
    assert tokenizer.decode(encoded[0]) == TEXT and encoded.max() < VOCAB
    with torch.no_grad():
        expected, found = model(encoded[:, :16]), theirs.float()(encoded[:, :16]).logits
    assert expected.abs().max() > 1 and (found - expected).abs().max() < 1e-4
    GenerationConfig.from_pretrained(out)


def test_a_model_of_no_family_of_transformers_is_refused_and_exported_under_its_own_names(tmp_path: Path) -> None:
    model = replace(TINY, qk_norm=True, qkv_bias=True)
    node = filled(tmp_path / "node", 1, about=RunManifest(replace(RUN, model=model)))
    said = refusal(node.state_dir, tmp_path / "out")
    assert "has this model's qk_norm=True, qkv_bias=True" in said and "export it with --layout names" in said
    assert not (tmp_path / "out").exists()
    call(node.state_dir, tmp_path / "out", "--dtype", "fp32", "--layout", "names")
    anchor, momentum = np.zeros((2, model.n_params), np.float32)
    InitialStateLoader(layout_for(model), model, anchor, momentum).load(str(tmp_path / "out"), True)
    assert anchor.tobytes() == node.anchor().tobytes()
    other = replace(model, norm_eps=1e-3)
    with pytest.raises(ConfigError, match="config.json says norm_eps="):
        InitialStateLoader(layout_for(other), other, anchor, momentum).load(str(tmp_path / "out"), True)


def test_what_is_in_one_file_and_in_several_is_the_same(tmp_path: Path) -> None:
    node = filled(tmp_path / "node", 5)
    call(node.state_dir, tmp_path / "one", "--dtype", "fp32", "--layout", "names")
    call(node.state_dir, tmp_path / "more", "--dtype", "fp32", "--layout", "names", "--shard-size", "10 kb")
    whole = load_file(tmp_path / "one" / "model.safetensors")
    flat = torch.cat([tensor.flatten() for _, tensor in sorted(whole.items())]).numpy()
    assert np.array_equal(flat, node.anchor())
    index = json.loads((tmp_path / "more" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": flat.size, "total_size": 4 * flat.size}
    assert index["weight_map"].keys() == whole.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "more" / file)[name], whole[name])
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()


def with_data(monkeypatch: pytest.MonkeyPatch, *sources: DataSource) -> None:
    monkeypatch.setattr(folders, "data_sources", lambda data: sources)


def test_the_tokenizer_is_the_data_sets_which_its_manifest_vouches_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    node, _ = trained(tmp_path / "node")
    written = tokenizer_json(VOCAB)
    digest = data_set(tmp_path / "data", written, VOCAB)
    with_data(monkeypatch, DataSource(str(tmp_path / "data"), digest))
    assert call(node.state_dir, tmp_path / "out").exit_code == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == written
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.model_max_length) == (END_OF_TEXT, 0, 16)
    assert AutoConfig.from_pretrained(tmp_path / "out").eos_token_id == 0
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 0
    assert f"| Data set | tiny\\-text (`{digest}`) |" in (tmp_path / "out" / "README.md").read_text()

    (tmp_path / "data" / "tokenizer.json").write_bytes(tokenizer_json(VOCAB - 1))
    assert "it was replaced; give the right one with --tokenizer" in refusal(node.state_dir, tmp_path / "other")
    with_data(monkeypatch, DataSource(str(tmp_path / "data"), "0" * 32))
    assert "it is another data set" in refusal(node.state_dir, tmp_path / "other")
    with_data(monkeypatch, DataSource(str(tmp_path / "gone"), digest))
    assert "give the run's tokenizer with --tokenizer" in refusal(node.state_dir, tmp_path / "other")
    assert not (tmp_path / "other").exists()
    done = call(node.state_dir, tmp_path / "other", "--tokenizer", str(tmp_path / "data"))
    assert "the card does not name the data set" in done.output
    assert f"| Data set | not known (`{digest}`) |" in (tmp_path / "other" / "README.md").read_text()


@pytest.mark.parametrize("query", ["", "?signature=secret"])
def test_what_came_with_a_data_sets_tokenizer_comes_with_the_export(
    query: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    beside = {
        "tokenizer_config.json": json.dumps({"eos_token": END_OF_TEXT, "model_max_length": 99}).encode(),
        "special_tokens_map.json": json.dumps({"eos_token": END_OF_TEXT}).encode(),
        "chat_template.jinja": template.encode(),
        "generation_config.json": json.dumps({"temperature": 0.3, "do_sample": True}).encode(),
    }
    node, _ = trained(tmp_path / "node")
    digest = data_set(tmp_path / "data", tokenizer_json(VOCAB), VOCAB, beside)
    out = tmp_path / "out"
    with web_server(tmp_path / "data") as web:
        with_data(monkeypatch, DataSource(f"{web.url}/{query}", digest))
        assert call(node.state_dir, out).exit_code == 0
        tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
        assert tokenizer.model_max_length == 99
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "<hello>"
        generation = GenerationConfig.from_pretrained(out)
        assert (generation.temperature, generation.eos_token_id) == (0.3, 0)
        (tmp_path / "data" / "chat_template.jinja").write_text("another")
        assert "chat_template.jinja of data set tiny-text has the digest" in refusal(
            node.state_dir, tmp_path / "other"
        )


def test_a_tokenizers_folder_keeps_what_it_says_of_itself(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    node, _ = trained(tmp_path / "node")
    (theirs := tmp_path / "theirs").mkdir()
    (theirs / "tokenizer.json").write_bytes(tokenizer_json(VOCAB))
    (theirs / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    code = {"AutoTokenizer": ["mine.Tokenizer", None]}
    theirs_says = {
        "eos_token": {"__type": "AddedToken", "content": END_OF_TEXT},
        "model_max_length": 99,
        "auto_map": code,
    }
    (theirs / "tokenizer_config.json").write_text(json.dumps(theirs_says))
    (theirs / "weights.bin").write_text("not of a tokenizer")
    call(node.state_dir, tmp_path / "out", "--tokenizer", str(theirs))
    assert not (tmp_path / "out" / "weights.bin").exists()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert tokenizer.model_max_length == 99 and tokenizer.eos_token_id == 0
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hello!"
    assert "auto_map" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())


def test_a_tokenizer_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    node, out = filled(tmp_path / "node", 1), tmp_path / "out"
    (path := tmp_path / "tokenizer.json").write_bytes(tokenizer_json(VOCAB))
    assert "the tokenizer has 280 tokens, the model of run tiny only 64" in refusal(
        node.state_dir, out, "--tokenizer", str(path)
    )
    path.write_text("[]")
    assert "is not a JSON object" in refusal(node.state_dir, out, "--tokenizer", str(path))
    path.write_text("[" * 100_000)
    assert "is not JSON" in refusal(node.state_dir, out, "--tokenizer", str(path))
    endless = '{"model": {"vocab": {}}, "added_tokens": [{"content": "a", "id": 1e400}]}'
    for text in ('{"model": {"vocab": {}}}', endless):
        path.write_text(text)
        said = refusal(node.state_dir, out, "--tokenizer", str(path))
        assert "is not a tokenizer of the tokenizers library" in said
    assert "give a tokenizer.json" in refusal(node.state_dir, out, "--tokenizer", str(tmp_path / "none"))
    assert not out.exists()


def test_a_run_on_bytes_has_no_tokenizer_and_the_command_says_so(tmp_path: Path) -> None:
    node = filled(tmp_path / "node", 1)
    done = call(node.state_dir, tmp_path / "out", "--json")
    assert "no tokenizer is written: run tiny has data.kind=stdlib" in done.stderr
    said = json.loads(done.stdout)
    assert said["round"] == 1 and bytes.fromhex(said["state_digest"]) == node.outer.finalize()
    assert "a token is a byte of UTF-8" in (tmp_path / "out" / "README.md").read_text()


def record(round_: int, digest: str = "", void: bool = False, **tokens: float) -> str:
    said = {"round": round_, "epoch": 1, "contributors": tokens, "tokens": 100 * round_, "state_digest": digest}
    return json.dumps({**said, "val_loss": 2.5, "void": void})


def test_the_card_says_what_the_commit_records_know(tmp_path: Path) -> None:
    node, records, out = filled(tmp_path / "node", 5), tmp_path / "rounds.jsonl", tmp_path / "out"
    digest = node.outer.finalize().hex()
    lines = [record(4, aa=9000.0), record(4, void=True, bb=1.0), record(5, digest, aa=10.0, bb=990.0)]
    records.write_text("\n".join([*lines, record(6, cc=5.0)]) + "\n")
    call(node.state_dir, out, "--rounds", str(records))
    card = (out / "README.md").read_text()
    assert "| Tokens | 500 |" in card and "| Validation loss | 2.5000 nats a token |" in card
    assert f"| State digest | `{digest}`" in card and "| Rounds | 5 |" in card
    assert "| aa | 9,010 | 90.1 % |\n| bb | 990 | 9.9 % |\n\n" in card

    records.write_text(record(5, "00" * 16))
    said = refusal(node.state_dir, tmp_path / "other", "--rounds", str(records))
    assert "it is not the run's state" in said
    records.write_text("{")
    assert "has a line that is no commit record" in refusal(
        node.state_dir, tmp_path / "other", "--rounds", str(records)
    )
    assert not (tmp_path / "other").exists() and not list(tmp_path.glob("*.new"))


def test_without_commit_records_the_card_has_no_figures_of_another_round(tmp_path: Path) -> None:
    node, out = filled(tmp_path / "node", 5), tmp_path / "out"
    done = call(node.state_dir, out)
    assert "give --coordinator URL" in done.stderr
    facts = read_facts(out / "model.safetensors")
    assert facts["tokens_round"] != facts["round"] == "5", "the newest snapshot is of an earlier round"
    assert "| Rounds | 5 |" in (card := (out / "README.md").read_text()) and "| Tokens |" not in card


def test_the_card_names_what_the_run_began_with(tmp_path: Path) -> None:
    model = replace(TINY, max_positions=4096)

    def card(name: str, init_from: str, *arguments: str) -> tuple[str, str]:
        node = filled(tmp_path / name, 1, about=RunManifest(replace(RUN, model=model, init_from=init_from)))
        done = call(node.state_dir, tmp_path / f"{name}-out", *arguments)
        return (tmp_path / f"{name}-out" / "README.md").read_text(), done.stderr

    text, said = card("hub", "hf://reef/base@v1", "--license", "apache-2.0")
    assert 'base_model: "reef/base"\n' in text and "| Begun with | reef/base |" in text and "--base" not in said
    assert 'license: "apache-2.0"\n' in text
    assert "| Sequences | trained on 16 tokens each; the model takes up to 4,096 |" in text
    text, said = card("folder", "/home/ada/secret")
    assert "which have no public name" in text and "base_model" not in text and "give --base ORG/NAME" in said
    assert "secret" not in text
    text, said = card("named", "/home/ada/secret", "--base", "reef/base")
    assert 'base_model: "reef/base"\n' in text and "--base" not in said
    text, said = card("random", "")
    assert "Begun with" not in text and "--base" not in said
    node = filled(tmp_path / "node", 1)
    for option, value in (("--base", "base"), ("--license", "The Apache License\nx: y")):
        assert f"{option} is " in refusal(node.state_dir, tmp_path / "none", option, value)


def test_generation_ends_where_a_turn_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    node, _ = trained(tmp_path / "node")
    (theirs := tmp_path / "theirs").mkdir()
    chat = json.loads(tokenizer_json(VOCAB - 1))
    turn = {"id": VOCAB - 1, "content": "<|im_end|>", "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    chat["added_tokens"].append(turn | flags)
    (theirs / "tokenizer.json").write_text(json.dumps(chat))
    (theirs / "chat_template.jinja").write_text("{{ messages[0].content }}<|im_end|>")
    (theirs / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
    call(node.state_dir, tmp_path / "out", "--tokenizer", str(theirs))
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [0, VOCAB - 1]
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == END_OF_TEXT


def test_a_plugins_card_names_it_and_its_package() -> None:
    run = replace(RUN, model=replace(TINY, plugin="reef"), plugin_packages=["reef-models==1.2"])
    packages = folders.plugin_packages(run)
    state, model = StateFacts("r", "ab", 1, 2, 1), ModelFiles((), {}, False)
    facts = CardFacts(run, state, model, WeightDtype.BF16, 1, packages=packages)
    assert "the plugin reef (reef\\-models==1\\.2)" in card_text(facts)


def test_an_export_is_replaced_if_that_is_said_and_nothing_else_is(tmp_path: Path) -> None:
    node, out = filled(tmp_path / "node", 1), tmp_path / "out"
    call(node.state_dir, out, "--shard-size", "10KB")
    assert "is an export already: give --overwrite" in refusal(node.state_dir, out)
    assert call(node.state_dir, out, "--overwrite").exit_code == 0
    assert [path.name for path in out.glob("model*")] == ["model.safetensors"]
    (out / "thesis.tex").write_text("mine")
    assert "has thesis.tex, which no export writes" in refusal(node.state_dir, out, "--overwrite")
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    save_file({"weight": torch.ones(2)}, base / "model.safetensors")
    assert "is a model's folder that no export has written" in refusal(node.state_dir, base, "--overwrite")
    assert (base / "model.safetensors").exists()
    (tmp_path / "file").write_text("mine")
    assert "is not a folder" in refusal(node.state_dir, tmp_path / "file", "--overwrite")
    (tmp_path / "link").symlink_to(tmp_path / "node")
    assert "is not a folder" in refusal(node.state_dir, tmp_path / "link", "--overwrite")


def test_a_disk_without_room_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    node = filled(tmp_path / "node", 1)
    with pytest.raises(ResourceError, match="MB for it"):
        FolderExporter(node.state_dir, room=lambda _: 1000).export(tmp_path / "deep" / "out")
    assert not list((tmp_path / "deep").iterdir())


def test_an_export_that_is_told_to_end_leaves_nothing(tmp_path: Path) -> None:
    node = filled(tmp_path / "node", 1)
    program = (
        "import os, signal, sys\n"
        "import atoll.node.export.folder as folder\n"
        "folder._configs = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"  # when the weights are written
        "from atoll.node.export.command import export\n"
        "export(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(node.state_dir), "--out", str(tmp_path / "out")],
        capture_output=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as a shell's background job has it
    )
    assert done.returncode == 1 and b"Aborted" in done.stderr, done.stderr
    assert os.listdir(tmp_path) == ["node"]


def test_a_model_that_transformers_has_not_is_written_under_its_own_names(tmp_path: Path) -> None:
    about = RunManifest(replace(RUN, engine=Engine.TORCHTITAN, titan=TitanConfig(config="llama3_8b")))
    node = filled(tmp_path / "node", 1, about=about, layout=(("norm.weight", (50, 60)),))
    call(node.state_dir, tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["norm.weight"].dtype == torch.bfloat16
    card = (tmp_path / "out" / "README.md").read_text()
    assert "torchtitan's llama3\\_8b" in card and "library_name" not in card
    assert not (tmp_path / "out" / "generation_config.json").exists()


def test_adapters_are_written_as_peft_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = tuple(f"base_model.model.layers.{i}.q_proj.lora_{m}.weight" for i in range(2) for m in "AB")
    node = filled(tmp_path / "node", 1, layout=tuple((name, (8, 4)) for name in names))
    config = {"peft_type": "LORA", "base_model_name_or_path": "reef/base"}

    def adapters(saved: SavedRun, naming: TensorNaming) -> ModelFiles:
        return ModelFiles(saved.layout, config, True, "adapter_model", "adapter_config.json")

    monkeypatch.setattr(folders, "model_files", adapters)
    call(node.state_dir, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        *("README.md", "adapter_config.json", "adapter_model.safetensors")
    ]
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == set(names)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text()) == config
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: peft\n" in card and 'base_model: "reef/base"' in card
    assert (
        "AutoPeftModelForCausalLM" in card and "LoRA adapters with 128 parameters for reef/base, trained" in card
    )


def test_names_of_nodes_do_nothing_in_the_card(tmp_path: Path) -> None:
    from atoll.node.export.commit_records import CommitRecord, CommitRecords

    rounds = {1: CommitRecord(1, {"n1": 5.0, "n2": 4.0, "n3": 3.0})}
    records = CommitRecords(rounds, {"n1": "[x](http://evil)|<img>\n# head", "n2": "a" * 500})
    node = filled(tmp_path / "node", 1)
    FolderExporter(node.state_dir, records=lambda: records).export(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| \\[x\\]\\(http\\://evil\\)\\|\\<img\\> \\# head | 5 | 41.7 % |" in card
    hostile = CardFacts(
        replace(RUN, name="x\n---\n# run"),
        StateFacts("x\n# run", "ab", 1, 2, 1),
        ModelFiles((), {"architectures": ["A`\n# arch<img>"]}, True),
        WeightDtype.BF16,
        1,
    )
    lines = card_text(hostile).splitlines()[8:]  # behind the front matter
    assert not [line for line in lines if line.startswith(("---", "# run", "# arch"))]
    assert f"| {'a' * 80} | 4 |" in card and "| n3 | 3 | 25.0 % |" in card


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--every", "2"], "--every is for a folder"),
        (["--push", "me/model"], "--push is for a folder"),
        (["--tokenizer", "t"], "--tokenizer is for a folder"),
    ],
)
def test_a_single_file_takes_no_options_of_a_folder(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    assert sentence in refusal(tmp_path, tmp_path / "model.safetensors", *arguments)


def test_options_that_contradict_one_another_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "give --push ORG/NAME" in refusal(tmp_path, out, "--public")
    assert "give one" in refusal(tmp_path, out, "--rounds", "r", "--coordinator", "http://c")
    assert "write ORG/NAME" in refusal(tmp_path, out, "--push", "model")
    assert "write a number with KB, MB or GB" in refusal(tmp_path, out, "--shard-size", "much")
    assert [parse_size(t) for t in ("5GB", "1.5 mb", "10", "7B")] == [5 * 10**9, 1_500_000, 10, 7]
    node = filled(tmp_path / "node", 1)
    with pytest.raises(ConfigError, match="500 or fewer"):
        shapes = tuple((f"p{i:04d}", (4,)) for i in range(1000))
        split_into_files(shapes, WeightDtype.BF16, 8, "model")
    assert node.state_dir.is_dir()
    assert tokenizers.data_sources(RUN.data) == ()
    assert FolderOptions().shard_bytes == 5_000_000_000
