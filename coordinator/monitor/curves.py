"""The curves of a run for a picture: columns over rounds, tokens or time, of as many points as a picture has.
Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.comm.terminal import plural
from atoll.coordinator.history.series import F64, PHASES, SeriesTable, kept_points

AXES = {"round": "round", "tokens": "tokens", "time": "committed_at"}
OF_TABLE = (
    *("round", "committed_at", "tokens", "train_loss", "val_loss", "members", "contributors", "attempts"),
    *(*PHASES, "bytes_up", "bytes_down", "void"),
)
DERIVED = ("wall", "tokens_per_s")  # seconds from the commit before (of round 1 its phases), and tokens in them
NAMES = (*OF_TABLE, *DERIVED)
DEFAULT_POINTS, MAX_POINTS = 1000, 4000  # of a curve
MAX_MARKS = 60
DIGITS = 7  # of a number in the answer


class BadQuestion(ValueError):
    """What is asked makes no sense; a sentence."""


@dataclass(frozen=True, slots=True)
class CurvesAsked:
    """What is asked: which curves, over what, from where to where, of how many points."""

    x: str = "round"
    names: tuple[str, ...] = ("train_loss", "val_loss")
    start: float | None = None  # of x
    end: float | None = None
    points: int = DEFAULT_POINTS

    def __post_init__(self) -> None:
        """Raises `BadQuestion`."""
        if self.x not in AXES:
            raise BadQuestion(f"x={self.x[:40]!r} is none of {', '.join(AXES)}")
        if odd := [name for name in self.names if name not in NAMES]:
            raise BadQuestion(f"there is no series {odd[0][:40]!r}; there are {', '.join(NAMES)}")
        if not 4 <= self.points <= MAX_POINTS:
            raise BadQuestion(f"points={self.points}: give 4 to {MAX_POINTS}")


def curves(table: SeriesTable, asked: CurvesAsked) -> dict[str, Any]:
    """The curves on one axis: `x`, for each name as many numbers (None: not known), and each point's round and
    time. `marks`: what happened to rounds in between; each of those rounds is among the points."""
    columns = dict(zip(OF_TABLE, table.columns(*OF_TABLE), strict=True))
    x = np.maximum.accumulate(columns[AXES[asked.x]]) if len(table) else columns[AXES[asked.x]]
    low = int(np.searchsorted(x, asked.start, "left")) if asked.start is not None else 0
    high = int(np.searchsorted(x, asked.end, "right")) if asked.end is not None else len(x)
    # A curve goes on to the picture's edges.
    part = slice(max(low - 1, 0), max(min(high + 1, len(x)), low))
    values = {name: _series(columns, name)[part] for name in asked.names}
    inside = {name: column[part] for name, column in columns.items()}
    marked = _marked(inside)
    # A marked round has its point, though it may have no figures: a void one.
    kept = [kept_points(x[part], value, asked.points) for value in values.values()]
    at = np.unique(np.concatenate([*kept, marked]))
    return {
        "x": _numbers(x[part][at], 15),
        "round": inside["round"][at].astype(int).tolist(),
        "at": _numbers(inside["committed_at"][at], 13),
        "series": {name: _numbers(value[at], DIGITS) for name, value in values.items()},
        "total": len(x),
        "inside": max(high - low, 0),
        "span": [float(x[0]), float(x[-1])] if len(x) else None,
        "marks": [_mark(inside, at, float(x[part][at])) for at in marked.tolist()],
    }


def _series(columns: dict[str, F64], name: str) -> F64:
    if name in OF_TABLE:
        return columns[name]
    at = columns["committed_at"]
    wall = np.diff(at, prepend=np.nan)
    wall[(wall < 0) | (at == 0) | (np.roll(at, 1) == 0)] = np.nan
    if len(wall) and columns["round"][0] == 1 and at[0] > 0:  # before which nothing was committed: its phases
        wall[0] = sum(columns[phase][0] for phase in PHASES)
    if name == "wall":
        return wall
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.maximum(np.diff(columns["tokens"], prepend=0.0), 0.0) / np.where(wall > 0, wall, np.nan)


def _marked(columns: dict[str, F64]) -> NDArray[np.int64]:
    """The places of rounds to which something happened, in their order; where it is too much, the gravest: void
    rounds, then those whose exchange was tried again, then those with fewer or more members than before."""
    change = np.abs(np.diff(columns["members"], prepend=columns["members"][:1]))
    grave = np.where(columns["void"] > 0, 3, np.where(columns["attempts"] > 1, 2, np.where(change != 0, 1, 0)))
    found = np.flatnonzero(grave)
    weight = grave[found] * 1e6 + change[found]
    return np.sort(found[np.argsort(-weight, kind="stable")[:MAX_MARKS]])


def _mark(columns: dict[str, F64], at: int, x: float) -> dict[str, Any]:
    """What happened to the round at this place."""
    number, members = int(columns["round"][at]), columns["members"]
    by = int(members[at] - members[at - 1]) if at else 0
    if columns["void"][at]:
        kind, text = "void", f"round {number:,} is void"
    elif (tries := int(columns["attempts"][at])) > 1:
        kind, text = "retried", f"round {number:,}: the exchange took {tries} attempts"
    else:
        kind = "joined" if by > 0 else "gone"
        text = f"round {number:,}: {by:+d} {plural('member', abs(by))}"
    return {"x": x, "round": number, "kind": kind, "text": text}


def _numbers(values: F64, digits: int) -> list[float | None]:
    """The numbers in so many digits; None for what is none."""
    return [float(f"{v:.{digits}g}") if np.isfinite(v) else None for v in values.tolist()]


def names_asked(given: str) -> Sequence[str]:
    return tuple(dict.fromkeys(filter(None, given.split(",")))) or CurvesAsked().names
