"""What the owner tells a running node: kept, above what config and command line say."""

from datetime import date, timedelta
from pathlib import Path

import pytest

from atoll.comm.errors import ConfigError
from atoll.node.config import NodeConfig
from atoll.node.manners import byte_account, sensors
from atoll.node.manners.byte_account import ByteAccount, load_account, save_account
from atoll.node.manners.limits import (
    KEYS,
    NAME,
    TRAINER_KEYS,
    Orders,
    changed,
    check_without_trainer,
    limited,
    load_orders,
    save_orders,
    shown,
    wishes,
)
from atoll.node.manners.may_train import Observations, Pause


def counted(*amounts: tuple[int, date]) -> ByteAccount:
    """An account of so many bytes on these days, one after the other."""
    account = ByteAccount()
    for count, day in amounts:
        account = account.add(count, day)
    return account


def test_what_is_told_goes_over_the_config_and_is_taken_back_by_an_empty_value() -> None:
    config = NodeConfig(upload=30.0, hours="08:00-20:00")
    orders = changed(Orders(), ["upload=20", "idle_only=true", "hours=22:00-07:00"])
    now = limited(config, orders)
    assert (now.upload, now.idle_only, now.hours) == (20.0, True, "22:00-07:00")
    back = limited(config, changed(orders, ["upload=", "hours="]))
    assert (back.upload, back.idle_only, back.hours) == (30.0, True, "08:00-20:00")
    assert limited(config, Orders()) is config


def test_orders_are_the_same_in_the_next_life(tmp_path: Path) -> None:
    assert load_orders(tmp_path) == Orders()
    orders = Orders({"upload": "20"}, Pause(1e9))
    save_orders(tmp_path, orders)
    assert load_orders(tmp_path) == orders
    (tmp_path / NAME).write_text("{")
    with pytest.raises(ConfigError, match=r"limits\.json.*remove it"):
        load_orders(tmp_path)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("colour=red", "colour"),
        ("upload", "KEY=VALUE"),
        ("device=cpu", "there is no limit"),
        ("upload=fast", "^upload is 'fast': it must be a number$"),
        ("upload=-1", "upload is -1"),
        ("daily=-1", "daily is -1"),
        ("gpu_duty=0", "gpu_duty is 0"),
        ("gpu_duty=1.5", "gpu_duty is 1.5"),
        ("gpu_temperature=8", "gpu_temperature is 8"),
        ("hours=7", "hours is"),
        ("threads=-2", "threads is -2"),
        ("threads=1000000", "threads is 1000000"),
        ("battery=perhaps", "^battery is 'perhaps': it must be true or false$"),
        ("idle_only=[1]", "^idle_only is '\\[1\\]': it must be true or false$"),
        ("threads=2.5", "^threads is '2.5': it must be a whole number$"),
        ("memory=-1", "memory is -1"),
    ],
)
def test_a_limit_that_cannot_be_is_refused_with_its_name(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        limited(NodeConfig(), changed(Orders(), [setting]))


def test_a_reducer_refuses_what_only_a_trainer_could_obey_and_no_more() -> None:
    keys = [key for key in KEYS if key not in TRAINER_KEYS]
    for key, value in zip(TRAINER_KEYS, ("80", "0.5", "2", "4"), strict=True):
        with pytest.raises(ConfigError, match=f"{key} is a limit on a trainer"):
            changed(Orders(), [f"{key}={value}"], keys)
        with pytest.raises(ConfigError, match=f"{key}={value} is a limit on a trainer"):
            check_without_trainer(limited(NodeConfig(), Orders({key: value})))
    orders = changed(Orders(), ["daily=1", "hours=22:00-07:00", "upload=20", "idle_only=true"], keys)
    check_without_trainer(limited(NodeConfig(), orders))


def test_gigabytes_are_bytes_in_what_is_wished_and_all_limits_are_shown() -> None:
    config = NodeConfig(daily=1.5, monthly=20)
    assert (wishes(config).daily, wishes(config).monthly) == (1_500_000_000, 20_000_000_000)
    assert shown(config)["daily"] == 1.5 and shown(config)["battery"] is True


def test_an_account_begins_anew_with_each_day_and_each_month() -> None:
    account = counted((10, date(2026, 11, 29)), (5, date(2026, 11, 29)), (7, date(2026, 11, 30)))
    assert (account.day_bytes, account.month_bytes) == (7, 22)
    december = account.at(date(2026, 12, 1))
    assert (december.day_bytes, december.month_bytes) == (0, 0)
    assert account.at(date(2026, 11, 30)) == account
    assert account.add(1, date(2027, 11, 30)).month_bytes == 1, "November of another year"


def test_an_account_does_not_shrink_when_the_clock_is_set_back() -> None:
    account = counted((90, date(2026, 11, 3)), (10, date(2026, 11, 25)))
    for earlier in (date(2026, 11, 23), date(2026, 10, 31), date(1970, 1, 1)):
        back = account.at(earlier)
        assert (back.day_bytes, back.month_bytes) == (10, 100), earlier
        more = back.add(5, earlier)
        assert (more.day_bytes, more.month_bytes) == (15, 105)
        assert more.at(earlier + timedelta(days=1)).day_bytes == 0, "the next day begins anew"
        right = more.at(date(2026, 11, 25))
        assert (right.day_bytes, right.month_bytes) >= (10, 100), "nor when it is put right again"
    assert account.at(date(1970, 1, 1)).at(date(1970, 1, 2)).month_bytes == 100
    assert account.at(date(1970, 1, 1)).at(date(1970, 2, 1)).month_bytes == 0


def test_a_clock_that_was_once_far_ahead_leaves_the_account_as_it_was_and_not_standing_still() -> None:
    account = counted((90, date(2026, 11, 25)), (3, date(2099, 1, 1)), (4, date(2099, 1, 2)))
    assert (account.day_bytes, account.month_bytes) == (4, 7)
    back = account.at(date(2026, 11, 25))
    assert (back.day_bytes, back.month_bytes) == (94, 97)
    tomorrow = back.add(1, date(2026, 11, 26))
    assert (tomorrow.day_bytes, tomorrow.month_bytes) == (1, 98)
    december = tomorrow.at(date(2026, 12, 1))
    assert (december.day_bytes, december.month_bytes) == (0, 0)


def test_a_clock_that_goes_back_and_forth_over_midnight_counts_nothing_twice() -> None:
    account = counted((50, date(2026, 11, 30)))
    for _ in range(20):
        account = account.add(1, date(2026, 12, 1)).add(1, date(2026, 11, 30))
    assert account.day_bytes <= 50 + 40 and account.month_bytes <= 50 + 40
    assert account.at(date(2026, 12, 1)).month_bytes == 20


def test_an_account_remembers_a_bounded_number_of_days_and_all_of_a_month() -> None:
    account, day = ByteAccount(), date(2026, 1, 1)
    for _ in range(400):
        account, day = account.add(1, day), day + timedelta(days=1)
    assert len(account.days) == byte_account.MAX_DAYS
    assert counted(*((1, date(2026, 12, n)) for n in range(1, 32))).month_bytes == 31


def test_an_account_is_the_same_in_the_next_life_and_a_damaged_one_is_empty(tmp_path: Path) -> None:
    account = counted((10, date(2026, 11, 29)), (5, date(2026, 11, 28)))
    save_account(tmp_path, account)
    assert load_account(tmp_path) == account
    (tmp_path / byte_account.NAME).write_bytes(b"\xff")
    assert load_account(tmp_path) == ByteAccount()


def test_a_limit_on_what_the_machine_cannot_tell_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for sense in ("on_battery", "on_metered", "gpu_celsius"):
        monkeypatch.setattr(sensors, sense, lambda: None)
    sensors.check_observable(NodeConfig(idle_only=True))
    for config, says in (
        (NodeConfig(battery=False), "no battery"),
        (NodeConfig(metered=False), "metered"),
        (NodeConfig(gpu_temperature=80), "temperature"),
    ):
        with pytest.raises(ConfigError, match=says):
            sensors.check_observable(config)
    monkeypatch.setattr(sensors, "on_battery", lambda: False)
    sensors.check_observable(NodeConfig(battery=False))


@pytest.mark.parametrize(
    ("answer", "metered"),
    [("u 1\n", True), ("u 3", True), ("u 2", False), ("u 4\n", False), ("u 0", None), ("", None), ("s yes", None)],
)
def test_networkmanagers_word_on_the_link_is_read(answer: str, metered: bool | None) -> None:
    assert sensors.metered_of(answer) is metered


def test_the_share_of_others_is_what_is_busy_and_not_the_nodes_own() -> None:
    assert sensors.others_share((100.0, 50.0, 10.0), (110.0, 58.0, 14.0)) == pytest.approx(0.4)
    assert sensors.others_share((100.0, 50.0, 10.0), (110.0, 52.0, 14.0)) == 0.0, "clocks differ a little"
    assert sensors.others_share((1.0, 1.0, 1.0), (1.0, 1.0, 1.0)) == 0.0


def test_this_machine_tells_something_or_nothing_but_never_fails() -> None:
    everything = NodeConfig(battery=False, metered=False, idle_only=True, gpu_temperature=80)
    asked = sensors.Sensors()
    assert asked.observe(everything).others_share is None, "the first look has nothing to compare with"
    share = asked.observe(everything).others_share
    assert share is not None and 0 <= share <= 1
    assert asked.observe(NodeConfig()) == Observations(), "nothing is asked that no limit needs"
