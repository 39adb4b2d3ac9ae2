"""What an operator sees first is what needs a look."""

from typing import Any

import pytest
from rich.console import Console

from atoll.coordinator.monitor.terminal import COLORS, by_urgency, members_table, reasons, show, summary


def member(number: int, state: str, **fields: Any) -> dict[str, Any]:
    known = {"phase": "inner", "inner_step": 3, "tokens_per_s": 9.0, "loss": 2.0, "bytes_up": 1, "bytes_down": 2}
    known |= {"mfu": None}
    more = {"reached": False, "ready": False, "reason": ""}
    return {"node_id": f"n{number}", "name": f"m{number}", "state": state, **known, **more, **fields}


RUN: dict[str, Any] = {
    "run_id": "reef",
    "round": 7,
    "rounds_total": 9,
    "phase": "collecting",
    "phase_reason": "a quorum has its steps",
    "tokens": 12345,
    "val_loss": 2.5,
    "draining": False,
    "awaited": [f"m{i}" for i in range(1, 8)],
    "members": [
        member(10, "active", ready=True),
        member(2, "active", reached=True),
        member(3, "suspect", reason="silent for 5 s"),
        member(4, "evicted"),
        member(1, "left"),
        member(5, "recovering"),
    ],
}


def test_the_summary_says_how_many_are_what_and_whom_the_round_waits_for() -> None:
    assert summary(RUN).splitlines() == [
        "run reef: round 7 of 9 collecting (a quorum has its steps), 12,345 tokens, validation loss 2.500",
        "1 suspect, 1 recovering, 1 evicted, 2 active, 1 left",
        "the round waits for m1, m2, m3, m4, m5 and 2 more",
    ]
    assert "stopping" in summary(RUN | {"draining": True})


def test_whom_the_round_waits_for_is_said_once() -> None:
    ada = RUN | {"awaited": ["ada"], "phase_reason": "waits for what ada has"}
    assert "the round waits" not in summary(ada) and summary(ada).count("ada") == 1
    assert "the round waits for bo" in summary(ada | {"awaited": ["bo"]})


def test_goodput_and_utilisation_are_said_with_what_each_is_of() -> None:
    spent = {"goodput_seconds": {"inner": 3.0, "down": 1.0}, "fleet_goodput": 0.75, "compute_utilisation": 1.0}
    assert (
        "fleet goodput 75.0% (steps that a commit has, of all the nodes' time), "
        "compute utilisation 100.0% (steps, of steps and exchange)"
    ) in summary(RUN | spent).splitlines()
    assert "goodput" not in summary(RUN | {**spent, "goodput_seconds": {}})


def test_members_in_trouble_come_first_and_the_others_by_age() -> None:
    assert [m["node_id"] for m in by_urgency(RUN["members"])] == ["n3", "n5", "n4", "n2", "n10", "n1"]


def test_of_a_run_that_all_have_left_no_empty_table_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show(RUN | {"members": [member(1, "left"), member(2, "left")]})
    assert capsys.readouterr().out.splitlines()[-1] == "2 have left: --all shows them"
    show(RUN)
    assert capsys.readouterr().out.splitlines()[-1] == "and 1 more: --all shows them"


def test_where_the_table_is_narrow_the_reasons_stand_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns, below in (("80", ["m3 (n3): silent for 5 s"]), ("140", [])):
        monkeypatch.setenv("COLUMNS", columns)
        assert list(reasons(RUN)) == below


def test_every_state_of_a_member_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    console = Console(width=140, record=True, file=None, quiet=False)
    run = {"members": [member(i, state) for i, state in enumerate(COLORS, 1)] + RUN["members"]}
    with console.capture() as captured:
        console.print(members_table(run))
    text = captured.get()
    for word in (*COLORS, "training, ready", "training, has its steps", "silent for 5 s"):
        assert word in text, word


def test_a_step_that_nobody_knows_as_that_of_a_past_round_is_not_shown() -> None:
    (shown, past) = (members_table({"members": [member(1, "active", inner_step=n)]}) for n in (3, 0))
    assert [list(table.columns[3].cells) for table in (shown, past)] == [["3"], [""]]


def test_the_utilisation_of_a_member_that_takes_steps_is_a_share_or_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    console = Console(width=160, file=None)
    for fields, shown in (({"mfu": 0.412}, "41.2 %"), ({}, "unknown"), ({"tokens_per_s": 0.0}, "  0    ")):
        with console.capture() as captured:
            console.print(members_table({"members": [member(1, "active", **fields)]}))
        text = captured.get()
        assert shown in text and ("unknown" in text) == (shown == "unknown")
