"""The beginning of a run to which one comes that does harm before anybody else is there: when the honest nodes'
first round is committed, and what it costs them. A control has one there first that is as honest as they are."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from attacks.cases import Attack
from attacks.tally import read
from attacks.trial import decisions, held_against, most_memory, of_member, others
from attacks.village import Village
from e2e.harness import until

from atoll.comm.build_info import full_version

ROUNDS = 3  # in which it shows what becomes of who came first


@dataclass(frozen=True)
class Beginning:
    """What came of who was first."""

    first: str  # who it was: the word of its case
    ended: str  # what became of it, in words
    seconds: float  # from the last honest node's join to the first commit
    memory: dict[str, int]  # bytes that processes had for themselves, the most until the end of `ROUNDS`
    others: float  # cores that processes of nobody here took
    harmed: list[str] = field(default_factory=list)  # what was held against honest members
    nice: int = 0  # of all processes of the run
    version: str = ""  # of Atoll


def beginning(folder: Path, first: Attack) -> Beginning:
    """Begin a run in this folder with this one first."""
    with Village.empty(folder) as village:
        name = village.new_name()
        village.add_first(name, first.word)
        url = village.invite(len(village.honest))
        for honest in village.honest:
            village.add_honest(url, honest)
        until("the honest nodes to join", lambda: all(map(village.member, village.honest)))
        joined = time.time()
        village.watch.start()
        until("the first rounds", lambda: village.committed() >= ROUNDS, village.patience)
        records, over, decided = village.records(1, ROUNDS), time.time(), decisions(village)
        told = read(Path(village.target(name).tally))
        return Beginning(
            first.word,
            of_member(records, decided, told, name, village.nodes[name].poll()),
            records[0]["committed_at"] - joined,
            most_memory(village, joined, over),
            others(village, joined, over),
            held_against(village, range(ROUNDS + 1), decided),
            os.nice(0),
            full_version(),
        )
