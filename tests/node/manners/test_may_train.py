"""Whether a machine may train now, and why not."""

import math
from dataclasses import replace
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from atoll.comm.errors import ConfigError
from atoll.comm.pause_reasons import PauseReason, words_of
from atoll.node.manners.hours import Hours, parse_hours
from atoll.node.manners.may_train import (
    BUSY_SHARE,
    COOLER,
    INPUT_SECONDS,
    QUIET_SHARE,
    Observations,
    Pause,
    Wishes,
    byte_room,
    may_train,
)

NOON = datetime(2026, 11, 24, 12, 0)
BERLIN = ZoneInfo("Europe/Berlin")
NIGHT = parse_hours("22:00-07:00")
# All that may hold a machine back at once, and what is seen where each does.
EVERY_WISH = Wishes(NIGHT, 1000, 9000, battery=False, metered=False, idle_only=True, gpu_temperature=80.0)
EVERY_FAULT = Observations(2000, 9001, 0, True, True, 0.9, 1.0, 95.0)


def test_who_wishes_for_nothing_trains_whatever_is_seen() -> None:
    assert may_train(Wishes(), EVERY_FAULT, None, NOON) is None


def test_a_wish_on_what_is_not_known_holds_nobody_back() -> None:
    assert may_train(replace(EVERY_WISH, hours=None), Observations(), None, NOON) is None


def test_the_reasons_come_in_the_order_of_their_numbers() -> None:
    """Each is found once the ones before it hold no more."""
    wishes, seen = EVERY_WISH, EVERY_FAULT
    assert may_train(wishes, seen, Pause(), NOON, leaving=True) is PauseReason.LEAVING
    assert may_train(wishes, seen, Pause(), NOON) is PauseReason.TOLD
    assert may_train(wishes, seen, None, NOON) is PauseReason.HOURS
    found = []
    for better in (
        {"hours": None},
        {"daily": 0},
        {"monthly": 0},
        {"battery": True},
        {"metered": True},
        {"idle_only": False},
        {"gpu_temperature": 0.0},
    ):
        wishes = replace(wishes, **better)
        found.append(may_train(wishes, seen, None, NOON))
    kinds = ("DAY_BYTES", "MONTH_BYTES", "BATTERY", "METERED", "IN_USE", "GPU_HOT")
    assert found == [*(PauseReason[kind] for kind in kinds), None]


def test_a_pause_ends_by_itself_when_it_was_for_so_long() -> None:
    until = Pause(NOON.timestamp() + 7200)
    assert may_train(Wishes(), Observations(), until, NOON + timedelta(hours=1, minutes=59)) is PauseReason.TOLD
    assert may_train(Wishes(), Observations(), until, NOON + timedelta(hours=2)) is None
    assert may_train(Wishes(), Observations(), Pause(), NOON + timedelta(days=400)) is PauseReason.TOLD


def test_a_pause_for_two_hours_lasts_two_hours_when_the_clock_is_put_forward() -> None:
    before = datetime(2026, 3, 29, 1, 30, tzinfo=BERLIN)  # at 2 it is 3
    pause = Pause(before.timestamp() + 7200)
    at = datetime.fromtimestamp(before.timestamp() + 7199, BERLIN)
    assert (at.hour, at.minute) == (4, 29) and pause.holds(at)
    assert not pause.holds(datetime.fromtimestamp(before.timestamp() + 7200, BERLIN))


@pytest.mark.parametrize(
    ("text", "within", "without"),
    [
        ("22:00-07:00", ("22:00", "23:59", "00:00", "06:59"), ("07:00", "12:00", "21:59")),
        ("9:30-17:00", ("09:30", "16:59"), ("09:29", "17:00", "00:00")),
        ("00:00-24:00", ("00:00", "12:00", "23:59"), ()),
        ("18:00-24:00", ("18:00", "23:59"), ("00:00", "17:59")),
        ("08:00-08:00", ("07:59", "08:00"), ()),
    ],
)
def test_hours_have_their_first_minute_and_not_their_last(
    text: str, within: tuple[str, ...], without: tuple[str, ...]
) -> None:
    hours = parse_hours(text)
    assert hours is not None
    for clock in (*within, *without):
        hour, minute = map(int, clock.split(":"))
        assert hours.include(NOON.replace(hour=hour, minute=minute)) == (clock in within), clock


@pytest.mark.parametrize("day", [datetime(2026, 3, 29), datetime(2026, 10, 25)])
def test_hours_are_of_the_clock_on_the_wall_on_the_days_on_which_it_is_put_forward_or_back(day: datetime) -> None:
    """The moments of such a day, one a minute of real time: 23 or 25 hours."""
    assert NIGHT is not None
    start = day.replace(tzinfo=BERLIN).timestamp()
    end = (day + timedelta(days=1)).replace(tzinfo=BERLIN).timestamp()
    assert (end - start) / 3600 in (23, 25)
    moments = [datetime.fromtimestamp(start + 60 * k, BERLIN) for k in range(int((end - start) / 60))]
    for moment in moments:
        assert NIGHT.include(moment) == (moment.hour >= 22 or moment.hour < 7)


def test_the_next_beginning_is_today_or_tomorrow() -> None:
    hours = Hours(22 * 60, 7 * 60)
    assert hours.next_begin(NOON) == datetime(2026, 11, 24, 22, 0)
    assert hours.next_begin(NOON.replace(hour=23)) == datetime(2026, 11, 25, 22, 0)


@pytest.mark.parametrize(
    "text", ["7", "22-7", "25:00-07:00", "22:60-07:00", "22:00-24:30", "night", "22:00-07:00x"]
)
def test_hours_that_cannot_be_are_refused_with_what_was_written(text: str) -> None:
    with pytest.raises(ConfigError, match="hours is"):
        parse_hours(text)


def test_a_round_that_would_take_more_than_what_is_left_is_not_begun() -> None:
    wishes = Wishes(daily=1000)
    assert may_train(wishes, Observations(day_bytes=600, round_bytes=400), None, NOON) is None
    reason = may_train(wishes, Observations(day_bytes=601, round_bytes=400), None, NOON)
    assert reason is PauseReason.DAY_BYTES


def test_bytes_are_saved_whatever_else_the_node_is_paused_for() -> None:
    wishes = Wishes(daily=1000, monthly=5000, metered=False, battery=False)
    assert byte_room(wishes, Observations(on_battery=True)) == 1000
    assert byte_room(wishes, Observations(day_bytes=200, month_bytes=4900)) == 100
    for seen in (
        Observations(on_battery=True, on_metered=True),
        Observations(day_bytes=1000),
        Observations(month_bytes=5001),
    ):
        assert byte_room(wishes, seen) == 0 and byte_room(Wishes(), seen) == math.inf
        assert may_train(wishes, seen, Pause(), NOON) is PauseReason.TOLD


def test_what_is_left_where_a_round_would_not_fit_may_pass() -> None:
    wishes, seen = Wishes(daily=1000), Observations(day_bytes=601, round_bytes=400)
    assert may_train(wishes, seen, None, NOON) is PauseReason.DAY_BYTES and byte_room(wishes, seen) == 399
    seen = Observations(day_bytes=1000)
    assert may_train(wishes, seen, None, NOON) is PauseReason.DAY_BYTES, "at the last of them"


def test_a_round_whose_bytes_are_overrated_is_begun_where_half_is_left() -> None:
    wishes = Wishes(daily=1000)
    assert may_train(wishes, Observations(day_bytes=500, round_bytes=5000), None, NOON) is None
    assert may_train(wishes, Observations(day_bytes=501, round_bytes=5000), None, NOON) is PauseReason.DAY_BYTES


def test_a_hot_gpu_is_used_again_once_it_is_cooler_by_a_margin() -> None:
    wishes, reason, story = Wishes(gpu_temperature=80.0), None, []
    for celsius in (80.0, 80.1, 79.0, 80.0 - COOLER + 0.1, 80.0 - COOLER, 79.9, 80.0, 81.0):
        reason = may_train(wishes, Observations(gpu_celsius=celsius), None, NOON, reason)
        story.append(reason is PauseReason.GPU_HOT)
    assert story == [False, True, True, True, False, False, False, True]


def test_a_machine_in_use_is_left_alone_until_it_is_quiet_by_a_margin() -> None:
    wishes, reason, story = Wishes(idle_only=True), None, []
    for share in (0.0, BUSY_SHARE - 0.01, BUSY_SHARE, QUIET_SHARE, QUIET_SHARE - 0.01, QUIET_SHARE):
        reason = may_train(wishes, Observations(others_share=share), None, NOON, reason)
        story.append(reason is PauseReason.IN_USE)
    assert story == [False, False, True, True, False, False]
    typed = Observations(others_share=0.0, input_age=INPUT_SECONDS - 1)
    assert may_train(wishes, typed, None, NOON) is PauseReason.IN_USE
    assert may_train(wishes, replace(typed, input_age=INPUT_SECONDS), None, NOON) is None


def test_every_reason_has_its_words_and_one_of_a_newer_version_has_some() -> None:
    assert len({reason.words for reason in PauseReason}) == len(PauseReason)
    assert words_of(0) == "" and words_of(PauseReason.HOURS) == PauseReason.HOURS.words
    assert words_of(2**32 - 1) == "paused"
