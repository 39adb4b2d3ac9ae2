"""What a coordinator answers to a machine that looks before it joins, and that nobody can make it do more."""

import asyncio
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from control_nodes import Code, Coordinator, coordinator, refused

from atoll.comm.config.run import RunConfig
from atoll.comm.errors import Refused
from atoll.comm.ids import NO_PIN, Pin
from atoll.comm.invite import Invite
from atoll.comm.proto import checkup_pb2 as cp
from atoll.comm.proto import checkup_pb2_grpc as rpc
from atoll.comm.rate_limits import RateLimit
from atoll.comm.transport.certificates import Certificate, load_or_make
from atoll.coordinator.service import checkup
from atoll.node.checks.reach import reach_check
from atoll.node.control.checkup import Busy, CheckupClient

CONFIG = RunConfig(name="reef")


def run(
    story: Callable[[Coordinator], Awaitable[None]],
    folder: Path,
    tls: Certificate | None = None,
    private: bool = True,
) -> None:
    async def told() -> None:
        async with coordinator(folder, CONFIG, tls, private) as c:
            await story(c)

    asyncio.run(told())


def asking(c: Coordinator, session: str = "", pin: Pin = NO_PIN) -> Any:
    return CheckupClient.opened(Invite(c.address, "reef", c.token, pin), session)


def stub(c: Coordinator) -> "rpc.CheckupAsyncStub":
    return rpc.CheckupStub(c.channel)


def caller(c: Coordinator, **changes: str) -> cp.Caller:
    fields = {"run": "reef", "token": c.token} | changes
    return cp.Caller(**fields)


@dataclass
class Listener:
    """Somebody at a port of this machine."""

    port: int
    came: int = 0
    here: int = 0  # now
    most: int = 0  # at a time
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # when it lets go of who came


@asynccontextmanager
async def listening(certificate: Certificate | None = None) -> AsyncIterator[Listener]:
    context: ssl.SSLContext | None = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.path)
    found = Listener(0)

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.came += 1
        found.here += 1
        found.most = max(found.most, found.here)
        await reader.read()
        found.here -= 1
        writer.close()

    server = await asyncio.start_server(meet, "127.0.0.1", 0, ssl=context)
    found.port = server.sockets[0].getsockname()[1]
    with closing(server):
        yield found


def test_a_token_shows_what_the_run_is_and_stays_as_it_is(tmp_path: Path) -> None:
    async def story(c: Coordinator) -> None:
        c.token = c.journal.issue_token("one", 1, math.inf)
        async with asking(c) as asks:
            sight = await asks.look()
            assert (sight.run, sight.host, sight.members, sight.penalty) == (CONFIG, "127.0.0.1", 0, "")
            assert abs(sight.clock_ahead) <= sight.seconds
            assert sight.private
        assert not c.event_loop.state.members.here
        await c.node().join()  # the only one that it is good for

    run(story, tmp_path)


def test_a_session_stands_for_the_token_that_its_node_used_up(tmp_path: Path) -> None:
    async def story(c: Coordinator) -> None:
        c.token = c.journal.issue_token("one", 1, math.inf)
        ada = c.node()
        await ada.join()
        async with asking(c, ada.session) as asks:
            assert (await asks.look()).run == CONFIG
        async with asking(c) as asks:
            with pytest.raises(Refused, match="used up"):
                await asks.look()

    run(story, tmp_path)


def test_who_shows_nothing_is_told_nothing(tmp_path: Path) -> None:
    async def story(c: Coordinator) -> None:
        nobody = cp.Caller(run="reef", token="guessed")
        async with listening() as there:
            asked = cp.DialBackRequest(caller=nobody, address=f":{there.port}")
            assert "not one of this run's" in await refused(stub(c).Look(nobody), Code.PERMISSION_DENIED)
            assert "not one of this run's" in await refused(stub(c).DialBack(asked), Code.PERMISSION_DENIED)
            assert there.came == 0
        received = stub(c).Receive(cp.ReceiveRequest(caller=nobody, bytes=1))
        assert await received.code() is Code.PERMISSION_DENIED
        other = cp.Caller(run="atoll", token=c.token)
        assert "serves 'reef'" in await refused(stub(c).Look(other), Code.FAILED_PRECONDITION)

    run(story, tmp_path)


def test_who_looks_too_often_takes_no_place_from_those_who_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "LOOKS", RateLimit(1e-9, 1))

    async def story(c: Coordinator) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with AsyncExitStack() as opened:
            codes = []
            for _ in range(3):
                channel = grpc.aio.insecure_channel(c.address, options=options)
                looking: Any = rpc.CheckupStub(await opened.enter_async_context(channel)).Look(caller(c))
                codes.append(await looking.code())
            assert codes == [Code.OK, Code.RESOURCE_EXHAUSTED, Code.RESOURCE_EXHAUSTED]
            assert len(c.plane.door._owners) == 1, "the others are strangers', as of who shows nothing"

    run(story, tmp_path)


def test_the_answer_of_a_dial_back_is_one_of_three_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "DIAL_SECONDS", 0.3)
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    own, others = load_or_make(tmp_path), load_or_make(elsewhere)

    async def story(c: Coordinator) -> None:
        async def outcome(port: int, pin: Pin = own.pin) -> int:
            return int((await asks.dial_back(f":{port}", pin)).outcome)

        async with asking(c, pin=own.pin) as asks, listening(own) as right, listening(others) as wrong:
            async with listening() as mute:  # no word of TLS
                assert await outcome(right.port) == cp.REACHED
                assert await outcome(wrong.port) == cp.REFUSED
                assert await outcome(mute.port) == cp.TIMED_OUT
                assert mute.came == 1
            assert await outcome(mute.port) == cp.REFUSED  # nobody is there any more
            with pytest.raises(Refused, match="encrypted"):
                await outcome(right.port, NO_PIN)

    run(story, tmp_path, own)


def test_no_address_is_dialled_but_the_one_that_the_call_comes_from() -> None:
    async def allowed(address: str, of: str, private: bool) -> str:
        try:
            return str((await checkup.own_place(address, of, private))[1][0])
        except ValueError as error:
            return str(error)

    async def story() -> None:
        for private in (False, True):
            assert await allowed("8.8.8.8:22", "8.8.8.8", private) == "8.8.8.8"
            assert await allowed("[::ffff:8.8.8.8]:22", "8.8.8.8", private) == "::ffff:8.8.8.8"
            assert "another machine's" in await allowed("8.8.4.4:22", "8.8.8.8", private)
            assert "another machine's" in await allowed("8.8.4.4:22", "10.0.0.7", private)
            assert await allowed("169.254.169.254:80", "169.254.169.254", private) != "169.254.169.254"
        # the coordinator's own network is not the caller's
        assert "another machine's" in await allowed("10.0.0.1:22", "8.8.8.8", True)
        assert "another machine's" in await allowed("127.0.0.1:22", "8.8.8.8", True)
        assert await allowed("10.0.0.1:22", "10.0.0.7", True) == "10.0.0.1"
        assert "private network" in await allowed("10.0.0.7:22", "10.0.0.7", False)
        assert "through a relay" in await allowed("8.8.8.8:22", "8.8.8.8.relayed", True)
        assert "through a relay" in await allowed("127.0.0.1:22", "127.0.0.1.relayed", True)
        assert "leads nowhere" in await allowed("nowhere.invalid:22", "8.8.8.8", True)

    asyncio.run(story())


def test_in_a_public_run_nobody_in_a_private_network_is_dialled(tmp_path: Path) -> None:
    async def story(c: Coordinator) -> None:
        async with asking(c) as asks, listening() as there:
            with pytest.raises(Refused, match="private network"):
                await asks.dial_back(f":{there.port}", NO_PIN)
            assert there.came == 0

    run(story, tmp_path, private=False)


def test_dial_backs_of_one_address_are_few(tmp_path: Path) -> None:
    async def story(c: Coordinator) -> None:
        async with asking(c) as asks, listening() as there:
            for _ in range(checkup.DIALS.burst):
                assert (await asks.dial_back(f":{there.port}", NO_PIN)).outcome == cp.REACHED
            with pytest.raises(Busy, match="from you"):
                await asks.dial_back(f":{there.port}", NO_PIN)
            assert there.came <= checkup.DIALS.burst

    run(story, tmp_path)


def test_a_node_has_one_quota_wherever_it_calls_from_and_what_is_refused_is_not_counted() -> None:
    quota = checkup.Quota("calls", RateLimit(0.1, 2), RateLimit(0.1, 3))
    assert not quota.take(("10.0.0.1", "n1"), 0.0) and not quota.take(("10.0.0.2", "n1"), 0.0)
    assert "from you" in quota.take(("10.0.0.3", "n1"), 0.0)
    assert not quota.take(("10.0.0.3",), 0.0)  # nor has it paid for the node
    assert "from everybody than 360 an hour" in quota.take(("10.0.0.4",), 0.0)
    assert not quota.take(("10.0.0.4",), 10.0)


def test_dial_backs_of_everybody_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "ALL_DIALS", RateLimit(1e-9, 2))

    async def story(c: Coordinator) -> None:
        async with asking(c) as asks, listening() as there:
            for _ in range(2):
                await asks.dial_back(f":{there.port}", NO_PIN)
            with pytest.raises(Busy, match="everybody"):
                await asks.dial_back(f":{there.port}", NO_PIN)

    run(story, tmp_path)


@pytest.mark.long
def test_few_are_dialled_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "DIAL_SECONDS", 1.0)
    own = load_or_make(tmp_path)

    async def story(c: Coordinator) -> None:
        async with asking(c, pin=own.pin) as asks, listening() as mute:
            asked = [asks.dial_back(f":{mute.port}", own.pin) for _ in range(2 * checkup.MAX_DIALS)]
            assert {reply.outcome for reply in await asyncio.gather(*asked)} == {cp.TIMED_OUT}
            assert mute.most <= checkup.MAX_DIALS

    run(story, tmp_path, own)


@pytest.mark.long
def test_who_finds_no_place_to_be_dialled_is_not_said_to_be_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "DIAL_SECONDS", 2.0)
    monkeypatch.setattr(checkup, "PLACE_SECONDS", 0.2)
    own = load_or_make(tmp_path)

    async def story(c: Coordinator) -> None:
        async with asking(c, pin=own.pin) as asks, listening() as mute:
            asked = [asks.dial_back(f":{mute.port}", own.pin) for _ in range(2 * checkup.MAX_DIALS)]
            came = await asyncio.gather(*asked, return_exceptions=True)
            late = [answer for answer in came if isinstance(answer, Busy)]
            assert len(late) == checkup.MAX_DIALS and all("it was not tried" in str(answer) for answer in late)
            async with listening(own) as there:  # and is dialled a moment later
                assert (await reach_check(asks, f":{there.port}", own.pin)).found.startswith(
                    "the coordinator dialled"
                )

    run(story, tmp_path, own)


def test_a_link_is_measured_both_ways(tmp_path: Path) -> None:
    own = load_or_make(tmp_path)

    async def story(c: Coordinator) -> None:
        async with asking(c, pin=own.pin) as asks:
            assert await asks.rate_down() > 0 and await asks.rate_up() > 0
        ada = c.node()
        await ada.join(pin=own.pin)
        async with asking(c, ada.session, own.pin) as asks:
            assert await asks.rate_down() > 0 and await asks.rate_up() > 0
        assert (await ada.heartbeat()).known

    run(story, tmp_path, own)


@asynccontextmanager
async def slow_uplink(c: Coordinator, rate: float) -> AsyncIterator[str]:
    """The "host:port" of a way to the coordinator that takes up so many bytes a second."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause: float) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 14):
                await asyncio.sleep(len(data) * pause)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = c.address.rsplit(":", 1)
        onward = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pass_on(reader, onward[1], 1 / rate), pass_on(onward[0], writer, 0.0))

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


@pytest.mark.long
def test_a_link_that_is_too_slow_for_all_bytes_of_a_measurement_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "RATE_SECONDS", 0.3)

    async def story(c: Coordinator) -> None:
        async with slow_uplink(c, 2e6) as address:
            invite = Invite(address, "reef", c.token)
            async with CheckupClient.opened(invite) as asks:
                assert 1e5 < await asks.rate_up() < 4e6
                assert (await asks.look()).run == CONFIG  # over the same connection

    run(story, tmp_path)


async def received(c: Coordinator, size: int) -> int:
    call = stub(c).Receive(cp.ReceiveRequest(caller=caller(c), bytes=size))
    return sum([len(block.body) async for block in call])


def test_no_more_bytes_are_sent_than_one_measurement_has(tmp_path: Path) -> None:
    async def story(c: Coordinator) -> None:
        assert await received(c, 1 << 30) <= checkup.RATE_BYTES

    run(story, tmp_path)


def test_the_bytes_of_one_address_are_bounded_by_the_hour(tmp_path: Path) -> None:
    async def story(c: Coordinator) -> None:
        for _ in range(checkup.MEASURED.burst // checkup.RATE_BYTES):
            assert await received(c, 1) == 1
        for asked in (received(c, 1), _sent(c)):
            assert "from you" in await refused(asked, Code.RESOURCE_EXHAUSTED)

    run(story, tmp_path)


async def _sent(c: Coordinator) -> cp.SendReply:
    call = stub(c).Send()
    await call.write(cp.SendRequest(caller=caller(c)))
    await call.done_writing()
    return await call


def test_the_bytes_of_everybody_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "ALL_MEASURED", RateLimit(1e-9, 2 * checkup.RATE_BYTES))

    async def story(c: Coordinator) -> None:
        for _ in range(2):
            await received(c, 1)
        assert "everybody" in await refused(received(c, 1), Code.RESOURCE_EXHAUSTED)

    run(story, tmp_path)


def test_who_does_not_read_what_it_asked_for_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "RATE_SECONDS", 0.2)

    async def story(c: Coordinator) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(c.address, options=options) as slow:
            asks = cp.ReceiveRequest(caller=caller(c), bytes=checkup.RATE_BYTES)
            call: Any = rpc.CheckupStub(slow).Receive(asks)
            await call.read()  # one block, and then no more
            async with asyncio.timeout(checkup.TURN_SECONDS):
                assert await received(c, 1) == 1

    run(story, tmp_path)


def test_who_measures_sends_no_more_than_it_was_let(tmp_path: Path) -> None:
    async def story(c: Coordinator) -> None:
        call = stub(c).Send()
        await call.write(cp.SendRequest(caller=caller(c)))
        await call.initial_metadata()
        block = cp.SendRequest(body=bytes(1 << 16))
        sent = 0
        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError)):
            while True:
                await call.write(block)
                sent += len(block.body)
                assert sent < 4 * checkup.RATE_BYTES

    run(story, tmp_path)
