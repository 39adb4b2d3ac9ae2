"""A node joins a run that is under way."""

import re
from functools import partial

import pytest
from e2e.harness import Run, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.chaos]


def committed_by(run: Run, members: int) -> bool:
    return run.contributors() == members


def test_a_joiners_first_contribution_has_its_own_tokens_and_a_norm_like_the_others(run: Run) -> None:
    run.start("rounds.inner_steps=40", "outer.damping=true")
    url = run.invite(5)
    run.join(url, "one"), run.join(url, "two")
    until("a commit of both", lambda: run.contributors() == 2)
    kept = None
    for members, name in enumerate(("three", "four", "five"), 3):
        if kept is None:  # else it was there just when a round began, and had missed none
            run.join(url, name)
            until("a commit of all", partial(committed_by, run, members))
            joiner = run.member(name)["node_id"]
            first, *_ = [r for r in run.rounds() if joiner in r["contributors"]]
            words = rf"round {first['round']}: 40 inner steps, on top of (\d+) samples of before"
            kept = re.search(words, run.log(name))
    assert kept is not None, "what it trained in the round that it missed is not there"
    mine = first["contributors"][joiner]
    others = {node: tokens for node, tokens in first["contributors"].items() if node != joiner}
    assert mine > int(kept[1]) * 32, "seq_len is 32: its tokens are more than those of before"
    for node, tokens in others.items():
        steps = mine / tokens  # of which a delta's norm is between a root and a multiple
        norm = first["norms"][joiner] / first["norms"][node]
        assert 0.5 * min(steps, 1) < norm < 2.0 * max(steps, 1), (first["norms"], first["contributors"])
    assert set(first["scales"]) == {joiner}, "its first steps are late"
    assert 0 < first["scales"][joiner] < 1
    run.whole(first["round"])
