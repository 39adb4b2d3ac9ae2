"""Credit: the tokens and rounds that each node, and each owner of nodes, has in the run. Pure.

    commit        the tokens of each contributor go to the account of its key, and of its owner
    void round    they are taken back: it is as if the round had not been
    leave, join   nothing changes but the name: an account is for ever

What counts is what the run accepted, as the commit record has it, never what a node says of itself; so at any
moment the accounts of nodes, and those of owners, come to the run's committed tokens exactly. Owners are the names
of invites, which the operator gives. A node is known by its key (`conduct.identity`), so one that comes back,
under another name or as another node, goes on with its account. Only a commit opens an account: who joins and
contributes nothing leaves no trace here.
"""

import struct
from collections.abc import Iterable

from msgspec import Struct

from atoll.comm.ids import NodeId
from atoll.comm.replace import replace

MAX_FORMER_NAMES = 8  # of a node, the latest
SHARE = struct.Struct("<IIQ")  # number of a node's account, number of its owner's, tokens


class Work(Struct, frozen=True, gc=False):
    """A contributor's part of a round that commits."""

    who: str  # its `conduct.identity`
    node: NodeId
    name: str
    owner: str
    tokens: int


class NodeAccount(Struct, frozen=True, gc=False):
    """The account of one key."""

    number: int  # counts the run's accounts, from 1
    node: NodeId  # that had the key last
    name: str  # that it gave last
    owner: str  # whose invite it came with last
    tokens: int = 0
    rounds: int = 0
    former_names: tuple[str, ...] = ()  # the latest last


class OwnerAccount(Struct, frozen=True, gc=False):
    """The account of one owner: of all that nodes contributed while they were its own."""

    number: int  # counts the run's accounts, from 1
    tokens: int = 0
    rounds: int = 0  # in which at least one of its nodes contributed


class RoundCredit(Struct, frozen=True, gc=False):
    """What a round that may still become void brought to whom."""

    round: int
    shares: bytes  # a `SHARE` for each key that contributed


class CreditBook(Struct, frozen=True, gc=False):
    """The accounts; the functions of this module change them."""

    nodes: dict[str, NodeAccount] = {}  # by `conduct.identity`
    owners: dict[str, OwnerAccount] = {}  # by name
    recent: tuple[RoundCredit, ...] = ()  # ascending
    opened: int = 0  # accounts, so far

    @property
    def tokens(self) -> int:
        """The sum of all nodes' accounts."""
        return sum(account.tokens for account in self.nodes.values())


def enter(book: CreditBook, round_: int, works: Iterable[Work], oldest: int) -> CreditBook:
    """Credit a round that commits to its contributors. `oldest`: the first round whose state the run may yet
    return to; what a round up to it brought is not taken back any more."""
    nodes, owners, opened = dict(book.nodes), dict(book.owners), book.opened
    tokens, shares = dict[str, int](), dict[str, Work]()
    for work in works:
        if work.tokens > 0:
            tokens[work.who], shares[work.who] = tokens.get(work.who, 0) + work.tokens, work
    there = set[str]()
    packed = bytearray()
    for who, work in shares.items():
        if who not in nodes:
            opened += 1
            nodes[who] = NodeAccount(opened, work.node, work.name, work.owner)
        if work.owner not in owners:
            opened += 1
            owners[work.owner] = OwnerAccount(opened)
        mine, its = _named(nodes[who], work.node, work.name, work.owner), owners[work.owner]
        nodes[who] = replace(mine, tokens=mine.tokens + tokens[who], rounds=mine.rounds + 1)
        first = work.owner not in there
        there.add(work.owner)
        owners[work.owner] = replace(its, tokens=its.tokens + tokens[who], rounds=its.rounds + first)
        packed += SHARE.pack(mine.number, its.number, tokens[who])
    recent = (*book.recent, RoundCredit(round_, bytes(packed)))
    return CreditBook(nodes, owners, tuple(r for r in recent if r.round > oldest), opened)


def take_back(book: CreditBook, last: int) -> CreditBook:
    """The accounts without what rounds after `last`, which are void, brought; those that have nothing else end."""
    nodes = {account.number: account for account in book.nodes.values()}
    owners = {account.number: account for account in book.owners.values()}
    for void in (r for r in book.recent if r.round > last):
        there = set[int]()
        for node, owner, tokens in SHARE.iter_unpack(void.shares):
            mine, its, first = nodes[node], owners[owner], owner not in there
            there.add(owner)
            nodes[node] = replace(mine, tokens=mine.tokens - tokens, rounds=mine.rounds - 1)
            owners[owner] = replace(its, tokens=its.tokens - tokens, rounds=its.rounds - first)
    return replace(
        book,
        nodes={who: nodes[a.number] for who, a in book.nodes.items() if nodes[a.number].rounds},
        owners={name: owners[a.number] for name, a in book.owners.items() if owners[a.number].rounds},
        recent=tuple(r for r in book.recent if r.round <= last),
    )


def rename(book: CreditBook, who: str, node: NodeId, name: str, owner: str) -> CreditBook:
    """Enter under which name, and whose, a key joins; nothing where it has no account."""
    account = book.nodes.get(who)
    if account is None or (named := _named(account, node, name, owner)) == account:
        return book
    return replace(book, nodes=book.nodes | {who: named})


def _named(account: NodeAccount, node: NodeId, name: str, owner: str) -> NodeAccount:
    if (node, name, owner) == (account.node, account.name, account.owner):
        return account
    former = account.former_names
    if name != account.name:
        former = (*(n for n in former if n not in (name, account.name)), account.name)[-MAX_FORMER_NAMES:]
    return replace(account, node=node, name=name, owner=owner, former_names=former)
