"""Offences of members, the evidence of one, and what the run decides on it. Data alone.

`conduct.charge` takes evidence in; what it decides leaves the machine as an effect (`events.Decision`), which the
journal keeps and `atoll blame` prints.
"""

from dataclasses import dataclass
from enum import StrEnum

from atoll.comm.ids import NodeId


class Offence(StrEnum):
    """The kinds of what can be held against a member."""

    # Proven by bytes and signatures that several members recomputed:
    FORGED_SEAL = "forged_seal"  # it sealed something other than the mean of what it got
    FORGED_INPUT = "forged_input"  # it sent other bytes than it signed
    # False statements, which no slow machine and no broken connection makes:
    FALSE_NORM = "false_norm"
    FALSE_CLAIM = "false_claim"
    FALSE_AUDIT = "false_audit"
    # What costs the others time, and may be nobody's fault:
    LATE = "late"  # did not seal its chunks in time
    SILENT = "silent"  # did not answer in time
    UNSHOWN = "unshown"  # showed most auditors nothing of what it had sealed, or summed
    ACCUSER = "accuser"  # says of peers, again and again, that it cannot reach them
    OUTLIER = "outlier"  # its delta is unlike all others
    # What a replay of a round shows, which is no proof:
    FALSE_WORK = "false_work"  # its delta is no more like its own work's than like others'
    # What a person decides:
    BY_OPERATOR = "by_operator"  # the operator bans it, for a reason of its own


class Consequence(StrEnum):
    """The consequences of evidence for a member, from the least to the most; and a pardon."""

    STRUCK = "struck"  # it is remembered
    NO_OWNER = "no owner"  # it owns no chunks
    NO_CONTRIBUTOR = "no contributor"  # in quarantine: it trains on, its work is not taken
    EVICTED = "evicted"  # it is out, until its strikes have decayed
    BANNED = "banned"  # it is out for good, with its key
    PARDONED = "pardoned"  # by the operator: nothing is held against it any more


@dataclass(frozen=True, slots=True)
class Evidence:
    """The reason to hold something against a member, for people and for an appeal."""

    round: int
    offence: Offence
    sentence: str  # what it did, as it is shown: "it ..."
    facts: tuple[tuple[str, str], ...] = ()  # (name, value): digests, signatures, figures
    by: NodeId | None = None  # who reported it; None: the coordinator saw it itself
    part: float = 1.0  # of a whole strike: less for a delay that cost the others little
