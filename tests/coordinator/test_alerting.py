"""An alert comes from a coordinator's rules to whom it was started for."""

import asyncio
import math
import sys
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest
from control_nodes import CONFIG, Node, commit
from webhook_receiver import Receiver

from atoll.comm.config.load import to_yaml
from atoll.comm.proto import atoll_pb2 as pb
from atoll.coordinator.server import opened_journal, page_url

# A coordinator that is not patient with too few members.
IMPATIENT = """
from atoll.coordinator.monitor import alerts
alerts.QUORUM_SECONDS = 0.0
from atoll.comm.cli import main
main()
"""
SECONDS = 120.0  # for all of it: a few on an idle machine


@pytest.mark.long
def test_a_coordinator_that_loses_its_quorum_posts_it_and_has_it_in_its_metrics(tmp_path: Path) -> None:
    config, state_dir, receiver = tmp_path / "reef.yaml", tmp_path / "coordinator", Receiver()
    config.write_text(to_yaml(CONFIG))
    words = (
        str(config),
        "wandb.mode=disabled",
        "reduce.block=2",
        "--state-dir",
        str(state_dir),
        "--webhook",
        receiver.url,
    )
    ports = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")

    def lost_quorum() -> str:
        with urlopen(f"{page_url(state_dir)}/metrics", timeout=30.0) as page:
            lines: list[str] = page.read().decode().splitlines()
        return next(line for line in lines if line.startswith('atoll_alert{kind="lost_quorum"}'))

    async def story() -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", IMPATIENT, "coordinator", "start", *words, *ports),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stderr is not None
            while b"page at" not in (line := await process.stderr.readline()):
                assert line, "it has ended"
            with opened_journal(state_dir) as journal:
                address, token = journal.meta("address") or "", journal.issue_token("test", 2, math.inf)
            async with grpc.aio.insecure_channel(address) as channel:
                ada, bo = Node(channel, token), Node(channel, token)
                await ada.at_work()
                await bo.at_work(name="bo")
                await commit(ada, bo, round_=1)
                assert (await asyncio.to_thread(lost_quorum)).endswith(" 0.0")
                await bo.report(leave=pb.Leave(reason="it is late"))
                [posted] = await asyncio.to_thread(receiver.wait, 1)
                assert (posted["run"], posted["kind"], posted["on"]) == ("reef", "lost_quorum", True)
                assert "1 of the 2 members" in posted["sentence"] and posted["page"] == page_url(state_dir)
                while not (await asyncio.to_thread(lost_quorum)).endswith(" 1.0"):  # a page is good for a second
                    await asyncio.sleep(0.1)
        finally:
            process.terminate()
            await process.communicate()
            receiver.close()
        assert process.returncode == 0

    asyncio.run(asyncio.wait_for(story(), SECONDS))
