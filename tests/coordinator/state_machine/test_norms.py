"""Deltas that are longer than their makers told: who is found out, and that nobody else is."""

import math
import struct
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import scenario

from atoll.comm.bitmap import bitmap
from atoll.comm.chunks import Chunks
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.outer import OuterConfig
from atoll.comm.config.run import CodecName
from atoll.comm.digest import digest
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine import ledger as book
from atoll.coordinator.state_machine.ledger import seal_terms
from atoll.coordinator.state_machine.weights import scales

A, B, C, D = NODES = tuple(NodeId(f"n{i}") for i in range(1, 5))
NAMES = ["ada", "bo", "cy", "dee"]
SEEN = Callable[[NodeId, int, NodeId], float]  # norm of a chunk of a node's delta, as an owner tells it


def reducing(names: list[str] = NAMES, told: float = 1.0, leaves: list[str] | None = None) -> scenario.Run:
    """Eight chunks, and deltas of this norm."""
    run = scenario.Run()
    run.config = replace(
        run.config,
        reduce=replace(run.config.reduce, chunk=5),
        outer=OuterConfig(clip=True),
        members=replace(run.config.members, minimum=1),
    )
    run.state = replace(run.state, config=run.config)
    run.do("leaf", leaves or [])
    run.do("begin", names)
    run.do("wait", ["10"])
    run.do("reached", names)
    for node in run.state.round.participants:
        front = run.state.leases.by_node[node][0][0]
        run.feed(ev.ContributionReady(node, 1, 1, ev.Contribution(10, 10, 2.0, told, front)))
    assert run.state.round.plan is not None
    run.said.clear()
    return run


def seal(run: scenario.Run, seen: SEEN) -> None:
    """All owners seal what they have, with the norms that they saw, and all hold it."""
    ledger = run.state.round.ledger
    alive = bitmap((i for i, e in enumerate(ledger.entries) if not e.gone and e.contribution), len(ledger.entries))
    for c in ledger.unsealed:
        owner = ledger.owners[c]
        assert owner is not None
        terms = sorted(sum(seal_terms(ledger, c, alive), []))
        norms = [seen(ledger.entries[i].node, c, owner) for i in terms]
        fence = run.fence({})._replace(attempt=ledger.since[c])
        one = (c, digest(b"%d %d" % (c, ledger.attempt)), alive)
        run.feed(ev.ChunksSealed(owner, 1, fence, (one,), (struct.pack(f"<{len(norms)}f", *norms),)))
    assert run.state.round.ledger.complete
    whole = run.state.round.ledger.root
    for node in run.state.round.ledger.members:
        run.feed(ev.ReduceComplete(node, 1, run.fence({}), whole, 0, 0))


def honest(node: NodeId, c: int, owner: NodeId) -> float:
    return math.sqrt(1 / 8)


def of(node: NodeId, times: float, owners: tuple[NodeId, ...] = NODES, chunks: range = range(8)) -> SEEN:
    """The delta of one node is longer than told, as these owners see it."""

    def seen(who: NodeId, c: int, owner: NodeId) -> float:
        lies = who == node and owner in owners and c in chunks
        return times * honest(who, c, owner) if lies else honest(who, c, owner)

    return seen


def committed(run: scenario.Run) -> set[NodeId]:
    assert run.state.pending is not None and run.state.committed == 1
    return set(run.state.pending.contributors)


def charged(run: scenario.Run) -> set[NodeId]:
    """Against whom something is held."""
    return {record.node for record in run.state.conduct.strikes.values()}


def test_who_told_the_truth_is_in_the_round() -> None:
    run = reducing()
    seal(run, honest)
    assert committed(run) == set(NODES) and run.state.pending is not None and run.state.pending.attempts == 1


@pytest.mark.parametrize("times", [1.6, 17.0, 1e30])
def test_one_whose_chunks_are_each_within_what_it_told_of_all_is_withdrawn(times: float) -> None:
    """The norm of a chunk says little: that of all is up to sqrt(chunks) times longer."""
    run = reducing()
    seen = of(D, times)
    seal(run, seen)
    assert run.state.round.number == 1 and D not in run.state.round.participants
    assert any("dee: its delta has a norm of" in line and "it is withdrawn" in line for line in run.said)
    attempt = run.state.round.ledger.attempt
    assert len(run.state.round.ledger.unsealed) == 8 and attempt > 1
    seal(run, seen)
    assert committed(run) == {A, B, C} and charged(run) == {D}


def test_one_whose_delta_is_too_long_in_one_owners_chunks_alone_is_withdrawn_when_another_sees_it_too() -> None:
    run = reducing()
    mine = [c for c, owner in enumerate(run.state.round.ledger.owners) if owner == A]
    seen = of(D, 50.0, chunks=range(mine[0], mine[0] + 1))
    seal(run, seen)
    ledger = run.state.round.ledger
    assert ledger.attempt == 2 and set(ledger.unsealed) == set(mine)
    assert not {A, D} & {ledger.owners[c] for c in mine} and D in run.state.round.participants
    assert any("by ada alone: others are to look" in line for line in run.said)
    seal(run, seen)
    assert D not in run.state.round.participants
    seal(run, seen)
    assert committed(run) == {A, B, C} and charged(run) == {D}


def test_an_owner_that_says_so_of_another_is_not_believed_alone() -> None:
    run = reducing()
    seen = of(D, 50.0, owners=(A,))
    seal(run, seen)
    ledger = run.state.round.ledger
    assert ledger.attempt == 2 and 0 < len(ledger.unsealed) < 8
    seal(run, seen)
    assert committed(run) == set(NODES) and not charged(run)
    assert not any("withdrawn" in line for line in run.said)


@pytest.mark.parametrize("count", [4, 6])
def test_an_owner_that_adds_a_little_to_what_all_tell_of_one_has_it_neither_charged_nor_left_out(
    count: int,
) -> None:
    """One that owns nothing: what is told of it comes to just what it told itself, and others told most of it."""
    names = ["ada", "bo", "cy", "dee", "eve", "flo"][:count]
    liar, victim = A, NodeId(f"n{count}")
    for seed in range(10):
        rng, run = Random(seed), reducing(names, leaves=[names[-1]])
        parts = {n: [rng.uniform(0.5, 1.5) for _ in range(8)] for n in run.state.round.participants}

        def seen(who: NodeId, c: int, owner: NodeId, parts: dict[NodeId, list[float]] = parts) -> float:
            square = parts[who][c] / sum(parts[who]) * (1 - 1e-7)
            return math.sqrt(square * (1.001 if (who, owner) == (victim, liar) else 1.0))

        while not run.state.committed:
            seal(run, seen)
        assert run.state.pending is not None and run.state.pending.attempts <= 3
        assert victim in committed(run) and not charged(run) - {liar}, run.said


def test_who_sends_each_owner_something_else_has_others_look_once_and_is_left_out() -> None:
    """One chunk is long at whoever merges it first, then others: of each chunk somebody sees that it is short."""
    run, looked = reducing(["ada", "bo", "cy", "dee", "eve", "flo"], leaves=["flo"]), dict[int, list[NodeId]]()

    def seen(who: NodeId, c: int, owner: NodeId) -> float:
        looked.setdefault(c, [])
        if owner not in looked[c]:
            looked[c].append(owner)
        long = len(looked[c]) == (1 if c == 0 else 2)
        return honest(who, c, owner) * (5.0 if who == NodeId("n6") and long else 1.0)

    while not run.state.committed:
        seal(run, seen)
    assert run.state.pending is not None and run.state.pending.attempts <= 3 and not charged(run)


def test_one_that_the_run_needs_and_is_longer_each_time_that_others_look_is_clipped_to_nothing_soon() -> None:
    run = reducing()
    run.config = replace(run.config, members=replace(run.config.members, minimum=4))
    run.state = replace(run.state, config=run.config)
    while not run.state.committed:
        assert run.state.round.ledger.attempt < 5
        seal(run, of(D, 10.0 ** (2 * run.state.round.ledger.attempt)))
    assert run.state.pending is not None and run.state.pending.scales[D] < 1e-30


def test_where_one_of_two_may_have_lied_neither_looks_at_what_the_other_told() -> None:
    """An honest owner that has most of a leaf's delta, and one that tells as much more of it as it has chunks."""
    run = reducing(["ada", "bo", "cy", "dee", "eve"], leaves=["eve"])
    leaf, heavy = NodeId("n5"), {c for c, owner in enumerate(run.state.round.ledger.owners) if owner == B}

    def seen(who: NodeId, c: int, owner: NodeId) -> float:
        square = 0.6 / len(heavy) if c in heavy else 0.4 / (8 - len(heavy))
        lie = 0.58 / run.state.round.ledger.owners.count(A) if owner == A else 0.0
        return math.sqrt(square + lie) if who == leaf else honest(who, c, owner)

    while not run.state.committed:
        seal(run, seen)
    assert run.state.pending is not None and run.state.pending.attempts == 2
    assert leaf in committed(run) and not charged(run)


def test_an_owner_that_says_so_of_one_after_the_other_has_nothing_reduced_more_than_once() -> None:
    """Whose word is doubted merges nothing that is looked at again."""
    run = reducing(["ada", "bo", "cy", "dee", "eve", "flo"])
    victims = [node for node in run.state.round.participants if node != A]
    for victim in victims:

        def of_victim(who: NodeId, c: int, owner: NodeId, victim: NodeId = victim) -> float:
            return honest(who, c, owner) * (5.0 if (owner, who) == (A, victim) else 1.0)

        if not run.state.committed:
            seal(run, of_victim)
    assert run.state.pending is not None and run.state.pending.attempts == 2
    assert committed(run) == {A, *victims} and not charged(run)


def test_of_two_nobody_is_charged_and_the_round_goes_on_with_one() -> None:
    run = reducing(NAMES[:2])
    seal(run, of(B, 3.0, owners=(A,)))
    assert any("nobody else can tell: it is left out" in line for line in run.said)
    seal(run, of(B, 3.0, owners=(A,)))
    assert committed(run) == {A} and not charged(run)


def test_one_that_the_run_needs_stays_clipped_by_what_others_saw() -> None:
    run = reducing()
    limits = replace(run.config.members, minimum=4)
    run.config = replace(run.config, members=limits)
    run.state = replace(run.state, config=run.config)
    seal(run, of(D, 17.0))
    assert D in run.state.round.participants and run.state.round.ledger.attempt == 2
    entry = run.state.round.ledger.entries[-1]
    assert entry.node == D and entry.contribution is not None
    assert entry.contribution.norm == pytest.approx(17)
    assert scales(run.state.round.ledger, run.config)[-1] == pytest.approx(1 / entry.contribution.norm)
    while run.state.pending is None and run.state.round.ledger.attempt < 5:
        seal(run, of(D, 17.0))  # it owns nothing any more: others see all of it now
    assert committed(run) == set(NODES) and charged(run) == {D}
    assert run.state.pending is not None and run.state.pending.scales[D] <= 1 / entry.contribution.norm


def test_what_one_owner_says_of_a_fleet_of_leaves_leaves_out_one_and_charges_nobody() -> None:
    run = reducing(leaves=["bo", "cy", "dee"])
    assert set(run.state.round.ledger.owners) == {A}
    seal(run, of(D, 3.0))
    assert any("nobody else can tell: it is left out" in line for line in run.said)
    seal(run, of(D, 3.0))
    assert committed(run) == {A, B, C} and not charged(run)


def test_what_an_owner_tells_of_its_own_delta_counts() -> None:
    """Nobody else sees that; audits look at it."""
    run = reducing()
    seal(run, of(D, 9.0, owners=(D,)))
    seal(run, of(D, 9.0, owners=(D,)))
    assert committed(run) == {A, B, C} and charged(run) == {D}


def test_no_relay_is_charged_with_what_one_of_its_region_told_too_short() -> None:
    """Two owners see a mean that is too long, and the relay alone sees why."""
    run = reducing([*NAMES, "eve", "flo"])
    r = run.state.round
    nodes, owners = [e.node for e in r.ledger.entries], [o for o in r.ledger.owners if o is not None]
    regions = {node: int(i > 2) for i, node in enumerate(nodes)}
    near = [o if regions[o] == 0 else A for o in owners], [o if regions[o] == 1 else nodes[4] for o in owners]
    run.state = replace(run.state, round=replace(r, ledger=book.divide(r.ledger, regions, near)))

    def seen(node: NodeId, c: int, owner: NodeId) -> float:
        return 17.0 * honest(node, c, owner) if node == D else honest(node, c, owner)

    def mean(relay: NodeId, c: int, owner: NodeId) -> float:
        return math.fsum(seen(n, c, owner) for n in nodes if regions[n] == regions[relay]) / 3

    ledger = run.state.round.ledger
    alive = bitmap(range(6), 6)
    for c, owner in enumerate(owners):
        terms, relays = seal_terms(ledger, c, alive)
        fence = run.fence({})._replace(attempt=1)
        for i in relays:
            inside = [n for n in nodes if regions[n] == ledger.regions[i]]
            inputs, told = bitmap(map(nodes.index, inside), 6), [seen(n, c, nodes[i]) for n in inside]
            sums = ((c, inputs, struct.pack("<3f", *told)),)
            run.feed(ev.ChunksSealed(nodes[i], 1, fence, (), sums=sums))
        norms = {i: seen(nodes[i], c, owner) for i in terms} | {i: mean(nodes[i], c, owner) for i in relays}
        packed = struct.pack(f"<{len(norms)}f", *(norms[i] for i in sorted(norms)))
        run.feed(ev.ChunksSealed(owner, 1, fence, ((c, digest(b"%d" % c), alive),), (packed,)))
    whole = run.state.round.ledger.root
    for node in nodes:
        run.feed(ev.ReduceComplete(node, 1, run.fence({}), whole, 0, 0))
    assert run.state.round.ledger.attempt == 2 and run.state.committed == 0
    assert charged(run) <= {D}, run.said


def test_a_seal_without_a_norm_of_each_contribution_is_none() -> None:
    run = reducing()
    ledger = run.state.round.ledger
    owner = ledger.owners[0]
    assert owner is not None
    for norms in ((), (b"",), (bytes(12),), (bytes(20),)):
        run.feed(ev.ChunksSealed(owner, 1, run.fence({}), ((0, digest(b"0"), b"\x0f"),), norms))
        assert not run.state.round.ledger.sealed
    run.feed(ev.ChunksSealed(owner, 1, run.fence({}), ((0, digest(b"0"), b"\x0f"),), (bytes(16),)))
    assert set(run.state.round.ledger.sealed) == {0}


@pytest.mark.parametrize("codec", [c for c in CodecName if c is not CodecName.SPARSE])
@pytest.mark.parametrize("seed", range(4))
def test_norms_of_real_bytes_are_never_found_longer_than_they_were_told(seed: int, codec: CodecName) -> None:
    """Summed by their maker in fp64, and by owners in whatever order, rounded to fp32 on their way."""
    rng = np.random.default_rng(seed)
    format_, chunks = make_codec(codec, 96), Chunks(40, 5)
    deltas = [(rng.standard_t(2, 40) * 10.0 ** rng.integers(-20, 20)).astype(np.float32) for _ in range(4)]

    def encoded(x: "np.typing.NDArray[np.float32]", c: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        payload = np.empty(format_.size(5), np.uint8)
        format_.encode(np.ascontiguousarray(x[chunks.span(c)]), payload)
        return payload

    squares = [[format_.square(encoded(x, c), 5) for c in range(8)] for x in deltas]
    run = reducing()
    entries = tuple(
        replace(e, contribution=replace(e.contribution, norm=math.sqrt(math.fsum(s))))
        for e, s in zip(run.state.round.ledger.entries, squares, strict=True)
        if e.contribution is not None
    )
    contributions = {e.node: e.contribution for e in entries if e.contribution is not None}
    ledger = replace(run.state.round.ledger, entries=entries, contributions=contributions)
    run.state = replace(run.state, round=replace(run.state.round, ledger=ledger))
    seal(run, lambda node, c, owner: math.sqrt(squares[NODES.index(node)][c]))
    assert committed(run) == set(NODES)


def lying(rng: Random, liar: NodeId) -> SEEN:
    """What a liar says of another delta, or makes of its own."""
    frames, times = rng.random() < 0.5, rng.choice([1.2, 3.0, 100.0])
    victim = rng.choice([n for n in NODES if n != liar])
    odd = {c for c in range(8) if rng.random() < 0.5}

    def seen(node: NodeId, c: int, owner: NodeId) -> float:
        if owner == liar:
            return times * honest(node, c, owner) if frames and node == victim else 0.0
        return (
            times * honest(node, c, owner) if node == liar and not frames and c in odd else honest(node, c, owner)
        )

    return seen


@pytest.mark.parametrize("seed", range(60))
def test_whoever_lies_however_the_honest_are_in_the_round(seed: int) -> None:
    """One liar of four, as contributor and as owner."""
    rng = Random(seed)
    run, liar = reducing(), rng.choice(NODES)
    seen = lying(rng, liar)
    while not run.state.committed:
        assert run.state.round.ledger.attempt < 6
        seal(run, seen)
    assert set(NODES) - {liar} <= committed(run) and charged(run) <= {liar}
