"""What a node keeps of a run, while the coordinator and its peers go on."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from accountants import accountant
from states import MARK, RUN, TINY, filled, layout_for
from terminals import Terminal

from atoll.comm import log
from atoll.comm.ids import NodeId
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.config import NodeConfig
from atoll.node.daemon import outer_loop as module
from atoll.node.daemon.outer_loop import OuterLoop
from atoll.node.daemon.state_dir import JoinOptions
from atoll.node.daemon.state_server import StateServer
from atoll.node.recovery.recovery import DonorsSilent, RecoveryProgress, RecoveryStats, RoundMovedOn
from atoll.node.state_machine import effects, events
from atoll.node.trainer_channel import Hello


def test_a_recovery_that_nobody_answers_is_tried_less_and_less_often_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outer_loop = cast(Any, SimpleNamespace(stranded="", _pause=module.SHORTEST_PAUSE))
    caplog.set_level("INFO", "atoll.node")
    pauses = [
        OuterLoop._again(outer_loop, DonorsSilent("nobody gives it the state: n1: refused")) for _ in range(6)
    ]
    assert pauses[0] < pauses[1] < pauses[2] < pauses[-1] == module.LONGEST_PAUSE and len(caplog.messages) == 1
    assert "n1: refused" in outer_loop.stranded
    assert (
        OuterLoop._again(outer_loop, RoundMovedOn("the round is over")) == module.SHORTEST_PAUSE
        and not outer_loop.stranded
    )


def test_a_recovery_has_a_bar_on_a_terminal_until_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    donor, terminal = filled(tmp_path / "donor", 3), Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    shown = list[str]()

    async def recover(outer: Any, *others: Any) -> RecoveryStats:
        on_progress = others[-1]
        for c in range(count := outer.chunks.count):
            outer.replace_chunk(c, 3, donor.outer.copy_chunk(c)[1].tobytes())
            on_progress(RecoveryProgress(count, c + 1, c + 1, 1.0, {NodeId("n2"): 1 << 20}))
            shown.append(terminal.screen[-1])
        return RecoveryStats(count, count, 0.0, {}, {})

    async def story() -> None:
        view = pb.View(committed=3, state_digest=donor.outer.finalize())
        member = member_of(tmp_path / "node", view)
        hello = Hello(1, 1, donor.chunks.numel, tuple(layout_for(TINY)))
        outer_loop = OuterLoop(cast(Any, member), hello, StateServer(), lambda _: None, asyncio.create_task)
        monkeypatch.setattr(module, "recover", recover)
        await outer_loop.recover(effects.Recover(view, differs=False, rebase=False))
        await outer_loop.durable.wait_idle()
        await outer_loop.close()

    log.status_line.use(terminal)
    try:
        asyncio.run(asyncio.wait_for(story(), 60))
    finally:
        log.status_line.use(None)
    count = donor.outer.chunks.count
    assert shown[-1].startswith(f"recovering [{'#' * 30}] 100 %  {count} of {count} chunks")
    assert shown[-1].endswith("from n2") and terminal.screen == [""]


def member_of(folder: Path, view: pb.View) -> SimpleNamespace:
    """What an outer loop needs of its node's place in the run."""
    peers = SimpleNamespace(buffers=SimpleNamespace(give=lambda _: None))
    return SimpleNamespace(
        run=RUN,
        config=NodeConfig(),
        options=JoinOptions(folder, "", "", "ada", 0.0),
        plane=SimpleNamespace(bytes_down=0, peers=peers),
        reports=SimpleNamespace(view=view, control=None),
        accountant=accountant(),
        signer=None,
        mark=MARK,
    )


def test_a_snapshot_of_a_fetched_state_tells_the_tokens_of_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    donor, told = filled(tmp_path / "donor", 3), list[events.Event]()
    view = pb.View(committed=3, tokens=30, state_digest=donor.outer.finalize())
    member = member_of(tmp_path / "node", view)

    async def recover(outer: Any, *_: Any) -> RecoveryStats:
        for c in range(outer.chunks.count):
            outer.replace_chunk(c, 3, donor.outer.copy_chunk(c)[1].tobytes())
        member.reports.view = pb.View(committed=5, tokens=50)  # the others did not wait
        return RecoveryStats(outer.chunks.count, outer.chunks.count, 0.0, {}, {})

    async def story() -> None:
        hello = Hello(1, 1, donor.chunks.numel, tuple(layout_for(TINY)))
        outer_loop = OuterLoop(cast(Any, member), hello, StateServer(), told.append, asyncio.create_task)
        attach = outer_loop.attachment
        assert attach.numel == hello.numel and Path(attach.copies) == Path(attach.anchor).parent / "copies"
        monkeypatch.setattr(module, "recover", recover)
        outer_loop.stranded = "nobody gives it the state"
        await outer_loop.recover(effects.Recover(view, differs=False, rebase=False))
        assert not outer_loop.stranded
        await outer_loop.durable.wait_idle()
        assert told == [events.StateMoved(3, view.state_digest)]
        assert (files := outer_loop.durable._files) is not None
        assert [(s.first, s.tokens) for s in files.snapshots.newest_first] == [(3, 30)]
        heard = list[Any]()
        outer_loop.uploads = cast(Any, SimpleNamespace(record_digest=lambda *what: heard.append(what)))
        outer_loop.follow(view)
        assert heard == [(3, view.state_digest)], "what is sent to a store is compared with it"
        await outer_loop.close()

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_recovery_that_is_stopped_keeps_what_came_and_goes_on_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    donor, told = filled(tmp_path / "donor", 3), list[events.Event]()
    view = pb.View(committed=3, tokens=30, state_digest=donor.outer.finalize())
    member = member_of(tmp_path / "node", view)
    fetched, half = list[int](), asyncio.Event()

    async def recover(outer: Any, *_: Any) -> RecoveryStats:
        for c in range(count := outer.chunks.count):
            await asyncio.sleep(0)
            if outer.chunk_rounds[c] != 3:
                fetched.append(c)
                outer.replace_chunk(c, 3, donor.outer.copy_chunk(c)[1].tobytes())
            if len(fetched) == count // 2 and not half.is_set():
                half.set()
                await asyncio.Event().wait()
        return RecoveryStats(count, count, 0.0, {}, {})

    async def story() -> None:
        hello = Hello(1, 1, donor.chunks.numel, tuple(layout_for(TINY)))
        outer_loop = OuterLoop(cast(Any, member), hello, StateServer(), told.append, asyncio.create_task)
        monkeypatch.setattr(module, "recover", recover)
        order = effects.Recover(view, differs=False, rebase=False)
        recovering = asyncio.create_task(outer_loop.recover(order))
        await half.wait()
        assert (count := outer_loop.outer.chunks.count) > 2
        outer_loop.stop_recovery()
        await recovering
        assert told == [events.MoveFailed(-1)] and len(fetched) == count // 2
        await outer_loop.recover(order)
        assert told[1:] == [events.StateMoved(3, view.state_digest)] and fetched == list(range(count))
        await outer_loop.durable.wait_idle()
        await outer_loop.close()

    asyncio.run(asyncio.wait_for(story(), 60))
