"""Members are judged by the clock at every tick, but not for a while after a late one, or while calls fail."""

from atoll.comm.config.run import MembersConfig, RunConfig
from atoll.comm.ids import NodeId
from atoll.coordinator.service.tick_schedule import MAX_TICK_GAP, TICK_INTERVAL, TickSchedule
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.members import RECONNECT_GRACE_SECONDS
from atoll.coordinator.state_machine.state import State
from atoll.coordinator.state_machine.step import step

LEASE = 10.0


def silent() -> State:
    """A member that is connected, and was last heard at 0 s."""
    node, state = NodeId("n1"), State(RunConfig(members=MembersConfig(lease=LEASE)))
    for event in (ev.Started(1), ev.Joined(node, 1, "ada", "h:1", "s"), ev.Connected(node, 1)):
        state = step(state, event, 0.0)[0]
    return state


def ticked(schedule: TickSchedule, since: float, until: float, refused: bool = False) -> set[str]:
    """The kinds of verdicts at the ticks of a time."""
    found, now = set[str](), since
    while now < until:
        if refused:
            schedule.excuse(now)
        found |= {type(verdict).__name__ for verdict in schedule.judge(silent(), now)}
        now += TICK_INTERVAL
    return found


def test_who_is_silent_is_judged_at_the_ticks() -> None:
    schedule = TickSchedule(0.0)
    assert ticked(schedule, 0.25, LEASE / 2) == set()
    assert ticked(schedule, LEASE / 2 + 0.25, LEASE) == {"Suspected"}
    assert ticked(schedule, LEASE + 0.25, LEASE + 1) == {"Expired"}


def test_nobody_is_judged_while_calls_are_refused_nor_for_a_while_after() -> None:
    schedule = TickSchedule(0.0)
    assert ticked(schedule, 0.25, 3 * LEASE, refused=True) == set()
    assert ticked(schedule, 3 * LEASE, 3 * LEASE + RECONNECT_GRACE_SECONDS - 0.5) == set()
    later = 3 * LEASE + RECONNECT_GRACE_SECONDS + 0.5
    assert ticked(schedule, later - 0.5, later + 1) == {"Expired"}


def test_nobody_is_judged_after_the_coordinator_itself_was_away() -> None:
    schedule = TickSchedule(0.0)
    back = LEASE + MAX_TICK_GAP
    assert ticked(schedule, back, back + RECONNECT_GRACE_SECONDS - 0.5) == set()
    assert ticked(schedule, back + RECONNECT_GRACE_SECONDS, back + RECONNECT_GRACE_SECONDS + 1) == {"Expired"}


def test_the_machine_is_told_now_and_then_that_calls_are_refused() -> None:
    schedule, told, now = TickSchedule(0.0), list[ev.Event](), 0.0
    while now < 10 * MAX_TICK_GAP:
        now += TICK_INTERVAL
        schedule.excuse(now)
        told += schedule.absence(now)
    assert told == [ev.HeardNobody()] * 10
    assert schedule.absence(now + TICK_INTERVAL) == []
