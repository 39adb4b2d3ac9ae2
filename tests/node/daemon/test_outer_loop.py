"""What a node keeps of a run, while the coordinator and its peers go on."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from states import MARK, RUN, TINY, filled, layout_for

from atoll.comm.proto import atoll_pb2 as pb
from atoll.node import state_machine
from atoll.node.config import NodeConfig
from atoll.node.daemon import outer_loop as keeper_
from atoll.node.daemon.outer_loop import OuterLoop
from atoll.node.daemon.state_dir import JoinOptions
from atoll.node.daemon.state_server import StateServer
from atoll.node.recovery.recovery import DonorsSilent, RecoveryStats, RoundMovedOn
from atoll.node.trainer_channel import Hello


def test_a_recovery_that_nobody_answers_is_tried_less_and_less_often_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    keeper = cast(Any, SimpleNamespace(stranded="", _pause=keeper_.SOON))
    caplog.set_level("INFO", "atoll.node")
    pauses = [OuterLoop._again(keeper, DonorsSilent("nobody gives it the state: n1: refused")) for _ in range(6)]
    assert pauses[0] < pauses[1] < pauses[2] < pauses[-1] == keeper_.SELDOM and len(caplog.messages) == 1
    assert "n1: refused" in keeper.stranded
    assert OuterLoop._again(keeper, RoundMovedOn("the round is over")) == keeper_.SOON and not keeper.stranded


def test_a_snapshot_of_a_fetched_state_tells_the_tokens_of_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    donor, told = filled(tmp_path / "donor", 3), list[state_machine.Event]()
    view = pb.View(committed=3, tokens=30, state_digest=donor.outer.finalize())
    peers = SimpleNamespace(buffers=SimpleNamespace(give=lambda _: None))
    member = SimpleNamespace(
        run=RUN,
        config=NodeConfig(),
        options=JoinOptions(tmp_path / "node", "", "", "ada", 0.0),
        plane=SimpleNamespace(bytes_down=0, peers=peers),
        reports=SimpleNamespace(view=view, control=None),
        mark=MARK,
    )

    async def recover(outer: Any, *_: Any) -> RecoveryStats:
        for c in range(outer.chunks.count):
            outer.replace_chunk(c, 3, donor.outer.copy_chunk(c)[1].tobytes())
        member.reports.view = pb.View(committed=5, tokens=50)  # the others did not wait
        return RecoveryStats(outer.chunks.count, outer.chunks.count, 0.0, {}, {})

    async def story() -> None:
        hello = Hello(1, 1, donor.chunks.numel, tuple(layout_for(TINY)))
        keeper = OuterLoop(cast(Any, member), hello, StateServer(), told.append, asyncio.create_task)
        monkeypatch.setattr(keeper_, "recover", recover)
        keeper.stranded = "nobody gives it the state"
        await keeper.recover(state_machine.Recover(view, differs=False, rebase=False))
        assert not keeper.stranded
        await keeper.durable.wait_idle()
        assert told == [state_machine.StateMoved(3, view.state_digest)]
        assert (files := keeper.durable._files) is not None
        assert [(s.first, s.tokens) for s in files.snapshots.newest_first] == [(3, 30)]
        heard = list[Any]()
        keeper.uploads = cast(Any, SimpleNamespace(told=lambda *what: heard.append(what)))
        keeper.told(view)
        assert heard == [(3, view.state_digest)], "what is sent to a store is compared with it"
        await keeper.close()

    asyncio.run(asyncio.wait_for(story(), 20))
