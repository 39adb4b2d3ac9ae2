"""When the gateway beside a node is there: as long as somebody needs it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from atoll.comm.gateway_note import MAX_GATEWAYS
from atoll.comm.invite import Invite
from atoll.comm.transport.certificates import pin_of
from atoll.node.config import NodeConfig
from atoll.node.daemon.node_gateway import NodeGateway
from atoll.node.daemon.state_dir import JoinOptions
from atoll.node.gateway.client import GatewayProcess, RelayOffer

PEER = "12D3KooWAhYiUJLCTg3PuwTMd1Vv7TRrQGMrFLXcvYXRShTqnDAC"
PLACE = f"/ip4/203.0.113.7/tcp/4701/p2p/{PEER}"
URL = Invite("203.0.113.9:4700", "reef", "token", pin_of(b"the coordinator's"))


class Process:
    multiaddr = PLACE

    def __init__(self, offer: RelayOffer | None) -> None:
        self.relays, self.lives = offer is not None, True

    async def reach(self, host: str) -> tuple[str, int]:
        return host, 1

    async def await_place(self, patience: float) -> None: ...


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Those that were started, in order."""
    started = list[Process]()

    @asynccontextmanager
    async def opened(
        state_dir: Path, gateways: Sequence[str], offer: RelayOffer | None = None
    ) -> AsyncIterator[Process]:
        assert tuple(gateways) == (PLACE,)
        started.append(process := Process(offer))
        try:
            yield process
        finally:
            process.lives = False

    monkeypatch.setattr(GatewayProcess, "opened", opened)
    return started


def run(story: Callable[[NodeGateway], Awaitable[None]], folder: Path, invite: Invite = URL) -> None:
    async def body() -> None:
        async with AsyncExitStack() as opened:
            options = JoinOptions(folder, "127.0.0.1:0", "", "ada", 1.0)
            gateway = NodeGateway(invite, NodeConfig(relay=True, relay_port=4711), options, opened)
            gateway.learn([PLACE])
            await story(gateway)

    asyncio.run(body())


def test_one_that_was_started_for_a_search_ends_with_it_and_the_next_search_has_another(
    tmp_path: Path, processes: list[Process]
) -> None:
    async def story(gateway: NodeGateway) -> None:
        for number in (1, 2):
            async with gateway.for_search():
                assert len(processes) == number and processes[-1].lives
            assert not processes[-1].lives

    run(story, tmp_path)


def test_one_that_others_need_outlives_the_search(tmp_path: Path, processes: list[Process]) -> None:
    async def before(gateway: NodeGateway) -> None:
        await gateway.reach("a-peer.p2p")
        async with gateway.for_search():
            pass
        assert [process.lives for process in processes] == [True]

    async def meanwhile(gateway: NodeGateway) -> None:
        async with gateway.for_search():
            await gateway.reach("a-peer.p2p")
        assert [process.lives for process in processes] == [True]

    async def led(gateway: NodeGateway) -> None:
        async with gateway.for_search():
            gateway.stay()
        assert [process.lives for process in processes] == [True]

    for story in (before, meanwhile, led):
        run(story, tmp_path)
        assert not processes.pop().lives, "it ends with the node"


def test_a_node_that_is_to_relay_has_one_that_does_even_if_a_search_had_begun(
    tmp_path: Path, processes: list[Process]
) -> None:
    async def story(gateway: NodeGateway) -> None:
        async with gateway.for_search():
            await gateway.offer_relay("203.0.113.8:4702")
        assert [(process.relays, process.lives) for process in processes] == [(False, False), (True, True)]
        assert gateway.relay == PLACE

    run(story, tmp_path)


def test_gateways_are_known_in_the_next_life_and_what_is_told_counts_before_them(tmp_path: Path) -> None:
    other = PLACE.replace("4701", "4702")

    async def first(gateway: NodeGateway) -> None:
        gateway.learn([PLACE, "/ip4/nowhere", *(PLACE.replace("4701", str(port)) for port in range(20))])
        assert len(gateway.run_gateways) == MAX_GATEWAYS and gateway.run_gateways[0] == PLACE
        gateway.learn([])
        gateway.learn(["/ip4/nowhere"])
        assert gateway.run_gateways[0] == PLACE, "a coordinator that has begun again knows none yet"
        gateway.learn([other])

    run(first, tmp_path)
    options = JoinOptions(tmp_path, "127.0.0.1:0", "", "ada", 1.0)
    again = NodeGateway(URL, NodeConfig(), options, AsyncExitStack())
    assert again.run_gateways == (other,) and not again.known.is_set()
    named = Invite(f"dht{PLACE}", URL.run, URL.token, URL.pin)
    assert NodeGateway(named, NodeConfig(), options, AsyncExitStack()).run_gateways == (PLACE,)
