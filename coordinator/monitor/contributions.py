"""Who contributed how much to a run: for scripts (`contributions`), and as tables for a terminal."""

from collections import Counter
from collections.abc import Mapping
from heapq import nlargest
from typing import Any, TypeVar

from rich.markup import escape
from rich.table import Table

from atoll.comm.ids import NodeId
from atoll.comm.terminal import plural, visible
from atoll.coordinator.monitor.terminal import short
from atoll.coordinator.state_machine.credit import NodeAccount, OwnerAccount
from atoll.coordinator.state_machine.state import State

NAME_WIDTH = 24  # characters of a name in a table
DEFAULT_ACCOUNTS, MAX_ACCOUNTS = 200, 1000  # of owners, and of nodes: where nothing is said, and at most
A = TypeVar("A", NodeAccount, OwnerAccount)


def contributions(state: State, run: str, limit: int = DEFAULT_ACCOUNTS, offset: int = 0) -> dict[str, Any]:
    """The accounts of owners and nodes, those with the most tokens first, as `GET /api/contributions` shows them:
    `limit` of each at most, behind the first `offset` of each. All nodes' tokens and `uncredited`, which were
    committed before the run kept accounts, come to the run's exactly."""
    book = state.credit
    belong = Counter(account.owner for account in book.nodes.values())
    return {
        "run_id": run,
        "committed": state.committed,
        "tokens": state.tokens,
        "uncredited": state.tokens - book.tokens,
        "owners_total": len(book.owners),
        "nodes_total": len(book.nodes),
        "owners": [
            {"owner": name, "tokens": a.tokens, "rounds": a.rounds, "nodes": belong[name]}
            for name, a in _page(book.owners, limit, offset)
        ],
        "nodes": [_node(who, a) for who, a in _page(book.nodes, limit, offset)],
    }


def account(state: State, node: NodeId) -> dict[str, Any] | None:
    """A node's account, as `contributions` has it; None: there is none."""
    return next((_node(who, a) for who, a in state.credit.nodes.items() if a.node == node), None)


def _node(who: str, a: NodeAccount) -> dict[str, Any]:
    return {
        "node_id": a.node,
        "key": who if who != a.node else "",
        "name": a.name,
        "former_names": a.former_names,
        "owner": a.owner,
        "tokens": a.tokens,
        "rounds": a.rounds,
    }


def _page(accounts: Mapping[str, A], limit: int, offset: int) -> list[tuple[str, A]]:
    """Accounts with their names; of those with equal tokens the older comes first, so that no two pages have
    one."""

    def rank(entry: tuple[str, A]) -> tuple[int, int]:
        return entry[1].tokens, -entry[1].number

    return nlargest(offset + min(limit, MAX_ACCOUNTS), accounts.items(), key=rank)[offset:]


def contribution_summary(said: dict[str, Any]) -> str:
    """The run's tokens and whose they are, in a line."""
    owners, nodes = said["owners_total"], said["nodes_total"]
    of = f"{owners:,} {plural('owner', owners)} with {nodes:,} {plural('node', nodes)}"
    before = f"; {said['uncredited']:,} of them before it kept accounts" if said["uncredited"] else ""
    return f"run {said['run_id']}: {said['tokens']:,} tokens up to round {said['committed']:,}, of {of}{before}"


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
