"""A reduce's plan as views carry it: most of a view's bytes, the same for all members, and compressed once.

A frame states its own size and may be wrong: it is asked what it declares, and refused before that is allocated.
"""

import zstandard
from google.protobuf.message import DecodeError

from atoll.comm.errors import Refused
from atoll.comm.proto import atoll_pb2 as pb

MAX_PLAN_SIZE = 64 << 20  # bytes; a million members would fit


def pack_plan(plan: pb.Plan) -> bytes:
    """One zstandard frame of the encoded plan, for `pb.View.packed_plan`."""
    return zstandard.ZstdCompressor(level=3).compress(plan.SerializeToString())


def unpack_plan(view: pb.View) -> None:
    """Fill in `view.plan` from `view.packed_plan`, if the view has one, and empty that. Raises `Refused` where it
    is no frame of a plan."""
    if not view.packed_plan:
        return
    try:
        size = zstandard.frame_content_size(view.packed_plan)
        if not 0 <= size <= MAX_PLAN_SIZE:
            raise Refused(f"the coordinator sent a plan of {size} bytes: at most {MAX_PLAN_SIZE} are read")
        view.plan.ParseFromString(zstandard.ZstdDecompressor().decompress(view.packed_plan))
    except (zstandard.ZstdError, DecodeError) as error:
        raise Refused(f"the coordinator sent a plan that cannot be read: {error}") from None
    view.ClearField("packed_plan")
