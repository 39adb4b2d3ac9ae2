"""The run in wandb: one writer, the coordinator; axis `round`; every committed round exactly once.

wandb may block on a slow network, so it lives in a thread of its own behind a queue. A restarted coordinator
logs the journal's rounds again into a fresh wandb run, because an offline run cannot be continued.
"""

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec

from atoll.comm.config.run import RunConfig, WandbMode
from atoll.comm.errors import ConfigError
from atoll.comm.extras import demand, lacking
from atoll.comm.ids import NodeId
from atoll.coordinator.service.telemetry import Vitals
from atoll.coordinator.state_machine.events import CommitRecord, Effect, Note, Publish

log = logging.getLogger("atoll.coordinator")
DEFAULT_PROJECT = "atoll"  # where neither config nor environment names one
MODE_OF_WORD = {  # what WANDB_MODE may be, with wandb's older words
    "online": WandbMode.ONLINE,
    "run": WandbMode.ONLINE,
    "shared": WandbMode.ONLINE,
    "offline": WandbMode.OFFLINE,
    "dryrun": WandbMode.OFFLINE,
    "disabled": WandbMode.DISABLED,
}
MAX_MEMBER_SERIES = 64  # contributors with series of their own; of more, least, median and most are logged
# What a round's row says of its contributors' trainers, one chart for all: figures of the vitals, and how they are
# put together. Members that do not know a figure do not count.
TRAINER_FIGURES: dict[str, dict[str, Callable[[list[float]], float]]] = {
    "tokens_per_s": {"sum": sum, "mean": fmean, "least": min},
    "mfu": {"mean": fmean, "least": min},
    "data_wait": {"mean": fmean, "most": max},
    "gradient_norm": {"mean": fmean, "most": max},
    "learning_rate": {"mean": fmean},
    "device_bytes": {"mean": fmean, "most": max},
    "trainer_rss_bytes": {"mean": fmean, "most": max},
}
Row = dict[str, Any]


class WandbLogger:
    """The run's one writer to wandb: `tell` takes effects from any thread, `close` flushes."""

    def __init__(self, config: RunConfig, directory: Path, past: Iterable[CommitRecord]) -> None:
        self._config, self._directory, self._past = config, directory, past
        self._queue: queue.SimpleQueue[tuple[Effect, Row] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        self.mode = wandb_mode(config)
        if self.mode is not WandbMode.DISABLED:
            self._thread.start()

    def tell(self, effect: Effect, vitals: Mapping[NodeId, Vitals] | None = None) -> None:
        """Log a commit record or a note; never waits. `vitals`: the members' when they last took inner steps."""
        if self.mode is WandbMode.DISABLED:
            return
        figures = trainer_figures(effect.record, vitals) if isinstance(effect, Publish) and vitals else {}
        self._queue.put((effect, figures))

    def close(self, timeout: float = 30.0) -> None:
        """Finish the wandb run; waits up to `timeout` seconds for it."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout)

    def _work(self) -> None:
        try:
            run = self._open()
        except Exception as error:  # wandb raises many kinds: the run must not end for want of a chart
            log.warning(f"wandb is off for this run, it could not start: {error}")
            return
        step = 0
        for record in self._past:
            step = record.round
            self._log(run, row(record))
        while (told := self._queue.get()) is not None:
            effect, figures = told
            match effect:
                case Publish(record) if record.round > step:
                    step = record.round
                    self._log(run, row(record) | figures)
                case Note(sentence, node):
                    self._log(run, {"event/round": step, "event/sentence": sentence, "event/node": node or ""})
        _finish(run)

    @staticmethod
    def _log(run: Any, row: Row) -> None:
        try:
            run.log(row)
        except Exception as error:
            log.warning(f"wandb did not take a row: {error}")

    def _open(self) -> Any:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._directory.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            x_disable_stats=True, console="off", silent=True, x_file_stream_transmit_interval=1
        )
        run = wandb.init(
            project=self._config.wandb.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            entity=self._config.wandb.entity or None,
            name=os.environ.get("WANDB_NAME") or self._config.name,
            dir=str(self._directory),
            mode="online" if self.mode is WandbMode.ONLINE else "offline",
            config=msgspec.to_builtins(self._config),
            settings=settings,
        )
        run.define_metric("round")
        run.define_metric("*", step_metric="round")
        return run


def _finish(run: Any) -> None:
    """Flush and close the run; `finish` alone returns a moment before wandb's own process has closed the file."""
    import wandb

    try:
        run.finish()
        wandb.teardown()
    except Exception as error:
        log.warning(f"wandb did not finish its run: {error}")


def row(record: CommitRecord) -> Row:
    """A commit record as one wandb row."""
    out: Row = {
        "round": record.round,
        "tokens": record.tokens,
        "members/contributors": len(record.contributors),
        "members/epoch": record.epoch,
        "reduce/attempts": record.attempts,
        "reduce/digests_equal": int(record.digests_equal is not False),
    }
    if not record.void:
        out["loss/train"] = record.train_loss
    if record.val_loss is not None:
        out["loss/val"] = record.val_loss
    out |= {f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()}
    for name, values in (
        ("tokens", record.contributors),
        ("bytes_up", record.bytes_up),
        ("bytes_down", record.bytes_down),
    ):
        of: dict[str, float] = {str(node): values.get(node, 0) for node in record.contributors}
        if len(of) > MAX_MEMBER_SERIES:
            of = {"least": min(of.values()), "median": median(of.values()), "most": max(of.values())}
        out |= {f"{name}/{which}": value for which, value in of.items()}
    return out


def trainer_figures(record: CommitRecord, vitals: Mapping[NodeId, Vitals]) -> Row:
    """The figures of the contributors' trainers, as a part of the round's wandb row."""
    known = [vitals[node] for node in record.contributors if node in vitals]
    out: Row = {}
    for name, ways in TRAINER_FIGURES.items():
        values = [float(value) for v in known if (value := getattr(v, name)) or name == "data_wait"]
        if values:
            out |= {f"trainer/{name}/{way}": together(values) for way, together in ways.items()}
    return out


def check_installed(config: RunConfig) -> None:
    """Raise `MissingPackage` where the config insists on wandb and it is not installed."""
    if config.wandb.mode in (WandbMode.ONLINE, WandbMode.OFFLINE):
        demand(f"wandb.mode={config.wandb.mode} (auto would do without)", "wandb")


def wandb_mode(config: RunConfig) -> WandbMode:
    """The config's mode; for `auto` the one of WANDB_MODE, and without that `online` where a key is present and
    `disabled` where there is no wandb.

    Raises `ConfigError` for a WANDB_MODE that is none of wandb's.
    """
    if config.wandb.mode is not WandbMode.AUTO:
        return config.wandb.mode
    if missing := lacking("a chart of the run", "wandb"):
        log.info(f"nothing goes to wandb (wandb.mode=auto): {missing}")
        return WandbMode.DISABLED
    if said := os.environ.get("WANDB_MODE"):
        if (known := MODE_OF_WORD.get(said.lower())) is None:
            raise ConfigError(f"WANDB_MODE is {said[:40]!r}: set it to online, offline or disabled")
        return known
    netrc = Path.home() / ".netrc"
    logged_in = netrc.exists() and "wandb" in netrc.read_text(errors="replace")
    key = os.environ.get("WANDB_API_KEY") or logged_in
    return WandbMode.ONLINE if key else WandbMode.OFFLINE
