"""How the run looks in a terminal."""

import shutil
from typing import Any

from rich.markup import escape
from rich.table import Table

COLORS = {
    "joining": "yellow",
    "recovering": "yellow",
    "synced": "cyan",
    "active": "green",
    "suspect": "magenta",
    "left": "dim",
    "evicted": "red",
}


def members_table(run: dict[str, Any]) -> Table:
    """Members and their states; `run` is what GET /api/run answers."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column, justify in (("node", "left"), ("state", "left"), ("doing", "left"), ("step", "right")):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    wide = shutil.get_terminal_size().columns >= 110
    for column in ("tokens/s", "loss", "sent", "received") if wide else ("tokens/s", "loss"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for m in run["members"]:
        here = m["state"] not in ("left", "evicted")
        table.add_row(
            escape(f"{short(m['name'], 20)} ({m['node_id']})"),
            f"[{COLORS.get(m['state'], 'none')}]{m['state']}[/]",
            escape(m["phase"]) if here else "",
            str(m["inner_step"]) if here else "",
            f"{m['tokens_per_s']:,.0f}" if here else "",
            f"{m['loss']:.3f}" if here and m["loss"] else "",
            *((size(m["bytes_up"]), size(m["bytes_down"])) if wide else ()),
            escape(short(m["reason"], 60 if wide else 28)),
        )
    return table


def short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
