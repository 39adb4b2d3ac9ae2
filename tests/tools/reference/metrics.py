"""Draws docs/reference/metrics.md: what a coordinator and a node answer to a scrape, asked of a coordinator in
whose run something of everything has happened, and of a node of which everything is known."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import exposition
from prometheus_client.parser import text_string_to_metric_families
from reference.table import row, table

HEAD = """# Metrics

`GET /metrics` of a coordinator's page, and of a node that was started with `--metrics`, in Prometheus's text
format: [monitoring.md](../monitoring.md) says how they are scraped and what they are for. A histogram NAME has the
series NAME_bucket, NAME_sum and NAME_count. This page is made of what both answer, by `make reference`.
"""
NO_LABELS = {"le", "quantile"}  # of a histogram's own series


def metrics(scrape: str) -> Iterator[str]:
    """The rows of a scrape, by name."""
    for family in sorted(text_string_to_metric_families(scrape), key=lambda found: found.name):
        labels = sorted({label for sample in family.samples for label in sample.labels} - NO_LABELS)
        name = {"counter": f"{family.name}_total", "info": f"{family.name}_info"}.get(family.type, family.name)
        shown = ", ".join(f"`{label}`" for label in labels)
        yield row(f"`{name}`", family.type, shown, family.documentation)


def draw() -> str:
    """The text of the page."""
    heads = table("metric", "type", "labels", "what")
    with tempfile.TemporaryDirectory() as folder:
        coordinator = exposition.of_coordinator(Path(folder))
    of_coordinator = ["\n## Of a coordinator\n", *heads, *metrics(coordinator)]
    of_node = ["\n## Of a node\n", *heads, *metrics(exposition.of_node())]
    return HEAD + "\n".join([*of_coordinator, *of_node]) + "\n"
