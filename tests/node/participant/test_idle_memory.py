"""A trainer that waits keeps no memory of its device that it does not need."""

import threading

import pytest
import torch

from atoll.node.participant.idle_memory import release_cached, released_when_idle

FAR = 3600.0  # seconds that no test waits


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_who_waits_for_long_gives_back_what_is_kept_of_the_device(kind: str) -> None:
    released, device = threading.Event(), torch.device(kind, 1)
    found: list[torch.device] = []

    def release(device: torch.device) -> None:
        found.append(device)
        released.set()

    with released_when_idle(device, release, after=0.0):
        assert released.wait(FAR)
    assert found == [device]


def test_who_is_given_an_order_at_once_keeps_it() -> None:
    before = threading.active_count()
    with released_when_idle(torch.device("cuda", 0), lambda device: pytest.fail("nobody waited"), after=FAR):
        (timer,) = (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
    timer.join(FAR)
    assert threading.active_count() == before


def test_a_processor_has_nothing_to_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.Timer", lambda *_: pytest.fail("a thread for nothing"))
    with released_when_idle(torch.device("cpu")):
        pass


def test_each_device_is_asked_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("torch.cuda.device", lambda device: torch.device("cpu"))  # a context, as that is
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: asked.append("cuda"))
    monkeypatch.setattr("torch.mps.empty_cache", lambda: asked.append("mps"))
    for kind in ("cuda", "cpu", "mps"):
        release_cached(torch.device(kind))
    assert asked == ["cuda", "mps"]
