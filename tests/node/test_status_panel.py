"""What `atoll node top` shows of a status, whatever is in it."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from rich.cells import cell_len

from atoll.comm.terminal import CONTROL
from atoll.node.status_panel import BAR_WIDTH, Sample, bar, byte_rate, panel

SAID: dict[str, Any] = {
    **{"node_id": "n3", "name": "ada", "run": "reef", "state": "inner", "reason": "3 members train"},
    **{"inner_step": 50, "steps": 200, "steps_at_most": 400, "training_round": 42, "tokens_per_s": 12345.6},
    **{"mfu": 0.412, "data_wait": 0.003, "loss": 2.3456, "gradient_norm": 0.4321, "learning_rate": 0.0004},
    **{"device_bytes": 17_300_000_000, "trainer_rss_bytes": 2_100_000_000, "recovery": None, "penalty": ""},
    **{"run_phase": "inner", "run_reason": "2 of 4 members reached 200 inner steps; waits for bo, cy"},
    **{"bytes_up": 3_000_000, "bytes_down": 9_000_000, "peers": 3, "members": 4, "coordinator_away_s": 0.0},
    **{"limits": {"upload": 20.0, "download": 0.0, "disk": 40.0}, "exchange": {"chunks": 10, "of": 40}},
    **{"committed": 41, "run_tokens": 1000, "credited_tokens": 250, "credited_rounds": 12, "trouble": ""},
}


def shown(said: dict[str, Any], before: Sample | None = None, width: int = 80) -> dict[str, str]:
    lines = panel(before, Sample(10.0, said), width)
    assert all(cell_len(line) <= width for line in lines), lines
    return dict(line.strip().split(" ", 1) for line in lines)


def test_each_thing_is_told_in_a_line() -> None:
    before = Sample(5.0, SAID | {"bytes_up": 1_000_000, "bytes_down": 8_999_000})
    assert shown(SAID, before) == {
        "node": "ada (n3), run reef",
        "state": "training: 3 members train",
        "step": f"{bar(50, 200)} 50 of 200, 400 at most, round 42",
        "loss": "2.3456, gradient 0.432, rate 0.0004",
        "speed": "12,346 tokens/s, MFU 41.2 %, waits for data 0.3 %",
        "memory": "devices 17.3 GB, trainer 2.1 GB",
        "round": "training: 2 of 4 members reached 200 inner steps; waits for bo, cy",
        "members": "4 in the run, connected to 3",
        "exchange": f"{bar(10, 40)} 10 of 40 merged chunks are here",
        "traffic": "sent 3.0 MB, 400.0 kB/s; received 9.0 MB, 200 B/s",
        "limits": "upload=20, disk=40",
        "committed": "250 of the run's 1,000 tokens (25.0 %), 12 of 41 rounds",
    }


def test_what_a_daemon_does_not_know_is_left_out() -> None:
    assert shown({}).keys() == {"node", "traffic"}
    reducer = {"node_id": "n2", "name": "hub", "run": "reef", "phase": "sync", "bytes_up": 5, "bytes_down": 6}
    assert shown(reducer)["state"] == "exchange" and shown(reducer)["traffic"] == "sent 5 B; received 6 B"
    assert shown(SAID | {"coordinator_away_s": 34.4})["coordinator"].startswith("has not answered for 34 s")
    assert shown(SAID | {"paused": "its operator paused it"})["paused"] == "its operator paused it"
    alike = SAID | {"reason": SAID["run_reason"]}
    assert "round" not in shown(alike), "it is the state"
    assert "paused" not in shown(SAID | {"paused": None}) | shown(SAID | {"paused": ""})


def test_a_rate_is_told_only_between_two_answers_of_one_life() -> None:
    now = Sample(10.0, {"node_id": "n1", "bytes_up": 500})
    assert byte_rate(Sample(9.0, {"node_id": "n1", "bytes_up": 100}), now, "bytes_up") == 400
    for before in (None, now, Sample(9.0, {"node_id": "n2"}), Sample(9.0, {"node_id": "n1", "bytes_up": 501})):
        assert byte_rate(before, now, "bytes_up") is None


@pytest.mark.parametrize(
    "done, of, full", [(0, 10, 0), (5, 10, 15), (10, 10, 30), (99, 10, 30), (-1, 10, 0), (1, 0, 0)]
)
def test_a_bar_is_as_full_as_much_is_done(done: float, of: float, full: int) -> None:
    assert bar(done, of).count("━") == full and len(bar(done, of)) == BAR_WIDTH


@given(words=st.text(max_size=400), width=st.integers(20, 200))
def test_no_line_is_too_long_and_no_word_of_others_moves_the_cursor(words: str, width: int) -> None:
    names = ("name", "reason", "run_reason", "trouble", "penalty", "paused")
    lines = panel(None, Sample(1.0, SAID | dict.fromkeys(names, words)), width)
    assert max(map(cell_len, lines)) <= width and len(lines) <= 22
    assert not any(CONTROL.search(line) for line in lines)
