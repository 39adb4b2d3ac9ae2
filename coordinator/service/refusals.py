"""The coordinator's no to who would join, and its status on the wire: `ABORTED` for one that passes by itself,
after which a node's service tries again, and `PERMISSION_DENIED` for one that stays until somebody does something.
Pure; `rpc` and `checkup` ask.
"""

import grpc

from atoll.comm.errors import Refused, RefusedForNow
from atoll.comm.ids import NodeId
from atoll.coordinator.state_machine.conduct import identity, refusal
from atoll.coordinator.state_machine.state import State


def barred(state: State, node: NodeId, key: bytes = b"") -> Refused | None:
    """Why a node may not join under this key, or as this node, by what is held against it; None: it may. Only a
    ban is for good."""
    if not (sentence := refusal(state, node, key)):
        return None
    record = state.conduct.strikes[identity(state, node, key)]
    return Refused(sentence) if record.ban is not None else RefusedForNow(sentence)


def status_of(no: Refused) -> grpc.StatusCode:
    """The status of an answer that says this."""
    return grpc.StatusCode.ABORTED if isinstance(no, RefusedForNow) else grpc.StatusCode.PERMISSION_DENIED
