"""Divides the volunteer's `disk=` between the outer state and what a trainer keeps, the inner optimizer's moments
and copies of the round at hand: the outer state, which the run lives by, comes first."""

from dataclasses import dataclass

from atoll.comm.config.run import OptimizerName

OUTER_BYTES = 30  # a parameter: two snapshots, a third that is being written, and the rounds since
# a parameter, at most, of one copy of the moments
MOMENT_BYTES = {OptimizerName.ADAMW: 8, OptimizerName.MUON: 8, OptimizerName.SGD: 0}
MOMENT_COPIES = 3.2  # two, a third that is being written, and what DCP puts around them
PARAMETER_BYTES = 4  # in what is trained of a round, beside the moments
ROUND_COPIES = 2.1  # one, another that is being written, and what DCP puts around them
NO_ROOM = 1.0  # byte: no limit would be 0


def disk_need(n_params: int, optimizer: OptimizerName) -> float:
    """Bytes that the outer state and the inner optimizer's moments take of a model of `n_params` parameters."""
    moments = MOMENT_BYTES[optimizer]
    inner = MOMENT_COPIES * moments + ROUND_COPIES * (moments + PARAMETER_BYTES)
    return (OUTER_BYTES + inner) * n_params


@dataclass(frozen=True, slots=True)
class DiskBudget:
    """Bytes that the outer state and the inner optimizer's moments may take; 0: no limit."""

    outer: float
    inner: float

    @classmethod
    def divide(cls, disk: float, n_params: int, optimizer: OptimizerName) -> "DiskBudget":
        """Divide `disk` bytes (0: no limit) for a model of `n_params` parameters and this inner optimizer. The
        moments get what the outer state leaves, and no more than they need."""
        if not disk:
            return cls(0.0, 0.0)
        outer = OUTER_BYTES * n_params
        inner = max(0.0, min(disk, disk_need(n_params, optimizer)) - outer)
        return cls(disk - inner, inner or NO_ROOM)
