"""docs/attacks.md, made from the trials that docs/attacks.jsonl has."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from attacks.beginning import ROUNDS, Beginning
from attacks.cases import ATTACKS, BEGINNINGS, HONEST_FIRST, MEMBERS, NOTHING, STRANGERS, Attack
from attacks.clocked import CALLS, HEARTBEAT, REPORT
from attacks.trial import LONG_LENGTHS, USUAL, USUAL_LENGTHS, Calls, Figures, Trial
from attacks.village import ROUND
from scipy.stats import t as student

CHANCE = "struck, outlier"  # nothing follows from it alone, and it happens without an attack, too
MEMORY_BOUND = 64 << 20  # bytes
HEAD = """\
# What attacks cost

Made by `make attacks`; do not edit. {trials} trials, on {hardware}: [attacks.jsonl](attacks.jsonl). They are of
{versions}.

Each attack of [SECURITY.md](../SECURITY.md#attacks) that real processes can make on one machine is made on a
run of a coordinator and four honest nodes with rounds of {seconds:.1f} s. Who attacks as a member is a fifth node,
whose daemon is honest until it is told to begin. A trial is {before} rounds without the attack, {during} with it
(more, here up to {most}, as long as they are unusual), and {after} after it. The tables have what honest members
and the coordinator notice, without -> with it:

- **round**: seconds from one commit to the next, in the middle, and their ratio. *Slow* rounds took more than
  {usual:g} times the middle of those without: which ones, counted from the attack's first, and the longest of all.
- **heartbeats; reports**: milliseconds that these calls of honest members took in the middle, and how many times
  as long both were together.
- **memory**: MB that a process has for itself, at its most; of the coordinator, the honest nodes' daemons and
  their trainers the one that grew most.

Without an attack, from trial to trial, rounds took {rounds} s in the middle, heartbeats {heartbeats} ms and
reports {reports} ms: so much is chance. In **bold** is what is more than a tenth above what it was and above all
that, or more than 64 MiB above what it was. Chance is, too, in a model this small, that an honest delta points
elsewhere than the others and its node is struck once, of which nothing follows: that happened {struck} times, and
is not in the tables.

Over all attacks, calls took {slowdowns} times as long with the attack as without;
where nobody did anything, {control}. What 95 of 100 took at most was {slow} times as
long; where nobody did anything, {slow_control}. Ranges have the mean of many such trials in 95 of 100 cases.

All processes share one machine. Strangers are nice to the others, and before they attack they do the same to a
port of nobody's: what they take of the processors is in both figures. Processes that have nothing to do with it
took {others:.2f} cores in the middle, {most_others:.2f} at most{precedence}.
"""
MEMBERS_HEAD = """
## By a member

What is held against it has the words of `atoll blame`: [what they are](operator.md#when-a-member-does-harm).
"""
STRANGERS_HEAD = """
## By strangers
"""
BEGINNINGS_HEAD = """
## At the beginning

A run of its own for each of these: one comes and is the first to take part, then the four honest nodes come at
once, which is when the run is to begin. Seconds are from the join of the last of them to the first commit, beside
those where one comes first that is as honest as they are; memory is until {rounds} rounds are committed, of the
process that has most more than it has there.

| first to come | what became of it | first commit, s | memory, MB |
|---|---|---|---|
"""
LONG_HEAD = """
## In long rounds

What slows single rounds costs them seconds, however long they are. Here rounds take {seconds:.0f} s, and each
attack has a run of its own; rounds without it: {before}, with it: {during}.

| attack | what became of it | round, s | longest, s |
|---|---|---|---|
"""
COLUMNS = "| attack | what became of it | round, s | slow | heartbeats; reports, ms | memory, MB |"


def load(path: Path) -> list[Trial]:
    """All trials of a file of JSON lines."""
    found = list[Trial]()
    for row in _lines(path):
        if "attack" not in row:
            continue
        for part in ("before", "during", "after"):
            if row[part] is not None:
                row[part]["calls"] = {what: Calls(**of) for what, of in row[part]["calls"].items()}
                row[part] = Figures(**row[part])
        found.append(Trial(**row))
    return found


def load_beginnings(path: Path) -> list[Beginning]:
    """All beginnings of the same file."""
    return [Beginning(**row) for row in _lines(path) if "first" in row]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def page(trials: Sequence[Trial], begun: Sequence[Beginning], hardware: str) -> str:
    """The page."""
    lengths, every = USUAL_LENGTHS, trials
    trials = [t for t in every if t.paced == ROUND]
    usual = statistics.median(t.before.seconds for t in trials)
    others = [figures.others for t in trials for figures in (t.before, t.during)]
    most = max(len(t.during.rounds) for t in trials)
    versions = Counter(t.version for t in every)
    attacked = [t for t in trials if t.attack != NOTHING.word]
    left_alone = [t for t in trials if t.attack == NOTHING.word]
    head = HEAD.format(
        **{"trials": len(every), "hardware": hardware, "seconds": usual, "usual": USUAL},
        **{
            "before": lengths.before,
            "during": lengths.during,
            "most": most,
            "after": lengths.after,
        },
        versions=", ".join(f"{version} ({count})" for version, count in versions.items()),
        rounds=spread([t.before.seconds for t in trials], 2),
        heartbeats=spread([1e3 * t.before.calls[HEARTBEAT].p50 for t in trials], 1),
        reports=spread([1e3 * t.before.calls[REPORT].p50 for t in trials], 1),
        slowdowns=_mean(map(slowdown, attacked)),
        control=_mean(map(slowdown, left_alone)),
        slow=_mean(map(slowdown_of_slow, attacked)),
        slow_control=_mean(map(slowdown_of_slow, left_alone)),
        **{"others": statistics.median(others), "most_others": max(others)},
        struck=sum(harm.endswith(CHANCE) for t in trials for harm in t.harmed),
        precedence=", after these had theirs" if any(t.nice < 0 for t in trials) else "",
    )
    parts = [head]
    for title, attacks in ((STRANGERS_HEAD, STRANGERS), (MEMBERS_HEAD, MEMBERS)):
        rows = [
            _row(attack, of, trials)
            for attack in attacks
            if (of := [t for t in trials if t.attack == attack.word])
        ]
        parts += [title, "\n".join([COLUMNS, "|---|---|---|---|---|---|", *rows]) + "\n"]
    parts.append(_in_long_rounds([t for t in every if t.paced != ROUND]))
    made = {t.attack for t in trials} | {b.first for b in begun}
    parts += [_beginnings(begun), _notes([each for each in (*ATTACKS, *BEGINNINGS) if each.word in made])]
    return "\n".join(part.strip("\n") + "\n" for part in parts if part)


def spread(values: Sequence[float], digits: int) -> str:
    """From the least to the most."""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def slowdown(t: Trial) -> float:
    """How many times as long as before calls took in the middle while there was the attack: the geometric mean of
    the kinds of calls."""
    return statistics.geometric_mean([t.during.calls[what].p50 / t.before.calls[what].p50 for what in CALLS])


def slowdown_of_slow(t: Trial) -> float:
    """The same, of what 95 of 100 calls took at most."""
    return statistics.geometric_mean([t.during.calls[what].p95 / t.before.calls[what].p95 for what in CALLS])


def _mean(ratios: Iterable[float]) -> str:
    """The geometric mean of ratios, and in what interval it is with 95 of 100 (Student's t)."""
    logs = [math.log(ratio) for ratio in ratios]
    if len(logs) < 2:
        return f"{math.exp(logs[0]):.2f}" if logs else "(not measured)"
    middle, error = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    reach = float(student.ppf(0.975, len(logs) - 1)) * error
    low, mean, high = (math.exp(middle + by) for by in (-reach, 0.0, reach))
    return f"{mean:.2f} ({low:.2f} to {high:.2f} by {len(logs)} trials)"


def growth(t: Trial) -> tuple[str, int, int]:
    """The process that grew most, and its bytes without the attack and with it."""
    name = max(t.before.memory, key=lambda name: t.during.memory.get(name, 0) - t.before.memory[name])
    return name, t.before.memory[name], t.during.memory.get(name, 0)


def _middle(trials: Sequence[Trial], figure: Callable[[Trial], float]) -> float:
    return statistics.median(map(figure, trials))


def _bold(text: str, beyond: bool) -> str:
    return f"**{text}**" if beyond else text


def _change(
    trials: Sequence[Trial], every: Sequence[Trial], figure: Callable[[Figures], float], times: float, digits: int
) -> str:
    """A figure without the attack and with it, in bold where it is beyond its bound, and beyond what `every` trial
    had without an attack."""
    without, with_ = _middle(trials, lambda t: figure(t.before)), _middle(trials, lambda t: figure(t.during))
    ratio = _middle(trials, lambda t: figure(t.during) / figure(t.before))
    text = f"{times * without:.{digits}f} -> {times * with_:.{digits}f} ({ratio:.2f})"
    return _bold(text, ratio > USUAL and with_ > max(figure(t.before) for t in every))


def _calls(trials: Sequence[Trial], every: Sequence[Trial]) -> str:
    """What calls took; in bold as `_change` has it."""

    def middle(what: str, figures: Callable[[Trial], Figures]) -> str:
        return f"{1e3 * _middle(trials, lambda t: figures(t).calls[what].p50):.1f}"

    changes = [f"{middle(what, lambda t: t.before)} -> {middle(what, lambda t: t.during)}" for what in CALLS]
    ratio = _middle(trials, slowdown)
    most = {what: max(t.before.calls[what].p50 for t in every) for what in CALLS}
    beyond = any(statistics.median(t.during.calls[what].p50 for t in trials) > most[what] for what in CALLS)
    return _bold(f"{'; '.join(changes)} ({ratio:.2f})", ratio > USUAL and beyond)


def _row(attack: Attack, trials: Sequence[Trial], every: Sequence[Trial]) -> str:
    latest = trials[-1]
    longest = max(max(t.during.rounds) for t in trials)
    slow = f"{_places(latest.slow)}; {longest:.1f} s" if any(t.slow for t in trials) else "none"
    name, least, most = max((growth(t) for t in trials), key=lambda found: found[2] - found[1])
    cells = (
        attack.sentence,
        _ended(trials),
        _change(trials, every, lambda f: f.seconds, 1, 2),
        slow,
        _calls(trials, every),
        _bold(f"{name}: {least / 1e6:.0f} -> {most / 1e6:.0f}", most - least > MEMORY_BOUND),
    )
    return f"| {' | '.join(cells)} |"


def _in_long_rounds(trials: Sequence[Trial]) -> str:
    """The table of attacks where rounds are long, where there are such."""
    if not trials:
        return ""
    by = {attack: [t for t in trials if t.attack == attack.word] for attack in ATTACKS}
    rows = [_long_row(attack, of, trials) for attack, of in by.items() if of]
    seconds = statistics.median(t.before.seconds for t in trials)
    head = LONG_HEAD.format(seconds=seconds, before=LONG_LENGTHS.before, during=LONG_LENGTHS.during)
    return head + "\n".join(rows)


def _long_row(attack: Attack, trials: Sequence[Trial], every: Sequence[Trial]) -> str:
    longest = max(max(t.during.rounds) for t in trials)
    times = max(max(t.during.rounds) / t.before.seconds for t in trials)
    cells = (
        attack.sentence,
        _ended(trials),
        _change(trials, every, lambda f: f.seconds, 1, 1),
        _bold(f"{longest:.1f} ({times:.2f})", times > USUAL),
    )
    return f"| {' | '.join(cells)} |"


def _ended(trials: Sequence[Trial]) -> str:
    """What became of the latest, and what was held against honest members in any of them."""
    harmed = sorted({harm for t in trials for harm in t.harmed if not harm.endswith(CHANCE)})
    return trials[-1].ended + (f"; **of honest members: {', '.join(harmed)}**" if harmed else "")


def _beginnings(begun: Sequence[Beginning]) -> str:
    """The table of who was first, where there are such."""
    by = {first: of for first in BEGINNINGS if (of := [b for b in begun if b.first == first.word])}
    rows = [_first_row(first, of, by.get(HONEST_FIRST, [])) for first, of in by.items()]
    return BEGINNINGS_HEAD.format(rounds=ROUNDS) + "\n".join(rows) if rows else ""


def _first_row(first: Attack, begun: Sequence[Beginning], honest: Sequence[Beginning]) -> str:
    harmed = sorted({harm for b in begun for harm in b.harmed if not harm.endswith(CHANCE)})
    middle, memory = statistics.median(b.seconds for b in begun), ""
    seconds = f"{middle:.1f}"
    if honest and first is not HONEST_FIRST:
        usual = [b.seconds for b in honest]
        without = statistics.median(usual)
        words = f"{without:.1f} -> {seconds} ({middle / without:.2f})"
        seconds, memory = _bold(words, middle > USUAL * max(usual)), _more_memory(begun, honest)
    ended = begun[-1].ended + (f"; **of honest members: {', '.join(harmed)}**" if harmed else "")
    return f"| {first.sentence} | {ended} | {seconds} | {memory} |"


def _more_memory(begun: Sequence[Beginning], honest: Sequence[Beginning]) -> str:
    """The process that had most more than where an honest one was first."""
    least = {name: max(b.memory.get(name, 0) for b in honest) for name in honest[0].memory}
    most = {name: max(b.memory.get(name, 0) for b in begun) for name in least}
    name = max(least, key=lambda name: most[name] - least[name])
    return _bold(
        f"{name}: {least[name] / 1e6:.0f} -> {most[name] / 1e6:.0f}", most[name] - least[name] > MEMORY_BOUND
    )


def _places(slow: Sequence[int]) -> str:
    """Round numbers, in a few words."""
    if not slow:
        return "none"
    whole = list(range(slow[0], slow[-1] + 1))
    return f"{slow[0]} to {slow[-1]}" if len(slow) > 2 and list(slow) == whole else ", ".join(map(str, slow))


def _notes(attacks: Sequence[Attack]) -> str:
    """Why attacks cost what they cost."""
    notes = dict.fromkeys(attack.note for attack in attacks if attack.note)
    of = {note: [attack.sentence for attack in attacks if attack.note == note] for note in notes}
    lines = [f"- **{'**, **'.join(sentences)}**: {note}" for note, sentences in of.items()]
    return "## Why\n\n" + "\n".join(lines)
