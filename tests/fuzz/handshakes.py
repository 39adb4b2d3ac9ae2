"""The two sides of a handshake on the data plane, of which a stranger sends one: what it sends is bytes."""

import asyncio
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from atoll.comm.ids import NodeId, RunId
from atoll.comm.signatures import PrivateKey
from atoll.comm.transport import frames, key_ring
from atoll.comm.transport.connection import LinkClosed
from atoll.comm.transport.key_ring import KeyRing

RUN, A, B, SECRET = RunId("reef"), NodeId("n1"), NodeId("n2"), b"k" * 32
NONCE = bytes(16)  # of each connection: what is recorded of one is good for the next
LARGEST_HELLO = 873  # bytes, as `frames.welcome` promises


class Wire:
    """A link on whose other end these bytes were sent, and nothing more."""

    def __init__(self, sent: bytes) -> None:
        self.heard, self._sent, self.read_bytes = b"", sent, 0

    async def read(self, size: int, timeout: float | None = None) -> bytes:
        if self.read_bytes + size > len(self._sent):
            raise LinkClosed("the other side hung up")
        self.read_bytes += size
        return self._sent[self.read_bytes - size : self.read_bytes]

    async def write(self, *buffers: bytes | memoryview) -> None:
        self.heard += b"".join(buffers)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def _identity(node: NodeId) -> PrivateKey:
    return PrivateKey.generate()


@cache
def _keys(node: NodeId) -> KeyRing:
    return KeyRing(_identity(node), SECRET)


def greeted(sent: bytes) -> bytes:
    """What a dialling side answers to this greeting. Raises `LinkBroken`."""
    wire: Any = Wire(sent)
    _loop().run_until_complete(frames.greet(wire, RUN, A, B, _keys(A)))
    heard: bytes = wire.heard
    return heard


def welcomed(sent: bytes) -> None:
    """Take this hello in on the accepting side. Raises `LinkBroken`."""
    wire: Any = Wire(sent)
    keys = _keys(B)
    keys.change_members({A: _identity(A).public})
    fixed = SimpleNamespace(urandom=lambda size: NONCE[:size])
    with patch.object(frames, "os", fixed), patch.object(key_ring, "VIEW_DELAY", 0.0):
        try:
            node = _loop().run_until_complete(frames.welcome(wire, RUN, B, keys))
        finally:
            assert wire.read_bytes <= LARGEST_HELLO
    assert node == A


def greeting() -> bytes:
    """What the accepting side says first."""
    return frames.GREETING.pack(frames.MAGIC, frames.VERSION, NONCE)


def hello() -> bytes:
    """What a member answers to it."""
    return greeted(greeting())
