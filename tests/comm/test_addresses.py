"""Which addresses may be dialled that somebody else has named."""

import asyncio
import socket
import threading
from typing import Any

import pytest

from atoll.comm.addresses import OwnNetwork, is_local_host, is_own_network, may_dial, resolve

PUBLIC = ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")
PRIVATE: tuple[str, ...] = (
    "127.0.0.1",
    "10.1.2.3",
    "192.168.0.1",
    "172.16.0.1",
    "::1",
    "fd00::1",
    "::ffff:127.0.0.1",
    "100.64.0.1",
)
PRIVATE += (
    "fd00:ec2::253",
    "64:ff9b::192.168.1.1",
    "2002:a00:1::",
    "64:ff9b::7f00:1",
    "2002:7f00:1::",
)  # translated to 127.0.0.1
NEVER = (
    "169.254.169.254",
    "fe80::1",
    "fe80::1%eth0",
    "224.0.0.1",
    "ff02::1",
    "::ffff:169.254.169.254",
    "fd00:ec2::254",
)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_may_be_dialled(address: str) -> None:
    assert not is_own_network(address) and may_dial(address, private=False) and may_dial(address, private=True)


@pytest.mark.parametrize("address", PRIVATE)
def test_a_private_address_may_be_dialled_in_a_private_run_alone(address: str) -> None:
    assert is_own_network(address) and not may_dial(address, private=False) and may_dial(address, private=True)


@pytest.mark.parametrize("address", NEVER)
def test_a_link_local_address_and_one_of_many_machines_is_never_dialled(address: str) -> None:
    assert not may_dial(address, private=False) and not may_dial(address, private=True)


def test_of_a_names_addresses_those_are_dialled_that_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        told = ["10.0.0.1", "8.8.8.8"]

        def lookup(host: str, port: int, **options: Any) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in told]

        monkeypatch.setattr(socket, "getaddrinfo", lookup)
        assert await resolve("there", 7, private=False) == [(socket.AF_INET, ("8.8.8.8", 7))]
        assert [address[0] for _, address in await resolve("there", 7, private=True)] == told
        told.remove("8.8.8.8")
        with pytest.raises(OwnNetwork, match=r"there leads into a private network \(10\.0\.0\.1\)"):
            await resolve("there", 7, private=False)

    asyncio.run(story())


def test_names_that_nobody_resolves_hold_up_neither_addresses_nor_other_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered, real = threading.Event(), socket.getaddrinfo

    def lookup(host: str, port: int, **options: Any) -> list[Any]:
        if host.endswith(".invalid"):
            answered.wait()
            raise OSError("no such name")
        return real(host, port, **options)

    async def story() -> None:
        names = [asyncio.ensure_future(resolve(f"n{i}.invalid", 7, private=False)) for i in range(50)]
        await asyncio.sleep(0)
        try:
            assert await asyncio.to_thread(lambda: "done") == "done"
            assert [address[0] for _, address in await resolve("8.8.8.8", 7, private=False)] == ["8.8.8.8"]
            assert not any(name.done() for name in names)
        finally:
            answered.set()
        assert all(isinstance(found, OSError) for found in await asyncio.gather(*names, return_exceptions=True))

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    asyncio.run(story())


def test_this_machine_is_local_and_a_name_that_leads_nowhere_is_not() -> None:
    assert is_local_host("127.0.0.1") and is_local_host("::1") and not is_local_host("8.8.8.8")
    assert not is_local_host("nowhere.invalid")
