"""What a daemon says of itself (`Daemon.status`) as lines for a terminal of any width, for `atoll node top`. Pure.

Every line is as wide as the terminal at most, whatever words of others are in it; what is not known is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len, chop_cells, set_cell_size

from atoll.comm.phases import phase_word
from atoll.comm.terminal import visible
from atoll.node.config import NodeConfig
from atoll.node.status_words import amount

LABEL_WIDTH = 12  # characters before a line's words
BAR_WIDTH = 30  # characters
TROUBLES = ("trouble", "penalty", "recovery_trouble", "disk_trouble", "remote_trouble")


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer of the daemon."""

    at: float  # seconds, the clock of who asked
    said: dict[str, Any]


def byte_rate(before: Sample | None, now: Sample, key: str) -> float | None:
    """Bytes a second between two answers; None: that cannot be told."""
    if before is None or now.at <= before.at or now.said.get("node_id") != before.said.get("node_id"):
        return None
    grown = now.said.get(key, 0) - before.said.get(key, 0)
    return grown / (now.at - before.at) if grown >= 0 else None  # less: the daemon was started again


def panel(before: Sample | None, now: Sample, width: int) -> list[str]:
    """The lines; `before`: the answer to which rates refer."""
    lines = list[str]()
    for label, words, most in _entries(before, now):
        lines += _wrapped(label, visible(words), most, width)
    return lines


def _entries(before: Sample | None, now: Sample) -> Iterator[tuple[str, str, int]]:
    """Label, words, and how many lines these may have: together 22, so that a terminal of 24 has room for all."""
    said = now.said
    about = (f"{said.get('name', '')} ({said.get('node_id', '')})", f"run {said.get('run', '')}")
    away = said.get("coordinator_away_s", 0.0)
    yield "node", ", ".join(about), 1
    if away:
        yield "coordinator", f"has not answered for {away:,.0f} s; what it told before that:", 1
    state = _together(said.get("state") or said.get("phase", ""), said.get("reason", ""))
    yield "state", state, 2
    if words := _flat(said.get("paused")):
        yield "paused", words, 1
    yield "step", _step(said), 1
    yield "loss", _loss(said), 1
    yield "speed", _speed(said), 1
    yield "memory", _memory(said), 1
    run = _together(said.get("run_phase", ""), said.get("run_reason", ""))
    yield "round", run if run != state else "", 2
    yield "members", _members(said), 1
    if recovery := said.get("recovery"):
        done, of = recovery.get("chunks", 0), recovery.get("of", 0)
        yield "recovery", f"{bar(done, of)} {done:,} of {of:,} chunks of the state", 1
    if exchange := said.get("exchange"):
        done, of = exchange.get("chunks", 0), exchange.get("of", 0)
        yield "exchange", f"{bar(done, of)} {done:,} of {of:,} merged chunks are here", 1
    yield "traffic", "; ".join(_traffic(before, now, k, w) for k, w in (("up", "sent"), ("down", "received"))), 1
    yield "limits", _flat(said.get("limits")), 2
    yield "committed", _credit(said), 2
    yield "trouble", "; ".join(str(said[key]) for key in TROUBLES if said.get(key)), 3


def _wrapped(label: str, words: str, most: int, width: int) -> list[str]:
    """The words behind their label, in `most` lines at most; none where there are none."""
    room = max(width - LABEL_WIDTH - 1, 2)
    parts = list(_parts(words, room))
    if len(parts) > most:
        parts = [*parts[: most - 1], set_cell_size(parts[most - 1], room - 1).rstrip() + "…"]
    shown = (f"{label if not i else '':>{LABEL_WIDTH}} {part}" for i, part in enumerate(parts))
    return [line if cell_len(line) <= width else set_cell_size(line, width) for line in shown]


def _parts(words: str, room: int) -> Iterator[str]:
    """The words in lines of so many characters at most, broken between words where that can be."""
    line = ""
    for word in words.split():
        for piece in chop_cells(word, room):
            if line and cell_len(line) + 1 + cell_len(piece) > room:
                yield line
                line = piece
            else:
                line = f"{line} {piece}" if line else piece
    if line:
        yield line


def bar(done: float, of: float, width: int = BAR_WIDTH) -> str:
    """A bar that is full where all is done."""
    full = round(width * min(max(done / of, 0.0), 1.0)) if of else 0
    return "━" * full + "·" * (width - full)


def _together(phase: str, reason: str) -> str:
    return ": ".join(filter(None, (phase_word(phase), reason)))


def _step(said: dict[str, Any]) -> str:
    done, of, most = said.get("inner_step", 0), said.get("steps", 0), said.get("steps_at_most", 0)
    if not of:
        return "nothing to train now" if "steps" in said else ""
    more = f", {most:,} at most" if most > of else ""
    return f"{bar(done, of)} {done:,} of {of:,}{more}, round {said.get('training_round', 0):,}"


def _loss(said: dict[str, Any]) -> str:
    figures = (("", "loss", ".4f"), ("gradient ", "gradient_norm", ".3g"), ("rate ", "learning_rate", ".3g"))
    return ", ".join(f"{word}{said[key]:{form}}" for word, key, form in figures if said.get(key))


def _speed(said: dict[str, Any]) -> str:
    if not (pace := said.get("tokens_per_s")):
        return ""
    share = f"{100 * said['mfu']:.1f} %" if said.get("mfu") else "unknown"
    return f"{pace:,.0f} tokens/s, MFU {share}, waits for data {100 * said.get('data_wait', 0.0):.1f} %"


def _memory(said: dict[str, Any]) -> str:
    figures = (("devices", "device_bytes"), ("trainer", "trainer_rss_bytes"))
    return ", ".join(f"{what} {amount(said[key])}" for what, key in figures if said.get(key))


def _members(said: dict[str, Any]) -> str:
    members = said.get("members")
    return "" if members is None else f"{members:,} in the run, connected to {said.get('peers', 0):,}"


def _traffic(before: Sample | None, now: Sample, way: str, word: str) -> str:
    rate = byte_rate(before, now, f"bytes_{way}")
    return f"{word} {amount(now.said.get(f'bytes_{way}', 0))}" + ("" if rate is None else f", {amount(rate)}/s")


def _credit(said: dict[str, Any]) -> str:
    """What the run committed of this node."""
    if "credited_tokens" not in said:
        return ""
    mine, rounds, all_ = said["credited_tokens"], said.get("credited_rounds", 0), said.get("run_tokens", 0)
    share = f" ({100 * mine / all_:.1f} %)" if all_ else ""
    return f"{mine:,} of the run's {all_:,} tokens{share}, {rounds:,} of {said.get('committed', 0):,} rounds"


def _flat(value: Any) -> str:
    """What is set of a table's values, or of limits otherwise than usual, in words."""
    if not isinstance(value, dict):
        return str(value) if value else ""
    usual = NodeConfig()
    there = ((k, part) for k, part in value.items() if (part != getattr(usual, k) if hasattr(usual, k) else part))
    parts = ((key, f"{part:g}" if isinstance(part, float) else str(part).lower()) for key, part in there)
    return ", ".join(f"{key}={part}" for key, part in parts)
