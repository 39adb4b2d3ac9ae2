"""Small tokenizers and texts for the tests of data sets."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from atoll.node.data.build import BuildOptions, BuildProgress, build
from atoll.node.data.destination import Destination
from atoll.node.data.manifest import Manifest
from atoll.node.data.reader import DataSetReader
from atoll.node.data.sources import find_sources
from atoll.node.data.tokenise import Tokeniser, TokeniserConfig
from atoll.node.data.tokenizer_files import read_tokenizer_files

END = "<|endoftext|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAMPLE = "the cat sat on the mat and the dog lay by the door; what then, said the cat to the dog\n" * 4


def byte_tokenizer(*special: str | AddedToken) -> Tokenizer:
    """A byte-level BPE with a few merges; END is token 0, then the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[END, *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE], trainer)
    return tokenizer


def tokenizer_folder(folder: Path, template: str = "") -> Path:
    """A folder as Hugging Face has them, with a tokenizer for ChatML."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [AddedToken(name, special=True, normalized=False) for name in ("<|im_start|>", "<|im_end|>")]
    byte_tokenizer(*tokens).save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": template or CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def jsonl(path: Path, records: Sequence[object]) -> Path:
    """A file with a record a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


class InlinePool:
    """A pool without processes."""

    def __init__(self, config: TokeniserConfig, count: int) -> None:
        self._tokeniser = Tokeniser(config)

    def __enter__(self) -> "InlinePool":
        return self

    def __exit__(self, *_: object) -> None: ...

    def tokenise(self, units):  # type: ignore[no-untyped-def]
        for read in units:
            yield read, self._tokeniser(read.unit)


def built(
    out: Path | str,
    sources: Sequence[Path | str],
    tokenizer: Path,
    show: object = None,
    workers: int = 1,
    **options: object,
) -> Manifest:
    """Build a data set of small blocks."""
    settings = BuildOptions(
        read_tokenizer_files(str(tokenizer)),
        **{"block_tokens": 64, "shard_blocks": 16, "validation_every": 5, **options},  # type: ignore[arg-type]
    )
    arguments = [str(source) for source in sources]
    found = find_sources(arguments, settings.chat)

    def ignore(progress: BuildProgress) -> None: ...

    return build(Destination(str(out)), arguments, found, settings, workers, show or ignore)  # type: ignore[arg-type]


def content(out: Path | str, slice_name: str) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]]:
    """The tokens of a slice, where documents begin, and what is to be learned, without padding."""
    reader = DataSetReader(str(out))
    manifest = reader.manifest()
    parts = []
    for shard in manifest.slice(slice_name):
        digests, left = reader.digests(shard), shard.tokens
        for block in reader.blocks(manifest, shard, digests, 0, shard.blocks):
            found, size = manifest.format.decode(block), min(left, manifest.block_tokens)
            parts.append((found.tokens[:size].astype(np.int64), found.begins[:size], found.learned[:size]))
            left -= size
    tokens, begins, learned = (np.concatenate(column) for column in zip(*parts, strict=True))
    return tokens, begins, learned


def files(folder: Path) -> dict[str, bytes]:
    """The content of a folder's files by name."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}
