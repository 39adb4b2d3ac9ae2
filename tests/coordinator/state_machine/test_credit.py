"""Credit is for what the run committed, to the token, whoever comes and goes."""

import random
from collections import Counter
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import scenario

from atoll.comm.digest import digest
from atoll.comm.ids import NodeId, PublicKey
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.journaled_machine import JournaledMachine, decode, encode
from atoll.coordinator.state_machine import credit
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.credit import MAX_FORMER_NAMES, CreditBook, NodeAccount, Work
from atoll.coordinator.state_machine.members import MAX_DEPARTED
from atoll.coordinator.state_machine.state import Phase


def key_of(person: str) -> PublicKey:
    return PublicKey(digest(person.encode()) * 2)


class Run(scenario.Run):
    """A run whose nodes have keys, and come with somebody's invite; what was committed of each is told apart."""

    def __init__(self) -> None:
        self.people = dict[NodeId, str]()
        self.owners = dict[str, str]()  # by person
        self.names = dict[str, str]()  # the newest, by person, where it is not the person's own
        self.kept = 0  # entries that are in a journal on disk
        super().__init__()
        self.set("security.audit", "0")

    def join(self, name: str, node: NodeId, life: int, disk: list[str] | None = None) -> None:
        """`name`: who has the key. Who was here and is not forgotten gets its id again."""
        known = [m for m in self.known if m.key == key_of(name)]
        node, life = (known[0].node, known[0].life + 1) if known else (node, life)
        self.people[node] = name
        shown, owner = self.names.get(name, name), self.owners.get(name, "")
        self.feed(ev.Joined(node, life, shown, f"{node}:1", f"session of {node}", key=key_of(name), owner=owner))
        self.feed(ev.Connected(node, life))
        if disk:
            round_, word = int(disk[0]), digest(" ".join(disk[:1]).encode())
            self.feed(ev.StateReported(node, life, round_, word))
        self.feed(ev.LayoutReported(node, life, scenario.NUMEL, digest(b"layout")))

    def come(self, *people: str, known: str = "") -> None:
        """They join and hold the state; `known`: the number by which they knew it."""
        for person in people:
            self.join(person, NodeId(f"n{self.state.members.next_id}"), 1)
        names = [self.names.get(person, person) for person in people]
        self.do("state", [*names, str(self.state.committed), *([f"as={known}"] if known else [])])

    def contribute(self, samples: dict[str, int] | None = None) -> None:
        """All participants are ready, ten seconds later: the reduce begins."""
        self.now += 10
        names = [self.name(n) for n in self.state.round.participants]
        self.do("reached", names)
        for name in names:
            self.do("ready", [name, f"samples={(samples or {}).get(name, 10)}"])
        assert self.state.round.phase is Phase.REDUCING

    def commit(self, samples: dict[str, int] | None = None) -> Counter[str]:
        """The round commits. Returns the tokens of each person in it."""
        self.contribute(samples)
        self.do("reduce", [])
        found = self.committed()
        self.do("state", [*(m.name for m in self.state.members.here.values()), str(self.state.committed)])
        return found

    def committed(self) -> Counter[str]:
        record, found = self.state.pending, Counter[str]()
        assert record is not None and record.round == self.state.committed
        for node, tokens in record.contributors.items():
            found[self.people[node]] += int(tokens)
        return found

    def account(self, person: str) -> NodeAccount:
        return self.state.credit.nodes[key_of(person).hex()]

    def reload(self, folder: Path) -> None:
        """The coordinator is started again, with nothing but its journal."""
        with closing(Journal(folder)) as journal:
            journal.append(self.journal[self.kept :], [])
            self.kept = len(self.journal)
            machine = JournaledMachine(self.config, journal, snapshot_every=300)
            assert machine.state.credit == self.state.credit
            if machine.snapshot_due():
                machine.snapshot()
        self.state = machine.state


@pytest.mark.long
def test_sums_are_exact_after_a_thousand_leaves(tmp_path: Path) -> None:
    """Volunteers come for a round or two, some of them again, by another name or with somebody else's invite."""
    run, rng = Run(), random.Random(7)
    run.owners = {"ada": "the institute", "bo": "the institute"}
    run.do("begin", ["ada", "bo"])
    nodes, owners = Counter[str](), Counter[str]()
    rounds: dict[str, set[int]] = {}
    leaves, people = 0, list[str]()
    while leaves < 1000:
        new = [f"v{len(people) + i}" for i in range(8)]
        people += new
        again = rng.sample(people[:-8], min(len(people) - 8, 3))
        for person in (*new, *again):
            run.owners[person] = f"owner {rng.randrange(20)}"
            run.names[person] = person if person in new or rng.random() < 0.5 else f"{person} at {leaves}"
        run.come(*new, *again)
        for _ in range(2):  # the first has them as those who fetch the state
            part = run.commit({run.names.get(p, p): rng.randint(1, 10) for p in ("ada", *new, *again)})
            nodes += part
            for person, tokens in part.items():
                owners[run.owners[person]] += tokens
                rounds.setdefault(person, set()).add(run.state.committed)
                rounds.setdefault(run.owners[person], set()).add(run.state.committed)
            assert run.state.credit.tokens == run.state.tokens == nodes.total()
        for person in (*new, *again):
            run.do("leave", [run.names[person]])
            leaves += 1
        run.reload(tmp_path)
    book = run.state.credit
    assert leaves >= 1000 and len(nodes) == len(people) + 2
    assert {p: run.account(p).tokens for p in nodes} == nodes and len(book.nodes) == len(nodes)
    assert {o: a.tokens for o, a in book.owners.items()} == owners
    assert {p: run.account(p).rounds for p in nodes} == {p: len(rounds[p]) for p in nodes}
    assert {o: a.rounds for o, a in book.owners.items()} == {o: len(rounds[o]) for o in owners}
    assert all(run.account(p).name == run.names.get(p, p) for p in nodes)
    assert all(run.account(p).owner == run.owners[p] for p in nodes)
    numbers = [a.number for a in book.nodes.values()] + [a.number for a in book.owners.values()]
    assert len(set(numbers)) == len(numbers)


def test_who_is_gone_before_the_commit_and_a_thousand_after_it_is_credited() -> None:
    """And its samples are consumed: nobody gets them again."""
    run = Run()
    run.do("begin", ["ada", "bo", "cy"])
    run.contribute()
    node, front = run.node("cy"), run.state.leases.by_node[run.node("cy")]
    for name in ("ada", "bo", "cy"):
        if run.node(name) in run.state.round.ledger.owners:
            run.do("seal", [name])
    run.feed(ev.Expired(node, 1, "silent"))
    for i in range(MAX_DEPARTED + 5):
        run.do("knock", [f"v{i}"])
        run.do("leave", [f"v{i}"])
    for name in ("ada", "bo"):  # they have what it had sealed
        run.do("orphans", [name, f"here={','.join(str(c) for c in run.state.round.ledger.orphans)}"])
    run.do("reduce", [])
    assert run.state.committed == 1 and run.committed() == {"ada": 10, "bo": 10, "cy": 10}
    assert run.account("cy").tokens == 10 and run.account("cy").name == "cy"
    assert run.state.leases.by_node[node][0] == (front[0][0] + 10, front[0][1] - 10)
    run.do("knock", ["one more"])
    run.do("leave", ["one more"])
    assert node not in run.state.members.departed and len(run.state.members.departed) == MAX_DEPARTED


def test_work_of_a_void_round_is_not_credited_and_what_came_before_and_after_is() -> None:
    run = Run()
    run.owners = {"ada": "the institute", "bo": "the institute", "eve": "eve's"}
    run.do("begin", ["ada", "bo"])
    run.commit()
    before = run.state.credit
    run.come("eve")
    run.commit()
    run.commit({"eve": 7})
    assert run.state.committed == 3 and run.account("eve").tokens == 7 and "eve's" in run.state.credit.owners
    run.do("restart", ["60"])
    run.do("return", ["ada", "1"])
    run.do("wait", ["2500"])
    assert "rounds 2 to 3 are void" in "\n".join(run.said)
    assert run.state.tokens == 20 and run.state.credit.nodes == before.nodes
    assert run.state.credit.owners == before.owners
    run.come("bo", "eve", known="1")
    run.commit({"eve": 3})
    assert run.state.committed == 4 and run.state.tokens == run.state.credit.tokens
    assert run.account("ada").rounds == 2 and run.account("ada").tokens == 20


def test_who_joins_and_contributes_nothing_has_no_account() -> None:
    run = Run()
    run.do("begin", ["ada", "bo"])
    run.come("cy")
    run.do("knock", ["dee"])
    run.commit()
    assert [a.name for a in run.state.credit.nodes.values()] == ["ada", "bo"]


def test_a_node_keeps_its_account_and_so_many_of_its_names() -> None:
    book, names = CreditBook(), [f"name {i}" for i in range(20)]
    for round_, name in enumerate(names, 1):
        book = credit.enter(book, round_, [Work("key", NodeId(f"n{round_}"), name, "ada", 5)], 0)
    account = book.nodes["key"]
    assert (account.name, account.node, account.tokens, account.rounds) == ("name 19", "n20", 100, 20)
    assert account.former_names == tuple(names[-MAX_FORMER_NAMES - 1 : -1])
    book = credit.rename(book, "key", NodeId("n21"), "name 15", "bo")
    account = book.nodes["key"]
    assert account.name == "name 15" and account.former_names[-1] == "name 19"
    assert "name 15" not in account.former_names and len(account.former_names) == MAX_FORMER_NAMES
    assert account.owner == "bo" and set(book.owners) == {"ada"}, "what it contributed as ada's stays hers"
    assert credit.rename(book, "key", NodeId("n21"), "name 15", "bo") is book
    assert credit.rename(book, "another key", NodeId("n22"), "eve", "") is book


def test_what_is_taken_back_is_exactly_what_later_rounds_brought() -> None:
    """By drawn rounds, with nodes that change their owners and two that have one key."""
    rng = random.Random(3)
    books = [CreditBook()]
    for round_ in range(1, 40):
        who = rng.sample(range(30), rng.randint(1, 12))
        works = [
            Work(f"key {i}", NodeId(f"n{i + 1}"), f"node {i}", f"owner {rng.randrange(5)}", rng.randrange(1 << 40))
            for i in (*who, who[0])
        ]
        oldest = rng.choice([0, 0, max(0, round_ - 20)]) if round_ > 25 else 0
        books.append(credit.enter(books[-1], round_, works, oldest))
        assert books[-1].tokens == sum(a.tokens for a in books[-1].owners.values())
    newest = books[-1]
    for round_ in range(newest.recent[0].round - 1, 40):
        left = credit.take_back(newest, round_)
        for accounts, were in ((left.nodes, books[round_].nodes), (left.owners, books[round_].owners)):
            assert {k: (a.number, a.tokens, a.rounds) for k, a in accounts.items()} == {
                k: (a.number, a.tokens, a.rounds) for k, a in were.items()
            }


def test_a_round_is_kept_in_mind_only_while_it_may_become_void() -> None:
    run = Run()
    run.do("begin", ["ada", "bo"])
    for _ in range(300):
        run.commit()
    recent = [r.round for r in run.state.credit.recent]
    assert recent == [*range(run.state.past[0].round + 1, 301)] and len(recent) < 300


def test_a_snapshot_of_a_version_without_accounts_can_be_read_and_accounts_begin_from_there() -> None:
    run = Run()
    run.do("begin", ["ada", "bo"])
    run.commit()
    body = msgspec.msgpack.decode(encode(run.state))
    del body["credit"]
    run.state = decode(msgspec.msgpack.encode(body), run.config)
    assert run.state.tokens == 20 and not run.state.credit.nodes
    run.commit()
    assert run.state.tokens == 40 and run.state.credit.tokens == 20
