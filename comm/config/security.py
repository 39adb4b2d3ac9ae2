"""Encryption, and what a run does about members that are broken, careless or malicious."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from atoll.comm.config.rules import Rule, representable

_AUDIT = re.compile(r"auto|[0-9]{1,6}(\.[0-9]{1,6})?")  # what security.audit may be
# Chunks that are audited in a round by itself: one of those of an owner of an eighth of 16 is drawn in 16 % of the
# rounds, in 97 % of 20 rounds.
AUTO_AUDITS = 1.3


class TlsMode(StrEnum):
    """The conditions under which a run is encrypted."""

    AUTO = "auto"  # on, unless the coordinator is on a loopback address only
    ON = "on"
    OFF = "off"


class PrivateAddresses(StrEnum):
    """The runs whose members and stores may have addresses of private networks."""

    AUTO = "auto"  # those whose coordinator is dialled at such an address itself
    ALLOW = "allow"
    REFUSE = "refuse"


@dataclass
class SecurityConfig:
    """Encryption of connections, where nodes may be sent, what one member may gain by what it says of itself, and
    audits of what members merge."""

    tls: TlsMode = TlsMode.AUTO  # between nodes and coordinator, and between nodes
    weight_bound: float = 1.5  # median weights that a member's delta counts at most; 0: no limit
    # Sealed chunks of a round that two other members recompute before its commit, on average; 0: nor are
    # contributions signed. auto: enough to find one lying owner of 8 within 20 rounds, if three members can be
    # dialled.
    audit: str = "auto"
    # whether a delta that is unlike the others of its round, by its length or by its direction along that of an
    # earlier round, is held against its node; with outer.clip alone
    outliers: bool = True
    # Share of the rounds in which each verifier (`atoll invite --role verifier`) trains once more what a
    # contributor did, and compares; 0: never. Who passed ten times is drawn a tenth as often
    replay: float = 0.0
    # whether members' addresses and the run's URLs may be in private networks; auto: where the coordinator is
    private_addresses: PrivateAddresses = PrivateAddresses.AUTO
    # whether nodes train models that the config does not describe (a node's `model=`, a script): two members must
    # then agree on the layout
    own_models: bool = False

    @property
    def audits(self) -> float:
        """Chunks to be audited in a round on average."""
        return AUTO_AUDITS if self.audit == "auto" else float(self.audit)

    def rules(self) -> Iterator[Rule]:
        """Rules of the bounds, and of the number of audits."""
        yield from representable("security", self)
        yield (
            self.weight_bound == 0 or self.weight_bound >= 1,
            f"security.weight_bound is {self.weight_bound:g}: it must be 1 or more, or 0 for no bound",
        )
        sentence = f"security.audit is {self.audit!r}: it must be auto, or a number of chunks from 0 to 1000000"
        yield _AUDIT.fullmatch(self.audit) is not None, sentence
        yield 0 <= self.replay <= 1, f"security.replay is {self.replay:g}: it must be in 0 ... 1"
        yield (
            self.replay == 0 or self.audits != 0,
            "security.replay is set and security.audit is 0: what is compared must be signed, as for audits",
        )
