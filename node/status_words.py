"""What a daemon says of itself (`Daemon.status`) in words for people: the lines of `atoll node status`. Pure."""

from collections.abc import Iterator
from typing import Any

from atoll.comm.durations import in_words
from atoll.comm.phases import phase_word
from atoll.node.config import NodeConfig

FOR_SCRIPTS = {"recovery", "phase", "exchange", "steps_at_most", "training_round"}  # others say it in words
LABELS = {
    "round": "state of round",
    "bytes_up": "sent",
    "bytes_down": "received",
    "bytes_this_day": "exchanged today",
    "bytes_this_month": "this month",
    "disk_bytes": "on the disk",
    "device_bytes": "device memory",
    "trainer_rss_bytes": "memory",  # of the trainer, unless the whole node's is looked at
    "memory_bytes": "memory",
}
BYTES = {key for key in LABELS if "bytes" in key}
UNLIMITED = {"daily", "monthly", "upload", "download", "gpu_temperature", "memory"}  # of these 0 is no limit
# Of these 0 says that it is not known yet.
KNOWN_LATER = {
    *("loss", "gradient_norm", "learning_rate"),
    *("device_bytes", "trainer_rss_bytes", "memory_bytes"),
}


def status_lines(said: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The labels and words of what a daemon says of itself. What it does not know is left out, but for the MFU of
    a trainer that takes steps."""
    for key, value in said.items():
        unknown = value in ("", None, -1) or (key in KNOWN_LATER and not value)
        if key == "mfu" and value is None and said.get("tokens_per_s"):
            yield "mfu", "unknown"
        elif key in FOR_SCRIPTS or unknown or (key == "trainer_rss_bytes" and said.get("memory_bytes")):
            continue
        elif words := _words(key, value):
            yield LABELS.get(key, key.replace("_", " ")), words


def _words(key: str, value: Any) -> str:
    """The words of one thing that is known; empty: it is not worth a line."""
    match key, value:
        case "limits", dict():
            usual = NodeConfig()
            told = (f"{k}={value_words(v)}" for k, v in value.items() if k != "disk" and v != getattr(usual, k))
            return " ".join(told)
        case "phase_seconds", dict():
            spent = ((phase_word(phase), seconds) for phase, seconds in value.items() if seconds >= 0.05)
            return ", ".join(f"{word} {in_words(seconds)}" for word, seconds in spent)
        case (("state" | "run_phase"), str()):
            return phase_word(value)
        case (("mfu" | "data_wait"), _):
            return f"{100 * value:.1f} %"
        case (("learning_rate" | "gradient_norm"), _):
            return f"{value:.4g}"
        case _ if key in BYTES:
            return amount(value)
        case _:
            return f"{value:,.2f}" if isinstance(value, float) else str(value)


def limit_words(key: str, value: Any) -> str:
    """A limit's value for people: 0 of most is none."""
    return "no limit (0)" if key in UNLIMITED and not value else value_words(value)


def value_words(value: Any) -> str:
    """A limit's value as it is written."""
    match value:
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case _:
            return str(value) or "-"


def amount(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
