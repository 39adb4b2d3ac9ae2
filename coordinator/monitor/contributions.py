"""Who contributed how much to a run: for scripts (`contributions`), and as tables for a terminal."""

from collections import Counter
from heapq import nlargest
from typing import Any

from rich.markup import escape
from rich.table import Table

from atoll.comm.terminal import plural, visible
from atoll.coordinator.monitor.terminal import short
from atoll.coordinator.state_machine.state import State

NAME_WIDTH = 24  # characters of a name in a table


def contributions(state: State, run: str, limit: int | None = None) -> dict[str, Any]:
    """The accounts of owners and nodes, those with the most tokens first, as `GET /api/contributions` shows them;
    `limit`: so many of each at most. The nodes' tokens and `uncredited`, which were committed before the run kept
    accounts, come to the run's exactly."""
    book = state.credit
    belong = Counter(account.owner for account in book.nodes.values())
    owners, nodes = list(book.owners.items()), list(book.nodes.items())
    return {
        "run_id": run,
        "committed": state.committed,
        "tokens": state.tokens,
        "uncredited": state.tokens - book.tokens,
        "owners_total": len(owners),
        "nodes_total": len(nodes),
        "owners": [
            {"owner": name, "tokens": a.tokens, "rounds": a.rounds, "nodes": belong[name]}
            for name, a in nlargest(limit or len(owners), owners, key=lambda entry: entry[1].tokens)
        ],
        "nodes": [
            {
                "node_id": a.node,
                "key": who if who != a.node else "",
                "name": a.name,
                "former_names": a.former_names,
                "owner": a.owner,
                "tokens": a.tokens,
                "rounds": a.rounds,
            }
            for who, a in nlargest(limit or len(nodes), nodes, key=lambda entry: entry[1].tokens)
        ],
    }


def contribution_summary(said: dict[str, Any]) -> str:
    """The run's tokens and whose they are, in a line."""
    owners, nodes = said["owners_total"], said["nodes_total"]
    of = f"{owners:,} {plural('owner', owners)} with {nodes:,} {plural('node', nodes)}"
    before = f"; {said['uncredited']:,} of them before it kept accounts" if said["uncredited"] else ""
    rounds = f"{said['committed']:,} {plural('round', said['committed'])}"
    return f"run {said['run_id']}: {said['tokens']:,} tokens in {rounds}, of {of}{before}"


def owners_table(said: dict[str, Any]) -> Table:
    """The owners' accounts; `said`: what `contributions` gave."""
    table = _table("owner", "nodes")
    for a in said["owners"]:
        table.add_row(_name(a["owner"]), str(a["nodes"]), *_figures(a, said))
    return table


def nodes_table(said: dict[str, Any]) -> Table:
    """The nodes' accounts; `said`: what `contributions` gave."""
    table = _table("node", "owner")
    for a in said["nodes"]:
        table.add_row(_name(f"{a['name']} ({a['node_id']})"), _name(a["owner"]), *_figures(a, said))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column)
    for column in ("rounds", "tokens", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _name(words: str) -> str:
    """Words of others, short enough for a table."""
    return escape(visible(short(words, NAME_WIDTH))) or "not known"


def _figures(account: dict[str, Any], said: dict[str, Any]) -> tuple[str, str, str]:
    share = account["tokens"] / said["tokens"] if said["tokens"] else 0.0
    return f"{account['rounds']:,}", f"{account['tokens']:,}", f"{100 * share:.1f} %"
