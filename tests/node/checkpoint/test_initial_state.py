"""What a run can begin with is what it was, bit for bit, or is refused with a sentence."""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from formats import to_checkpoint_1, to_snapshot_1
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from states import MARK, RUN, TINY, Node, filled, layout_for
from torch import Tensor

from atoll.comm.config.model import ModelConfig
from atoll.comm.errors import ConfigError, ResourceError
from atoll.node.checkpoint import saved_run, snapshots
from atoll.node.checkpoint.initial_state import InitialState, InitialStateLoader
from atoll.node.checkpoint.remote_store import (
    ANCHOR,
    MANIFEST,
    MOMENTUM,
    CheckpointFacts,
    RemoteStore,
    StatePiece,
    folder_of,
)
from atoll.node.checkpoint.run_manifest import RunManifest
from atoll.node.export import single_file as export
from atoll.node.export.model_files import TensorNaming

F32 = NDArray[np.float32]
WIDE = replace(TINY, ffn_dim=64)


def loaded(url: str, momentum: bool = True, model: ModelConfig = TINY) -> tuple[InitialState, F32, F32]:
    layout = layout_for(model)
    vectors = np.zeros((2, sum(int(np.prod(shape)) for _, shape in layout)), np.float32)
    shares = list[float]()
    begun = InitialStateLoader(layout, model, vectors[0], vectors[1], shares.append).load(str(url), momentum)
    assert shares[-1] == 1.0
    return begun, vectors[0], vectors[1]


def stored(node: Node, store: str, round_: int) -> Path:
    """The state of a round as a checkpoint; its folder."""
    kept = saved_run.open_run(node.folder)
    assert kept is not None
    there = RemoteStore(folder_of(store, RUN.name, MARK.hex()))
    facts = CheckpointFacts(RUN.name, kept.run_id, round_, 0, round_, kept.chunks, kept.layout)
    there.write(facts, (StatePiece(*found[1:]) for found in saved_run.replay_state(kept, round_)), lambda _: None)
    return Path(there.path, f"round-{round_:012d}")


@pytest.mark.parametrize("up", [0, 1, 2], ids=["checkpoint", "run", "store"])
def test_a_checkpoint_comes_back_with_anchor_and_momentum_as_they_were(up: int, tmp_path: Path) -> None:
    node = filled(tmp_path / "node", 5)
    anchor, momentum = node.outer.vectors.anchor, node.outer.vectors.momentum
    stored(node, f"file://{tmp_path}/store", 4)
    folder = stored(node, f"file://{tmp_path}/store", 5)
    begun, a, m = loaded(f"file://{[folder, *folder.parents][up]}")
    assert begun == InitialState("the checkpoint of round 5 of run tiny, with its momentum", True)
    assert a.tobytes() == anchor.tobytes() and m.tobytes() == momentum.tobytes()
    begun, a, m = loaded(str(folder), momentum=False)
    assert not begun.momentum and a.tobytes() == anchor.tobytes() and not m.any()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("naming", TensorNaming)
def test_what_export_writes_comes_back(naming: TensorNaming, tied: bool, tmp_path: Path) -> None:
    run = replace(RUN, model=replace(TINY, tied_head=tied))
    node = filled(tmp_path / "node", 3, about=RunManifest(run))
    out = tmp_path / "model.safetensors"
    export.export(node.state_dir, out, naming)
    for url in (out, tmp_path, f"file://{out}"):
        begun, anchor, momentum = loaded(str(url), model=run.model)
        assert anchor.tobytes() == node.anchor().tobytes()
        assert not begun.momentum and not momentum.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_in_half_precision_are_widened_and_a_tied_head_may_be_there(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    node = filled(tmp_path / "node", 1)
    out = tmp_path / "model.safetensors"
    export.export(node.state_dir, out, TensorNaming.LLAMA)
    half = {name: tensor.to(dtype) for name, tensor in load_file(out).items()}
    save_file({**half, "lm_head.weight": half["model.embed_tokens.weight"].clone()}, out)
    export.export(node.state_dir, tmp_path / "names" / "model.safetensors", TensorNaming.NAMES)
    ours = load_file(tmp_path / "names" / "model.safetensors")
    expected = torch.cat([ours[name].to(dtype).float().flatten() for name, _ in layout_for(TINY)])
    assert loaded(str(out))[1].tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize("name", ["snapshot-000000000003.safetensors", "the-model-that-i-like.safetensors"])
def test_a_snapshot_of_a_nodes_disk_comes_back(name: str, tmp_path: Path) -> None:
    node = filled(tmp_path / "node", 3)  # which takes one after the third round
    [path] = node.folder.glob("snapshot-*3.safetensors")
    path = path.rename(tmp_path / name)
    begun, anchor, momentum = loaded(str(path))
    assert begun.momentum and "round 3" in begun.what
    assert anchor.tobytes() == node.outer.vectors.anchor.tobytes()
    assert momentum.tobytes() == node.outer.vectors.momentum.tobytes()
    flip(path, -9)
    with pytest.raises(ConfigError, match=r"chunk \d+ is damaged"):
        loaded(str(path))


def test_a_snapshot_of_another_format_is_refused_by_its_name(tmp_path: Path) -> None:
    (path,) = filled(tmp_path / "node", 3).folder.glob("snapshot-*3.safetensors")
    to_snapshot_1(path)
    sentence = "of the format 'atoll snapshot 1'.* with the version that wrote it"
    with pytest.raises(ConfigError, match=sentence) as told:
        loaded(str(path))
    assert "damaged" not in str(told.value)


def test_a_checkpoint_of_another_format_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = stored(filled(tmp_path / "node", 1), f"file://{tmp_path}/store", 1)
    to_checkpoint_1(folder / MANIFEST)
    with pytest.raises(ConfigError, match=f"of the format 'atoll checkpoint 1'.* give {folder}/{ANCHOR}") as told:
        loaded(str(folder))
    assert "damaged" not in str(told.value)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def headed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def without(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda t: without(t, "norm.weight"), "it lacks norm.weight of the model's 20 tensors"),
        (lambda t: {**t, "bias": torch.zeros(3)}, "it has bias, which the model has not"),
        (
            lambda t: {**t, "norm.weight": torch.zeros(31)},
            r"norm.weight has the shape \(31,\), the model's is \(32,\)",
        ),
        (lambda t: {**t, "norm.weight": torch.full((32,), torch.nan)}, "norm.weight holds NaN or infinity"),
        (lambda t: {**t, "norm.weight": torch.full((32,), torch.inf)}, "norm.weight holds NaN or infinity"),
        (lambda t: {**t, "norm.weight": torch.zeros(32, dtype=torch.int32)}, "norm.weight is of I32"),
    ],
)
def test_weights_of_another_model_are_refused(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], why: str, tmp_path: Path
) -> None:
    node, out = filled(tmp_path / "node", 1), tmp_path / "model.safetensors"
    export.export(node.state_dir, out, TensorNaming.NAMES)
    save_file(change(load_file(out)), out)
    with pytest.raises(ConfigError, match=f"the run cannot begin with init_from={out}: {why}"):
        loaded(str(out))


def test_hugging_faces_names_of_a_model_that_is_not_the_runs_own_are_told_from_others(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(2), "lm_head.weight": torch.ones(2)}, tmp_path / "hf.safetensors")
    vectors = np.zeros((2, 2), np.float32)
    loading = InitialStateLoader((("norm.weight", (2,)),), None, vectors[0], vectors[1])
    with pytest.raises(ConfigError, match="titan_weights from-hf makes a file to begin with"):
        loading.load(str(tmp_path / "hf.safetensors"), True)


@pytest.mark.parametrize("name", [ANCHOR, MOMENTUM, MANIFEST])
def test_a_checkpoint_that_was_changed_or_cut_is_refused(name: str, tmp_path: Path) -> None:
    folder = stored(filled(tmp_path / "node", 2), str(tmp_path / "store"), 2)
    whole = (folder / name).read_bytes()
    if name == MANIFEST:
        manifest = json.loads(whole)
        (folder / name).write_text(json.dumps({**manifest, "state_digest": "0" * 32}))
        with pytest.raises(ConfigError, match=f"the state's digest is {manifest['state_digest']}, not 0000"):
            loaded(str(folder))
    else:
        flip(folder / name, -3)
        with pytest.raises(ConfigError, match=f"the digest of {folder / name} is .*, which {MANIFEST} has"):
            loaded(str(folder))
    (folder / name).write_bytes(whole[:-5])
    with pytest.raises(ConfigError, match="damaged|bytes, .* were written"):
        loaded(str(folder))
    (folder / name).unlink()
    if name == MANIFEST:
        assert loaded(str(folder))[0].what.startswith("the weights in ")
    else:
        with pytest.raises(ResourceError, match="FileNotFoundError"):
            loaded(str(folder))
    (folder / name).write_bytes(whole)
    with pytest.raises(ConfigError, match="has the shape"):
        loaded(str(folder), model=WIDE)


@pytest.mark.parametrize(
    "data, why",
    [
        (b"", "it ends too early"),
        (struct.pack("<Q", 1 << 60) + b"{}", f"its header would have {1 << 60} bytes"),
        (struct.pack("<Q", 2) + b"{]", "its header is damaged"),
        (struct.pack("<Q", 2) + b"[]", "its header is damaged"),
        (struct.pack("<Q", 2) + b"{}" + b"0000", "has 4 bytes of tensors, its header says 0"),
        (
            struct.pack("<Q", 62) + b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4]}}'[:62],
            "damaged",
        ),
        (headed(b"[" * 100_000), "its header is damaged"),
        (headed(b'{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}'), "its header is damaged"),
        (headed(b'{"a":{"dtype":"F32","shape":[%s9],"data_offsets":[0,4]}}' % (b"9," * 10**6)), "is damaged"),
        (struct.pack("<Q", 56) + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}  0000', "is not where"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(data: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    assert snapshots.describe(path) is None
    with pytest.raises(ConfigError, match=why):
        loaded(str(path))


@pytest.mark.parametrize("up", [0, 1], ids=["checkpoint", "run"])
def test_a_checkpoint_within_another_file_comes_back(up: int, tmp_path: Path) -> None:
    """Where the store is more than its protocol: an archive, or a server."""
    node = filled(tmp_path / "node", 5)
    folder = stored(node, f"file://{tmp_path}/store", 5)
    archive = shutil.make_archive(str(tmp_path / "runs"), "zip", tmp_path / "store")
    inside = [folder, *folder.parents][up].relative_to(tmp_path / "store")
    begun, a, _ = loaded(f"zip://{inside}::file://{archive}")
    assert begun.momentum and a.tobytes() == node.outer.vectors.anchor.tobytes()


def test_the_newest_checkpoint_is_none_that_was_put_aside_under_another_name(tmp_path: Path) -> None:
    node = filled(tmp_path / "node", 5)
    older = stored(node, f"file://{tmp_path}/store", 4)
    newest = stored(node, f"file://{tmp_path}/store", 5)
    for name in (f"{older.name}-copy2", "round-best"):
        shutil.copytree(older, older.with_name(name))
    for folder in (newest.parent, newest.parent.parent):
        assert "round 5" in loaded(str(folder))[0].what
    assert "round 4" in loaded(str(older.with_name("round-best")))[0].what


def test_what_cannot_be_read_or_is_ambiguous_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"FileNotFoundError.*the first node to join has to read it"):
        loaded(f"{tmp_path}/absent.safetensors")
    with pytest.raises(ConfigError, match=f"neither {MANIFEST}, nor round-"):
        loaded(str(tmp_path))
    for run in ("a-1", "b-2"):
        (tmp_path / run / "round-1").mkdir(parents=True)
        (tmp_path / run / "round-1" / MANIFEST).write_text("{}")
    with pytest.raises(ConfigError, match="checkpoints of 2 runs: give the folder of one of a-1, b-2"):
        loaded(str(tmp_path))
