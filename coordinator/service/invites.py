"""Invites: what a join token is good for. Pure; the journal keeps them, `rpc` asks at each join.

An invite has a name (for whom it is), the roles that its nodes may have, and a quota of nodes. It ends when the
quota is used up, when it expires, when the operator revokes it, and when a node that came with it is banned.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.comm.errors import ConfigError, Refused
from atoll.coordinator.state_machine.members import REDUCER, VERIFIER

TRAINER = "trainer"  # the role of a node that trains, for which the protocol has the empty word
MAX_OWNER = 64  # characters
ROLES = (TRAINER, REDUCER, VERIFIER)  # the last is of those alone whose invites name it
ASK = "ask the operator for an invite"


@dataclass(frozen=True, slots=True)
class InviteRecord:
    """One invite, as it stands now."""

    number: int  # counts the run's invites, from 1
    name: str
    roles: tuple[str, ...]  # empty: all but verifiers, who are trusted
    nodes: int  # quota
    left: int  # nodes that may still join with it
    expires: float  # seconds since 1970
    revoked: str = ""  # why; empty: it is not

    @property
    def owner(self) -> str:
        """Who is credited for its nodes' work: its name, as it may be shown, or its number where it has none."""
        name = "".join(c for c in self.name if c.isprintable()).strip()[:MAX_OWNER]
        return name or f"invite {self.number}"

    def check(self, wall: float) -> None:
        """Raise `Refused`, with a sentence for who would join with it at `wall` (seconds since 1970), unless it is
        good for one node more."""
        if self.revoked:
            raise Refused(f"the invite in the join URL was revoked ({self.revoked}): {ASK}")
        if wall > self.expires:
            raise Refused("the token in the join URL has expired: ask the operator for a new invite")
        if self.left < 1:
            raise Refused("the token in the join URL is used up: ask the operator for a new invite")

    def check_role(self, role: str) -> None:
        """Raise `Refused` unless its nodes may have this role of the protocol (empty: they train)."""
        if (self.roles or role == VERIFIER) and (role or TRAINER) not in self.roles:
            roles = " or ".join(self.roles) or "trainer or reducer"
            own = f"give --role {self.roles[0]}, or " if self.roles and self.roles[0] != TRAINER else ""
            raise Refused(f"the invite of this node is for a {roles}, not a {role or TRAINER}: {own}{ASK}")

    def state(self, wall: float) -> str:
        """The state that people are shown, at `wall` (seconds since 1970)."""
        if self.revoked:
            return f"revoked: {self.revoked}"
        return "expired" if wall > self.expires else "open" if self.left else "used up"


def checked_roles(roles: Sequence[str]) -> tuple[str, ...]:
    """The roles of an invite, each once. Raises `ConfigError` for one that there is not."""
    if unknown := [role for role in roles if role not in ROLES]:
        raise ConfigError(f"--role is {unknown[0]!r}: a node is a {' or a '.join(ROLES)}")
    return tuple(role for role in ROLES if role in roles)
