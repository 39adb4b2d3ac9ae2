"""A coordinator's no, by the status of its answer: whether it stays, passes by itself, or is none."""

import grpc

from atoll.comm.errors import Refused, RefusedForNow

FINAL = {  # answers that trying again will not change
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
}
FOR_NOW = grpc.StatusCode.ABORTED  # what is asked will not be answered otherwise soon, but later


def refused(error: grpc.aio.AioRpcError) -> Refused | None:
    """The no that an answer is; None: it is none, and the call may be made again."""
    sentence = error.details() or error.code().name
    if error.code() is FOR_NOW:
        return RefusedForNow(sentence)
    return Refused(sentence) if error.code() in FINAL else None
