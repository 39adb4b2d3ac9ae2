"""A short trial of an attack, with real processes: what `make attacks` makes of all of them."""

from pathlib import Path

import pytest
from attacks.cases import ATTACKS
from attacks.page import page, slowdown
from attacks.trial import Lengths, trial
from attacks.village import HONEST, Village

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.chaos]


def test_an_attack_is_made_and_measured(tmp_path: Path) -> None:
    [attack] = [attack for attack in ATTACKS if attack.word == "vast"]
    with Village.opened(tmp_path, HONEST[:3]) as village:
        done = trial(village, attack, Lengths(2, 3, 3, 1))
    assert "banned from round 1" in done.ended and "it ended with code 5" in done.ended
    assert not done.harmed
    for figures, rounds in ((done.before, 2), (done.during, 3), (done.after, 1)):
        assert figures is not None and len(figures.rounds) == rounds and min(figures.rounds) > 0
        for calls in figures.calls.values():
            assert calls.count > 5 * rounds and 0 < calls.p50 <= calls.p95
    assert slowdown(done) > 0
    assert f"| {attack.sentence} | {done.ended} |" in page([done], "some machine")
    assert set(done.before.memory) == set(done.during.memory) and min(done.before.memory.values()) > 1 << 20
