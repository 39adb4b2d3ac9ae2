"""The chunk ledger alone: drawn operations are compared with plain dictionaries. How the run uses it, and what
goes wrong in a reduce, is in transcripts/ledger."""

import random

import msgspec
import pytest

from atoll.comm.bitmap import bit, bitmap
from atoll.comm.chunks import Chunks
from atoll.comm.digest import digest, root
from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine import ledger as book
from atoll.coordinator.state_machine.events import Contribution
from atoll.coordinator.state_machine.ledger import Ledger

A, B, C = NODES = (NodeId("n1"), NodeId("n2"), NodeId("n3"))


def contributed(*nodes: NodeId) -> Ledger:
    ledger = Ledger()
    for i, node in enumerate(nodes):
        ledger = book.contribute(ledger, node, Contribution(10 * (i + 1), 10, 2.0, 1.0))
    return ledger


def turns(*nodes: NodeId) -> book.Deal:
    return lambda chunks: tuple(nodes[c % len(nodes)] for c in range(chunks))


def opened(ledger: Ledger, *members: NodeId, chunks: int = 6) -> Ledger:
    return book.reopen(ledger, members, (), chunks, turns(*members))


def sealed_by(ledger: Ledger, node: NodeId, *chunks: int, inputs: tuple[int, ...] = (0, 1, 2)) -> Ledger:
    for c in chunks:
        ledger = book.seal(ledger, node, ledger.since[c], ((c, digest(b"%d" % c), bitmap(inputs, 8)),))
    return ledger


@pytest.mark.parametrize("seed", range(50))
def test_whatever_is_said_the_ledger_keeps_its_promises(seed: int) -> None:
    rng = random.Random(seed)
    ledger, life = Ledger(), 0
    for _ in range(300):
        node, draw, before = rng.choice(NODES), rng.random(), ledger
        if draw < 0.2:
            life += 1
            ledger = book.contribute(ledger, node, Contribution(rng.randint(1, 9), 1, 0.0, 0.0, life=life))
            assert ledger.contributions[node] == before.contributions.get(node, ledger.contributions[node])
        elif draw < 0.25:
            ledger = book.withdraw(ledger, node)
            assert ledger.sealed == before.sealed and node not in ledger.contributions
        elif draw < 0.32 and ledger.contributions:
            some = sorted(ledger.contributions)
            ledger = opened(ledger, *rng.sample(some, rng.randint(1, len(some))))
            assert ledger.sealed == before.sealed and set(ledger.sealed_before) == set(ledger.sealed)
            assert [e.node for e in ledger.entries if not e.gone].sort() == list(ledger.members).sort()
            assert [e.node for e in before.entries] == [e.node for e in ledger.entries[: len(before.entries)]]
            stays = {e.node for e, was in zip(ledger.entries, before.entries, strict=False) if not e.gone}
            for c, owner in enumerate(before.owners):
                same = owner in stays
                assert (ledger.owners[c], ledger.since[c]) == (owner, before.since[c]) or not same
                assert same or ledger.since[c] == ledger.attempt
                assert same or (ledger.owners[c] is None) == (c in ledger.sealed)
        elif draw < 0.36 and ledger.orphans:
            told = {
                n: {c: rng.choice([ledger.sealed[c].digest, digest(b"other")]) for c in ledger.orphans}
                for n in ledger.members
            }
            ledger = book.adopt(ledger, told, turns(*ledger.members))
            assert not ledger.orphans and ledger.attempt == before.attempt + 1
            for c in before.orphans:
                holders = [n for n in told if told[n][c] == before.sealed[c].digest]
                assert (c in ledger.sealed) == bool(holders) and ledger.owners[c] in (holders or ledger.members)
        else:
            since, place = rng.randint(0, ledger.attempt + 1), rng.randint(0, 9)
            seals = tuple(
                (rng.randint(-2, 8), digest(rng.randbytes(4)), bitmap([place], 16))
                for _ in range(rng.randint(0, 4))
            )
            ledger = book.seal(ledger, node, since, seals)
            for c, entered in ledger.sealed.items():
                if c not in before.sealed:
                    assert ledger.owners[c] == node and ledger.since[c] == since and place < len(ledger.entries)
                else:
                    assert entered == before.sealed[c], "the first seal wins"
        assert set(ledger.unsealed) == set(range(len(ledger.owners))) - set(ledger.sealed)
        assert ledger.complete == (ledger.attempt > 0 and not ledger.unsealed)
        if ledger.complete:
            assert ledger.root == root([ledger.sealed[c].digest for c in range(6)])


@pytest.mark.parametrize("seed", range(30))
def test_chunks_in_two_levels_have_all_their_relays_or_start_anew(seed: int) -> None:
    rng = random.Random(seed)
    ledger = opened(contributed(*NODES), *NODES)
    regions = {n: i % 2 for i, n in enumerate(NODES)}
    near = [[n for n in NODES if regions[n] == g] for g in (0, 1)]
    owners = [o for o in ledger.owners if o]
    relays = [[o if regions[o] == g else rng.choice(near[g]) for o in owners] for g in (0, 1)]
    ledger = book.divide(ledger, regions, relays)
    assert ledger.layered == set(range(6)) and set(NODES) <= ledger.workers | {*NODES}
    for _ in range(6):
        before, places = ledger, [e.node for e in ledger.entries]
        for c in rng.sample(range(6), 2):
            if (owner := ledger.owners[c]) is not None:
                ledger = sealed_by(ledger, owner, c)
        if flat := rng.random() < 0.1:
            ledger = book.flatten(ledger)
        members = sorted(rng.sample(NODES, rng.randint(2, len(NODES))))
        ledger = opened(ledger, *members)
        came_back = any(n in places for n in [e.node for e in ledger.entries[len(before.entries) :]])
        for c in before.layered:
            here = all(not ledger.entries[row[c]].gone for row in before.relays)
            stays = here and not flat and (c in ledger.sealed or not came_back)
            assert (c in ledger.layered) == stays
            assert ledger.since[c] == (before.since[c] if stays else ledger.attempt)
            assert not here or ledger.owners[c] == before.owners[c]
        assert ledger.layered <= before.layered


def test_what_is_sealed_before_a_next_attempt_that_is_flat_is_made_of_what_relays_summed() -> None:
    """A owns the chunk; C sums for B and itself."""
    ledger = opened(contributed(*NODES), *NODES)
    ledger = book.flatten(book.divide(ledger, {A: 0, B: 1, C: 1}, [[A] * 6, [C] * 6]))
    all_ = bitmap(range(3), 3)
    assert 0 not in book.seal(ledger, A, 1, ((0, digest(b"x"), all_),), norms=(bytes(3 * 4),)).sealed
    ledger = book.seal(ledger, A, 1, ((0, digest(b"x"), all_),), norms=(bytes(2 * 4),))
    assert ledger.sealed[0].means == bitmap([2], 3) and book.made_by(ledger, {C}) == {0}
    ledger = opened(ledger, *NODES)
    assert not ledger.layered and not ledger.relays and ledger.since[0] == 2 and 0 in ledger.sealed


def test_a_ledger_without_an_attempt_is_not_complete() -> None:
    assert not contributed(A, B).complete


def test_the_chunks_of_those_that_stay_are_theirs_and_only_unsealed_ones_of_the_lost_are_dealt() -> None:
    ledger = sealed_by(sealed_by(opened(contributed(A, B, C), A, B, C), A, 0), C, 2)
    ledger = opened(book.withdraw(ledger, C), A, B)
    assert ledger.owners == (A, B, None, A, B, A) and ledger.since == (1, 1, 2, 1, 1, 2)
    assert ledger.orphans == (2,) and ledger.sealed_before == (0, 2)


def test_an_orphan_goes_to_who_holds_it_and_is_reopened_if_nobody_does() -> None:
    ledger = sealed_by(opened(contributed(A, B, C), A, B, C), C, 2, 5)
    ledger = opened(book.withdraw(ledger, C), A, B)
    ledger = book.adopt(ledger, {A: {2: digest(b"forged"), 5: digest(b"5")}, B: {}}, turns(B))
    assert ledger.owners[2] == B and 2 not in ledger.sealed  # what A holds is not what was sealed
    assert ledger.owners[5] == A and ledger.sealed_before == (5,)
    assert ledger.since == (1, 1, 3, 1, 1, 3)


def test_orphans_that_several_hold_go_to_one_after_another() -> None:
    ledger = sealed_by(opened(contributed(A, B, C), A, B, C), C, 5, 2)
    ledger = opened(book.withdraw(ledger, C), A, B)
    assert ledger.sealed_before == (2, 5)
    here = {c: digest(b"%d" % c) for c in (2, 5)}
    ledger = book.adopt(ledger, {A: here, B: here}, turns(A))
    assert {ledger.owners[2], ledger.owners[5]} == {A, B} and ledger.sealed_before == (2, 5)


def test_a_first_attempt_without_relays_is_flat() -> None:
    ledger = book.divide(opened(contributed(A, B), A, B), {A: 0, B: 1}, [])
    assert ledger.regions == (0, 1) and ledger.layered == set()


def test_who_comes_back_has_a_new_place_and_owns_nothing_of_before() -> None:
    ledger = opened(contributed(A, B), A, B)
    again = book.contribute(book.withdraw(ledger, B), B, Contribution(20, 10, 2.0, 1.0, life=2))
    ledger = opened(again, A, B)
    assert [(e.node, e.gone) for e in ledger.entries] == [(A, False), (B, True), (B, False)]
    assert all(since == 2 for c, since in enumerate(ledger.since) if c % 2)


def test_a_contribution_counts_for_the_part_of_the_vector_that_it_is_in() -> None:
    ledger = opened(contributed(A, B, C), A, B, C)
    ledger = sealed_by(ledger, A, 0, 3, inputs=(0, 1, 2))
    ledger = sealed_by(ledger, B, 1, 4, inputs=(0, 1))
    ledger = sealed_by(ledger, C, 2, 5, inputs=(0, 1))
    parts = {n: included.part for n, included in book.inclusions(ledger, Chunks(55, 10)).items()}
    assert parts == pytest.approx({A: 1.0, B: 1.0, C: 20 / 55})
    assert bit(ledger.sealed[0].inputs, 2) and not bit(ledger.sealed[5].inputs, 2)


def test_a_reducer_owns_chunks_and_contributes_nothing() -> None:
    ledger = book.reopen(contributed(A, C), (A, C), (B,), 4, turns(A, B, C))
    assert ledger.members == (A, C) and B in ledger.owners
    assert [e.contribution is None for e in ledger.entries] == [False, False, True]
    assert not sealed_by(ledger, A, 0, inputs=(2,)).sealed, "nothing is in it"
    assert sealed_by(ledger, A, 0, inputs=(1, 2)).sealed and book.contributed_samples(ledger, B, 0) == 0


def test_others_wait_for_owners_of_whatever_is_not_an_orphan_and_for_relays_that_are_there() -> None:
    ledger = book.reopen(contributed(A, B), (A, B), (C,), 2, turns(A, C))
    assert ledger.workers == {A, C} == sealed_by(ledger, C, 1).workers
    assert opened(sealed_by(ledger, C, 1), A, B).workers == {A}, "nobody owns an orphan"
    ledger = book.divide(ledger, {A: 0, B: 1, C: 1}, [[A, A], [B, C]])
    assert ledger.workers == {A, B, C} and sealed_by(sealed_by(ledger, A, 0), C, 1).workers == {A, B, C}
    assert book.reopen(book.withdraw(ledger, B), (A,), (C,), 2, turns(A)).workers == {A, C}


def test_a_reducer_that_comes_back_brings_nothing_that_could_be_in_a_regions_sum() -> None:
    ledger = book.reopen(contributed(A, B), (A, B), (C,), 1, turns(A))
    ledger = book.divide(ledger, {A: 0, B: 1, C: 1}, [[A], [B]])
    for reducers in ((), (C,)):
        ledger = book.reopen(ledger, (A, B), reducers, 1, turns(A))
    assert ledger.layered == {0} and ledger.since == (1,)


def test_a_lease_is_used_as_far_as_contributions_from_its_front_go() -> None:
    ledger = sealed_by(opened(contributed(A, B), A, B), A, 0, inputs=(0, 1))
    for again in (Contribution(30, 10, 2.0, 1.0, life=2), Contribution(90, 10, 2.0, 1.0, life=3, front=40)):
        ledger = opened(book.contribute(book.withdraw(ledger, A), A, again), A, B)
    assert [book.contributed_samples(ledger, A, front) for front in (0, 40)] == [30, 90], "sealed or not"
    sealed = book.inclusions(ledger, Chunks(60, 10))
    assert sealed[A].samples == {0: 10} and sealed[B].samples == {0: 20}
    both = book.inclusions(sealed_by(ledger, B, 1, inputs=(1, 2)), Chunks(60, 10))[A]
    assert (both.contribution, both.part) == (ledger.entries[2].contribution, 2 / 6), "the longest of both"


def test_a_chunk_lacks_a_node_that_has_several_places_where_none_of_them_is_in_it() -> None:
    ledger = opened(contributed(A, B, C), A, B, C)
    back = book.contribute(book.withdraw(ledger, B), B, Contribution(20, 10, 2.0, 1.0, life=2))
    ledger = opened(back, A, B, C)
    for inputs, *chunks in ((0b1111, 0, 3), (0b1101, 1), (0b0101, 4), (0b0011, 2)):
        seals = tuple((c, bytes(16), bytes([inputs])) for c in chunks)
        ledger = book.seal(ledger, ledger.owners[chunks[0]], ledger.since[chunks[0]], seals)  # type: ignore[arg-type]
    assert set(ledger.sealed) == {0, 1, 2, 3, 4}
    assert book.missing_contributors(ledger, {A, B, C}) == {4: (B,), 2: (C,)}
    assert book.missing_contributors(ledger, {A, C}) == {2: (C,)}, "only of those that are asked for"


def test_the_ledger_of_an_attempt_among_hundreds_is_stored() -> None:
    """As a snapshot in the middle of a round must."""
    nodes = [NodeId(f"n{i}") for i in range(200)]
    ledger = opened(contributed(*nodes), *nodes)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ledger), type=Ledger) == ledger
