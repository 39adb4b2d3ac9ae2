"""What was measured, as a table on the terminal and as a page."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from bench.cases import Row, Verdict, spread
from bench.command import congestion_control
from rich.table import Table

STYLES = {Verdict.AIM: "green", Verdict.MUST: "yellow", Verdict.MISSED: "red", Verdict.FAILED: "bold red"}
Plan = Mapping[str, Sequence[Mapping[str, Any]]]  # predictions by scenario


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    model: str
    kernel: str
    tcp: str
    day: date

    def __str__(self) -> str:
        return f"{self.cores} cores, {self.model}, Linux {self.kernel}, TCP {self.tcp}, {self.day.isoformat()}"


def this_machine() -> Machine:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    model = found[1] if found else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return Machine(cores, model, platform.release(), congestion_control(), date.today())


def table(rows: Sequence[Row]) -> Table:
    """For a terminal."""
    made = Table("", "case", "must", "aim", "median (range)", "unit", "", "note")
    for row in rows:
        style = STYLES.get(row.verdict, "")
        made.add_row(*_cells(row), style=style)
    return made


def page(machine: Machine, rows: Sequence[Row], plan: Plan, picture: str) -> str:
    """As Markdown."""
    lines = [
        "# Performance",
        "",
        "Made by `make bench`; do not edit.",
        "",
        f"Machine: {machine}. All peers, the coordinator and the emulated network shared it.",
        "",
        "A *must* is the bar, an *aim* would be good; both are upper bounds. Values are medians of the measured",
        "iterations, after one for warming up; in brackets the range. *x gloo* is the ratio to an fp32 all-reduce",
        "of `torch.distributed` over gloo: both ran in turns, the value is the median of the turns' ratios.",
        "",
        f"![Seconds of an all-reduce]({picture})",
        "",
        "| | case | must | aim | median (range) | unit | | note |",
        "|---|---|---|---|---|---|---|---|",
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in _cells(row)) + " |" for row in rows),
        "",
        "- The links are emulated in user space (`tests/tools/bench/wan.c`): Mbit/s on the wire with all headers,",
        "  a queue of 200 ms, loss of single segments. Its own cost and error are in the rows `wan`.",
        "- A peer's time ends when the mean is in its memory as fp32. It is decoded past the caches, which nodes",
        "  do not do: they step from it at once. After half a second chunks are decoded as they come; nodes step",
        "  when all are committed. Not in the time: the outer step, and a node's look at the digests of its",
        "  state, which training hides as long as this node's trainer is not the last one.",
        "- The limit is 2(N-1)/N bytes an element, through the links, at one byte an element.",
        "- m: memory at a peer's peak, without its vectors and what its process has before the first round.",
        "- k: the same members and links with flat plans, and with what the planner chooses, after three rounds",
        "  in which nodes learn their links; a note says in how many levels each iteration went.",
        "- l: from the plan to the commit, by the coordinator's clock, with `security.audit` as it is by default",
        "  and with 0, in turns; each value is a turn's. Two fetch some 1.3 chunks of a round's once more.",
        "- n: two rounds of members that other processes of this machine simulate, without a data plane",
        "  (`atoll bench coordinator --help`); the control time is what a member waits for it in a round.",
        "- t: the same steps of one model in turns: the built-in trainer, and a loop of torch alone",
        "  (`atoll bench trainer --help`); memory is the process's at peak, activations and torch included.",
        "- g: the bars are c's median + 35 % + 1 s, and + 22 % + 0.3 s; 22 % is what the dead peer's part costs.",
        "- The seconds of others are published figures for links of the same numbers, not measured in this run.",
        "",
        "Commands (WAN cases run inside the emulator):",
        "",
        *(f"- {row.key}: `{row.command}`" for row in rows if row.command),
        "",
    ]
    for scenario, predicted in plan.items():
        lines += [
            f"## Predicted seconds of a reduce{': ' if scenario else ''}{scenario}",
            "",
            "Arithmetic (`atoll bench plan`), not measured.",
            "",
            "| members | flat, s | two levels, s | chosen |",
            "|---|---|---|---|",
            *(f"| {r['n']} | {_s(r['flat_s'])} | {_s(r['two_level_s'])} | {r['chosen']} |" for r in predicted),
            "",
        ]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    note = row.failure or row.left_out or row.note
    bars = ("-" if bar is None else f"{bar:.3g}" for bar in (row.must, row.aim))
    return row.key, row.title, *bars, spread(row.values) or "-", row.unit, row.verdict.value, note


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:,.1f}"
