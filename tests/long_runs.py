"""Commit records of long runs with many members, as a real run would have them."""

import random

from atoll.comm.ids import NodeId
from atoll.comm.rounding import rounded
from atoll.coordinator.state_machine.events import CommitRecord, TrainerFigures

BUCKETS = ("inner", "sync", "recovering", "waiting", "paused", "down", "lost", "starting", "open")

SECONDS = {"inner": 3500.0, "collect": 2.0, "reduce": 90.0, "commit": 0.25}
USUAL = (9000.0, 0.4, 0.37, 3e-4, 0.01)  # figures of a trainer


def time_of_a_round(rng: random.Random) -> dict[str, float]:
    """Seconds of a member in which nothing went wrong."""
    usual = {"inner": 3500.0, "sync": 88.0, "waiting": 4.0}
    return {bucket: round(rng.gauss(of, of / 10), 1) for bucket, of in usual.items()}


def long_record(round_: int, members: int) -> CommitRecord:
    """The record of a round of `members` trainers of a model of 10B parameters, an hour a round."""
    rng = random.Random(round_)
    nodes = [NodeId(f"n{1 + i + i // 7}") for i in range(members)]
    tokens = {n: float(rng.randrange(400, 600) * 8 * 2048) for n in nodes}
    link = {n: rng.lognormvariate(17, 0.5) for n in nodes}
    loss = rounded(2 + 9 / (1 + round_ / 50) + rng.gauss(0, 0.02), 24)
    digest = rng.randbytes(16).hex()
    return CommitRecord(
        round=round_,
        epoch=12,
        attempts=1,
        members=tuple(nodes),
        contributors=tokens,
        tokens=int(sum(tokens.values())) * round_,
        train_loss=loss,
        seconds={name: rounded(rng.gauss(of, of / 10), 24) for name, of in SECONDS.items()},
        bytes_up={n: rng.randrange(9_000_000_000, 9_900_000_000) for n in nodes},
        bytes_down={n: rng.randrange(9_000_000_000, 9_900_000_000) for n in nodes},
        reason="everybody has its inner steps",
        sealed_digest=rng.randbytes(16).hex(),
        shares={n: rounded(rng.random() / members, 16) for n in nodes},
        predicted=88.5,
        rates={n: (rounded(link[n], 8), rounded(3 * link[n], 8)) for n in nodes},
        predictions={"flat": 90.0, "two_level": 88.5},
        norms={n: rounded(rng.lognormvariate(0, 0.1), 16) for n in nodes},
        samples={n: ((1_000_000 * round_ + 1000 * i, int(tokens[n]) // 2048),) for i, n in enumerate(nodes)},
        state_digest=digest,
        digests=dict.fromkeys(nodes, digest),
        digests_equal=True,
        val_loss=rounded(loss + 0.01, 24) if round_ % 10 == 0 else None,
        committed_at=1.7e9 + 3600.0 * round_,
        names={n: rng.choice(["gpu", "ada", "vm"]) + f"-{rng.randrange(10_000)}" for n in nodes},
        exchange={n: rounded(rng.gauss(90, 5), 8) for n in nodes},
        losses={n: rounded(loss + rng.gauss(0, 0.05), 16) for n in nodes},
        config_digest="ab" * 16,
        figures={n: TrainerFigures(*(rounded(rng.gauss(of, of / 10), 8) for of in USUAL)) for n in nodes},
        goodput={bucket: rounded(rng.random() * 1e7, 16) for bucket in BUCKETS},
        spent={n: time_of_a_round(rng) for n in nodes},
    )
