"""The view in which wandb shows a run as we would want to see it: `atoll coordinator wandb-view` saves it.

What is shown is data here (`SECTIONS`); wandb's own library makes a workspace of it. A run has one such view,
which is changed when it is saved again.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import Unreachable
from atoll.comm.extras import demand
from atoll.coordinator.tracking.wandb_settings import DEFAULT_PROJECT


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over rounds, or over tokens: the figures named, or all of which the pattern is true."""

    title: str
    figures: tuple[str, ...] = ()
    pattern: str = ""
    x: str = "round"
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class ViewSection:
    """Charts that belong together."""

    title: str
    charts: tuple[Chart, ...]


def _each(title: str, figure: str) -> tuple[Chart, Chart]:
    """A figure of each contributor, and its spread, which is there also where contributors are too many."""
    return (
        Chart(f"{title}, by node", pattern=f"^node/[^/]+/{figure}$"),
        Chart(
            f"{title}: least, median, most", tuple(f"nodes/{figure}/{way}" for way in ("least", "median", "most"))
        ),
    )


PHASES = tuple(f"seconds/{phase}" for phase in ("inner", "collect", "reduce", "commit"))
SECTIONS = (
    ViewSection(
        "Loss",
        (
            Chart("Loss by tokens", ("loss/train", "loss/val"), x="tokens"),
            Chart("Loss by round", ("loss/train", "loss/val")),
            *_each("Training loss", "loss"),
        ),
    ),
    ViewSection(
        "Speed",
        (
            Chart("Tokens a second", ("speed/run_tokens_per_s", "speed/trainers_tokens_per_s")),
            *_each("Tokens a second", "tokens_per_s"),
            Chart("MFU and waiting for data", ("speed/mfu", "speed/data_wait")),
            *_each("MFU", "mfu"),
        ),
    ),
    ViewSection(
        "Rounds and goodput",
        (
            Chart("Where a round's seconds go", PHASES, stacked=True),
            Chart("Where the nodes' time went", pattern="^goodput/", stacked=True),
            Chart("Goodput of the fleet, and compute utilisation", ("fleet/goodput", "fleet/compute_utilisation")),
            Chart("Failures noticed", ("failures/noticed",)),
            Chart(
                "Failures: seconds",
                tuple(f"failures/{of}" for of in ("detect_s", "recover_s", "survivors_lost_s")),
            ),
            Chart("Members", ("members/active", "members/contributors")),
        ),
    ),
    ViewSection(
        "Exchange",
        (
            Chart("Exchange: predicted and measured seconds", ("exchange/predicted_s", "exchange/measured_s")),
            Chart("Attempts", ("exchange/attempts",)),
            *_each("Seconds of the exchange", "exchange_s"),
            Chart("Bytes", ("exchange/bytes_up", "exchange/bytes_down")),
            *_each("Bytes up", "bytes_up"),
            *_each("Bytes down", "bytes_down"),
        ),
    ),
    ViewSection(
        "Optimisation",
        (
            Chart("Learning rate", ("train/learning_rate",)),
            Chart("Gradient and delta norms", ("train/gradient_norm", "train/delta_norm")),
            *_each("Gradient norm", "gradient_norm"),
            *_each("Delta norm", "delta_norm"),
        ),
    ),
)
EVENTS = "events"  # the table, in the run's summary


def save_view(config: RunConfig, run_id: str, url: str = "") -> str:
    """Save the view of the wandb run `run_id`; returns its URL. `url`: where it was saved before. Raises
    `MissingPackage`, and `Unreachable` for whatever wandb says."""
    demand("atoll coordinator wandb-view", "wandb", "wandb_workspaces")
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        workspace = _workspace(config, run_id, url)
        workspace.save()
        return str(workspace.url)
    except Exception as error:  # wandb raises many kinds
        raise Unreachable(f"wandb did not save the view: {error}") from None


def _workspace(config: RunConfig, run_id: str, url: str) -> Any:
    import wandb_workspaces.workspaces as ws

    made = None
    if url:
        with suppress(Exception):  # it was deleted: then there is a new one
            made = ws.Workspace.from_url(url)
    if made is None:
        made = ws.Workspace(entity=_entity(config), project=_project(config), auto_generate_panels=False)
    made.name, made.sections = f"{config.name} (Atoll)", [*map(_section, SECTIONS), _events()]
    made.runset_settings = ws.RunsetSettings(filters=ws.And(ws.Metric("ID") == run_id))
    return made


def _section(section: ViewSection) -> Any:
    import wandb_workspaces.workspaces as ws

    charts = [_panel(chart) for chart in section.charts]
    return ws.Section(name=section.title, panels=charts, is_open=True)


def _panel(chart: Chart) -> Any:
    import wandb_workspaces.reports.v2 as wr

    return wr.LinePlot(
        title=chart.title,
        x=chart.x,
        y=list(chart.figures),
        metric_regex=chart.pattern or None,
        plot_type="stacked-area" if chart.stacked else "line",
    )


def _events() -> Any:
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    return ws.Section(name="Events", panels=[wr.WeavePanelSummaryTable(table_name=EVENTS)], is_open=True)


def _project(config: RunConfig) -> str:
    return config.wandb.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT


def _entity(config: RunConfig) -> str:
    """The config's entity, or the environment's, or the account's own."""
    import wandb

    return config.wandb.entity or os.environ.get("WANDB_ENTITY") or str(wandb.Api().default_entity)
