"""`atoll bench plan`: what the planner predicts for fleets of 4 to 1000 members; nothing is measured or sent.

The scenarios are stated in full, so that a reader can judge them: `clusters` is where two levels pay (fast
networks behind common, slower links), `homes` where they do not (each member's own link is the limit).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import click
import msgspec
from rich.table import Table

from atoll.comm.options import json_option
from atoll.comm.terminal import show_table
from atoll.coordinator.placement.bandwidth_shares import PlanNode
from atoll.coordinator.placement.two_level import Rtts, TwoLevel, faster, plan_flat, plan_regions

FLEET_SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1000)
REGION_SIZE = 16  # members, at most
MBIT = 1e6 / 8  # bytes/s


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of fleet: each member's links, and the round trips between members."""

    name: str
    about: str
    node: PlanNode  # each member
    near: float  # seconds, round trip within a region
    far: float  # seconds, to another region
    between: float = 0.0  # bytes/s, each way, of a region's common link; 0: no common link


SCENARIOS = (
    Scenario(
        "clusters",
        f"regions of up to {REGION_SIZE}: 10 Gbit/s within (1 ms), one link of 1 Gbit/s to the others (80 ms)",
        PlanNode(1000 * MBIT, 1000 * MBIT, local=10_000 * MBIT),
        near=0.001,
        far=0.08,
        between=1000 * MBIT,
    ),
    Scenario(
        "homes",
        f"a link of 100 Mbit/s for each member, towns of up to {REGION_SIZE} (10 ms) that are 80 ms apart",
        PlanNode(100 * MBIT, 100 * MBIT),
        near=0.01,
        far=0.08,
    ),
)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One size of fleet: predicted seconds of a reduce."""

    n: int
    flat_s: float
    two_level_s: float | None  # None: there is one region
    chosen: str


@dataclass(frozen=True, slots=True)
class PlanRows:
    """One scenario."""

    name: str
    rows: list[PlanRow]


@click.command()
@click.option("--params", default=1e9, show_default=True, type=click.FloatRange(1), help="Of the model.")
@click.option(
    "--bits", default=4.25, show_default=True, type=click.FloatRange(1, 32), help="Encoded, a parameter."
)
@click.option("--chunk", default=1 << 20, show_default=True, type=click.IntRange(1), help="Parameters in a chunk.")
@json_option
def plan(params: float, bits: float, chunk: int, as_json: bool) -> None:
    """Predict the seconds of a reduce among 4 to 1000 members, flat and two-level, in stated scenarios."""
    payload, chunks = params * bits / 8, int(-(-params // chunk))
    found = [PlanRows(s.name, [predicted(s, n, payload, chunks) for n in FLEET_SIZES]) for s in SCENARIOS]
    if as_json:
        click.echo(msgspec.json.encode({"scenarios": found}).decode())
        return
    for scenario, rows in zip(SCENARIOS, found, strict=True):
        click.echo(f"{scenario.name}: {scenario.about}")
        show_table(_table(rows.rows))


def predicted(scenario: Scenario, n: int, payload: float, chunks: int) -> PlanRow:
    """The predictions for a fleet of `n` members; `payload` is an encoded delta, bytes."""
    nodes, rtts, between = [scenario.node] * n, _rtts(scenario, n), scenario.between
    flat = plan_flat(nodes, rtts, payload, chunks, between=between)
    layered = plan_regions(nodes, rtts, payload, chunks, between=between)
    chosen = "two-level" if isinstance(faster(flat, layered), TwoLevel) else "flat"
    return PlanRow(n, flat.seconds, layered.seconds if layered else None, chosen)


def _rtts(scenario: Scenario, n: int) -> Rtts:
    """Measured by each member to its region, and by the regions' first members to each other."""
    near = {
        (i, j): scenario.near for i in range(n) for j in range(i + 1, min(n, i - i % REGION_SIZE + REGION_SIZE))
    }
    return near | dict.fromkeys(combinations(range(0, n, REGION_SIZE), 2), scenario.far)


def _table(rows: Sequence[PlanRow]) -> Table:
    table = Table("members", "flat, s", "two-level, s", "chosen")
    for column in table.columns[:3]:
        column.justify = "right"
    for row in rows:
        layered = "-" if row.two_level_s is None else f"{row.two_level_s:,.1f}"
        table.add_row(str(row.n), f"{row.flat_s:,.1f}", layered, row.chosen)
    return table
