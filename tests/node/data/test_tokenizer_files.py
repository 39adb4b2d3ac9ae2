"""The token behind each document: told by its name, by tokenizer_config.json, or by whoever builds."""

import json
from pathlib import Path

import pytest
from corpora import byte_tokenizer
from tokenizers import Tokenizer, models

from atoll.comm.errors import ConfigError
from atoll.node.data.tokenizer_files import (
    TokenizerFiles,
    end_of_text_of,
    load_plain,
    load_tokenizer,
    read_tokenizer_files,
    vocabulary_size,
)


def tokenizer(*tokens: str) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.add_special_tokens(list(tokens))
    return made


def files(eos: object = None) -> TokenizerFiles:
    return TokenizerFiles(b"", {"tokenizer_config.json": json.dumps({"eos_token": eos}).encode()})


@pytest.mark.parametrize(
    ("tokens", "eos", "given", "end"),
    [
        (("<s>", "</s>"), None, "", "</s>"),
        (("<|endoftext|>", "<|im_end|>"), "<|im_end|>", "", "<|endoftext|>"),  # Qwen's instruct models
        (("<|endoftext|>", "</s>"), "</s>", "", "</s>"),
        (("<x>", "<y>"), {"content": "<y>"}, "", "<y>"),
        (("<x>", "<|endoftext|>"), None, "<x>", "<x>"),
    ],
)
def test_the_end_of_text_is_told(tokens: tuple[str, ...], eos: object, given: str, end: str) -> None:
    assert end_of_text_of(tokenizer(*tokens), files(eos), given) == end


def test_an_end_of_text_that_cannot_be_told_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="it has none of the usual names: say --end-of-text"):
        end_of_text_of(tokenizer("<x>"), files("<gone>"), "")
    with pytest.raises(ConfigError, match=r"it has <\|endoftext\|> and </s>: say --end-of-text"):
        end_of_text_of(tokenizer("</s>", "<|endoftext|>"), files(), "")


def test_a_tokenizer_that_cuts_or_pads_does_neither_here(tmp_path: Path) -> None:
    made = byte_tokenizer()
    made.enable_truncation(4)
    made.enable_padding(length=64)
    loaded = load_plain(made.to_str().encode(), "<|endoftext|>")
    assert loaded.decode(loaded.encode("a text of some length").ids) == "a text of some length"
    assert vocabulary_size(loaded) == vocabulary_size(made)


def test_ids_with_gaps_are_counted_to_the_largest() -> None:
    made = Tokenizer(models.WordLevel({"a": 0, "b": 77}, "a"))
    assert vocabulary_size(made) == 78


def test_files_beside_the_tokenizer_come_along_and_what_is_none_is_refused(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    for place in (tmp_path, tmp_path / "tokenizer.json", f"file://{tmp_path}"):
        assert set(read_tokenizer_files(str(place)).beside) == {"generation_config.json"}
    (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    assert read_tokenizer_files(str(tmp_path / "other.json")).beside == {}
    with pytest.raises(ConfigError, match="there is no tokenizer.json"):
        read_tokenizer_files(str(tmp_path))
    with pytest.raises(ConfigError, match="tokenizer.json is not a tokenizer's"):
        load_tokenizer(b"{}")
    with pytest.raises(ConfigError, match="tokenizer_config.json is damaged"):
        TokenizerFiles(b"", {"tokenizer_config.json": b"["}).special_token("eos_token")
