"""Strikes against the holders of keys: how heavy an offence is, how it is forgotten, and what it leads to. Pure.

Each strike has a weight. The weights of a key add up, and halve every `HALF_LIFE_ROUNDS` committed rounds. Beyond
one limit the key's node owns no chunks; beyond the next its work is not taken; beyond the last it is out until
they have decayed. What may be nobody's fault (a slow machine, a bad link) never leads to the last of these,
however often it happens: only false statements do.

    weight   0 ------ 2.5 ------------ 5 -------------------- 10 ------------>
             struck   owns no chunks   its work is not taken  out (for false statements)

What delays a round weighs as much as it cost the others, and a whole strike at most, whatever it looked like: who
is out of reach for a moment is late, silent and blamed for broken paths at once.

A delay is made up for, too: whoever held the others up owes them time, and while it does they rely on it for
nothing. That is held against nobody, and is over after some rounds.

Who comes into quarantine anew before the earlier one is forgotten stays in it for longer: 20 committed rounds, 40,
60; and who says what is not after a quarantine is out.
"""

from collections.abc import Mapping

from msgspec import Struct

from atoll.comm.evidence import Consequence, Evidence, Offence
from atoll.comm.ids import NodeId
from atoll.comm.replace import replace

HALF_LIFE_ROUNDS = 20  # committed rounds in which strikes halve
OWNER_LIMIT = 2.5  # weight from which on a member owns no chunks
CONTRIBUTOR_LIMIT = 5.0  # weight from which on its work is not taken
EVICTION_LIMIT = 10.0  # weight of false statements from which on it is out
FORGOTTEN = 0.05  # weight below which nothing is held against a key any more
MAX_TROUBLE = 8 * CONTRIBUTOR_LIMIT  # weight of what may be nobody's fault, at most: 60 rounds of quarantine
MAX_RECORDS = 10_000  # keys about which something is remembered, bans aside

PROVEN = frozenset({Offence.FORGED_SEAL, Offence.FORGED_INPUT})
BANNING = PROVEN | {Offence.BY_OPERATOR}  # one is enough
FALSE_STATEMENTS = frozenset({Offence.FALSE_NORM, Offence.FALSE_CLAIM, Offence.FALSE_AUDIT})
DOUBTFUL = frozenset({Offence.OUTLIER, Offence.ACCUSER})  # nobody is struck where most members are
DELAYS = frozenset({Offence.LATE, Offence.SILENT, Offence.ACCUSER})  # one strike a round for all of these together
FALSE_STATEMENT_WEIGHT = 4.0  # one: it owns no chunks; two: its work is not taken; one more: it is out
FALSE_WORK_WEIGHT = 2.5  # one: it owns no chunks; two: its work is not taken; never more
UNSHOWN_WEIGHT = 4.0  # one: it owns no chunks for 15 rounds; two in 20: its work is not taken; never more
HEAVIER = {Offence.FALSE_WORK: FALSE_WORK_WEIGHT, Offence.UNSHOWN: UNSHOWN_WEIGHT}
MIN_PART = 0.05  # of a strike: what delayed a round by less is held against nobody
TROUBLE_WEIGHT = 1.0  # three in a row: it owns no chunks; six: its work is not taken


class Strikes(Struct, frozen=True, gc=False):
    """The record of one key: the weights of its offences, and a ban."""

    node: NodeId  # the latest under the key
    as_of: int = 0  # committed rounds when the weights were these
    lies: float = 0.0  # weight of false statements
    trouble: float = 0.0  # weight of what may be nobody's fault
    quarantines: int = 0  # how often it came into one since all was forgotten
    latest: dict[Offence, int] = {}  # the last round of each offence
    delay: tuple[int, float] = (0, 0.0)  # the last round that it delayed, and the part of a strike it has for that
    ban: Evidence | None = None
    owes_until: int = 0  # committed rounds from which on it owes the others no time

    def weights(self, committed: int) -> tuple[float, float]:
        """The weights (false statements, trouble) when so many rounds are committed."""
        factor = decay(committed - self.as_of)
        return self.lies * factor, self.trouble * factor

    def consequence(self, committed: int) -> Consequence:
        """The consequence of the strikes when so many rounds are committed."""
        if self.ban is not None:
            return Consequence.BANNED
        lies, trouble = self.weights(committed)
        if lies >= EVICTION_LIMIT:
            return Consequence.EVICTED
        if lies + trouble >= CONTRIBUTOR_LIMIT:
            return Consequence.NO_CONTRIBUTOR
        return Consequence.NO_OWNER if lies + trouble >= OWNER_LIMIT else Consequence.STRUCK

    def owes(self, committed: int) -> bool:
        """Whether the others are to do without it for some of the time that they waited for it."""
        return committed < self.owes_until

    def forgotten(self, committed: int) -> bool:
        """Whether nothing is held against the key any more."""
        return self.ban is None and sum(self.weights(committed)) < FORGOTTEN


def decay(rounds: int) -> float:
    """The part of a strike's weight that is left after so many committed rounds: halves every `HALF_LIFE_ROUNDS`,
    falls evenly in between. Exact on every machine, as a replay must be."""
    halvings, rest = divmod(max(rounds, 0), HALF_LIFE_ROUNDS)
    return 0.5 ** min(halvings, 1000) * (1.0 - 0.5 * rest / HALF_LIFE_ROUNDS)


def strike(before: Strikes, evidence: Evidence, committed: int) -> Strikes:
    """The strikes with this evidence added, when so many rounds are committed."""
    if evidence.offence in BANNING:
        return replace(before, ban=before.ban or evidence, latest=_latest(before, evidence))
    was, (lies, trouble) = before.consequence(committed), before.weights(committed)
    quarantines = 0 if before.forgotten(committed) else before.quarantines
    delay = before.delay
    if evidence.offence in FALSE_STATEMENTS:
        lies += FALSE_STATEMENT_WEIGHT * (1 + quarantines)
    elif evidence.offence in DELAYS:
        part = min(evidence.part, left_of_strike(before, evidence.round))
        trouble += TROUBLE_WEIGHT * part
        delay = evidence.round, part + (delay[1] if delay[0] == evidence.round else 0.0)
    else:
        trouble += HEAVIER.get(evidence.offence, TROUBLE_WEIGHT)
    free = was in (Consequence.STRUCK, Consequence.NO_OWNER)
    if free and lies + trouble >= CONTRIBUTOR_LIMIT:
        trouble = max(trouble, CONTRIBUTOR_LIMIT * 2**quarantines - lies) if quarantines else trouble
        quarantines = min(quarantines + 1, 10)
    trouble = min(trouble, MAX_TROUBLE)
    latest = _latest(before, evidence)
    changed = replace(before, as_of=committed, lies=lies, trouble=trouble, quarantines=quarantines)
    return replace(changed, latest=latest, delay=delay)


def left_of_strike(record: Strikes, round_: int) -> float:
    """The part of a strike that delays of this round may still add to the record."""
    delayed, part = record.delay
    return 1.0 - part if delayed == round_ else 1.0


def _latest(before: Strikes, evidence: Evidence) -> dict[Offence, int]:
    return before.latest | {evidence.offence: evidence.round}


def remember(records: Mapping[str, Strikes], committed: int) -> dict[str, Strikes]:
    """The records without those that are forgotten, and without the oldest beyond MAX_RECORDS; bans stay."""
    left = {key: r for key, r in records.items() if not r.forgotten(committed) or r.owes(committed)}
    surplus = len(left) - MAX_RECORDS
    if surplus > 0:
        old = [key for key, record in left.items() if record.ban is None]
        for key in old[:surplus]:
            del left[key]
    return left
