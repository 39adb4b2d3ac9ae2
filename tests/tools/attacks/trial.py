"""One attack on a run: rounds without it, with it, and after it; what each of these cost honest members, and how
the attack ended."""

import json
import os
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attacks.cases import Attack
from attacks.strangers import stranger
from attacks.tally import read
from attacks.village import ROUND, Record, Village
from e2e.harness import ATOLL

from atoll.comm.build_info import full_version

USUAL = 1.1  # times the median of the rounds before: what a round may take
MS = ", ms"  # behind what is no count
MAX_UNSETTLED = 30  # rounds until all members contribute
SETTLED = 3  # rounds in a row that are usual, after which an attack does not become dearer or cheaper


@dataclass(frozen=True)
class Lengths:
    """Rounds of a trial."""

    before: int = 8
    during: int = 9
    most: int = 24  # while rounds are unusual
    after: int = 2


USUAL_LENGTHS, LONG_LENGTHS = Lengths(), Lengths(1, 2, 2, 0)  # of long rounds, few


@dataclass(frozen=True)
class Calls:
    """What calls of one kind took."""

    count: int
    p50: float  # seconds, in the middle
    p95: float

    @staticmethod
    def of(seconds: Sequence[float]) -> "Calls":
        ordered = sorted(seconds)
        return Calls(len(ordered), ordered[len(ordered) // 2], ordered[int(0.95 * len(ordered))])


@dataclass(frozen=True)
class Figures:
    """What some rounds cost honest members."""

    rounds: list[float]  # seconds from commit to commit
    exchange: list[float]  # seconds, of these
    calls: dict[str, Calls]  # to the coordinator, by what they were (`clocked.CALLS`)
    memory: dict[str, int]  # bytes that processes had for themselves, the most
    others: float  # cores that processes of nobody here took

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)


@dataclass(frozen=True)
class Trial:
    """What came of an attack."""

    attack: str
    ended: str  # what became of it, in words
    before: Figures
    during: Figures
    after: Figures | None
    slow: list[int] = field(default_factory=list)  # rounds since it began that were not usual, from 1
    harmed: list[str] = field(default_factory=list)  # what was held against honest members, or left out of theirs
    nice: int = 0  # of all processes of the run
    version: str = ""  # of Atoll
    paced: float = ROUND  # seconds that the steps of a round were to take


def trial(village: Village, attack: Attack, lengths: Lengths = USUAL_LENGTHS) -> Trial:
    """Make the attack on the run."""
    with _attacker(village, attack) as name:
        target = village.target(name)
        flag, tally = Path(target.flag), Path(target.tally)
        first = _whole(village, village.committed() + 1)
        begun = _rounds(village, first, lengths.before)
        flag.touch()
        before = figures(village, first, begun)
        until = _during(village, begun, before.seconds, lengths)
        told = read(tally)
        flag.unlink()
        exit_code = village.nodes[name].poll() if name in village.nodes else None
        during = figures(village, begun, until)
        after = figures(village, until, _rounds(village, until, lengths.after)) if lengths.after else None
    slow = [i for i, s in enumerate(during.rounds, 1) if s > USUAL * before.seconds]
    records = village.records(begun + 1, until)
    decided = decisions(village)
    ended = of_member(records, decided, told, name, exit_code) if attack.member else _counted(told)
    harm = harmed(village, records, decided)
    nice, version = os.nice(0), full_version()
    return Trial(attack.word, ended, before, during, after, slow, harm, nice, version, village.seconds)


@contextmanager
def _attacker(village: Village, attack: Attack) -> Iterator[str]:
    """Who does harm, and is ended with the context; yields its name."""
    name = village.new_name()
    target = village.target(name)
    if not attack.member:
        with stranger(attack.word, village.aim(), Path(target.flag), Path(target.tally)):
            yield name
        return
    village.add_liar(name, attack.word)
    try:
        yield name
    finally:
        village.part(name)


def _whole(village: Village, round_: int) -> int:
    """The first round from this one on that all members contributed to, when it is committed."""
    for found in range(round_, round_ + MAX_UNSETTLED):
        village.committed_after(found - 1)
        if len(village.contributors_of(found)) >= len(village.nodes):
            return found
    raise AssertionError(f"in {MAX_UNSETTLED} rounds there was none to which all members contributed")


def _rounds(village: Village, since: int, count: int) -> int:
    """Wait for so many more commits; returns the last of them."""
    while village.committed() < since + count:
        village.committed_after(village.committed())
    return since + count


def _during(village: Village, since: int, usual: float, lengths: Lengths) -> int:
    """Wait until the attack costs no more or less; returns the last round."""
    until = _rounds(village, since, lengths.during)
    while until < since + lengths.most:
        latest = _seconds(village, until - min(SETTLED, lengths.during), until)
        if max(latest) <= USUAL * usual:
            break
        until = _rounds(village, until, 1)
    return until


def _seconds(village: Village, since: int, until: int) -> list[float]:
    at = [record["committed_at"] for record in village.records(since, until)]
    return [b - a for a, b in zip(at, at[1:], strict=False)]


def figures(village: Village, since: int, until: int) -> Figures:
    """Of the rounds after `since` up to `until`."""
    records = village.records(since, until)
    start, end = records[0]["committed_at"], records[-1]["committed_at"]
    at = [record["committed_at"] for record in records]
    return Figures(
        [b - a for a, b in zip(at, at[1:], strict=False)],
        [record["seconds"]["reduce"] for record in records[1:]],
        {what: Calls.of(seconds) for what, seconds in village.calls(start, end).items()},
        most_memory(village, start, end),
        others(village, start, end),
    )


def most_memory(village: Village, start: float, end: float) -> dict[str, int]:
    """The most bytes that each process had for itself in this time (seconds since 1970)."""
    memory = Counter[str]()
    for when, found in list(village.watch.memory):
        if start <= when < end:
            memory |= Counter(found)  # the largest of each
    return dict(memory)


def others(village: Village, start: float, end: float) -> float:
    """The cores that processes of nobody here took in this time (seconds since 1970)."""
    used = [(when, seconds) for when, seconds in list(village.watch.others) if start <= when < end]
    return max((used[-1][1] - used[0][1]) / (used[-1][0] - used[0][0]), 0.0) if len(used) > 1 else 0.0


# How it ended


def decisions(village: Village) -> list[dict[str, Any]]:
    """What was decided about members, as `atoll blame` tells it."""
    command = [*ATOLL, "blame", "--state-dir", str(village.folder / "c"), "--json"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [told for told in map(json.loads, lines) if "evidence" in told]


def held_against(village: Village, rounds: range, decided: Sequence[dict[str, Any]]) -> list[str]:
    """What was held against honest members in these rounds."""
    return [
        f"{told['name']}: {told['consequence']}, {told['evidence']['offence']}"
        for told in decided
        if told["name"] in village.honest and told["evidence"]["round"] in rounds
    ]


def harmed(village: Village, records: Sequence[Record], decided: Sequence[dict[str, Any]]) -> list[str]:
    """What was held against honest members in these rounds, and where their work was left out."""
    found = held_against(village, range(records[0]["round"], records[-1]["round"] + 1), decided)
    for name in village.honest:
        out = [r["round"] for r in records if name not in {r["names"][n] for n in r["contributors"]}]
        found += [f"{name} is not in {len(out)} rounds"] if out else []
    return found


def of_member(
    records: Sequence[Record],
    decided: Sequence[dict[str, Any]],
    told: dict[str, int],
    name: str,
    ended_with: int | None,
) -> str:
    """What became of a member that did harm in these rounds, and before the first of the run if that is there."""
    begun = records[0]["round"] - 1
    since = begun + 1 if begun else 0
    of = [d for d in decided if d["name"] == name and d["evidence"]["round"] >= since]
    words = [_counted(told)] if told else []
    node = {n: who for r in records for n, who in r["names"].items()}
    its = next((n for n, who in node.items() if who == name), "")
    counted = [r for r in records if its in r["contributors"]]
    if scales := [r["scales"][its] for r in counted if its in r["scales"]]:
        words.append(f"its delta counted {statistics.median(scales):.2g} of its length")
    offences = Counter(d["evidence"]["offence"] for d in of if d["consequence"] != "pardoned")
    words += [
        f"held against it: {what} {'once' if times == 1 else f'{times} times'}" for what, times in offences.items()
    ]
    for consequence in ("no owner", "no contributor", "evicted", "banned"):
        if first := next((d for d in of if d["consequence"] == consequence), None):
            words.append(f"{consequence} from round {max(first['evidence']['round'] - begun, 1)}")
    words.append(f"its work is in {len(counted)} of {len(records)} rounds")
    if ended_with is not None:
        words.append(f"it ended with code {ended_with}")
    return "; ".join(words)


def _counted(told: dict[str, int]) -> str:
    rows = sorted(told.items(), key=lambda row: -row[1])
    return ", ".join(
        f"{word.removesuffix(MS)} {times / 1e3:.1f} s" if word.endswith(MS) else f"{word} {times:,}"
        for word, times in rows
    )
