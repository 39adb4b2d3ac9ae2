"""What the coordinator tells the process of a sink: a line of JSON each, down its standard input, whose end is the
process's end."""

import msgspec

from atoll.comm.config.run import WandbMode
from atoll.comm.log import LogSetup
from atoll.coordinator.tracking.sink import SinkKind


class SinkSpec(msgspec.Struct, frozen=True):
    """The first line: which sink, and where the run is."""

    kind: SinkKind
    state_dir: str
    run: str
    archive: str  # where old commit records are copied to; empty: nowhere
    log: LogSetup
    wandb_id: str = ""
    wandb_mode: WandbMode = WandbMode.DISABLED


class Committed(msgspec.Struct, frozen=True, tag=True):
    """The journal has a new record."""


class AlertRaised(msgspec.Struct, frozen=True, tag=True):
    """Whoever watches the run is to be told at once."""

    title: str
    sentence: str
    on: bool  # it begins; False: it is over


Message = Committed | AlertRaised
