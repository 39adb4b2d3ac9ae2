"""One mutation of the source, and the folders and tests that the tables name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str
    new: str
    by: int | str = 0  # the seed to start at; tests
    slow: bool = False  # it takes long to be noticed


C, N, X = "coordinator/", "node/", "comm/allreduce/protocol.py"
SCENARIOS, LEDGER = (
    "tests/coordinator/state_machine/test_transcripts.py",
    "tests/coordinator/state_machine/test_ledger.py",
)
EXCHANGE, NODE = "tests/comm/allreduce/test_protocol_attempts.py", "tests/node/state_machine"
LEVELS = "tests/comm/allreduce/test_protocol_levels.py"
OUTBOX = "tests/node/control/test_outbox.py"
