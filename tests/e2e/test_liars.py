"""One of eight real nodes lies, in every round: the run ends where it ends without the lie, and who forges a seal
is convicted and does not come back. docs/strangers.md has the same for simulated members and more lies.

Both runs have the same seed, and the same samples behind each round as long as all are in it. The learning rate is
constant: by a schedule of tokens, who is put out would have taken a part of it along.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from e2e.harness import ATOLL, ROOT, Run, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.chaos]

HONEST, LIAR, ROUNDS = ("ada", "bo", "cy", "di", "flo", "gus", "hal"), "eve", 40
NODES = len(HONEST) + 1
BAR = 1.02  # of the honest run's loss
SETTINGS = (
    *(f"members.start={NODES}", f"rounds.total={ROUNDS}", "rounds.inner_steps=5"),
    *("rounds.quorum=1", "rounds.ceiling=1"),  # the same samples are behind each round, whoever is fast
    *("inner.lr=1e-3", "inner.min_lr=1e-3", "inner.warmup_tokens=1000"),
    *("data.val_batches=32", "reduce.chunk=2016"),  # 14 chunks
)


def lying(word: str) -> str:
    """A program that is `atoll` of a node which lies so."""
    path = f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})"
    return f"{path}; from e2e.lying_node import main; main({word!r})"


@contextmanager
def finished(folder: Path, lie: str = "", *settings: str) -> Iterator[Run]:
    """A run that came to its end, of which one node tells this lie; its coordinator is still there."""
    run = Run(folder)
    try:
        run.start(*SETTINGS, *settings)
        (folder / "url").write_text(run.invite(NODES))
        for name in (*HONEST, LIAR):
            program = lying(lie) if lie and name == LIAR else ""
            run.join(f"@{folder / 'url'}", name, faults="", program=program)
        until("the last round", lambda: run.committed() == ROUNDS, 240)
        assert [run.nodes[name].wait(30) for name in HONEST] == [0] * len(HONEST)
        run.whole(ROUNDS)
        yield run
    finally:
        run.stop()
        for log in folder.glob("*.log"):  # shown when the test fails
            print(f"--- {log.name}\n{log.read_text()[-3000:]}")


def blamed(run: Run, what: str = "") -> list[dict[str, Any]]:
    """The decisions that `atoll blame` tells of, against a node or all."""
    command = [*ATOLL, "blame", *([what] if what else []), "--state-dir", str(run.folder / "c"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return [each for each in told if "evidence" in each]  # not the verdicts on slow rounds


def put_out(run: Run, what: str = "") -> list[dict[str, Any]]:
    """The decisions that have consequences: in a model this small chance strikes a node once, as its delta points
    elsewhere than the others'."""
    return [decision for decision in blamed(run, what) if decision["consequence"] != "struck"]


@pytest.fixture(scope="module")
def honest_loss(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The validation loss at the end of the run of which nobody lies."""
    with finished(tmp_path_factory.mktemp("honest")) as run:
        assert not put_out(run)
        assert all(len(record["contributors"]) == NODES for record in run.rounds())
        return float(run.run()["val_loss"])


@pytest.mark.parametrize("lie", ["noise:1e4", "flip:10"])
def test_a_false_delta_is_clipped_to_nothing_that_matters(lie: str, honest_loss: float, tmp_path: Path) -> None:
    with finished(tmp_path, lie) as run:
        loss = float(run.run()["val_loss"])
        print(f"{lie}: loss {loss:.4f}, {100 * (loss / honest_loss - 1):+.2f} % of {honest_loss:.4f}")
        assert loss < BAR * honest_loss
        node = run.member(LIAR)["node_id"]
        scales = [record["scales"][node] for record in run.rounds() if node in record["contributors"]]
        assert max(scales) < 0.2, "every one of its deltas was too long"
        print(f"its work was taken in {len(scales)} of {ROUNDS} rounds")
        assert {decision["name"] for decision in put_out(run)} == {LIAR} and len(scales) < ROUNDS, (
            "it is as long every time, and is left out in the end"
        )


def test_who_seals_what_is_longer_than_any_delta_is_convicted_before_anything_of_it_is_applied(
    honest_loss: float, tmp_path: Path
) -> None:
    """One chunk of 1e30 would be the end of the model, drawn for an audit or not."""
    with finished(tmp_path, "vast", "security.audit=0.000001") as run:
        loss = float(run.run()["val_loss"])
        print(f"vast: loss {loss:.4f}, {100 * (loss / honest_loss - 1):+.2f} % of {honest_loss:.4f}")
        assert loss < BAR * honest_loss
        [decision] = put_out(run)
        assert (decision["name"], decision["consequence"]) == (LIAR, "banned")
        evidence = decision["evidence"]
        assert (evidence["offence"], evidence["round"]) == ("forged_seal", 1)
        assert run.nodes[LIAR].wait(30) == 5


def test_who_forges_seals_is_convicted_and_its_key_is_refused(honest_loss: float, tmp_path: Path) -> None:
    with finished(tmp_path, "seal:0.125") as run:
        loss = float(run.run()["val_loss"])
        print(f"seal:0.125: loss {loss:.4f}, {100 * (loss / honest_loss - 1):+.2f} % of {honest_loss:.4f}")
        assert loss < BAR * honest_loss
        [decision] = put_out(run)
        assert (decision["name"], decision["consequence"]) == (LIAR, "banned")
        assert decision["evidence"]["offence"] == "forged_seal" and decision["key"]
        assert put_out(run, LIAR) == put_out(run, decision["key"][:16]) == [decision]
        at = decision["evidence"]["round"]
        print(f"convicted in round {at}")
        contributors = [len(record["contributors"]) for record in run.rounds()]
        assert contributors[: at - 1] == [NODES] * (at - 1)
        assert contributors[at:] == [len(HONEST)] * (ROUNDS - at)
        assert run.nodes[LIAR].wait(30) == 5 and "banned from the run" in run.log(LIAR)
        (tmp_path / LIAR / "session").unlink()  # its key alone tells who it is
        assert run.join(f"@{tmp_path / 'url'}", LIAR).wait(60) == 5
        assert "was revoked (eve came with it and was banned" in run.log(LIAR)
        (tmp_path / "url").write_text(run.invite(1))
        (tmp_path / f"{LIAR}.log").unlink()
        assert run.join(f"@{tmp_path / 'url'}", LIAR).wait(60) == 5
        assert "banned from the run" in run.log(LIAR)
