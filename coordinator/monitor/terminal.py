"""Text for a terminal about a run, living or past (`show`): its state in a few lines (`summary`), its members in a
table (`members_table`), and below a narrow table what it has no room for (`reasons`)."""

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

from atoll.comm.durations import grain, in_words, remaining
from atoll.comm.phases import phase_word
from atoll.comm.terminal import say, show_table, visible

MEMBERS_SHOWN = 50
WIDE_COLUMNS = 110  # from which on the table has the reasons, too
COLORS = {  # in the order in which a long list needs to be looked at
    "suspect": "magenta",
    "joining": "yellow",
    "recovering": "yellow",
    "evicted": "red",
    "synced": "cyan",
    "active": "green",
    "left": "dim",
}


def show(run: dict[str, Any], every_member: bool = False) -> None:
    """Print the run; `run` is what GET /api/run answers. Of many members the first in need of a look."""
    for line in summary(run).splitlines():
        say(line)
    members = by_urgency(run["members"])
    shown = members if every_member else [m for m in members if m["state"] != "left"][:MEMBERS_SHOWN]
    if shown:
        show_table(members_table(run | {"members": shown}))
    for line in reasons(run | {"members": shown}):
        say(line)
    if len(shown) < len(members):
        gone = sum(m["state"] == "left" for m in members)
        said = f"{gone} have left" if gone == len(members) else f"and {len(members) - len(shown)} more"
        say(f"{said}: --all shows them")


def summary(run: dict[str, Any]) -> str:
    """The run in a few lines."""
    loss = "" if run["val_loss"] is None else f", validation loss {run['val_loss']:.3f}"
    total = f" of {run['rounds_total']}" if run["rounds_total"] else ""
    lines = [
        f"run {run['run_id']}: round {run['round']}{total} {phase_word(run['phase'])} ({run['phase_reason']}), "
        f"{run['tokens']:,} tokens{loss}"
    ]
    states = Counter(m["state"] for m in run["members"])
    lines.append(", ".join(f"{states[state]:,} {state}" for state in COLORS if states[state]) or "no member")
    late, told = run["awaited"], run["phase_reason"].partition("waits for ")[2]
    if not all(name in told for name in late):  # else the phase's reason has said it
        more = f" and {len(late) - 5} more" if len(late) > 5 else ""
        lines.append(f"the round waits for {', '.join(late[:5])}{more}")
    lines += _story(run)
    if run["draining"]:
        lines.append("the coordinator is stopping for a while")
    return "\n".join(lines)


def _story(run: dict[str, Any]) -> Iterator[str]:
    """How fast it goes, when it will be finished, and what the last round was like, where that is said."""
    pace = run.get("pace") or {}
    said = [f"a round takes {in_words(pace['round_s'])}"] if pace.get("round_s") else []
    said += [f"{pace['tokens_per_s']:,.0f} tokens/s"] if pace.get("tokens_per_s") else []
    if run.get("ends_at") and pace.get("seconds_left"):
        of = max(grain(pace["seconds_left"]), 60)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(of * round(run["ends_at"] / of)))
        said.append(f"finished in {remaining(pace['seconds_left'])}, {when}")
    if said:
        yield ", ".join(said)
    if sum(run.get("goodput_seconds", {}).values()):
        yield (
            f"fleet goodput {run['fleet_goodput']:.1%} (steps that a commit has, of all the nodes' time), "
            f"compute utilisation {run['compute_utilisation']:.1%} (steps, of steps and exchange)"
        )
    if last := run.get("last_round"):
        yield f"round {last['round']} took {in_words(last['seconds'])}: {last['why']}"
    for m in run.get("returned", []):
        since, until = (time.strftime("%H:%M:%S", time.localtime(m[at])) for at in ("since", "until"))
        yield f"{m['name']} ({m['node_id']}) was away {since} to {until}: {m['reason']}"
    yield from (f"{m['name']} ({m['node_id']}) {m['slow']}" for m in run["members"] if m.get("slow"))


def by_urgency(members: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Members in the order in which they need a look: those in trouble first, then by age."""
    order = list(COLORS)
    return sorted(members, key=lambda m: (order.index(m["state"]), int(m["node_id"][1:])))


def members_table(run: dict[str, Any]) -> Table:
    """Members and their states; `run` is what GET /api/run answers."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column, justify in (("node", "left"), ("state", "left"), ("doing", "left"), ("step", "right")):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    wide = is_wide()
    for column in ("tokens/s", "MFU", "loss", "sent", "received") if wide else ("tokens/s", "loss"):
        table.add_column(column, justify="right", no_wrap=True)
    if wide:
        table.add_column("")
    for m in run["members"]:
        here = m["state"] not in ("left", "evicted")
        table.add_row(
            escape(visible(f"{short(m['name'], 20)} ({m['node_id']})")),
            f"[{COLORS[m['state']]}]{m['state']}[/]",
            escape(doing(m)) if here else "",
            str(m["inner_step"] or "") if here else "",
            f"{m.get('pace') or m['tokens_per_s']:,.0f}" if here else "",
            *((utilisation(m) if here else "",) if wide else ()),
            f"{m['loss']:.3f}" if here and m["loss"] else "",
            *(
                (size(m["bytes_up"]), size(m["bytes_down"]), escape(visible(short(m["reason"], 60))))
                if wide
                else ()
            ),
        )
    return table


def reasons(run: dict[str, Any]) -> Iterator[str]:
    """The members' reasons, a line each, for a terminal in whose table there is no room for them."""
    if not is_wide():
        yield from (f"{m['name']} ({m['node_id']}): {m['reason']}" for m in run["members"] if m["reason"])


def is_wide() -> bool:
    return shutil.get_terminal_size().columns >= WIDE_COLUMNS


def utilisation(m: dict[str, Any]) -> str:
    """The model FLOPs utilisation of a member that takes inner steps: a share, or that it is unknown."""
    if not m["tokens_per_s"]:
        return ""
    return f"{100 * m['mfu']:.1f} %" if m["mfu"] else "unknown"


def doing(m: dict[str, Any]) -> str:
    """The phase that a member says it is in, and whether it has its steps or is ready."""
    phase = phase_word(m["phase"])
    if m["ready"]:
        return f"{phase}, ready"
    return f"{phase}, has its steps" if m["reached"] else phase


def short(text: str, width: int) -> str:
    """The text, cut to `width` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
