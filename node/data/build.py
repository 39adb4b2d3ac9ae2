"""`atoll data build`: documents of the sources become token shards and a manifest (`atoll.node.data.manifest`).

    sources -> units (this process) -> tokens (one process a core) -> blocks and shards (this process) -> store

The same sources, tokenizer and options give the same bytes, however many processes tokenise and however often the
build is killed: after each finished shard, and every half minute, `build.json` says behind which unit the input
stands and what of the open blocks is there, and a build that finds it goes on from it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np

from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.digest import digest
from atoll.comm.errors import AtollError, ConfigError, ResourceError
from atoll.comm.terminal import plural
from atoll.node.data.destination import Destination
from atoll.node.data.manifest import (
    DTYPES,
    TOKENIZER,
    TRAIN,
    VALIDATION,
    VERSION,
    BlockFormat,
    Manifest,
    Shard,
    Skipped,
)
from atoll.node.data.shards import SUFFIXES, SliceState, SliceWriter
from atoll.node.data.sources import Source, SourceFile, describe, listing_digest, name_of
from atoll.node.data.tokenise import TokenisedUnit, TokeniserConfig
from atoll.node.data.tokeniser_pool import TokeniserPool
from atoll.node.data.tokenizer_files import TokenizerFiles, end_of_text_of, load_tokenizer, vocabulary_size
from atoll.node.data.units import Position, read_units

SAVE_INTERVAL = 30.0  # seconds between two states on the disk, where no shard is finished
MAX_EXAMPLES = 100  # of records left out, that the manifest names
SLICES = (TRAIN, VALIDATION)
UINT16_IDS = 1 << 16
TEMPLATE_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class BuildOptions:
    """The choices that decide the bytes of a data set, besides its sources."""

    tokenizer: TokenizerFiles
    end_of_text: str = ""  # empty: told by the tokenizer
    column: str = "text"
    chat: bool = False
    validation_every: int = 100  # documents; 0: no slice for validation
    block_tokens: int = 32768
    shard_blocks: int = 2048
    name: str = ""


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """Counts of what a build has read and written. `consumed`: bytes of the source files, as they lie on the
    disk."""

    consumed: int
    documents: int
    tokens: int
    skipped: int
    shards: int
    replaced: int = 0  # plain texts that are not UTF-8, in which characters were replaced


class BuildState(msgspec.Struct, frozen=True):
    """A build that can go on from here."""

    settings: dict[str, str]  # what decides the bytes: a build with others does not go on
    position: Position = Position()
    consumed: int = 0
    documents: int = 0
    tokens: int = 0
    current: str = TRAIN  # the slice of the document that the input stands in
    pending: bool = False  # that document has no token yet
    skipped: int = 0
    examples: tuple[str, ...] = ()
    replaced: int = 0  # plain texts that are not UTF-8
    last_replaced: str = ""  # which of them was the last
    shards: tuple[Shard, ...] = ()
    slices: tuple[SliceState, ...] = tuple(SliceState(name) for name in SLICES)


def build(
    destination: Destination,
    arguments: Sequence[str],
    sources: Sequence[Source],
    options: BuildOptions,
    workers: int,
    show: Callable[[BuildProgress], None],
    tell: Callable[[str], None] = lambda line: None,
) -> Manifest:
    """Build the data set of `sources`, which `arguments` named, or go on with it, which `tell` is told. Raises
    `ConfigError` if there is one already, or the beginning of another."""
    tokenizer = load_tokenizer(options.tokenizer.tokenizer, options.tokenizer.name)
    end_of_text = end_of_text_of(tokenizer, options.tokenizer, options.end_of_text)
    vocabulary = vocabulary_size(tokenizer)
    dtype = "uint16" if vocabulary <= UINT16_IDS else "uint32"
    layout = BlockFormat(DTYPES[dtype], options.block_tokens, options.chat)
    end_id = tokenizer.token_to_id(end_of_text)
    settings = _settings(sources, options, end_of_text)
    with destination.taken():
        if destination.manifest() is not None:
            raise ConfigError(f"{destination.url} has a data set already: build elsewhere, or give --overwrite")
        state = _load(destination, settings)
        if state.position != Position():
            tell(f"goes on {_place(state, sources)}")
        config = TokeniserConfig(
            options.tokenizer.tokenizer, end_of_text, dtype, options.column, **_template(options)
        )
        try:
            with TokeniserPool(config, workers) as pool, _Sender(destination, state.shards) as sender:
                units = read_units(sources, options.column, state.position)
                with _Writer(destination, layout, options, end_id, state) as writer:
                    state = _write_all(writer, pool, units, sender, show)
        except OSError as error:
            raise ResourceError(f"cannot write to {destination.folder}: {error}") from error
        except AtollError:
            if not destination.saved():  # nothing to go on from
                destination.abandon()
            raise
        if not state.documents:
            destination.abandon()  # its state would be in the way of better sources
            first = f"; {state.examples[0]}" if state.examples else ""
            raise ConfigError(
                f"the sources hold no document: {state.skipped} {plural('record', state.skipped)} left out{first}"
            )
        destination.write(TOKENIZER, options.tokenizer.tokenizer)
        for name, data in options.tokenizer.beside.items():
            destination.write(name, data)
        manifest = Manifest(
            version=VERSION,
            name=options.name or name_of(sources[0]),
            dtype=dtype,
            block_tokens=options.block_tokens,
            vocab_size=vocabulary,
            end_of_text=end_id,
            tokenizer=digest(options.tokenizer.tokenizer).hex(),
            masked=options.chat,
            documents=state.documents,
            shards=tuple(sorted(state.shards, key=lambda shard: (SLICES.index(shard.slice), shard.name))),
            skipped=Skipped(state.skipped, state.examples),
            sources=describe(arguments, sources),
            packages=_packages(),
            tokenizer_files={name: digest(data).hex() for name, data in options.tokenizer.beside.items()},
        )
        Manifest.decode(manifest.encode())
        destination.finish(manifest.encode())
    return manifest


def _write_all(
    writer: "_Writer",
    pool: TokeniserPool,
    units: Iterator[Any],
    sender: "_Sender",
    show: Callable[[BuildProgress], None],
) -> BuildState:
    """Write the tokens of all units, keep the state on the way, and send what is finished."""
    saved_at = time.monotonic()
    for read, tokenised in pool.tokenise(units):
        finished = writer.add(tokenised, read.skipped, read.behind, read.consumed)
        show(writer.progress)
        if finished or time.monotonic() - saved_at >= SAVE_INTERVAL:
            writer.save()
            sender.send(finished)
            saved_at = time.monotonic()
    finished = writer.finish()
    show(writer.progress)
    state = writer.save()
    sender.send(finished)
    return state


class _Writer:
    """Gives each document's tokens to its slice, and knows how far everything is."""

    def __init__(
        self, destination: Destination, layout: BlockFormat, options: BuildOptions, end: int, state: BuildState
    ) -> None:
        self._destination, self._layout, self._every = destination, layout, options.validation_every
        self._state = state
        self._slices = {
            of.slice: SliceWriter(destination.folder, layout, options.shard_blocks, end, of) for of in state.slices
        }

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._slices.values():
            writer.close()

    @property
    def progress(self) -> BuildProgress:
        s = self._state
        return BuildProgress(s.consumed, s.documents, s.tokens, s.skipped, len(s.shards), s.replaced)

    def add(self, unit: TokenisedUnit, skipped: tuple[str, ...], behind: Position, consumed: int) -> list[Shard]:
        """Write a unit's tokens; returns the shards that this finished."""
        state = self._state
        tokens = np.frombuffer(unit.tokens, self._layout.dtype)
        starts = np.frombuffer(unit.starts, np.int64)
        learned = np.frombuffer(unit.learned, np.bool_)
        begins = np.zeros(len(tokens) + 1, np.bool_)
        begins[starts] = True
        begins[0] |= state.pending
        finished = list[Shard]()
        current, at = state.current, 0
        for start, slice_ in self._changes(starts, state.documents):
            finished += self._slices[current].add(tokens[at:start], begins[at:start], learned[at:start])
            current, at = slice_, start
        finished += self._slices[current].add(tokens[at:], begins[at:-1], learned[at:])
        self._state = msgspec.structs.replace(
            state,
            position=behind,
            consumed=consumed,
            documents=state.documents + len(starts),
            tokens=state.tokens + len(tokens),
            current=current,
            pending=bool(begins[-1]),
            skipped=state.skipped + len(skipped) + unit.skipped,
            examples=(*state.examples, *skipped, *unit.examples)[:MAX_EXAMPLES],
            replaced=state.replaced + len(unit.replaced) - (unit.replaced[:1] == [state.last_replaced]),
            last_replaced=unit.replaced[-1] if unit.replaced else state.last_replaced,
            shards=(*state.shards, *finished),
        )
        return finished

    def _changes(self, starts: Any, documents: int) -> Iterator[tuple[int, str]]:
        """Where the documents go to another slice than those before them, and to which. Every n-th is for
        validation."""
        if not self._every or not len(starts):
            return
        first = self._every - 1 - documents % self._every  # the first for validation among these
        if self._state.current == VALIDATION:
            yield int(starts[0]), TRAIN
        for number in range(first, len(starts), self._every):
            yield int(starts[number]), VALIDATION
            if number + 1 < len(starts):
                yield int(starts[number + 1]), TRAIN

    def finish(self) -> list[Shard]:
        """Finish what is begun; returns the last shards."""
        finished = [shard for writer in self._slices.values() for shard in writer.finish()]
        self._state = msgspec.structs.replace(self._state, shards=(*self._state.shards, *finished))
        return finished

    def save(self) -> BuildState:
        """The state, which is on the disk."""
        slices = tuple(writer.save() for writer in self._slices.values())
        self._state = msgspec.structs.replace(self._state, slices=slices)
        self._destination.save(msgspec.json.encode(self._state))
        return self._state


class _Sender:
    """Sends finished shards to the store, one after the other, while others are made."""

    def __init__(self, destination: Destination, finished: Sequence[Shard]) -> None:
        """`finished`: those that a build which was killed has finished and may not have sent."""
        self._destination, self._thread = destination, ThreadPoolExecutor(1, "send")
        self._sending = list[Future[None]]()
        self.send(finished)

    def __enter__(self) -> "_Sender":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=error is not None)
        if error is None:
            for sent in self._sending:
                sent.result()

    def send(self, shards: Sequence[Shard]) -> None:
        """Begin to send; waits for the last ones but one, so that few are on the disk at a time."""
        while len(self._sending) > 1:
            self._sending.pop(0).result()
        self._sending += [self._thread.submit(self._send, shard) for shard in shards]

    def _send(self, shard: Shard) -> None:
        for suffix in SUFFIXES:
            self._destination.send(shard.name + suffix)


def _load(destination: Destination, settings: dict[str, str]) -> BuildState:
    """The state to go on from, or that of a beginning. Raises `ConfigError` if it is another build's."""
    saved = destination.saved()
    if saved is None:
        return BuildState(settings)
    try:
        state = msgspec.json.decode(saved, type=BuildState)
    except DECODE_ERRORS as error:
        raise ConfigError(
            f"the state of the build in {destination.folder} is damaged, {error}: begin anew with --overwrite"
        ) from None
    others = [key for key in settings if state.settings.get(key) != settings[key]]
    if others:
        raise ConfigError(
            f"{destination.folder} has the beginning of another build, with other {' and '.join(others)}: go on "
            "with those, or begin anew with --overwrite"
        )
    return state


def _place(state: BuildState, sources: Sequence[Source]) -> str:
    """How far a build has come, in words."""
    files = [source for source in sources if isinstance(source, SourceFile)]
    if len(files) == len(sources) and (total := sum(file.size for file in files)):
        return f"at {100 * state.consumed // total} %, behind {state.documents:,} documents"
    return f"behind {state.documents:,} documents"


def _settings(sources: Sequence[Source], options: BuildOptions, end_of_text: str) -> dict[str, str]:
    """What decides the bytes, under the names that people know."""
    beside = sorted((name, digest(data).hex()) for name, data in options.tokenizer.beside.items())
    return {
        "sources": listing_digest(sources),
        "tokenizer": digest(options.tokenizer.tokenizer).hex(),
        "tokenizer's files": repr(beside),
        "--end-of-text": end_of_text,
        "--column": options.column,
        "--chat": repr(options.chat),
        "--validation-every": str(options.validation_every),
        "--block-tokens": str(options.block_tokens),
        "--shard-blocks": str(options.shard_blocks),
        "versions of packages": repr(sorted(_packages().items())),
    }


def _packages() -> dict[str, str]:
    return {name: version(name) for name in ("atoll", "tokenizers")}


def _template(options: BuildOptions) -> dict[str, Any]:
    if not options.chat:
        return {}
    found = ((name, options.tokenizer.special_token(name)) for name in TEMPLATE_TOKENS)
    return {
        "template": options.tokenizer.chat_template(),
        "variables": {name: token for name, token in found if token is not None},
    }
