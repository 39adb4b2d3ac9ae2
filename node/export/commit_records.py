"""The commit records of a run, which its coordinator has and a node has not: whose tokens are in the model, and
the digest that a round's state must have.

They come from a file of them, one JSON object a line (`rounds.jsonl`), or from the coordinator's page
(`/api/rounds`, `/api/run`). Only what an export needs is read of them.
"""

import json
import urllib.request
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any

import msgspec

from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.errors import ConfigError, ResourceError, Unreachable

PAGE_RECORDS = 1000  # of an answer
TIMEOUT = 20.0  # seconds for an answer
MAX_ANSWER_BYTES = 64 << 20


Tokens = Annotated[float, msgspec.Meta(ge=0, le=2**63)]


class CommitRecord(msgspec.Struct, frozen=True):
    """The part of a commit record that an export needs."""

    round: int
    contributors: dict[str, Tokens] = {}  # tokens that each node contributed
    tokens: int = 0  # committed by the run, this round included
    state_digest: str = ""  # hexadecimal; empty: nobody has told it yet
    val_loss: float | None = None  # of the anchor after the round
    void: bool = False  # its state was lost: it is as if it had not been


FIELDS = ",".join(CommitRecord.__struct_fields__)


@dataclass(frozen=True)
class CommitRecords:
    """The records of a run's rounds, and what is known of its nodes' names."""

    rounds: dict[int, CommitRecord]
    names: dict[str, str] = field(default_factory=dict)  # of the nodes, by id

    def contributors(self, round_: int) -> list[tuple[str, int]]:
        """The nodes whose work is in the state of a round, by name or id, with their tokens; the most first."""
        tokens = Counter[str]()
        for record in self.rounds.values():
            if record.round <= round_:
                tokens.update({node: int(weight) for node, weight in record.contributors.items()})
        return sorted(
            ((self.names.get(node, node), count) for node, count in tokens.items()), key=lambda c: (-c[1], c[0])
        )

    def check_digest(self, round_: int, found: str) -> None:
        """Raise `ResourceError` if the round's commit record has another digest than `found`."""
        record = self.rounds.get(round_)
        if record is not None and record.state_digest not in ("", found):
            raise ResourceError(
                f"the state of round {round_} on this disk has the digest {found}, the run's commit record has "
                f"{record.state_digest}: it is not the run's state, or the records are of another run; export "
                "from another node"
            )


def read_file(path: Path) -> CommitRecords:
    """The records in a file, one JSON object a line. Raises `ConfigError`."""
    decode = msgspec.json.Decoder(CommitRecord).decode
    try:
        with open(path, "rb") as file:
            return CommitRecords(_valid(decode(line) for line in file if line.strip()))
    except OSError as error:
        raise ConfigError(f"cannot read the commit records in {path}: {error.strerror}") from None
    except DECODE_ERRORS as error:
        raise ConfigError(f"{path} has a line that is no commit record: {error}") from None


def fetch(page: str) -> CommitRecords:
    """The records that the coordinator's page at the URL `page` has. Raises `ConfigError`, `Unreachable`."""
    page = page.rstrip("/")
    if not page.startswith(("http://", "https://")):
        raise ConfigError(f"{page!r} is not an http:// URL: give the one the coordinator prints at its start")
    found, since = list[CommitRecord](), 0
    while True:
        query = f"{page}/api/rounds?since={since}&limit={PAGE_RECORDS}&fields={FIELDS}"
        try:
            new = msgspec.convert(_get(query), list[CommitRecord])
        except msgspec.MsgspecError as error:
            raise Unreachable(f"{page} does not answer as a coordinator's page ({error})") from None
        if not new or (last := max(record.round for record in new)) <= since:
            break
        found += new
        since = last
    try:
        names = {str(member["node_id"]): str(member["name"]) for member in _get(f"{page}/api/run")["members"]}
    except (KeyError, TypeError) as error:
        raise Unreachable(f"{page}/api/run does not answer as a coordinator's page ({error!r})") from None
    return CommitRecords(_valid(found), names)


def is_finished(page: str, round_: int) -> bool:
    """Whether the coordinator's page says that the run has ended, and that no round is after `round_`. Raises
    `Unreachable`."""
    run = _get(f"{page.rstrip('/')}/api/run")
    try:
        return bool(run["phase"] == "finished" and run["committed"] <= round_)
    except (KeyError, TypeError) as error:
        raise Unreachable(f"{page}/api/run does not answer as a coordinator's page ({error!r})") from None


def _valid(records: Iterable[CommitRecord]) -> dict[int, CommitRecord]:
    """The records of rounds that are not void, by round."""
    return {record.round: record for record in records if not record.void}


def _get(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            return json.loads(answer.read(MAX_ANSWER_BYTES))
    except (OSError, HTTPException, ValueError, RecursionError) as error:
        reason = getattr(error, "reason", error)
        raise Unreachable(
            f"no coordinator's page at {url} ({reason}): is it running, is the port right?"
        ) from None
