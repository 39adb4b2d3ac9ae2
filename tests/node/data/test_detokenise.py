"""A data set's tokens as text, by the tokenizer that it was built with."""

from pathlib import Path

import pytest
from corpora import InlinePool, built, jsonl, tokenizer_folder

from atoll.comm.config.data import DataConfig, DataKind
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.run import RunConfig
from atoll.comm.digest import digest
from atoll.node.config import NodeConfig
from atoll.node.data import build
from atoll.node.data.detokenise import NoText, detokeniser
from atoll.node.data.manifest import MANIFEST, TOKENIZER
from atoll.node.data.source import open_source


def test_tokens_of_a_data_set_are_its_text_and_none_with_another_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "TokeniserPool", InlinePool)
    texts = [f"document {i}: {'the cat sat on the mat. ' * 9} ç€😀 {i}" for i in range(60)]
    folder = tmp_path / "set"
    manifest = built(
        folder, [jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts])], tokenizer_folder(tmp_path / "tokens")
    )
    data = DataConfig(DataKind.DATASET, "s3://elsewhere/set", digest((folder / MANIFEST).read_bytes()).hex())
    run = RunConfig(data=data, model=ModelConfig(vocab_size=manifest.vocab_size, seq_len=16))
    source = open_source(run, NodeConfig(data=str(folder)), tmp_path / "cache")
    text = detokeniser(run, source)
    said = text(source.train(0).input_ids.tolist())
    assert len(said) > 16 and any(said.strip(" �") in t for t in texts), said
    (folder / TOKENIZER).write_bytes(b"{}")
    with pytest.raises(NoText, match="is not the one of its manifest"):
        detokeniser(run, source)
