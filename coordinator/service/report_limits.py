"""The limits on what one member reports: no more entries than exist, no more bytes than a round has.

Every report may end in the journal and in the state, which are kept for long; `rpc` asks here before it looks into
one. Pure: the caller tells the time.
"""

from atoll.comm.chunks import Chunks
from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.rate_limits import RateLimit, TokenBuckets
from atoll.coordinator.state_machine.state import State

# Reports of one node. The longest are of an owner's seals: those of 100,000 chunks, a run of 100B parameters, are
# 4 MiB, and a round of such a run takes many minutes.
REPORT_BYTES = RateLimit(256 << 10, 16 << 20)


def max_chunks(state: State) -> int:
    """The chunks of the run's largest fragment; 1 before the layout is known."""
    if state.layout is None:
        return 1
    return Chunks(max(state.fragments or state.layout[:1]), state.config.reduce.chunk).count


def check_entries(request: pb.ReportRequest, state: State) -> None:
    """Raise `ValueError` for a report that names more chunks than the run's model has, or a round that is yet to
    come."""
    most = max_chunks(state)
    match request.WhichOneof("report"):
        case "chunks_sealed":
            named = max(len(request.chunks_sealed.seals), len(request.chunks_sealed.sums))
        case "orphans_found":
            named = len(request.orphans_found.here)
        case "chunks_missing":
            named = 8 * (len(request.chunks_missing.chunks) - 1)  # at least
        case "state_repaired":
            if request.state_repaired.round > state.committed:
                raise ValueError(f"it repaired round {request.state_repaired.round}, which is not committed yet")
            return
        case _:
            return
    if named > most:
        raise ValueError(f"it names {named:,} chunks, and there are {most:,}")


class ReportBytes:
    """The bytes that each member may report."""

    def __init__(self) -> None:
        self._buckets = TokenBuckets(REPORT_BYTES)

    def take(self, node: NodeId, request: pb.ReportRequest, now: float) -> bool:
        """Count a report at `now` (seconds). Returns False for one too many, which is not counted."""
        return self._buckets.take(node, now, request.ByteSize())
