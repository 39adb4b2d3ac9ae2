"""Conversations as text, by the tokenizer's own chat template, and which characters of it the assistant said.

The template is Jinja from the tokenizer's files, run in a sandbox, with what transformers gives it but the clock:
the same conversation is the same text on every day. What is to be learned are the assistant's turns: what the
template has between `{% generation %}` and `{% endgeneration %}`, or else, for each such turn, what follows the
rendering of the messages before it with the prompt for an answer, as far as the rendering with the turn goes. A
turn that the template renders otherwise once others follow (without its reasoning, for example) is not learned.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from atoll.comm.errors import ConfigError

ASSISTANT = "assistant"
MAX_CHARACTERS = 4 << 20  # of a conversation: it is rendered once more for each turn of the assistant
# Characters of Unicode's private use that nobody writes: they mark places in a rendered text.
BEGIN, END, BREAK = "\U0010fff0", "\U0010fff1", "\U0010fff2"
CLOSING = "\n>]"  # what a mark behind a turn ends with
Message = dict[str, Any]


class BadConversation(ValueError):
    """A record that is no conversation, or none that the template takes."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation's text and the spans [start, end) of characters that are to be learned, in order."""

    text: str
    learned: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        """`variables`: the tokenizer's special tokens under the names that templates use, such as bos_token.
        Raises `ConfigError` for a template that is not Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the tokenizer's chat template is damaged, line {error.lineno}: {error.message}"
            ) from None
        self._variables = variables
        self._marks_generation = "endgeneration" in source

    def render(self, messages: list[Message]) -> RenderedChat:
        """The text of a conversation, which `check_messages` has passed. Raises `BadConversation`."""
        marked = self._text(messages)
        if self._marks_generation:
            rendered = _without_marks(marked)
        else:
            rendered = RenderedChat(marked, tuple(self._turns(messages, marked)))
        if not rendered.learned:
            raise BadConversation("no turn of the assistant is to be learned")
        return rendered

    def _turns(self, messages: list[Message], text: str) -> Iterator[tuple[int, int]]:
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._text_of_part(messages[:number], prompt=True) if number else ""
            through = text if number + 1 == len(messages) else self._text_of_part(messages[: number + 1])
            if before is None or through is None or not text.startswith(before):
                continue
            if end := _end_of_turn(text, through, len(before), (message.get("content") or "").strip()):
                yield len(before), end

    def _text_of_part(self, messages: list[Message], prompt: bool = False) -> str | None:
        """The text of the first messages; None if the template does not take them without the others."""
        try:
            return self._text(messages, prompt)
        except BadConversation:
            return None

    def _text(self, messages: list[Message], prompt: bool = False) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=prompt, **self._variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise BadConversation(f"the chat template does not take it: {error}") from None


def _end_of_turn(text: str, through: str, start: int, content: str) -> int:
    """Where a turn that begins at `start` ends in the text of all; 0 if it is not there as it is in `through`, the
    text of the messages up to it. That may end in what stands behind a whole conversation only: the two go
    together through the turn's content and the marks that close it, and perhaps into the beginning of the next
    mark."""
    if text.startswith(through):
        return len(through)
    common = len(commonprefix([text, through]))
    found = text.find(content, start, common) if content else -1
    if found < 0:
        return 0
    closing = text[found + len(content) : common]
    return found + len(content) + max(closing.rfind(mark) + 1 for mark in CLOSING)


def check_messages(messages: object) -> None:
    """Raise `BadConversation` unless these are messages: a list of {"role": text, "content": text or none}."""
    if not isinstance(messages, list) or not messages:
        raise BadConversation("it is not a list of messages")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadConversation(f'message {number} is not an object with a text "role"')
        if not isinstance(message.get("content"), str | None):
            raise BadConversation(f'message {number} has a "content" that is not a text')
        if any(mark in (message.get("content") or "") for mark in (BEGIN, END, BREAK)):
            raise BadConversation(f"message {number} has characters that stand for no text")
    if (length := sum(len(message.get("content") or "") for message in messages)) > MAX_CHARACTERS:
        raise BadConversation(f"it has {length} characters, and a conversation has {MAX_CHARACTERS} at most")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise BadConversation("the assistant says nothing in it")


def _without_marks(marked: str) -> RenderedChat:
    parts, spans, length = list[str](), list[tuple[int, int]](), 0
    for part in marked.split(BEGIN):
        said, separator, rest = part.partition(END)
        if separator:
            spans.append((length, length + len(said)))
        parts += [said, rest]
        length += len(said) + len(rest)
    return RenderedChat("".join(parts), tuple(span for span in spans if span[0] < span[1]))


class _Generation(Extension):
    """The block around what the assistant says: marks before and behind it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


def _to_json(value: Any, **settings: Any) -> str:
    """Jinja's own escapes what HTML would take for markup."""
    return json.dumps(value, **{"ensure_ascii": False, **settings})


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
