"""What a node keeps of where its run's coordinator may be: the gateways that the run has, as it was told them, and
the address at which the coordinator was found again. It is kept by the run and the pin, as the session is, for the
next life of a node whose URL has an address.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from atoll.comm.files import atomic_write, write_all
from atoll.comm.gateway_note import gateways_among
from atoll.comm.invite import Invite

log = logging.getLogger("atoll.node")
MAX_BYTES = 8192


class _Kept(msgspec.Struct, frozen=True):
    whose: str  # the run, as `Invite.whose` has it
    url: str  # the address in the join URL
    gateways: tuple[str, ...] = ()
    moved_to: str = ""


class Whereabouts:
    """The gateways, and the address, of one run, in memory and in a file. One that cannot be read is none, one
    that cannot be written is said."""

    def __init__(self, path: Path, invite: Invite) -> None:
        self._path, self._kept = path, _Kept(invite.whose, invite.address)
        try:
            with open(path, "rb") as file:
                found = msgspec.json.decode(file.read(MAX_BYTES), type=_Kept)
        except (OSError, ValueError, RecursionError):  # msgspec's are ValueErrors
            return
        if found.whose == invite.whose:
            # A new URL says where the coordinator is; the one from which it has moved does not.
            moved_to = found.moved_to if found.url == invite.address else ""
            self._kept = msgspec.structs.replace(
                self._kept, gateways=gateways_among(found.gateways), moved_to=moved_to
            )

    @property
    def gateways(self) -> tuple[str, ...]:
        """The run's, by their multiaddrs, as it told them last."""
        return self._kept.gateways

    @property
    def moved_to(self) -> str:
        """The "host:port" at which the coordinator was found again; empty: it is where the URL says."""
        return self._kept.moved_to

    def learn(self, gateways: Sequence[str]) -> None:
        """Keep which gateways the run has now."""
        self._keep(msgspec.structs.replace(self._kept, gateways=tuple(gateways)))

    def found_at(self, address: str) -> None:
        """Keep that the coordinator is at this "host:port" now."""
        self._keep(msgspec.structs.replace(self._kept, moved_to="" if address == self._kept.url else address))

    def _keep(self, kept: _Kept) -> None:
        if kept == self._kept:
            return
        self._kept = kept
        try:
            with atomic_write(self._path, None) as file:
                write_all(file, [memoryview(msgspec.json.encode(kept))], 0)
        except OSError as error:
            log.warning(f"cannot write {self._path}: {error.strerror or error}")
