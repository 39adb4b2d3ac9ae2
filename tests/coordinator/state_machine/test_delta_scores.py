"""Deltas that point elsewhere than the others, by what owners tell: who is charged, and that nobody else is."""

import math
import struct
from collections.abc import Callable
from random import Random

import pytest
import scenario

from atoll.comm.bitmap import bitmap
from atoll.comm.config.outer import OuterConfig
from atoll.comm.digest import digest
from atoll.comm.evidence import Offence
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.delta_scores import directions
from atoll.coordinator.state_machine.ledger import seal_terms

CHUNKS = 8
NAMES = [f"m{i}" for i in range(1, 9)]
NODES = [NodeId(f"n{i}") for i in range(1, 9)]
Seen = Callable[[NodeId, NodeId], float | None]  # voice, contributor: its cosine; None: the voice tells of nobody


def honest(voice: NodeId, node: NodeId) -> float:
    """Near 0.4, each as it is: some by 0.02 more."""
    return 0.4 + 0.01 * (int(node[1:]) % 3)


def turned(*nodes: NodeId) -> Seen:
    return lambda voice, node: -0.4 if node in nodes else honest(voice, node)


def slandered(node: NodeId, *liars: NodeId) -> Seen:
    """These owners say of a node that it is turned."""
    return lambda voice, of: -1.0 if voice in liars and of == node else honest(voice, of)


def reducing(members: int = 8, told: dict[NodeId, float] | None = None, **security: object) -> scenario.Run:
    names = NAMES[:members]
    run = scenario.Run()
    run.config = replace(
        run.config,
        reduce=replace(run.config.reduce, chunk=-(-40 // CHUNKS)),
        outer=OuterConfig(clip=True),
        members=replace(run.config.members, minimum=1),
        security=replace(run.config.security, audit="0", **security),  # type: ignore[arg-type]
    )
    run.state = replace(run.state, config=run.config)
    run.do("begin", names)
    run.do("wait", ["10"])
    contribute(run, told or {})
    return run


def contribute(run: scenario.Run, told: dict[NodeId, float], samples: dict[NodeId, int] | None = None) -> None:
    run.do("reached", [run.state.name(n) for n in run.state.round.participants])
    for node in run.state.round.participants:
        front, count = run.state.leases.by_node[node][0][0], (samples or {}).get(node, 10)
        work = ev.Contribution(count, count, 2.0, told.get(node, 1.0), front)
        run.feed(ev.ContributionReady(node, 1, run.state.round.number, work))
    assert run.state.round.plan is not None


def seal(run: scenario.Run, seen: Seen, told: dict[NodeId, float] | None = None) -> None:
    """All owners seal what they have, and tell of it; all hold it; the round is committed."""
    ledger = run.state.round.ledger
    alive = bitmap((i for i, e in enumerate(ledger.entries) if not e.gone and e.contribution), len(ledger.entries))
    for c in ledger.unsealed:
        owner = ledger.owners[c]
        assert owner is not None
        nodes = [ledger.entries[i].node for i in sorted(sum(seal_terms(ledger, c, alive), []))]
        norms = [(told or {}).get(node, 1.0) * math.sqrt(1 / CHUNKS) for node in nodes]
        cosines = [seen(owner, node) for node in nodes]
        dots = b""
        if None not in cosines:
            dots = struct.pack(
                f"<{1 + len(nodes)}f", 0.5, *(n * (x or 0.0) for n, x in zip(norms, cosines, strict=True))
            )
        fence = run.fence({})._replace(attempt=ledger.since[c])
        one = (c, digest(b"%d %d" % (c, ledger.attempt)), alive)
        packed = struct.pack(f"<{len(norms)}f", *norms)
        run.feed(ev.ChunksSealed(owner, 1, fence, (one,), (packed,), dots=(dots,)))
    number, whole = run.state.round.number, run.state.round.ledger.root
    for node in run.state.round.ledger.members:
        run.feed(ev.ReduceComplete(node, 1, run.fence({}), whole, 0, 0))
    assert run.state.committed == number


def charged(run: scenario.Run) -> set[NodeId]:
    records = run.state.conduct.strikes.values()
    assert all(set(record.latest) == {Offence.OUTLIER} for record in records)
    return {record.node for record in records}


def test_honest_deltas_are_held_against_nobody() -> None:
    run = reducing()
    seal(run, honest)
    assert not charged(run) and run.state.pending is not None
    assert set(run.state.pending.contributors) == set(NODES)


def test_one_or_two_turned_deltas_are_charged_and_the_sentence_says_why() -> None:
    for liars in ({NODES[7]}, {NODES[2], NODES[5]}):
        run = reducing()
        seal(run, turned(*liars))
        assert charged(run) == liars
        assert any("its delta has cosine -0.4" in line for line in run.said)
        assert run.state.pending is not None and set(run.state.pending.contributors) == set(NODES)


def test_where_half_point_elsewhere_nobody_is_charged() -> None:
    run = reducing()
    seal(run, turned(*NODES[:4]))
    assert not charged(run)


@pytest.mark.parametrize("members", [1, 2, 3])
def test_of_few_nobody_is_charged(members: int) -> None:
    run = reducing(members, {NODES[0]: 9.0})
    seal(run, turned(NODES[0]), {NODES[0]: 9.0})
    assert not charged(run)


@pytest.mark.parametrize("liars", [NODES[1:2], NODES[1:3]])
def test_what_one_or_two_of_eight_make_up_of_another_convicts_nobody_and_clears_no_liar(
    liars: list[NodeId],
) -> None:
    run = reducing()
    seal(run, slandered(NODES[7], *liars))
    assert not charged(run)
    run = reducing()
    seal(run, lambda voice, node: 0.9 if voice in liars else turned(NODES[7])(voice, node))
    assert charged(run) == {NODES[7]}


def test_what_an_owner_makes_up_of_all_says_nothing_of_anybody() -> None:
    run, rng = reducing(), Random(3)
    seal(run, lambda voice, node: rng.uniform(-1, 1) if voice in NODES[:2] else honest(voice, node))
    assert not charged(run)


def test_owners_without_an_earlier_delta_tell_nothing_and_three_voices_are_needed() -> None:
    for speaking, found in ((NODES[:3], {NODES[7]}), (NODES[:2], set[NodeId]())):

        def seen(voice: NodeId, node: NodeId, speaking: list[NodeId] = speaking) -> float | None:
            return turned(NODES[7])(voice, node) if voice in speaking else None

        run = reducing()
        seal(run, seen)
        assert charged(run) == found


def test_of_its_own_direction_nobody_is_asked() -> None:
    """Two see that it is turned; it and another say that it is not."""

    def seen(voice: NodeId, node: NodeId) -> float | None:
        if voice not in (*NODES[:2], *NODES[6:]):
            return None
        return 0.9 if node == NODES[7] and voice in NODES[6:] else turned(NODES[7])(voice, node)

    run = reducing()
    seal(run, seen)
    assert charged(run) == {NODES[7]}


def test_by_length_are_compared_those_of_whom_nobody_tells_a_direction() -> None:
    run = reducing(told={NODES[4]: 8.0})
    seal(run, lambda voice, node: None, {NODES[4]: 8.0})
    assert charged(run) == {NODES[4]} and any("8 times as long as the median" in line for line in run.said)


def test_few_steps_make_an_honest_delta_short_and_turn_it_as_noise_does() -> None:
    run = reducing(told={})
    told, samples = {NODES[6]: 0.001}, {NODES[6]: 1}
    seal(run, honest)
    run.do("wait", ["10"])
    after_commit(run)
    contribute(run, told, samples)
    seal(run, turned(NODES[6]), told)
    assert not charged(run)


def test_work_that_the_last_round_left_out_is_not_compared_by_its_direction() -> None:
    run = reducing()
    member = run.state.members.here[NODES[7]]
    here = run.state.members.here | {NODES[7]: replace(member, missed=1)}
    run.state = replace(run.state, members=replace(run.state.members, here=here))
    seal(run, turned(NODES[7]))
    assert not charged(run)


def test_the_key_turns_it_off() -> None:
    run = reducing(outliers=False)
    seal(run, turned(NODES[7]))
    assert not run.state.conduct.strikes


def test_dots_of_the_wrong_length_are_left_out_of_a_seal_that_counts() -> None:
    run = reducing()
    ledger = run.state.round.ledger
    owner = ledger.owners[0]
    assert owner is not None
    for dots in (bytes(32), bytes(40)):
        one = (0, digest(b"0"), b"\xff")
        state = run.state
        run.feed(ev.ChunksSealed(owner, 1, run.fence({}), (one,), (bytes(32),), dots=(dots,)))
        assert run.state.round.ledger.sealed[0].dots == b""
        run.state = state
    run.feed(ev.ChunksSealed(owner, 1, run.fence({}), (one,), (bytes(32),), dots=(bytes(36),)))
    assert run.state.round.ledger.sealed[0].dots == bytes(36)


@pytest.mark.parametrize("seed", range(200))
def test_two_liars_of_eight_never_convict_whatever_they_say(seed: int) -> None:
    """Honest voices differ by what they sampled; liars say anything, of anybody."""
    rng = Random(seed)
    liars = rng.sample(NODES, 2)
    heard = {
        voice: {
            node: rng.choice([-1.0, 0.0, 1.0, rng.uniform(-1, 1)])
            if voice in liars
            else rng.gauss(honest(voice, node), 0.01)
            for node in NODES
            if node != voice and (voice not in liars or rng.random() < 0.8)
        }
        for voice in NODES
    }
    found = directions(heard, NODES)
    assert all(0.3 < found[node] < 0.5 for node in NODES if node not in liars)


def after_commit(run: scenario.Run) -> None:
    """All have the state that was committed, and train on."""
    for node in list(run.state.members.here):
        run.feed(ev.StateReported(node, 1, run.state.committed, digest(b"state")))
    run.do("wait", ["10"])
