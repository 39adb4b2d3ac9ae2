"""A short trial of an attack, with real processes: what `make attacks` makes of all of them."""

from pathlib import Path

import pytest
from attacks.beginning import beginning
from attacks.cases import ATTACKS, BEGINNINGS, Attack
from attacks.page import CHANCE, page, slowdown
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
    assert f"| {attack.sentence} | {done.ended} |" in page([done], [], "some machine")
    assert set(done.before.memory) == set(done.during.memory) and min(done.before.memory.values()) > 1 << 20


def test_who_is_banned_comes_back_by_no_way(tmp_path: Path) -> None:
    [attack] = [attack for attack in ATTACKS if attack.word == "returns"]
    with Village.opened(tmp_path, HONEST[:3]) as village:
        done = trial(village, attack, Lengths(2, 3, 3, 0))
    assert "banned from round 1" in done.ended and "its work is in 1 of 3 rounds" in done.ended
    for way in ("its session", "its key", "another key"):
        assert f"{way}: PERMISSION_DENIED" in done.ended
    assert "taken" not in done.ended


def test_who_tells_others_addresses_is_charged_and_nobody_who_is_there(tmp_path: Path) -> None:
    [attack] = [attack for attack in ATTACKS if attack.word == "elsewhere"]
    with Village.opened(tmp_path) as village:
        done = trial(village, attack, Lengths(2, 10, 10, 0))
    assert "held against it: accuser" in done.ended and "no owner from round" in done.ended
    assert "addresses told" in done.ended and "dialled at a third's" in done.ended
    assert not [harm for harm in done.harmed if not harm.endswith(CHANCE)]


@pytest.mark.parametrize("first", BEGINNINGS, ids=lambda first: first.word)
def test_whoever_comes_first_the_run_begins(first: Attack, tmp_path: Path) -> None:
    done = beginning(tmp_path, first)
    assert 0 < done.seconds < 60 and not done.harmed
    assert ("false_claim" in done.ended) is (first.word == "makes up")
