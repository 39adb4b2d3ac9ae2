"""The chunk ledger alone: drawn operations are compared with plain dictionaries. How the run uses it, and what
goes wrong in a reduce, is in scenarios/ledger."""

import random

import pytest

from atoll.comm.digest import digest, root
from atoll.comm.ids import NodeId
from atoll.coordinator import ledger as book
from atoll.coordinator.ledger import Contribution, Ledger

A, B, C = NODES = (NodeId("n1"), NodeId("n2"), NodeId("n3"))


def contributed(*nodes: NodeId) -> Ledger:
    ledger = Ledger()
    for i, node in enumerate(nodes):
        ledger = book.contribute(ledger, node, Contribution(10 * (i + 1), 10, 2.0, 1.0))
    return ledger


@pytest.mark.parametrize("seed", range(50))
def test_the_first_seal_of_each_chunk_by_its_owner_counts_until_the_next_attempt(seed: int) -> None:
    rng = random.Random(seed)
    ledger, entered, sealed, attempt = Ledger(), dict[NodeId, Contribution](), dict[int, bytes](), 0
    for _ in range(300):
        node, draw = rng.choice(NODES), rng.random()
        if draw < 0.2:
            contribution = Contribution(rng.randint(1, 9), 1, 0.0, 0.0)
            ledger = book.contribute(ledger, node, contribution)
            entered.setdefault(node, contribution)
        elif draw < 0.25:
            ledger = book.withdraw(ledger, node)
            entered.pop(node, None)
        elif draw < 0.3 and entered:
            members = tuple(rng.sample(sorted(entered), rng.randint(1, len(entered))))
            ledger = book.reopen(ledger, members, chunks=rng.randint(1, 12))
            sealed, attempt = {}, attempt + 1
            assert set(ledger.owners) <= set(members) == set(ledger.members)
            shares = [ledger.owners.count(m) for m in members]
            assert max(shares) - min(shares) <= 1
        else:
            seals = tuple((rng.randint(-2, 14), digest(rng.randbytes(4))) for _ in range(rng.randint(0, 4)))
            ledger = book.seal(ledger, node, seals)
            for chunk, word in seals:
                if chunk in range(len(ledger.owners)) and ledger.owners[chunk] == node:
                    sealed.setdefault(chunk, word)
        assert (ledger.contributions, ledger.sealed, ledger.attempt) == (entered, sealed, attempt)
        assert set(ledger.unsealed) == set(range(len(ledger.owners))) - set(sealed)
        assert ledger.complete == (attempt > 0 and not ledger.unsealed)
        if ledger.complete:
            assert ledger.root == root([sealed[c] for c in range(len(ledger.owners))])


def test_a_ledger_without_an_attempt_is_not_complete() -> None:
    assert not contributed(A, B).complete


def test_only_the_members_of_the_attempt_have_a_weight_their_tokens() -> None:
    ledger = book.reopen(contributed(A, B, C), (A, C), chunks=4)
    assert book.weights(ledger, sample=128) == {A: 1280.0, C: 3840.0}
    assert book.weights(book.withdraw(ledger, C), sample=128) == {A: 1280.0}
