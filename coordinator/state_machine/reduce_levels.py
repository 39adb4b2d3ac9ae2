"""Choice of a round's reduce in one level or two, by the round trips and rates that its members told. Pure.

A node tells its round trips and, once a plan has told it the regions, the rates at which it sent within its own
and to others. So the first round knows nothing, the second measures, and from the third on both plans are
predicted, the flat one as it would be dealt. Two levels must be predicted to save a tenth: they round once more.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from statistics import median

from atoll.comm.config.outer import MergeName
from atoll.comm.config.run import CodecName, RunConfig
from atoll.comm.ids import NodeId
from atoll.coordinator.placement.bandwidth_shares import PlanNode
from atoll.coordinator.placement.two_level import (
    Rtts,
    TwoLevel,
    faster,
    find_regions,
    plan_regions,
    predict_flat,
    usable,
)
from atoll.coordinator.state_machine.chunk_owners import SHARE_LIMIT, ChunkOwners, able_owners, reducers
from atoll.coordinator.state_machine.members import Member
from atoll.coordinator.state_machine.state import State


@dataclass(frozen=True, slots=True)
class RegionLevels:
    """Choice between one level and two for a reduce among several regions."""

    regions: dict[NodeId, int]
    flat: float = 0.0  # predicted seconds; 0: not enough is known of the links
    two_level: float = 0.0
    owners: tuple[NodeId, ...] = ()  # of each chunk; empty: it is to be flat
    relays: tuple[tuple[NodeId, ...], ...] = ()  # (regions, chunks)

    @property
    def levels(self) -> int:
        """The number of levels that was chosen: 1 or 2."""
        return 2 if self.owners else 1

    @property
    def predicted(self) -> float:
        """Seconds of the plan that was chosen."""
        return self.two_level if self.owners else self.flat

    @property
    def predictions(self) -> dict[str, float]:
        return {"flat": self.flat, "two_level": self.two_level} if self.flat else {}


def choose_levels(state: State, members: Sequence[NodeId], planned: ChunkOwners) -> RegionLevels | None:
    """Choose one level or two for a round's first attempt, which `planned` describes if it is flat. None: all are
    one region."""
    if state.config.reduce.levels < 2 or not averages(state.config):
        return None
    nodes, here = (*members, *reducers(state)), state.members.here
    told = [here[n] for n in nodes]
    links = _links(told, frozenset(members), able_owners(state, nodes))
    rtts = _rtts(told)
    regions = usable(find_regions(len(nodes), rtts), links, rtts)
    if len(regions) < 2:
        return None
    of = {nodes[i]: g for g, region in enumerate(regions) for i in region}
    if not any(m.inside and m.outside for m in told):
        return RegionLevels(of)
    payload, chunks = state.chunks.numel * state.config.reduce.bytes_per_element, state.chunks.count
    flat = predict_flat(links, planned.shares, rtts, payload, chunks, regions)
    two = plan_regions(links, rtts, payload, chunks, limit=SHARE_LIMIT)
    if two is None:
        return RegionLevels(of)
    if not isinstance(faster(flat, two), TwoLevel):
        return RegionLevels(of, flat.seconds, two.seconds)
    owners = tuple(nodes[i] for i in two.owners)
    relays = tuple(tuple(nodes[row[g]] for row in two.relays) for g in range(len(regions)))
    return RegionLevels(of, flat.seconds, two.seconds, owners, relays)


def averages(config: RunConfig) -> bool:
    """Whether a region's mean can stand for the deltas of its members."""
    return config.outer.merge is MergeName.MEAN and config.reduce.codec is not CodecName.SPARSE


def describe_choice(split: RegionLevels) -> str:
    """A clause about the choice, for the log and the page."""
    if not split.flat:
        return ""
    regions = len(set(split.regions.values()))
    if split.owners:
        return f" in two levels, {regions} regions: {split.two_level:.2g} s predicted, {split.flat:.2g} s flat"
    return f", {regions} regions, flat: {split.flat:.2g} s predicted, {split.two_level:.2g} s in two levels"


def _links(told: Sequence[Member], contributors: Set[NodeId], able: Set[NodeId]) -> list[PlanNode]:
    """The members as the predictions see them: who told no rates is like most of the others. That its link carried
    something within the region and something to others does not mean that it carries both at once. What it told of
    bursts within its region nobody else saw: the limit of its shares holds in the place of that."""
    inside = median([m.inside for m in told if m.inside] or [0.0])
    far = [min(m.outside, m.seen_up) for m in told]  # others saw no more of it
    outside = median([rate for rate in far if rate] or [0.0])
    return [
        PlanNode(
            out := rate or outside,
            out,
            m.node not in able,
            m.node in contributors,
            near := m.inside or inside,
            max(m.rates[0], near, out),
        )
        for m, rate in zip(told, far, strict=True)
    ]


def _rtts(told: Sequence[Member]) -> Rtts:
    """The shorter of what the two ends of a path say."""
    place = {m.node: i for i, m in enumerate(told)}
    found: dict[tuple[int, int], float] = {}
    for i, m in enumerate(told):
        for node, seconds in m.rtts.items():
            if (j := place.get(node, i)) != i:
                pair = min(i, j), max(i, j)
                found[pair] = min(seconds, found.get(pair, seconds))
    return found
