"""Alerts reach the operator's webhook, whatever it does; nothing waits for it."""

import logging
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from webhook_receiver import SECRET, Receiver

from atoll.comm.errors import ConfigError
from atoll.comm.ids import NodeId
from atoll.coordinator.monitor.alerts import Alert, AlertKind
from atoll.coordinator.monitor.webhook import MAX_WAITING, Webhook, checked_url


def alert(number: int) -> Alert:
    return Alert(AlertKind.LOW_GOODPUT, True, f"sentence {number}", 1000.0 + number, number, NodeId("n1"), "ada")


@contextmanager
def receiving(*codes: int) -> Iterator[tuple[Receiver, Webhook, list[float]]]:
    receiver, pauses = Receiver(*codes), list[float]()
    webhook = Webhook(receiver.url, "reef", "http://127.0.0.1:4701", pauses.append)
    try:
        yield receiver, webhook, pauses
    finally:
        webhook.close()
        receiver.close()


def test_an_alert_is_one_post_of_json_with_a_line_for_chats() -> None:
    with receiving() as (receiver, webhook, _):
        webhook.send(alert(1))
        (got,) = receiver.wait(1)
    line = "run reef, round 1: low goodput. sentence 1"
    assert got == {
        **{"run": "reef", "kind": "low_goodput", "on": True, "title": "low goodput", "sentence": "sentence 1"},
        **{"at": 1001.0, "round": 1, "node": "n1", "name": "ada", "page": "http://127.0.0.1:4701"},
        **{"text": line, "content": line, "code": 200, "type": "application/json"},
    }


def test_what_is_not_taken_is_tried_again_with_longer_pauses_and_in_order() -> None:
    with receiving(500, 503, 429) as (receiver, webhook, pauses):
        webhook.send(alert(1))
        webhook.send(alert(2))
        got = receiver.wait(5)
    assert [(g["round"], g["code"]) for g in got] == [(1, 500), (1, 503), (1, 429), (1, 200), (2, 200)]
    assert pauses == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("code", [302, 400, 404])
def test_what_is_refused_is_said_once_without_the_secret(code: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), receiving(code) as (receiver, webhook, pauses):
        webhook.send(alert(1))
        webhook.send(alert(2))
        got = receiver.wait(2)
    assert [g["round"] for g in got] == [1, 2] and not pauses
    (said,) = caplog.messages
    assert str(code) in said and "127.0.0.1" in said and SECRET not in said


def test_a_receiver_that_never_answers_keeps_nobody_waiting_and_the_newest_alerts_stay() -> None:
    hole = socket.create_server(("127.0.0.1", 0))
    webhook = Webhook(f"http://127.0.0.1:{hole.getsockname()[1]}/", "reef", "")
    began = time.monotonic()
    for number in range(10 * MAX_WAITING):
        webhook.send(alert(number))
    assert time.monotonic() - began < 5
    assert len(webhook._waiting) == MAX_WAITING and webhook._waiting[-1] == alert(10 * MAX_WAITING - 1)
    webhook.close(0.1)
    hole.close()


def test_what_waits_is_sent_before_the_end() -> None:
    with receiving() as (receiver, webhook, _):
        for number in range(20):
            webhook.send(alert(number))
        webhook.close()
        assert [g["round"] for g in receiver.got] == list(range(20))


@pytest.mark.parametrize(
    "url", ["", "example.org/x", "ftp://example.org/s3cret", "http://", "http://h:99999/s3cret"]
)
def test_what_is_no_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        checked_url(url)
    assert "http" in str(error.value) and "s3cret" not in str(error.value)
