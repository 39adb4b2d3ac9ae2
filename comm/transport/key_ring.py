"""The keys of a node on the data plane: what it shows to those it dials, and whom it accepts.

    who dials     proves with the run's key that it is of the run, and with its own that it is the member it names
    who accepts   compares both with what its view of the run says: only members that are here are let in

The run's key changes whenever somebody is expelled; the one before is good for a while, because views do not come
everywhere at once. For the same reason one whose view came earlier, or whose join is younger than this node's
view, waits for a moment before it is refused. Who is no member any more is refused from the view on that says so,
whatever keys it has.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from atoll.comm.ids import NodeId, Pin, PublicKey
from atoll.comm.signatures import SIGNATURE_BYTES, PrivateKey, sign, verify

KEY_OVERLAP = 60.0  # seconds for which the run's earlier keys are accepted beside the newest
VIEW_DELAY = 5.0  # seconds by which this node's view may be behind that of who dials
MAX_KEYS_AHEAD = 8  # of the run, that others may be told of before this node
PURPOSE = b"atoll hello"
MAC_BYTES = 32  # HMAC-SHA256
PROOF_BYTES = MAC_BYTES + SIGNATURE_BYTES


class RunKey(NamedTuple):
    """A key that all members have, told by the coordinator."""

    number: int  # how many were expelled before it
    secret: bytes  # empty: none is known yet, which nobody can prove


class KeyRing:
    """The keys that one node has: its own, the run's, and the members' public ones. Told to it at the join and by
    each view."""

    def __init__(self, identity: PrivateKey | None = None, secret: bytes = b"") -> None:
        """`identity`: the node's own key; None: hellos are not signed, and whoever knows the run's key is
        accepted, as in one operator's benchmark."""
        self._identity = identity
        self._members: Mapping[NodeId, PublicKey] = {}
        self._key = RunKey(0, secret)
        self._earlier: dict[
            int, tuple[bytes, float]
        ] = {}  # number: secret, and until when it is accepted (seconds)
        self._changed = asyncio.Event()  # set, and replaced, at each change

    @property
    def key(self) -> RunKey:
        """The newest key of the run."""
        return self._key

    def change_key(self, key: RunKey, now: float) -> None:
        """Show this key from now on (`now`: seconds); the one before is accepted for `KEY_OVERLAP` more. One of an
        earlier number, as another run's are, is taken as told, and nothing before it is accepted any more."""
        if key == self._key:
            return
        self._earlier = {
            n: (s, until) for n, (s, until) in self._earlier.items() if until > now and n < key.number
        }
        if self._key.secret and self._key.number < key.number:
            self._earlier[self._key.number] = self._key.secret, now + KEY_OVERLAP
        self._key = key
        self._tell()

    def change_members(self, members: Mapping[NodeId, PublicKey]) -> set[NodeId]:
        """Accept these, and nobody else, from now on. Returns those that were accepted and are not any more."""
        gone = {node for node, public in self._members.items() if members.get(node) != public}
        self._members = dict(members)
        self._tell()
        return gone

    def prove(self, nonce: bytes, hello: bytes, pin: Pin) -> bytes:
        """The proof behind a hello, of `PROOF_BYTES`: that its sender knows the run's key, and has its own.
        `nonce`: of who accepts, fresh; `pin`: of the certificate that it showed, empty without TLS."""
        signature = bytes(SIGNATURE_BYTES)
        if self._identity is not None:
            signature = sign(self._identity, PURPOSE, nonce, pin.encode(), hello)
        return _mac(self._key.secret, nonce, hello) + signature

    async def refusal(
        self, nonce: bytes, hello: bytes, pin: Pin, proof: bytes, number: int, sender: NodeId
    ) -> str:
        """The sentence with which a dialler is refused that says it is `sender`, and has the run's key of this
        number; empty: it is let in. `nonce` and `pin` are those that it was given. May take `VIEW_DELAY`."""
        if not self._key.secret:
            return "this node has not joined its run yet"
        if number <= self._key.number + MAX_KEYS_AHEAD:
            await self._until(lambda: number <= self._key.number)
        mac, signature = proof[:MAC_BYTES], proof[MAC_BYTES:]
        if (secret := self._secret(number)) is None:
            return f"the run's key number {number} is not the one in force: a member has been expelled since"
        if not hmac.compare_digest(mac, _mac(secret, nonce, hello)):
            return "it does not know the run's key"
        if self._identity is None:
            return ""
        await self._until(lambda: sender in self._members)
        if (public := self._members.get(sender)) is None:
            return f"{sender} is no member of the run"
        if not verify(public, signature, PURPOSE, nonce, pin.encode(), hello):
            return f"it is not {sender}: it does not have its key"
        return ""

    def _secret(self, number: int) -> bytes | None:
        if number == self._key.number:
            return self._key.secret
        secret, until = self._earlier.get(number, (b"", 0.0))
        return secret if secret and asyncio.get_running_loop().time() < until else None

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait until it holds, or until a view would have come that makes it hold."""
        with suppress(TimeoutError):
            async with asyncio.timeout(VIEW_DELAY):
                while not holds():
                    await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _mac(secret: bytes, nonce: bytes, hello: bytes) -> bytes:
    return hmac.digest(secret, nonce + hello, hashlib.sha256)
