"""Numbers at the ends of what a float can be, as members tell them: nothing breaks, and the others count as
before."""

import struct
import sys
from itertools import product

import pytest
import scenario

from atoll.comm.bitmap import bitmap
from atoll.comm.config.outer import OuterConfig
from atoll.comm.digest import digest
from atoll.comm.ids import Epoch, Incarnation, NodeId, Round
from atoll.comm.plan import Fence
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.replace import replace
from atoll.coordinator.service.validation import Report
from atoll.coordinator.service.view import view
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.ledger import seal_terms
from atoll.node.control.reports import plan_of
from atoll.outer_opt.clip import SMALLEST_FACTOR, clip_factors

NAMES = ["ada", "bo", "cy", "dee", "eve"]
NORMS = [0.0, 5e-324, 1e-300, sys.float_info.min, 2.0**-149, 1e-30, 1.0, 1e30, 1e200, 1e308, sys.float_info.max]
SEEN = [0.0, 2.0**-149, 1.0, 1e30, 3.4e38]  # as fp32, which seals travel in


def reducing(norms: list[float], dampings: list[float] | None = None) -> scenario.Run:
    """The members have told these norms and dampings of their deltas; an attempt is in force."""
    names, run = NAMES[: len(norms)], scenario.Run()
    run.config = replace(
        run.config,
        outer=OuterConfig(clip=True, damping=True),
        members=replace(run.config.members, minimum=1),
        reduce=replace(run.config.reduce, levels=2),
    )
    run.state = replace(run.state, config=run.config)
    run.do("begin", names)
    run.do("wait", ["10"])
    run.do("reached", names)
    told = zip(run.state.round.participants, norms, dampings or [1.0] * len(norms), strict=True)
    for node, norm, damping in told:
        front = run.state.leases.by_node[node][0][0]
        work = ev.Contribution(10, 10, 2.0, norm, front, damping)
        run.feed(ev.ContributionReady(node, 1, 1, work))
    assert run.state.round.plan is not None
    return run


def scales(run: scenario.Run) -> list[float]:
    """What the plan says, which every member can carry out."""
    plan = plan_of(view(run.state, NodeId("n1")).plan)
    plan.validate()
    return [member.scale for member in plan.members]


def seal(run: scenario.Run, norm: float) -> None:
    """All seal what they own, and tell of each delta that it has this norm, and is along the last round's."""
    ledger = run.state.round.ledger
    alive = bitmap((i for i, e in enumerate(ledger.entries) if not e.gone and e.contribution), len(ledger.entries))
    for c in ledger.unsealed:
        owner = ledger.owners[c]
        assert owner is not None
        terms = len(sum(seal_terms(ledger, c, alive), []))
        fence = run.fence({})._replace(attempt=ledger.since[c])
        norms, dots = (
            struct.pack(f"<{terms}f", *[norm] * terms),
            struct.pack(f"<{1 + terms}f", *[norm] * (1 + terms)),
        )
        one = (c, digest(b"%d %d" % (c, ledger.attempt)), alive)
        run.feed(ev.ChunksSealed(owner, 1, fence, (one,), (norms,), dots=(dots,)))
    whole = run.state.round.ledger.root
    for node in run.state.round.ledger.members:
        run.feed(ev.ReduceComplete(node, 1, run.fence({}), whole, 0, 0))


@pytest.mark.parametrize(("one", "rest"), [(a, b) for a, b in product(NORMS, NORMS) if a != b])
def test_whatever_norms_are_told_the_plan_can_be_carried_out_and_the_round_ends(one: float, rest: float) -> None:
    for norms in ([one, rest], [one, rest, rest], [rest] * 4 + [one]):
        run = reducing(norms)
        assert all(0 < scale <= 1 for scale in scales(run))
        for _ in range(6):
            if run.state.committed or run.state.round.plan is None:
                break
            seal(run, 0.0)
        assert run.state.committed == 1


@pytest.mark.parametrize(("told", "seen"), list(product(NORMS, SEEN)))
def test_whatever_norms_owners_see_of_deltas_of_any_length_the_round_ends(told: float, seen: float) -> None:
    run = reducing([told, 1.0, told, 1e-30, told])
    for _ in range(12):
        if run.state.committed or run.state.round.plan is None:
            break
        seal(run, seen)
    assert run.state.round.number == 2 or run.state.round.plan is None, "nobody is left, or all is committed"


@pytest.mark.parametrize("damping", [5e-324, 1e-300, 1e-30, 0.5])
def test_however_little_one_says_that_its_work_counts_the_others_count_as_before(damping: float) -> None:
    for norm in (1.0, 1e30):
        (*others, one) = scales(reducing([1.0] * 3 + [norm], [1.0] * 3 + [damping]))
        assert others == [1.0] * 3 and SMALLEST_FACTOR <= one <= max(damping, SMALLEST_FACTOR)


@pytest.mark.parametrize("norm", [5e-324, 1e-300, 2.0**-150])
def test_a_norm_that_no_numbers_in_fp32_have_clips_nobody(norm: float) -> None:
    """Of two deltas the shorter one is the measure."""
    told = Report(NodeId("n1"), 1, Fence(Incarnation(1), Epoch(1), Round(1), 1))
    event = told.contribution_ready(pb.ContributionReady(samples=10, steps=10, loss=2.0, delta_norm=norm))
    assert event.contribution.norm == 0.0
    assert scales(reducing([event.contribution.norm, 1.0])) == [1.0, 1.0]
    least = told.contribution_ready(pb.ContributionReady(samples=10, steps=10, delta_norm=2.0**-149))
    assert least.contribution.norm == 2.0**-149


def test_factors_of_any_norms_are_above_0() -> None:
    for a, b in product(NORMS, NORMS):
        assert all(0 < factor <= 1 for factor in clip_factors([a, b], [3.0, 8.0], 8.0))
