"""Members are told of gateways that are there, and a member can send the others to none but itself."""

import asyncio
import os
from pathlib import Path

import pytest
from control_nodes import CONFIG, coordinator, until

from atoll.comm.gateway_note import GatewayNote, read_gateways, read_note, write_gateways
from atoll.comm.ids import NodeId
from atoll.coordinator.service import run_gateways
from atoll.coordinator.service.run_gateways import GREETING, LOST_AFTER, MAX_OFFERS, MAX_RELAYS, RelayOffers

PEER = "12D3KooWAhYiUJLCTg3PuwTMd1Vv7TRrQGMrFLXcvYXRShTqnDAC"


def at(host: str, port: int = 4701) -> str:
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}/p2p/{PEER}"


def offered(*hosts: str, private: bool = False) -> RelayOffers:
    offers = RelayOffers(private)
    for number, host in enumerate(hosts):
        assert not offers.offer(NodeId(f"n{number}"), at(host), [host], 0.0)
    return offers


def test_a_relay_is_told_once_it_was_found_there_and_until_it_is_gone() -> None:
    offers = offered("8.8.8.8", "9.9.9.9")
    assert offers.told() == ()
    assert offers.due(0.0) == [at("8.8.8.8"), at("9.9.9.9")] and not offers.due(1.0)
    offers.looked(at("9.9.9.9"), True, 1.0)
    offers.looked(at("8.8.8.8"), False, 1.0)
    assert offers.told() == (at("9.9.9.9"),)
    for _ in range(LOST_AFTER):
        assert offers.told() == (at("9.9.9.9"),)
        offers.looked(at("9.9.9.9"), False, 2.0)
    assert offers.told() == ()
    offers.looked(at("9.9.9.9"), True, 3.0)
    assert offers.told() == (at("9.9.9.9"),)
    offers.keep({NodeId("n0")})  # its node is no member any more
    assert offers.told() == ()
    offers.looked(at("8.8.8.8"), True, 3.0)
    offers.offer(NodeId("n0"), "", [], 4.0)  # it relays no more
    assert offers.told() == ()


@pytest.mark.parametrize(
    ("multiaddr", "hosts", "why"),
    [
        (at("8.8.4.4"), ["8.8.8.8", "9.9.9.9"], "not where it comes from"),
        (at("192.168.1.1"), ["192.168.1.1"], "in a private network"),
        (at("169.254.169.254"), ["169.254.169.254"], "in a private network"),
        (at("127.0.0.1"), ["8.8.8.8.relayed"], "not where it comes from"),
        (f"/dns4/router.lan/tcp/80/p2p/{PEER}", ["router.lan"], "no multiaddr with an IP address"),
        (at("8.8.8.8", 0), ["8.8.8.8"], "no multiaddr"),
        ("/ip4/8.8.8.8/tcp/80", ["8.8.8.8"], "no multiaddr"),
    ],
)
def test_a_member_sends_nobody_to_another_machine_than_its_own(multiaddr: str, hosts: list[str], why: str) -> None:
    offers = RelayOffers(private=False)
    assert why in offers.offer(NodeId("n1"), multiaddr, hosts, 0.0)
    assert offers.due(0.0) == []


def test_few_relays_are_told_and_one_of_a_network_and_the_next_takes_the_place_of_who_goes() -> None:
    hosts = [*(f"8.8.8.{i}" for i in range(1, 6)), *(f"9.9.{i}.9" for i in range(6))]
    offers = offered(*hosts)
    for host in hosts:
        offers.looked(at(host), True, 0.0)
    assert offers.told() == tuple(map(at, ["8.8.8.1", "9.9.0.9", "9.9.1.9", "9.9.2.9"]))
    assert len(offers.told()) == MAX_RELAYS
    offers.keep({NodeId(f"n{number}") for number in range(1, len(hosts))})
    assert offers.told() == tuple(map(at, ["8.8.8.2", "9.9.0.9", "9.9.1.9", "9.9.2.9"]))


def test_no_more_offers_are_looked_at_than_there_may_be() -> None:
    offers = offered(*(f"8.8.{i}.8" for i in range(MAX_OFFERS)))
    assert "offer one already" in offers.offer(NodeId("late"), at("9.9.9.9"), ["9.9.9.9"], 0.0)


def test_a_gateways_note_counts_while_that_writes_it_and_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert read_gateways(tmp_path) == ()
    write_gateways(tmp_path, "one", [at("8.8.8.8"), at("9.9.9.9")])
    write_gateways(tmp_path, "two", [at("9.9.9.9"), at("1.1.1.1")])
    (tmp_path / "gateways" / "three").write_text('["/ip4/none"]')
    (tmp_path / "gateways" / "four").write_bytes(b"\xff")
    assert read_gateways(tmp_path) == (at("8.8.8.8"), at("9.9.9.9"), at("1.1.1.1"))
    os.utime(tmp_path / "gateways" / "one", (0, 0))
    assert read_gateways(tmp_path) == (at("9.9.9.9"), at("1.1.1.1"))


def test_members_learn_of_the_operators_gateways_and_of_each_others_relays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_gateways, "POLL_SECONDS", 0.01)

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await writer.drain()
        writer.close()

    async def story() -> None:
        async with coordinator(tmp_path, CONFIG) as c:
            c.plane.gateways.describe(GatewayNote("reef", "8.8.8.8:4700", "/entrance", 1))
            write_gateways(tmp_path, "one", [at("8.8.8.8")])
            await until(lambda: c.plane.gateways.told)
            ada, bo = c.node(), c.node()
            assert list((await ada.join()).gateways) == [at("8.8.8.8")]
            await bo.join()
            server = await asyncio.start_server(greet, "127.0.0.1", 0)
            relay = at("127.0.0.1", server.sockets[0].getsockname()[1])
            assert list((await ada.heartbeat(relay=relay)).gateways) == [at("8.8.8.8")]
            await until(lambda: len(c.plane.gateways.told) == 2)
            assert list((await bo.heartbeat()).gateways) == [at("8.8.8.8"), relay]
            assert (await bo.heartbeat(relay=at("8.8.4.4"))).known  # it lives, whatever it says
            await until(lambda: (note := read_note(tmp_path)) is not None and note.relays == (relay,))
            await ada.heartbeat()
            await until(lambda: len(c.plane.gateways.told) == 1)
            server.close()

    asyncio.run(story())
