"""The scrubber of a past run in a terminal: what each key does (`moved`, pure), and the loop around it
(`scrub`)."""

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import click

from atoll.coordinator.monitor.run_answers import RunAnswers
from atoll.coordinator.monitor.terminal import show

PLAY_INTERVAL = 0.5  # seconds between two looks, while it plays
PLAY_LOOKS = 200  # in which a whole run is played at most
KEYS = {  # what terminals send
    "\x1b[D": "left",
    "\x1b[C": "right",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
    "\x1b[H": "home",
    "\x1b[1~": "home",
    "\x1b[F": "end",
    "\x1b[4~": "end",
    " ": "space",
    "q": "quit",
    "\x03": "quit",
    "": "quit",  # the terminal is gone
}


@dataclass(frozen=True, slots=True)
class Scrubber:
    """Where in the run one is; `last`: its last round."""

    at: int
    last: int
    playing: bool = False
    over: bool = False


def moved(scrubber: Scrubber, key: str | None) -> Scrubber:
    """The scrubber after a key; None: none came for PLAY_INTERVAL."""
    tenth = max(scrubber.last // 10, 1)
    match key:
        case None if scrubber.playing:
            at = min(scrubber.at + max(scrubber.last // PLAY_LOOKS, 1), scrubber.last)
            return replace(scrubber, at=at, playing=at < scrubber.last)
        case "quit":
            return replace(scrubber, over=True)
        case "space":
            begins = scrubber.at >= scrubber.last and not scrubber.playing
            return replace(scrubber, at=1 if begins else scrubber.at, playing=not scrubber.playing)
        case "left" | "right" | "page up" | "page down":
            by = {"left": -1, "right": 1, "page up": -tenth, "page down": tenth}[key]
            return replace(scrubber, at=min(max(scrubber.at + by, 1), scrubber.last), playing=False)
        case "home" | "end":
            return replace(scrubber, at=1 if key == "home" else scrubber.last, playing=False)
        case _:
            return scrubber


def scrub(answers: RunAnswers, number: int, every_member: bool = False) -> None:
    """Show the run as of round `number`, and where there is somebody to type, wherever they go. Raises what
    `RunAnswers.past` does."""
    scrubber = Scrubber(min(number, answers.last), answers.last)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        show(answers.past(scrubber.at), every_member)
        return
    with _keys():
        while not scrubber.over:
            click.clear()
            show(answers.past(scrubber.at), every_member)
            click.echo(
                f"round {scrubber.at:,} of {scrubber.last:,}: left, right, page up and down, space plays, q ends"
            )
            before = scrubber
            while scrubber == before:
                scrubber = moved(before, _key(PLAY_INTERVAL if before.playing else None))


def _key(patience: float | None) -> str | None:
    """The next key, or None after `patience` seconds."""
    if not select.select([sys.stdin], [], [], patience)[0]:
        return None
    sent = os.read(sys.stdin.fileno(), 16).decode(errors="replace")
    return KEYS.get(sent, "")


@contextmanager
def _keys() -> Iterator[None]:
    """Keys come one by one, unseen."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
