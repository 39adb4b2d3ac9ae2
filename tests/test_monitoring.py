"""Alert rules and dashboards in docker/ speak of metrics that there are."""

import json
import re
from pathlib import Path
from typing import Any

import exposition
import pytest
import yaml

DOCKER = Path(__file__).resolve().parent.parent / "docker"
RULES = DOCKER / "prometheus/alerts.yml"
DASHBOARDS = sorted((DOCKER / "grafana/dashboards").glob("*.json"))
METRIC = re.compile(r"\b(?:atoll|process)_[a-z_0-9]+\b")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries(dashboard: Path) -> list[str]:
    panels = json.loads(dashboard.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    coordinator = exposition.of_coordinator(tmp_path_factory.mktemp("coordinator"))
    return exposition.names(coordinator) | exposition.names(exposition.of_node())


def test_rules_are_of_metrics_that_there_are_and_say_what_is_wrong(known: set[str]) -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules()) > 10
    for rule in rules():
        found = set(METRIC.findall(rule["expr"]))
        assert found <= known, found - known
        assert found or rule["expr"].startswith("up{"), rule["expr"]
        assert rule["labels"]["severity"] in ("critical", "warning") and rule["annotations"]["summary"].endswith(
            "."
        )


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_dashboards_are_of_metrics_that_there_are(dashboard: Path, known: set[str]) -> None:
    board = json.loads(dashboard.read_text())
    assert board["uid"].startswith("atoll-") and board["panels"]
    for query in queries(dashboard):
        found = set(METRIC.findall(query)) - {"process"}
        assert found and found <= known, found - known


def test_grafana_is_told_where_dashboards_and_data_are() -> None:
    sources = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert [source["uid"] for source in sources] == ["prometheus"]
    used = {
        panel["datasource"]["uid"]
        for dashboard in DASHBOARDS
        for panel in json.loads(dashboard.read_text())["panels"]
        if "datasource" in panel
    }
    assert used == {"prometheus"}
    providers = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/atoll.yml").read_text())["providers"]
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["grafana"]
    assert f"./grafana/dashboards:{providers[0]['options']['path']}:ro" in compose["volumes"]
