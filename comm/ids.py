"""Distinct id types, so that a node is never mistaken for a rank, nor a round for an epoch."""

import re
from typing import NewType

RunId = NewType("RunId", str)
NodeId = NewType("NodeId", str)  # given by the coordinator at the join, e.g. "n3"
Round = NewType("Round", int)  # round k turns state_{k-1} into state_k; 0 is the initial state
Epoch = NewType("Epoch", int)  # a membership generation
Incarnation = NewType("Incarnation", int)  # a life of the coordinator
# SHA-256 of a certificate in base32, 52 characters (`atoll.comm.transport.certificates`).
Pin = NewType("Pin", str)
NO_PIN = Pin("")  # none is known, or the run is not encrypted
# Of a node, for its life: a compressed point of P-256, 33 bytes (`atoll.comm.signatures`).
PublicKey = NewType("PublicKey", bytes)
NO_KEY = PublicKey(b"")  # none is known
MIN_KEY_PREFIX = 8  # hex digits of a key that name a node
_PIN = re.compile("[a-z2-7]{52}")


def is_pin(text: str) -> bool:
    """Whether `text` has the form of a certificate's pin."""
    return _PIN.fullmatch(text) is not None


def is_meant(what: str, node: NodeId, name: str, key: str) -> bool:
    """Whether a person may mean the node of this name and this key (hex) by `what`: its id, its name, or the
    beginning of its key."""
    return what in (node, name) or (len(what) >= MIN_KEY_PREFIX and key.startswith(what.lower()))
