"""What became of a run in a stretch of time, an hour as a rule. Pure."""

from typing import Any

import numpy as np

from atoll.coordinator.history.series import SeriesTable


def period(series: SeriesTable, after: float, before: float) -> dict[str, Any] | None:
    """The rounds committed from `after` on and before `before` (seconds since 1970), so that a round is of one
    hour alone; void ones are counted apart. `began`, `ended`: when the run's first and last rounds were committed.
    None: no round is."""
    rounds, at, void, losses = series.columns("round", "committed_at", "void", "train_loss")
    if not len(rounds):
        return None
    at = np.maximum.accumulate(at)
    inside = slice(*np.searchsorted(at, (after, before)).tolist())
    valid = void[inside] == 0
    committed, loss = rounds[inside][valid], losses[inside][valid]
    measured = loss[np.isfinite(loss)]
    return {
        "committed": len(committed),
        "void": int(len(valid) - len(committed)),
        "rounds": [int(committed[0]), int(committed[-1])] if len(committed) else None,
        "train_loss": [float(measured[0]), float(measured[-1])] if len(measured) else None,
        "began": float(at[0]),
        "ended": float(at[-1]),
    }
