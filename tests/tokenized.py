"""A tiny tokenizer as a tokenizer.json, and a data set that names it."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from atoll.comm.digest import digest
from atoll.node.data.manifest import MANIFEST, TOKENIZER, Manifest, Shard

TEXT = "a model trains here and there; there a model is averaged, d\u00e9j\u00e0 vu"
END_OF_TEXT = "<|end|>"


def tokenizer_json(vocab_size: int) -> bytes:
    """A byte-level BPE tokenizer with 256 bytes, `END_OF_TEXT` and some merges: `vocab_size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 10, trainer)
    text: str = tokenizer.to_str()
    return text.encode()


def data_set(folder: Path, tokenizer: bytes, vocab_size: int, beside: dict[str, bytes] | None = None) -> str:
    """Write the manifest and the tokenizer of a data set to `folder`, with the files `beside` it by their names;
    returns the manifest's digest."""
    folder.mkdir(parents=True)
    shard = Shard("train-00000", "train", 1, 8, "0" * 32)
    end_of_text = 0  # special tokens come first
    manifest = Manifest(
        *(1, "tiny-text", "uint16", 8, vocab_size, end_of_text, digest(tokenizer).hex(), False, 1, (shard,)),
        tokenizer_files={name: digest(data).hex() for name, data in (beside or {}).items()},
    )
    for name, data in (beside or {}).items():
        (folder / name).write_bytes(data)
    (folder / TOKENIZER).write_bytes(tokenizer)
    (folder / MANIFEST).write_bytes(manifest.encode())
    return digest(manifest.encode()).hex()
