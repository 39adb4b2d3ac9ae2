"""Past runs with a story, as a coordinator's state directory: for the page, its pictures and its measurements."""

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.comm.config.run import RoundsConfig, RunConfig, to_json
from atoll.comm.evidence import Consequence, Evidence, Offence
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace
from atoll.coordinator.causes.explanation import Confidence, Kind, Verdict
from atoll.coordinator.history import record_codec
from atoll.coordinator.history.record_archive import RecordArchive
from atoll.coordinator.history.record_store import LocalStore
from atoll.coordinator.history.segment import ROUNDS
from atoll.coordinator.history.series import series_row
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.service.journaled_machine import encode
from atoll.coordinator.service.run_records import FOLDER, ROWS_KEPT
from atoll.coordinator.state_machine import credit
from atoll.coordinator.state_machine.credit import CreditBook, Work
from atoll.coordinator.state_machine.events import CommitRecord, Decision, Failure, Note, Passage, TrainerFigures
from atoll.coordinator.state_machine.members import Member, Members, MemberState
from atoll.coordinator.state_machine.state import Phase, RoundState, State

NAMES = "ada bo cy dee eve fay gus hal ivy jo kai lou max ned oz pia".split()
OWNERS = ("Reef Institute", "ada@home", "Lagoon Lab", "<b>Kelp</b> & Co")
BEGAN = 1_790_000_000.0 - 1_790_000_000.0 % 3600  # seconds since 1970; a full hour
USUAL = {"inner": 52.0, "collect": 1.5, "reduce": 6.0, "commit": 0.5}  # seconds
SLOW, SLOW_LINK, GONE = NodeId("n7"), NodeId("n9"), NodeId("n11")
BUCKETS = ("inner", "sync", "recovering", "waiting", "paused", "down", "lost")


@dataclass(frozen=True, slots=True)
class Story:
    """A run's story: the seventh node trains slowly from a third of it on; in its last three rounds the ninth's
    link is slow; the eleventh is banned and gone in its middle, in an hour in which the coordinator is away for 20
    minutes, a round is void, and an exchange takes three attempts. From a third on rounds close without all."""

    rounds: int
    members: int = 12
    total: int = 0  # rounds that the run is to have; 0: as many as it has
    accounted: bool = False  # records say where each node's time went, and what failed

    @property
    def middle(self) -> int:
        return self.rounds // 2

    @property
    def away(self) -> float:
        """Seconds for which the coordinator is away in the middle."""
        return 1200.0 if self.middle > 10 else 0.0

    def committed_at(self, number: int) -> float:
        slow = max(number - (self.rounds - 3), 0) * 38.0
        return BEGAN + 60.0 * number + (self.away if number >= self.middle else 0.0) + slow

    def nodes(self, number: int) -> list[NodeId]:
        there = [NodeId(f"n{k}") for k in range(1, self.members + 1)]
        return [n for n in there if n != GONE or number < self.middle]


def name(node: NodeId) -> str:
    k = int(node[1:]) - 1
    return NAMES[k % len(NAMES)] + (f"-{k // len(NAMES)}" if k >= len(NAMES) else "")


def owner(node: NodeId) -> str:
    return OWNERS[int(node[1:]) % len(OWNERS)]


def record(story: Story, number: int, before: int) -> CommitRecord:
    """The record of a round; `before`: tokens committed before it."""
    rng = random.Random(number)
    nodes = story.nodes(number)
    late, slow_link = number > story.rounds // 3, number > story.rounds - 3
    pace = {n: (420.0 if n == SLOW and late else 1000.0) * rng.gauss(1, 0.04) for n in nodes}
    weights = {n: float(round(pace[n] * USUAL["inner"])) for n in nodes}
    link = {n: (1.1e6 if n == SLOW_LINK and slow_link else 12e6) * rng.gauss(1, 0.05) for n in nodes}
    loss = 2.2 + 8.5 / (1 + number / (story.rounds / 40)) + rng.gauss(0, 0.02)
    seconds = {phase: of * rng.gauss(1, 0.05) for phase, of in USUAL.items()}
    seconds["reduce"] += 38.0 if slow_link else 0.0
    void = number == story.middle + 2
    reason = "every member has its 20 steps"
    if late:
        reason = f"a quorum has its 20 steps; {name(SLOW)} had less"
    accused = Evidence(number, Offence.FORGED_INPUT, f"{name(GONE)} sent bytes that are not what it signed")
    banned = Decision(1, GONE, "ab" * 32, number, accused, Consequence.BANNED, 3.0, name(GONE))
    node_seconds = 60.0 * number * len(nodes)
    half = len(nodes) // 2
    return CommitRecord(
        round=number,
        epoch=1 + (number >= story.middle),
        attempts=3 if number == story.middle + 1 else 1,
        members=tuple(nodes),
        contributors={} if void else weights,
        tokens=before + (0 if void else int(sum(weights.values()))),
        train_loss=loss,
        seconds=seconds,
        bytes_up={n: int(31e6 * rng.gauss(1, 0.02)) for n in nodes},
        bytes_down={n: int(31e6 * rng.gauss(1, 0.02)) for n in nodes},
        reason=f"round {number} is void: nobody has its state any more" if void else reason,
        sealed_digest="ab" * 16,
        shares=dict.fromkeys(nodes, 1 / len(nodes)),
        predicted=6.2,
        rates={n: (link[n], 3 * link[n]) for n in nodes},
        predictions={"flat": 6.4, "two_level": 6.2},
        levels=2,
        regions=(tuple(nodes[:half]), tuple(nodes[half:])),
        state_digest="cd" * 16,
        digests=dict.fromkeys(nodes, "cd" * 16),
        digests_equal=True,
        val_loss=None if number % 10 else loss + 0.03,
        passage=None if number % 10 else Passage(nodes[0], "def f(x):\n", f"    return {number} * x"),
        void=void,
        committed_at=story.committed_at(number),
        names={n: name(n) for n in nodes},
        losses={n: loss + rng.gauss(0, 0.05) for n in nodes},
        config_digest="ef" * 16,
        decisions=(banned,) if number == story.middle else (),
        figures={n: TrainerFigures(pace[n], 0.38 * pace[n] / 1000, 0.7, 3e-4, 0.01) for n in nodes},
        goodput=dict(
            zip(BUCKETS, (k * node_seconds for k in (0.83, 0.1, 0.02, 0.03, 0, 0.015, 0.005)), strict=True)
        ),
        **(accounts(story, number, seconds) if story.accounted else {}),
    )


def accounts(story: Story, number: int, seconds: dict[str, float]) -> dict[str, Any]:
    """Where each node's time went in a round of these phases, and what failed: the ninth's path to the seventh, in
    the round that takes three attempts."""
    wall = story.committed_at(number) - story.committed_at(number - 1)
    exchange = seconds["reduce"] + seconds["commit"]
    spent = dict[NodeId, dict[str, float]]()
    for n in story.nodes(number):
        inner = USUAL["inner"]  # as tokens and pace have it
        spent[n] = {"inner": inner, "sync": exchange, "waiting": max(wall - inner - exchange, 0.0)}
    if number == story.middle and GONE not in spent:
        spent[GONE] = {"lost": 30.0, "down": wall - 30.0}
    spent = {n: {bucket: round(value, 3) for bucket, value in of.items()} for n, of in spent.items()}
    if number != story.middle + 1:
        return {"spent": spent}
    path = f"the path from {name(SLOW_LINK)} to {name(SLOW)} lost packets"
    seen = Verdict(
        *(Kind.PACKET_LOSS, SLOW_LINK, name(SLOW_LINK), SLOW, name(SLOW), path, Confidence.AGREED),
        facts=(("sent again", "4.1 %"), ("usually", "0.0 %")),
        beside=(f"{name(NodeId('n3'))} had no room on its disk",),
    )
    silent = Failure(
        1, SLOW_LINK, number, "silent for 5.0 s", story.committed_at(number) - 30, 5.2, 21.0, 3.0, 84.0
    )
    return {"spent": spent, "verdict": seen, "failures": (silent,)}


def records(story: Story) -> Iterator[CommitRecord]:
    tokens = 0
    for number in range(1, story.rounds + 1):
        yield (made := record(story, number, tokens))
        tokens = made.tokens


def notes(story: Story) -> Iterator[tuple[float, Note]]:
    """What was noted, in the order of time."""
    yield BEGAN, Note("the coordinator started for the 1st time")
    for node in story.nodes(0):
        yield BEGAN + 1, Note(f"{name(node)} joined", node)
    for number in range(1, story.rounds + 1):
        at = story.committed_at(number)
        if number == story.middle:
            yield at - 1300, Note(f"{name(GONE)} evicted: it sent bytes that are not what it signed", GONE)
            yield at - 60, Note("the coordinator started for the 2nd time: it was away for 20 min")
        if number == story.middle + 1:
            yield at - 20, Note(f"attempt 2 failed: the connection of {name(SLOW_LINK)} and {name(SLOW)} broke")
        if number > story.rounds - 3:
            yield at - 30, Note(f"the exchange waits for {name(SLOW_LINK)}, whose link is slow", SLOW_LINK)
        if number > story.rounds // 3:
            yield at - 10, Note(f"round {number} closes: {name(SLOW)} contributes the steps that it has")
        if number == story.middle + 2:
            yield at, Note(f"round {number} is void: nobody has its state any more")
        if number % 25 == 0 and number <= story.rounds - 3:
            yield at, Note(f"{name(NodeId(f'n{1 + number % story.members}'))} evaluated round {number}")


def write(folder: Path, story: Story) -> None:
    """The run as a coordinator's state directory, with its older rounds in segments."""
    config = RunConfig(name="reef", rounds=RoundsConfig(total=story.total or story.rounds))
    whole, said, book = list(records(story)), list(notes(story)), CreditBook()
    archive = RecordArchive(LocalStore(folder / FOLDER))
    archive.enter_config("reef", "ef" * 16, to_json(config))
    old = max((len(whole) - ROWS_KEPT) // ROUNDS, 0) * ROUNDS
    for first in range(0, old, ROUNDS):
        part = whole[first : first + ROUNDS]
        since = whole[first - 1].committed_at if first else 0.0
        during = [(at, n) for at, n in said if since <= at < part[-1].committed_at]
        archive.add("reef", [series_row(r) for r in part], [record_codec.encode(r) for r in part], during)
    archive.enter_owners({n: owner(n) for made in whole for n in made.contributors})
    for made in whole:
        works = [Work(f"key {n}", n, name(n), owner(n), int(w)) for n, w in made.contributors.items()]
        book = credit.enter(book, made.round, works, made.round) if works else book
    with closing(Journal(folder)) as journal:
        journal.set_meta("config", to_json(config).decode())
        journal.set_meta("run", "reef")
        decisions = [(r.committed_at - 1300, d) for r in whole for d in r.decisions]
        for first in range(old, len(whole), 500):
            journal.append([], whole[first : first + 500], decisions=decisions if first == old else ())
        journal.append([], [], said)
        journal.snapshot(whole[-1].committed_at, encode(_state(config, story, whole[-1], book)))


def _state(config: RunConfig, story: Story, last: CommitRecord, book: CreditBook) -> State:
    here = {
        n: Member(n, 1, name(n), f"{name(n)}.example.org:4710", "", MemberState.ACTIVE, last.committed_at, 0.0)
        for n in story.nodes(story.rounds)
    }
    far = list(here)[len(here) // 2 :]
    here = {
        n: with_links(m, {o: 0.12 if (n in far) is not (o in far) else 0.004 for o in list(here)[:40] if o != n})
        for n, m in here.items()
    }
    return State(
        config,
        incarnation=2,
        epoch=last.epoch,
        round=RoundState(story.rounds + 1, Phase.FINISHED, "all rounds are committed"),
        members=Members(here, trusted_counts={MemberState.ACTIVE: len(here)}, holding={-1: len(here)}),
        committed=story.rounds,
        tokens=last.tokens,
        credit=book,
    )


def with_links(member: Member, rtts: dict[NodeId, float]) -> Member:
    return replace(member, rtts=rtts, owner=owner(member.node), version="0.1.0")
