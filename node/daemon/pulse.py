"""The progress of a node's trainer, as its heartbeats and `atoll node status` tell it."""

import math
from dataclasses import dataclass

from msgspec.structs import replace

from atoll.node.trainer_channel import Progress

SPEED_SECONDS = 10.0  # for which a trainer that idles between two rounds is shown at the speed of its last steps


@dataclass(slots=True)
class Pulse:
    """The progress that the heartbeat tells, beyond the machine's phase."""

    at: float = 0.0  # seconds; when the trainer last made progress
    progress: Progress = Progress(0, 0, 0.0)  # what it said last
    said_at: float = -math.inf  # seconds; when it said so

    def figures(self, training: bool, now: float) -> Progress:
        """What it said last; its speed only while it takes steps, or did a moment ago."""
        if now - self.said_at < SPEED_SECONDS or (training and self.progress.step):
            return self.progress
        return replace(self.progress, tokens_per_s=0.0, mfu=0.0, data_wait=0.0)
