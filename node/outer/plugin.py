"""The outer rule of a run that names a plugin: what an entry point of the group atoll.outer makes of
`OuterConfig`.

Every node must get the same bits from the same bytes, however the flat vector is cut into chunks. A rule that is
not element by element would not, so a few steps are tried before the first real one; that it has the same bits on
every machine is the package's promise.
"""

import numpy as np
from numpy.typing import NDArray

from atoll.comm.config.outer import OuterConfig
from atoll.comm.config.plugin import Plugin
from atoll.outer_opt.schedule import Schedule

TRIAL_ROUNDS = 3
TRIAL_ELEMENTS = 61
TRIAL_SPLIT = 17  # where the trial's vectors are cut in two


def plugin_schedule(plugin: Plugin, outer: OuterConfig) -> Schedule:
    """The outer rule of each round, by the plugin. Raises `AtollError` where it is not installed, fails, or is no
    rule that works element by element on fp32 in place."""
    schedule: Schedule = plugin.call(outer)
    if not callable(getattr(schedule, "at", None)):
        raise plugin.unusable(
            f"returned a {type(schedule).__name__} without at(): it must return an "
            "atoll.outer_opt.schedule.Schedule"
        )
    try:
        with np.errstate(all="ignore"):  # what is not finite is found below
            whole = _trial(schedule, [slice(0, TRIAL_ELEMENTS)])
            parts = _trial(schedule, [slice(0, TRIAL_SPLIT), slice(TRIAL_SPLIT, TRIAL_ELEMENTS)])
    except Exception as error:  # the package's code may raise anything
        raise plugin.unusable(f"failed in its step: {type(error).__name__}: {error}") from error
    if not np.isfinite(whole).all():
        raise plugin.unusable("makes numbers that are not finite of small ones")
    if whole.tobytes() != parts.tobytes():
        raise plugin.unusable(
            "does not give the same bits for a vector whole and in parts: its step must be element by element, in "
            "place, and the same each time"
        )
    return schedule


def _trial(schedule: Schedule, spans: list[slice]) -> NDArray[np.float32]:
    """Anchor and momentum after a few rounds of made-up deltas, of the vector part by part: (2,
    TRIAL_ELEMENTS)."""
    places = np.arange(TRIAL_ELEMENTS, dtype=np.float32)
    state = np.stack([places / np.float32(7) - 4, np.zeros_like(places)])
    for round_ in range(1, TRIAL_ROUNDS + 1):
        deltas = (places - 20 * round_) / np.float32(100)  # whose parts differ in mean and size
        for span in spans:
            delta = deltas[span].copy()
            schedule.at(round_, 1.0).step(state[0, span], state[1, span], delta, np.empty_like(delta))
    return state
