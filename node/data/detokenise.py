"""Tokens as text, for people to read."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from atoll.comm.config.data import DataKind
from atoll.comm.config.run import RunConfig
from atoll.comm.digest import digest
from atoll.comm.errors import ConfigError
from atoll.node.data.dataset import DataSetSource
from atoll.node.data.fetch import FetchedSet
from atoll.node.data.manifest import TOKENIZER
from atoll.node.data.samples import Source
from atoll.node.data.store import StoreError
from atoll.node.data.tokenizer_files import MAX_FILE_BYTES, load_tokenizer

Detokeniser = Callable[[Sequence[int]], str]


class NoText(Exception):
    """Tokens that this node cannot read as text; a sentence."""


def detokeniser(run: RunConfig, source: Source) -> Detokeniser:
    """What makes text of a run's tokens. Raises `NoText` where they are a plugin's or a script's own, this node
    lacks the package `tokenizers`, or the data set's store does not give its tokenizer."""
    if isinstance(source, DataSetSource):
        if find_spec("tokenizers") is None:
            raise NoText("the package tokenizers is not installed (the extra text)")
        return _of_data_set(source.fetcher.sets[0])
    if run.data.kind not in (DataKind.STDLIB, DataKind.BYTES):
        raise NoText(f"nobody knows how tokens of data.kind={run.data.kind} are read")
    return _of_bytes


def _of_bytes(tokens: Sequence[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def _of_data_set(data_set: FetchedSet) -> Detokeniser:
    try:
        content = data_set.store.read_whole(TOKENIZER, MAX_FILE_BYTES)
        if digest(content).hex() != data_set.manifest.tokenizer:
            raise NoText(f"{TOKENIZER} of {data_set.manifest.name} is not the one of its manifest")
        tokenizer = load_tokenizer(content)
    except (StoreError, ConfigError) as error:
        raise NoText(str(error)) from None

    def text(tokens: Sequence[int]) -> str:
        found: str = tokenizer.decode([*tokens], skip_special_tokens=False)
        return found

    return text
