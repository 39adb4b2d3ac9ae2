"""What the owner tells a running node: kept, above what config and command line say."""

from datetime import date
from pathlib import Path

import pytest

from atoll.comm.errors import ConfigError
from atoll.node.config import NodeConfig
from atoll.node.manners import byte_account, sensors
from atoll.node.manners.byte_account import ByteAccount, load_account, save_account
from atoll.node.manners.limits import NAME, Orders, changed, limited, load_orders, save_orders, shown, wishes
from atoll.node.manners.may_train import Observations, Pause


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
        ("upload=fast", "upload"),
        ("upload=-1", "upload is -1"),
        ("daily=-1", "daily is -1"),
        ("gpu_duty=0", "gpu_duty is 0"),
        ("gpu_duty=1.5", "gpu_duty is 1.5"),
        ("gpu_temperature=8", "gpu_temperature is 8"),
        ("hours=7", "hours is"),
        ("threads=-2", "threads is -2"),
        ("battery=perhaps", "battery"),
    ],
)
def test_a_limit_that_cannot_be_is_refused_with_its_name(setting: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        limited(NodeConfig(), changed(Orders(), [setting]))


def test_gigabytes_are_bytes_in_what_is_wished_and_all_limits_are_shown() -> None:
    config = NodeConfig(daily=1.5, monthly=20)
    assert (wishes(config).daily, wishes(config).monthly) == (1_500_000_000, 20_000_000_000)
    assert shown(config)["daily"] == 1.5 and shown(config)["battery"] is True


def test_an_account_begins_anew_with_each_day_and_each_month() -> None:
    account = ByteAccount().add(10, date(2026, 11, 29)).add(5, date(2026, 11, 29)).add(7, date(2026, 11, 30))
    assert (account.day_bytes, account.month_bytes) == (7, 22)
    december = account.at(date(2026, 12, 1))
    assert (december.day_bytes, december.month_bytes) == (0, 0)
    assert account.at(date(2026, 11, 30)) == account
    assert account.add(1, date(2027, 11, 30)).month_bytes == 1, "November of another year"


def test_an_account_is_the_same_in_the_next_life_and_a_damaged_one_is_empty(tmp_path: Path) -> None:
    account = ByteAccount().add(10, date(2026, 11, 29))
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
