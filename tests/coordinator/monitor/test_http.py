"""What a coordinator answers over HTTP: pages of round records, members, metrics."""

import asyncio
import io
import json
import math
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest
from control_nodes import commit, coordinator, get
from rich.console import Console

from atoll.comm.config.run import RunConfig
from atoll.comm.ids import NodeId
from atoll.coordinator.monitor import run_answers
from atoll.coordinator.monitor.contributions import (
    contribution_summary,
    contributions,
    nodes_table,
    owners_table,
)
from atoll.coordinator.monitor.run_metrics import TRAINER_FIGURES
from atoll.coordinator.state_machine import credit
from atoll.coordinator.state_machine import events as ev
from atoll.coordinator.state_machine.credit import CreditBook, Work
from atoll.coordinator.state_machine.state import State


@pytest.mark.parametrize(
    "query",
    [
        "since=",
        "since=x",
        "since=-1",
        "limit=1.0",
        "limit=0",
        "limit=" + "9" * 19,
        "fields=__class__",
        "fields=round,",
        "fields=q",
    ],
)
def test_a_question_for_records_that_makes_no_sense_is_refused_with_a_sentence(tmp_path: Path, query: str) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            status, body = await get(c, f"/api/rounds?{query}")
            assert status == 400 and body.endswith(b"\n") and len(body) < 100
            assert await get(c, "/api/rounds?since=0&limit=1&fields=round,val_loss") == (200, b"[]")

    asyncio.run(story())


def record(number: int) -> ev.CommitRecord:
    spent = {"inner": 1.0, "collect": 0.0, "reduce": 0.0, "commit": 0.0}
    weights = {NodeId("n1"): 100.0}
    return ev.CommitRecord(number, 1, 1, (), weights, 100 * number, 3.0, spent, {}, {}, "", "", val_loss=2.0)


@pytest.mark.long
def test_records_are_answered_in_pages_of_bounded_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            records = [record(k) for k in range(1, 1251)]
            c.journal.append([], records)

            async def pages(query: str) -> list[list[dict[str, Any]]]:
                """What a reader gets that asks on until there is nothing more."""
                got, since = list[list[dict[str, Any]]](), 0
                while True:
                    status, body = await get(c, f"/api/rounds?since={since}{query}")
                    assert status == 200, body
                    if not (page := json.loads(body)):
                        return got
                    got, since = [*got, page], page[-1]["round"]

            whole = json.loads(msgspec.json.encode(records))
            assert [len(page) for page in await pages("")] == [200] * 6 + [50]
            assert list(chain(*await pages(""))) == whole
            assert [len(page) for page in await pages("&limit=9999&fields=round")] == [1000, 250]
            few = await pages("&limit=1000&fields=round,val_loss,fragment")
            assert list(chain(*few)) == [{"round": r.round, "val_loss": 2.0, "fragment": 0} for r in records]

            monkeypatch.setattr(run_answers, "MAX_ANSWER_BYTES", 10_000)
            short = await pages("&limit=1000")
            assert list(chain(*short)) == whole and 1 < len(short[0]) < 50
            monkeypatch.setattr(run_answers, "MAX_ANSWER_BYTES", 1)
            assert await get(c, "/api/rounds?since=7&fields=round") == (200, b'[{"round":8}]')

    asyncio.run(story())


def test_what_a_node_says_of_its_progress_and_troubles_is_on_the_page(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada = c.node()
            await ada.at_work()
            await ada.heartbeat(phase="recovering", progress="3 of 9 chunks\n", trouble="no room" + "!" * 900)
            [member] = json.loads((await get(c, "/api/run"))[1])["members"]
            assert member["progress"] == "3 of 9 chunks"
            assert member["trouble"].startswith("no room!") and len(member["trouble"]) < 300
            assert "3 of 9 chunks; no room!" in member["reason"]
            await ada.heartbeat(phase="inner")
            [member] = json.loads((await get(c, "/api/run"))[1])["members"]
            assert "chunks" not in member["reason"] and "room" not in member["reason"]

    asyncio.run(story())


FIGURES: dict[str, Any] = {
    "tokens_per_s": 5000.0,
    "mfu": 0.25,
    "data_wait": 0.125,
    "gradient_norm": 0.5,
    "learning_rate": 0.001,
    "device_bytes": 3 << 30,
    "trainer_rss_bytes": 5 << 30,
}


def test_a_members_figures_are_in_the_json_and_in_the_metrics_where_they_are_known(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, bo = await c.pair()
            await ada.heartbeat(phase="inner", **FIGURES)
            await bo.heartbeat(phase="inner", tokens_per_s=7.0)
            first, second = json.loads((await get(c, "/api/run"))[1])["members"]
            assert {name: first[name] for name in FIGURES} == FIGURES
            unknown = {"mfu", "gradient_norm", "learning_rate", "device_bytes", "trainer_rss_bytes"}
            assert {name for name in FIGURES if second[name] is None} == unknown
            lines = set((await get(c, "/metrics"))[1].decode().splitlines())
            for name in FIGURES.keys() - {"tokens_per_s"}:
                metric = f"atoll_member_{TRAINER_FIGURES[name][0]}{{"
                values = [float(line.split()[-1]) for line in lines if line.startswith(metric)]
                assert sorted(values) == ([0.0] if name == "data_wait" else []) + [FIGURES[name]]

    asyncio.run(story())


def test_the_figures_of_a_members_last_steps_outlast_the_exchange(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            ada, _ = await c.pair()
            await ada.heartbeat(phase="inner", **FIGURES)
            await ada.heartbeat(phase="sync")
            telemetry = c.event_loop.telemetry
            assert telemetry.vitals[ada.node].mfu == 0
            assert telemetry.at_work[ada.node].mfu == 0.25
            assert telemetry.load(telemetry.dump()).at_work == telemetry.at_work

    asyncio.run(story())


def test_contributions_are_of_owners_and_nodes_and_come_to_the_runs_tokens(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            c.token = c.journal.issue_token("the in\x1bstitute", 2, math.inf)
            ada, bo = await c.pair()
            assert json.loads((await get(c, "/api/contributions"))[1]) == {
                **{"run_id": "reef", "committed": 0, "tokens": 0, "uncredited": 0},
                **{"owners_total": 0, "nodes_total": 0, "owners": [], "nodes": []},
            }
            await commit(ada, bo, round_=1)
            status, body = await get(c, "/api/contributions")
            said = json.loads(body)
            each = 2 * c.event_loop.state.config.model.seq_len  # tokens
            assert status == 200 and said["tokens"] == 2 * each and not said["uncredited"]
            assert said["owners"] == [
                {"owner": "the institute", "tokens": 2 * each, "rounds": 1, "nodes": 2},
            ]
            assert said["nodes"][0] == {
                **{"node_id": ada.node, "key": ada.key.public.hex(), "name": "ada", "former_names": []},
                **{"owner": "the institute", "tokens": each, "rounds": 1},
            }
            one = json.loads((await get(c, "/api/contributions?limit=1"))[1])
            assert len(one["nodes"]) == 1 and one["nodes_total"] == 2
            assert (await get(c, "/api/contributions?limit=-1"))[0] == 400
            assert (await get(c, "/api/contributions?limit=0"))[0] == 400
            two = json.loads((await get(c, "/api/contributions?limit=1&offset=1"))[1])
            assert one["nodes"] + two["nodes"] == said["nodes"] and not two["owners"]

            total = f"{2 * each:,} tokens up to round 1"
            assert contribution_summary(said) == f"run reef: {total}, of 1 owner with 2 nodes"
            console = Console(width=80, file=(written := io.StringIO()))
            for table in (owners_table(said), nodes_table(said)):
                console.print(table)
            text = written.getvalue()
            assert "the institute" in text and "50.0 %" in text and f"ada ({ada.node})" in text

    asyncio.run(story())


def test_no_answer_has_more_accounts_than_one_may_and_pages_have_each_of_them_once() -> None:
    works = [Work(f"key {n}", NodeId(f"n{n}"), "ada", f"owner {n % 3}", 1 + n % 7) for n in range(2500)]
    state = State(RunConfig(), credit=credit.enter(CreditBook(), 1, works, 0))
    first = contributions(state, "reef")
    assert (len(first["nodes"]), first["nodes_total"]) == (200, 2500)
    pages = [contributions(state, "reef", 10**6, offset)["nodes"] for offset in (0, 1000, 2000, 3000)]
    assert [len(page) for page in pages] == [1000, 1000, 500, 0]
    assert len({account["node_id"] for page in pages for account in page}) == 2500
    tokens = [account["tokens"] for page in pages for account in page]
    assert tokens == sorted(tokens, reverse=True)


def test_names_of_accounts_are_text_in_a_terminal_too() -> None:
    book = credit.enter(CreditBook(), 1, [Work("key", NodeId("n1"), "[red]ada\x1b[2J", "[bold]o\x07", 5)], 0)
    said = contributions(State(RunConfig(), tokens=12, committed=1, credit=book), "reef")
    assert said["uncredited"] == 7 and "7 of them before" in contribution_summary(said)
    console = Console(width=80, file=(written := io.StringIO()))
    for table in (owners_table(said), nodes_table(said)):
        console.print(table)
    text = written.getvalue()
    assert "[red]ada" in text and "[bold]o" in text and not {"\x1b", "\x07"} & set(text)
