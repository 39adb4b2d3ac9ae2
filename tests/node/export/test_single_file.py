"""What `atoll export` writes is the state of a round, and loads without Atoll."""

import asyncio
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from formats import to_snapshot_1
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from states import MARK, RUN, TINY, Node, filled, layout_for

from atoll.comm.config.engine import Engine, TitanConfig
from atoll.comm.config.model import ModelConfig
from atoll.comm.errors import AtollError, ConfigError, ResourceError
from atoll.node.checkpoint import saved_run
from atoll.node.checkpoint.initial_state import InitialStateLoader
from atoll.node.checkpoint.run_manifest import RunManifest, path_of
from atoll.node.export import single_file
from atoll.node.export.command import export
from atoll.node.export.model_files import TensorNaming
from atoll.node.trainer.model import build, init_parameters


def call(node: Path, out: Path, *arguments: str) -> Result:
    result = CliRunner().invoke(export, [str(node), "--out", str(out), *arguments])
    assert result.exception is None or isinstance(result.exception, AtollError), result.output
    return result


def refusal(node: Path, out: Path, *arguments: str) -> AtollError:
    said = call(node, out, *arguments).exception
    assert isinstance(said, AtollError)
    return said


def flat(path: Path) -> bytes:
    return b"".join(tensor.tobytes() for _, tensor in sorted(load_file(path).items()))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def contents(folder: Path) -> dict[str, str]:
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_the_newest_state_is_written_bit_for_bit_and_the_state_directory_stays_as_it_was(tmp_path: Path) -> None:
    node = filled(tmp_path / "node", 5)  # the snapshot is of round 3
    half_written = node.folder / "snapshot-000000000006.safetensors.new"
    half_written.write_bytes(b"half: the daemon is at it")
    before, out = contents(tmp_path), tmp_path / "model.safetensors"
    assert "round 5" in call(node.state_dir, out).output
    assert {k: v for k, v in contents(tmp_path).items() if k in before} == before
    assert flat(out) == node.anchor().tobytes()
    with safe_open(out, framework="pt") as file:
        said = file.metadata()
    assert {k: said[k] for k in ("format", "run", "round")} == {"format": "pt", "run": "tiny", "round": "5"}
    assert (said["tokens"], said["tokens_round"]) == ("30", "3")
    assert bytes.fromhex(said["state_digest"]) == node.outer.finalize(), "as the commit record has it"
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["round"] == "5" and ModelConfig(**config["model"]) == TINY


def test_the_model_that_was_trained_loads_it_by_name(tmp_path: Path) -> None:
    node = filled(tmp_path / "node", 1)
    call(node.state_dir, tmp_path / "model.safetensors")
    model = build(TINY)
    model.load_state_dict(load_tensors(tmp_path / "model.safetensors"))
    loaded = torch.cat([parameter.detach().flatten() for _, parameter in sorted(model.named_parameters())])
    assert np.array_equal(loaded.numpy(), node.anchor())


def test_what_is_damaged_is_made_up_for_or_ends_the_tail(tmp_path: Path) -> None:
    node = Node(tmp_path / "node")
    asyncio.run(node.commit(*range(4)))
    third = node.anchor()
    asyncio.run(node.commit(4))
    fourth = node.anchor()
    asyncio.run(node.commit(5))
    [newest, oldest] = sorted(node.folder.glob("snapshot-*"), reverse=True)
    out = tmp_path / "model.safetensors"
    flip(node.folder / "sealed-000000000005", -1)
    call(node.state_dir, out)
    assert flat(out) == fourth.tobytes()
    flip(newest, -4 * node.chunks.numel - 3)  # of the anchor; the one before has the chunk
    call(node.state_dir, out, "--overwrite")
    assert flat(out) == fourth.tobytes()
    flip(node.folder / "sealed-000000000004", -1)
    call(node.state_dir, out, "--overwrite")
    assert flat(out) == third.tobytes()
    flip(oldest, -4 * node.chunks.numel - 3)
    said = refusal(node.state_dir, out, "--overwrite")
    assert isinstance(said, ResourceError) and "is damaged or gone" in str(said)
    assert flat(out) == third.tobytes(), "what was there stays"
    assert not list(tmp_path.glob("*.new"))


def test_files_that_the_daemon_replaces_meanwhile_are_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = filled(tmp_path / "node", 5)
    look, looked = saved_run.open_run, list[Any]()

    def looking(folder: Path) -> Any:
        looked.append(look(folder))
        if len(looked) == 1:
            asyncio.run(node.commit(*range(6, 20)))  # nothing of what was found is left
        return looked[-1]

    monkeypatch.setattr(saved_run, "open_run", looking)
    call(node.state_dir, tmp_path / "model.safetensors")
    assert flat(tmp_path / "model.safetensors") == node.anchor().tobytes()


def no_snapshot(folder: Path) -> None:
    (folder / "outer" / MARK.hex()).mkdir(parents=True)


def coordinators(folder: Path) -> None:
    folder.mkdir()
    (folder / "journal.sqlite").touch()


def damaged(folder: Path) -> None:
    for path in filled(folder, 1).folder.glob("snapshot-*"):
        path.write_bytes(path.read_bytes()[:100])


def of_format_1(folder: Path) -> None:
    for path in filled(folder, 1).folder.glob("snapshot-*"):
        to_snapshot_1(path)


def unknown(folder: Path) -> None:
    path_of(filled(folder, 1).folder).unlink()


def two_runs(folder: Path) -> None:
    filled(folder, 1)
    filled(folder, 2, about=RunManifest(replace(RUN, name="other")), mark=b"s" * 16)


@pytest.mark.parametrize(
    "prepare, kind, sentence",
    [
        (lambda folder: None, ConfigError, "there is no state directory"),
        (coordinators, ConfigError, "a coordinator's"),
        (no_snapshot, ResourceError, "no snapshot"),
        (damaged, ResourceError, "can be read"),
        (of_format_1, ResourceError, "'atoll snapshot 1'"),
        (unknown, ResourceError, "can be read"),
        (two_runs, ConfigError, "tiny (72727272, round 1), other (73737373, round 2): say which; give --run"),
    ],
    ids=["absent", "coordinator", "no snapshot", "damaged", "of format 1", "unknown", "two runs"],
)
def test_a_state_directory_without_a_model_is_refused(
    tmp_path: Path, prepare: Callable[[Path], None], kind: type[AtollError], sentence: str
) -> None:
    prepare(tmp_path / "node")
    said = refusal(tmp_path / "node", tmp_path / "model.safetensors")
    assert type(said) is kind and sentence in str(said)
    assert not (tmp_path / "model.safetensors").exists()


def test_one_of_several_runs_is_chosen_by_name(tmp_path: Path) -> None:
    two_runs(tmp_path / "node")
    assert "run other, round 2" in call(tmp_path / "node", tmp_path / "m.safetensors", "--run", "other").output
    assert "0 of them are 'third'" in str(
        refusal(tmp_path / "node", tmp_path / "n" / "m.safetensors", "--run", "third")
    )


def test_of_runs_that_share_a_name_the_newest_is_named_by_its_id(tmp_path: Path) -> None:
    filled(tmp_path / "node", 1)
    filled(tmp_path / "node", 2, mark=b"s" * 16)
    out = tmp_path / "m.safetensors"
    for seconds, newest in ((1e9, "72727272"), (3e9, "73737373")):
        for path in (tmp_path / "node" / "outer" / ("73" * 16)).glob("snapshot-*"):
            os.utime(path, (seconds, seconds))
        for given in ((), ("--run", "tiny")):
            assert f"`--run {newest}` is the newest" in str(refusal(tmp_path / "node", out, *given))
    assert "run tiny, round 2" in call(tmp_path / "node", out, "--run", "73737373").output


def test_nothing_is_overwritten_unless_told(tmp_path: Path) -> None:
    node = filled(tmp_path / "node", 1)
    (tmp_path / "config.json").write_text("mine")
    said = refusal(node.state_dir, tmp_path / "model.safetensors")
    assert isinstance(said, ConfigError) and "config.json exists: give --overwrite" in str(said)
    assert call(node.state_dir, tmp_path / "model.safetensors", "--overwrite").exit_code == 0
    assert "model.safetensors exists" in str(refusal(node.state_dir, tmp_path / "model.safetensors"))
    (tmp_path / "folder.safetensors").mkdir()
    assert "is a folder" in str(refusal(node.state_dir, tmp_path / "folder.safetensors"))


def test_a_folder_that_is_no_nodes_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    said = refusal(tmp_path / "thesis", tmp_path / "model.safetensors")
    assert isinstance(said, ConfigError) and "is no node's state directory" in str(said)


def test_exports_of_other_names_each_have_their_own_config(tmp_path: Path) -> None:
    node, other = filled(tmp_path / "node", 1), replace(TINY, norm_eps=1e-3)
    another = filled(tmp_path / "another", 1, about=RunManifest(replace(RUN, model=other)))
    call(node.state_dir, tmp_path / "one.safetensors")
    call(another.state_dir, tmp_path / "two.safetensors")
    assert {path.name for path in tmp_path.glob("*.json")} == {"one.config.json", "two.config.json"}
    anchor, momentum = np.zeros((2, TINY.n_params), np.float32)
    layout = layout_for(TINY)
    InitialStateLoader(layout, TINY, anchor, momentum).load(str(tmp_path / "one.safetensors"), True)
    assert anchor.tobytes() == node.anchor().tobytes()
    with pytest.raises(ConfigError, match="two.config.json says norm_eps"):
        InitialStateLoader(layout, TINY, anchor, momentum).load(str(tmp_path / "two.safetensors"), True)


def test_a_disk_without_room_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    node, out = filled(tmp_path / "node", 1), tmp_path / "out" / "model.safetensors"
    with pytest.raises(ResourceError, match="MB for it"):
        single_file.export(node.state_dir, out, TensorNaming.NAMES, room=lambda _: 1000)
    assert not list(out.parent.iterdir())


def test_a_volunteers_own_model_has_no_llama_layout(tmp_path: Path) -> None:
    about, out = RunManifest(RUN, "my.module:make"), tmp_path / "model.safetensors"
    node = filled(tmp_path / "node", 1, about=about, layout=(("a", (50, 60)), ("b", (20,))))
    assert "model of its own (model=my.module:make)" in str(refusal(node.state_dir, out, "--layout", "llama"))
    assert call(node.state_dir, out).exit_code == 0
    assert load_file(out)["a"].shape == (50, 60)
    assert json.loads((tmp_path / "config.json").read_text())["build"] == "my.module:make"


def test_a_model_of_torchtitans_goes_to_hugging_face_by_torchtitans_own_adapter(tmp_path: Path) -> None:
    titan = TitanConfig(config="llama3_8b", settings=["--training.local_batch_size=1"])
    about, out = RunManifest(replace(RUN, engine=Engine.TORCHTITAN, titan=titan)), tmp_path / "model.safetensors"
    node = filled(tmp_path / "node", 1, about=about, layout=(("norm.weight", (50, 60)),))
    said = str(refusal(node.state_dir, out, "--layout", "llama"))
    assert "titan_weights to-hf MODEL.safetensors FOLDER --module llama3 --config llama3_8b" in said
    assert call(node.state_dir, out).exit_code == 0
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["engine"] == "torchtitan" and config["model"] == asdict(titan)


def test_parameters_that_are_not_the_models_are_no_llama(tmp_path: Path) -> None:
    node = filled(tmp_path / "node", 1, layout=(*layout_for(TINY)[:-1], ("norm.weight", (16,))))
    out = tmp_path / "model.safetensors"
    assert "(norm.weight differs)" in str(refusal(node.state_dir, out, "--layout", "llama"))
    other = refusal(node.state_dir, out.with_name("x.safetensors"), "--layout", "llama")
    assert "transformers looks for model.safetensors" in str(other)


@pytest.mark.parametrize(
    "model",
    [
        TINY,
        replace(TINY, kv_heads=2, tied_head=False, rope_base=500.0, norm_eps=1e-3),
    ],
    ids=["tied", "untied, grouped queries"],
)
def test_transformers_loads_the_llama_layout_and_computes_the_same_logits(
    tmp_path: Path, model: ModelConfig
) -> None:
    from transformers import LlamaForCausalLM

    ours = build(model)
    init_parameters(ours, seed=1)
    node, folder = Node(tmp_path / "node", RunManifest(replace(RUN, model=model))), tmp_path / "llama"
    parts = [parameter.detach().flatten() * 5 for _, parameter in sorted(ours.named_parameters())]
    node.outer.vectors.anchor[:] = torch.cat(parts).numpy()  # five times: attention is then far from uniform
    node.outer.initialise()

    async def keep() -> None:
        node.disk.finalized(0, 0)
        await node.disk.wait_idle()

    asyncio.run(keep())
    assert call(node.state_dir, folder / "model.safetensors", "--layout", "llama").exit_code == 0
    for parameter in ours.parameters():
        parameter.data *= 5
    theirs, notes = LlamaForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"] and not notes["mismatched_keys"]
    tokens = torch.randint(0, model.vocab_size, (2, model.seq_len), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = ours(tokens), theirs(tokens).logits
    assert found.dtype == torch.float32 and expected.abs().max() > 1
    assert (found - expected).abs().max() < 1e-4
