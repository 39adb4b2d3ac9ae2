"""Encrypted runs over gRPC: pins are asked for and passed on; who trusts another certificate gets no answer."""

import asyncio
from pathlib import Path

import grpc
from control_nodes import Code, Node, coordinator, healthy, refused, trusting

from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.transport.certificates import load_or_make, pin_of


def test_an_encrypted_run_passes_pins_on_and_asks_for_them(tmp_path: Path) -> None:
    pins = {name: pin_of(name.encode()) for name in ("ada", "bo")}

    async def story() -> None:
        async with coordinator(tmp_path, tls=load_or_make(tmp_path)) as c:
            old = await refused(c.node().join(), Code.INVALID_ARGUMENT)
            assert "this run is encrypted" in old and "update atoll" in old
            ada, bo = c.node(), c.node()
            await ada.at_work(name="ada", pin=pins["ada"])
            await bo.at_work(name="bo", pin=pins["bo"])
            for node in (ada, bo):
                await node.sees(lambda v: v.train.round == 1)
                await node.report(pb.Fence(round=1), steps_reached=pb.StepsReached())
            for node in (ada, bo):
                await node.ready(1)
            plan = (await ada.sees(lambda v: v.HasField("plan"))).plan
            assert [member.pin for member in plan.members] == [pins["ada"], pins["bo"]]
            await bo.join(
                bo.session, name="bo", pin=pin_of(b"another")
            )  # its state directory was lost but for that
            assert c.event_loop.state.members.here[bo.node].pin == pin_of(b"another")
            late = c.node()
            await late.join(name="late", pin=pin_of(b"late"))
            late.watch()
            donors = (await late.sees(lambda v: v.donors)).donors
            assert [(d.node_id, d.pin) for d in donors] == [(ada.node, pins["ada"])]

    asyncio.run(story())


def test_an_encrypted_control_plane_answers_only_who_trusts_its_certificate(tmp_path: Path) -> None:
    (tmp_path / "another").mkdir()
    certificate, another = load_or_make(tmp_path), load_or_make(tmp_path / "another")

    async def story() -> None:
        async with coordinator(tmp_path, tls=certificate) as c:
            assert await healthy(c)
            for channel in (grpc.aio.insecure_channel(c.address), trusting(c.address, another)):
                await refused(Node(channel, c.token).join(pin=certificate.pin), Code.UNAVAILABLE)
                await channel.close()

    asyncio.run(story())


def test_a_run_that_is_not_encrypted_keeps_no_pins(tmp_path: Path) -> None:
    async def story() -> None:
        async with coordinator(tmp_path) as c:
            node = c.node()
            await node.join(pin="a" * 52)
            assert c.event_loop.state.members.here[node.node].pin == ""

    asyncio.run(story())
