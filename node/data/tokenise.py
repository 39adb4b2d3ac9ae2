"""Units of input become tokens: what each process of a build does (`atoll.node.data.tokeniser_pool`).

The tokens of a document depend on its text and the tokenizer alone, not on the unit or the process: a text goes
through the tokenizer in pieces that end with a line or before a blank, and a conversation as a whole. A record
that cannot be read is left out, counted, and named with its place.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.node.data.chat import BREAK, BadConversation, ChatTemplate, RenderedChat, check_messages
from atoll.node.data.manifest import DTYPES
from atoll.node.data.tokenizer_files import load_plain, load_tokenizer, special_pattern
from atoll.node.data.units import LinesUnit, RowsUnit, TextPiece, TextUnit, Unit

PIECE_CHARACTERS = 1 << 17  # that go through the tokenizer at once: about 60 MB while they do
MESSAGES = b'"messages"'  # the key of a conversation
MAX_EXAMPLES = 20  # of records left out, that a unit names
Tokens = NDArray[np.unsignedinteger[Any]]  # (n,) of the data set's dtype


class TokeniserConfig(msgspec.Struct, frozen=True):
    """Settings of a process, which it has before the first unit."""

    tokenizer: bytes  # tokenizer.json
    end_of_text: str
    dtype: str  # of the tokens that it returns, as the manifest has it
    column: str  # of a record, that holds the text or the messages
    template: str = ""  # Jinja; empty: records are plain text
    variables: dict[str, str] = {}  # of the template


class TokenisedUnit(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a unit's documents, one after the other, with the end of text behind each that ends there."""

    tokens: bytes  # (n,) of the dtype
    starts: bytes  # (k,) int64: where a document begins; n: its first token is in a later unit
    learned: bytes  # (n,) bool; empty: no conversations
    skipped: int
    examples: list[str]  # of the records left out
    replaced: list[str] = []  # the plain texts that are not UTF-8, in which characters were replaced


class UnreadableRecord(ValueError):
    """A record without a text; the reason is for people."""


class Tokeniser:
    """Tokenises units, one after the other."""

    def __init__(self, config: TokeniserConfig) -> None:
        self._plain = load_plain(config.tokenizer, config.end_of_text)
        self._dtype = DTYPES[config.dtype]
        self._end = np.array([self._plain.token_to_id(config.end_of_text)], self._dtype)
        self._chat = _ChatEncoder(config) if config.template else None
        kind = Any if self._chat else str
        record = msgspec.defstruct("Record", [("value", kind)], rename={"value": config.column})
        self._decoder: Any = msgspec.json.Decoder(record)

    def __call__(self, unit: Unit) -> TokenisedUnit:
        """The tokens of a unit."""
        out = _Output(self._end)
        match unit:
            case TextUnit():
                self._texts(unit.pieces, out)
            case LinesUnit():
                self._lines(unit, out)
            case RowsUnit():
                self._records(((f"{unit.place} row {n}", row) for n, row in enumerate(unit.rows, unit.first)), out)
        return out.finish()

    def _texts(self, pieces: tuple[TextPiece, ...], out: "_Output") -> None:
        for piece in pieces:
            try:
                text = piece.text.decode()
            except UnicodeDecodeError:
                text = piece.text.decode(errors="replace")
                out.replace(piece.place)
            if not text and piece.begins:
                out.skip(piece.place, "it is empty")
            else:
                out.add(self._encode(text), begins=piece.begins, ends=piece.ends)

    def _lines(self, unit: LinesUnit, out: "_Output") -> None:
        lines = unit.lines.split(b"\n")
        if not lines[-1]:
            lines.pop()
        self._records(
            ((f"{unit.place} line {n}", line) for n, line in enumerate(lines, unit.first) if line.strip()),
            out,
            self._of_line,
        )

    def _of_line(self, line: bytes) -> Any:
        try:
            return self._decoder.decode(line).value
        except UnicodeDecodeError as error:
            raise UnreadableRecord(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
        except msgspec.ValidationError as error:
            hint = "; it is a conversation, which --chat reads" if not self._chat and MESSAGES in line else ""
            raise UnreadableRecord(f"{error}{hint}") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise UnreadableRecord(f"it is not JSON: {error}") from None

    def _records(
        self, records: Iterator[tuple[str, Any]], out: "_Output", read: Callable[[Any], Any] = lambda value: value
    ) -> None:
        for place, record in records:
            try:
                value = read(record)
                if self._chat is None:
                    out.add(self._encode(_text(value)), begins=True, ends=True, place=place)
                else:
                    ids, learned = self._chat(value)
                    tokens = np.array(ids, self._dtype)
                    out.add(tokens, begins=True, ends=True, place=place, learned=learned)
            except (UnreadableRecord, BadConversation) as error:
                out.skip(place, str(error))

    def _encode(self, text: str) -> Tokens:
        """The tokens of a text; of a long one only a piece's are Python's own numbers, of 32 bytes each."""
        pieces = [np.array(_ids(self._plain, piece), self._dtype) for piece in cut_text(text)]
        return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, self._dtype), *pieces])


class _ChatEncoder:
    """Conversations as token ids, of which each is to be learned or not."""

    def __init__(self, config: TokeniserConfig) -> None:
        self._template = ChatTemplate(config.template, config.variables)
        self._special = load_tokenizer(config.tokenizer)
        self._plain = load_plain(config.tokenizer, config.end_of_text)
        self._pattern = special_pattern(self._special)

    def __call__(self, messages: Any) -> tuple[list[int], list[bool]]:
        check_messages(messages)
        broken = [{**m, "content": self._broken(m["content"])} if m.get("content") else m for m in messages]
        chat = self._template.render(broken)
        flags = bytearray(len(chat.text) + 1)
        for start, end in chat.learned:
            flags[start:end] = b"\1" * (end - start)
        learned = bytes(flags)
        if len(chat.text) <= PIECE_CHARACTERS and BREAK not in chat.text:
            return _flagged(_encoding(self._special, chat.text), learned)
        return self._in_pieces(chat, learned)

    def _broken(self, text: str) -> str:
        """The text with a mark within each special token that somebody wrote there, so that it is none."""
        while self._pattern and self._pattern.search(text):
            text = self._pattern.sub(_break, text)
        return text

    def _in_pieces(self, chat: RenderedChat, learned: bytes) -> tuple[list[int], list[bool]]:
        """The tokens of the template's special tokens and of what lies between them, each for itself."""
        ids, flags, at, end = list[int](), list[bool](), 0, len(chat.text)
        matches = self._pattern.finditer(chat.text) if self._pattern else iter(())
        for start, stop in (*(match.span() for match in matches), (end, end)):
            for text, of_text in _without_breaks(chat.text[at:start], learned[at:start]):
                found = _flagged(_encoding(self._plain, text), of_text + b"\0")
                ids += found[0]
                flags += found[1]
            if start < stop:
                token = chat.text[start:stop]
                found_ids = _encoding(self._special, token).ids
                ids += found_ids
                flags += [bool(learned[start + len(token) - len(token.lstrip())])] * len(found_ids)
            at = stop
        return ids, flags


def _break(match: re.Match[str]) -> str:
    token = match[0].strip()
    if len(token) < 2:
        raise BadConversation(f"it has the special token {token!r}, which cannot be read as text")
    return match[0].replace(token, f"{token[0]}{BREAK}{token[1:]}", 1)


def _without_breaks(text: str, flags: bytes) -> Iterator[tuple[str, bytes]]:
    """The text without the marks in it, in pieces for the tokenizer, and the flag of each character of them."""
    if BREAK in text:
        stays = np.frombuffer(text.encode("utf-32-le"), np.uint32) != ord(BREAK)
        flags = np.frombuffer(flags, np.uint8)[stays].tobytes()
        text = text.replace(BREAK, "")
    at = 0
    for piece in cut_text(text):
        yield piece, flags[at : at + len(piece)]
        at += len(piece)


class _Output:
    """The tokens of a unit as they come."""

    def __init__(self, end: Tokens) -> None:
        """`end`: the end of a text, (1,)."""
        self._end, self._length = end, 0
        self._parts, self._flags = list[Tokens](), list[NDArray[np.bool_]]()
        self._starts, self._skipped, self._examples = list[int](), 0, list[str]()
        self._replaced = list[str]()

    def add(
        self, ids: Tokens, *, begins: bool, ends: bool, place: str = "", learned: list[bool] | None = None
    ) -> None:
        """The tokens of a document, or of a piece of one. `learned`: of each, where the data set has a mask."""
        if begins and ends and not len(ids):
            self.skip(place, "it has no token")
            return
        if begins:
            self._starts.append(self._length)
        self._parts.append(ids)
        self._length += len(ids)
        closes = ends and not (learned is not None and ids[-1] == self._end[0])  # a template may have ended it
        if closes:
            self._parts.append(self._end)
            self._length += 1
        if learned is not None:
            self._flags.append(np.array([*learned, False] if closes else learned, np.bool_))

    def skip(self, place: str, reason: str) -> None:
        self._skipped += 1
        if len(self._examples) < MAX_EXAMPLES:
            self._examples.append(f"{place}: {reason}")

    def replace(self, place: str) -> None:
        if place not in self._replaced[-1:]:
            self._replaced.append(place)

    def finish(self) -> TokenisedUnit:
        tokens = np.concatenate(self._parts).tobytes() if self._parts else b""
        learned = np.concatenate(self._flags).tobytes() if self._flags else b""
        starts = np.array(self._starts, np.int64).tobytes()
        return TokenisedUnit(tokens, starts, learned, self._skipped, self._examples, self._replaced)


def cut_text(text: str) -> Iterator[str]:
    """The text in pieces of at most `PIECE_CHARACTERS`, cut behind a line, else before a blank, where it can
    be."""
    at = 0
    while len(text) - at > PIECE_CHARACTERS:
        half, stop = at + PIECE_CHARACTERS // 2, at + PIECE_CHARACTERS
        cut = text.rfind("\n", half, stop) + 1 or text.rfind(" ", half, stop)
        cut = cut if cut > at else stop
        yield text[at:cut]
        at = cut
    if at < len(text):
        yield text[at:] if at else text


def _text(value: Any) -> str:
    match value:
        case bytes():
            try:
                value = value.decode()
            except UnicodeDecodeError as error:
                raise UnreadableRecord(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
        case None:
            raise UnreadableRecord("it has no text")
        case str():
            pass
        case _:
            raise UnreadableRecord(f"it is a {type(value).__name__}, not a text")
    if not value:
        raise UnreadableRecord("its text is empty")
    return str(value)


def _encoding(tokenizer: Any, text: str) -> Any:
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # tokenizers raises bare Exception
        raise UnreadableRecord(f"the tokenizer does not take it: {error}") from None


def _ids(tokenizer: Any, text: str) -> list[int]:
    """The same without offsets, which take as long as the ids."""
    try:
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except Exception as error:  # tokenizers raises bare Exception
        raise UnreadableRecord(f"the tokenizer does not take it: {error}") from None
    return ids


def _flagged(encoding: Any, learned: bytes) -> tuple[list[int], list[bool]]:
    """The ids of an encoding, and whether the character that each begins with is to be learned."""
    return encoding.ids, [bool(learned[start]) for start, _ in encoding.offsets]
