"""What the saved view shows is there: each figure is one of a row's, and most of a row's figures are shown."""

import re
from contextlib import closing
from pathlib import Path

import pytest
from watched_runs import record

from atoll.comm.errors import ConfigError
from atoll.coordinator.server import save_wandb_view
from atoll.coordinator.service.journal import Journal
from atoll.coordinator.tracking.figures import row
from atoll.coordinator.tracking.view import SECTIONS, Chart

CHARTS = [chart for section in SECTIONS for chart in section.charts]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_a_chart_is_of_figures_that_are_logged(chart: Chart) -> None:
    figures = row(record(3))
    assert chart.x in figures and set(chart.figures) <= figures.keys()
    assert bool(chart.figures) != bool(chart.pattern)
    if chart.pattern:
        assert len([name for name in figures if re.search(chart.pattern, name)]) > 2


def test_what_is_logged_is_in_a_chart_or_said_here_not_to_be() -> None:
    shown = {name for chart in CHARTS for name in chart.figures}
    patterns = [re.compile(chart.pattern) for chart in CHARTS if chart.pattern]
    left_out = {name for name in row(record(3)) if name not in shown and not any(p.search(name) for p in patterns)}
    assert {re.sub("^node/[^/]+/", "node/", name) for name in left_out} == {
        *("round", "tokens", "committed_at", "members/epoch", "seconds/round"),
        *("exchange/levels", "exchange/states_equal", "node/tokens", "node/data_wait"),
        *(f"nodes/{name}/{way}" for name in ("tokens", "data_wait") for way in ("least", "median", "most")),
    }


def test_a_run_that_was_never_in_wandb_has_no_view(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)):
        pass
    with pytest.raises(ConfigError, match="has nothing in wandb: start it with wandb.mode=online first"):
        save_wandb_view(tmp_path)
