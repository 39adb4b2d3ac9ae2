"""Runs a command of atoll with a deadline, and reads the JSON that it prints."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import psutil
from bench.cases import Failed

ATOLL = (sys.executable, "-P", "-m", "atoll.comm.cli")
GRACE = 10.0  # seconds to clear up after SIGTERM


def ask(words: Sequence[str], patience: float, atoll: Sequence[str] = ATOLL) -> dict[str, Any]:
    """The JSON object that `atoll WORDS` prints; `Failed` if it fails or takes more than `patience` seconds."""
    process = subprocess.Popen(
        [*atoll, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        raise Failed(f"not done after {patience:g} s") from None
    finally:
        _end(process)
    if process.returncode:
        said = err.strip().splitlines()
        raise Failed(f"exit code {process.returncode}: {said[-1] if said else 'without a word'}")
    try:
        told = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise Failed(f"it printed no JSON: {out[-200:]!r}") from None
    if not isinstance(told, dict):
        raise Failed(f"it printed no JSON object: {out[-200:]!r}")
    return told


def _end(process: subprocess.Popen[str]) -> None:
    """Stop it and the processes that it started, unless it has ended."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
    _, living = psutil.wait_procs(family, timeout=0)
    for child in living:
        child.kill()
    process.communicate()


def shown(words: Sequence[str]) -> str:
    """As it is typed."""
    return " ".join(["atoll", *(f'"{word}"' if " " in word or "{" in word else word for word in words)])


def congestion_control() -> str:
    path = "/proc/sys/net/ipv4/tcp_congestion_control"
    return open(path).read().strip() if os.path.exists(path) else "unknown"
