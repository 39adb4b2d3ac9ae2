"""What must hold at every moment of every run. Each is a function with its promise as docstring, in the file of
its subject; `check_written` says what is looked at after a write, the world and its parts call the others."""

from typing import TYPE_CHECKING

from sim.invariants.audits import only_liars_are_convicted
from sim.invariants.charges import (
    only_who_lied_of_a_norm_is_charged_with_it as only_who_lied_of_a_norm_is_charged_with_it,
)
from sim.invariants.charges import (
    only_whose_delta_was_turned_is_an_outlier as only_whose_delta_was_turned_is_an_outlier,
)
from sim.invariants.charges import (
    who_saves_bytes_is_not_waited_for as who_saves_bytes_is_not_waited_for,
)
from sim.invariants.commits import check_commit, no_fragment_has_a_step_twice, the_digest_is_the_logs
from sim.invariants.conduct import decisions_are_made_once_and_of_liars, the_journal_has_every_decision
from sim.invariants.credit import credit_is_for_what_was_committed
from sim.invariants.endings import the_run_ends, the_run_goes_on
from sim.invariants.ledgers import check_ledger
from sim.invariants.members import (
    LENIENCY,
    LONG_AWAY,
    epochs_name_memberships,
    members_have_the_runs_state,
    members_said_what_is_believed,
    one_node_a_session,
    the_late_are_out,
    verdicts_are_on_the_silent,
)
from sim.invariants.nodes import (
    active_nodes_have_the_logs_state,
    carried_work_is_the_front_of_the_lease,
    every_step_counts_once,
    only_committed_work_is_dropped,
    only_who_can_is_to_evaluate,
    sealed_bytes_are_the_logs,
    states_go_forward,
    steps_ahead_are_kept,
    steps_ahead_are_the_next_ones,
    the_state_stands_still_until_it_is_taken,
    who_departs_takes_nothing_along,
    who_saves_bytes_exchanges_nothing,
)
from sim.invariants.records import (
    never_backwards,
    only_durable_states_are_shown,
    only_what_nobody_can_bring_is_void,
    published_once_in_order,
    replay_gives_what_was_durable,
    the_journal_has_every_record,
)
from sim.invariants.rounds import (
    a_plan_is_of_its_rounds_fragment,
    a_round_has_its_inner_steps,
    attempts_end_in_time,
    fences_grow,
    no_round_waits_for_suspects,
    one_plan_an_attempt,
    one_result_an_attempt,
    plans_leave_out_who_saves_bytes,
    rounds_close_at_a_quorum,
)
from sim.invariants.samples import every_sample_has_one_place, who_left_takes_what_may_be_committed
from sim.invariants.streams import (
    a_stream_takes_no_other_with_it,
    nodes_are_told_of_views_that_they_lack,
    reasons_are_shown_soon,
    rosters_are_the_views,
    streams_show_the_state,
    who_has_a_stream_is_connected,
)
from sim.invariants.violation import Violation

from atoll.coordinator.service.journaled_machine import Batch
from atoll.coordinator.state_machine.state import State

if TYPE_CHECKING:
    from sim.world import World

__all__ = [
    "LENIENCY",
    "LONG_AWAY",
    "Violation",
    "a_plan_is_of_its_rounds_fragment",
    "a_round_has_its_inner_steps",
    "a_stream_takes_no_other_with_it",
    "active_nodes_have_the_logs_state",
    "carried_work_is_the_front_of_the_lease",
    "check_written",
    "every_step_counts_once",
    "who_departs_takes_nothing_along",
    "no_fragment_has_a_step_twice",
    "nodes_are_told_of_views_that_they_lack",
    "one_node_a_session",
    "one_plan_an_attempt",
    "one_result_an_attempt",
    "only_committed_work_is_dropped",
    "only_durable_states_are_shown",
    "only_who_can_is_to_evaluate",
    "reasons_are_shown_soon",
    "replay_gives_what_was_durable",
    "rosters_are_the_views",
    "sealed_bytes_are_the_logs",
    "states_go_forward",
    "steps_ahead_are_kept",
    "steps_ahead_are_the_next_ones",
    "streams_show_the_state",
    "the_journal_has_every_decision",
    "the_journal_has_every_record",
    "the_late_are_out",
    "the_run_ends",
    "the_run_goes_on",
    "the_state_stands_still_until_it_is_taken",
    "verdicts_are_on_the_silent",
    "who_has_a_stream_is_connected",
    "who_saves_bytes_exchanges_nothing",
]


def check_written(world: "World", before: State, batch: Batch) -> None:
    after = batch.state
    if void := [record for record in batch.records if record.void]:
        only_what_nobody_can_bring_is_void(world, before, batch, void)
    never_backwards(world, before, batch)
    if batch.decisions:
        decisions_are_made_once_and_of_liars(world, batch)
    only_liars_are_convicted(world, batch)
    if len(batch.entries) == 1:  # else the quorum may be lost again by the next one
        rounds_close_at_a_quorum(before, after)
    no_round_waits_for_suspects(after)
    epochs_name_memberships(before, after)
    members_said_what_is_believed(world, before, after)
    plan = after.round.plan
    if plan is not None:
        plans_leave_out_who_saves_bytes(after)
        attempts_end_in_time(world, batch)
        if plan is not before.round.plan:
            fences_grow(world, plan.fence)
    if after.round is not before.round:
        check_ledger(world, before, after)
    who_left_takes_what_may_be_committed(world, before, batch)
    if after.committed != before.committed:
        check_commit(world, before, batch)
    credit_is_for_what_was_committed(world, batch)
    if after.digest != before.digest or after.committed != before.committed:
        the_digest_is_the_logs(world, after)
    if after.leases is not before.leases or after.members.departed is not before.members.departed:
        every_sample_has_one_place(world, after)
    if after.members is not before.members or after.digest != before.digest:
        members_have_the_runs_state(after)
        for node in world.nodes.values():
            active_nodes_have_the_logs_state(world, node)
    for record in batch.records:
        published_once_in_order(world, record)
