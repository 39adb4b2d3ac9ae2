"""Peers have one name each, and what is no name is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.comm.peer_names import host_of_peer, is_peer_host, peer_of_host, peer_of_multiaddr

RSA = "QmZDDvMFbXfGNj3cyFPNp7RHWPMPnSGxeEsGdMrrcVYZuh"
ED25519 = "12D3KooWEmQcoZWHUbkKswLwCvaZ7kp6mEZ7AQca18HovsZnoAEo"
PEERS = st.one_of(
    st.binary(min_size=32, max_size=32).map(lambda key: b"\x12\x20" + key),
    st.binary(min_size=36, max_size=36).map(lambda key: b"\x00\x24" + key),
)


@given(PEERS)
def test_a_peers_host_is_read_back_and_is_a_host(peer: bytes) -> None:
    host = host_of_peer(peer)
    assert peer_of_host(host) == peer and is_peer_host(host)
    assert host == host.lower() and max(map(len, host.split("."))) <= 63


@pytest.mark.parametrize("name", [RSA, ED25519])
def test_a_multiaddr_names_its_peer(name: str) -> None:
    peer = peer_of_multiaddr(f"/dns/gateway.example.org/tcp/4701/p2p/{name}")
    assert len(peer) == (34 if name == RSA else 38)
    assert peer_of_multiaddr(f"/ip6/2001:db8::1/tcp/1/p2p/{name}") == peer


@given(st.one_of(st.text(), st.from_regex(r"[a-z2-7]{1,70}\.p2p")))
def test_any_text_names_one_peer_or_none(text: str) -> None:
    for read in (peer_of_host, peer_of_multiaddr):
        try:
            peer = read(text)
        except ValueError:
            continue
        assert read is peer_of_multiaddr or host_of_peer(peer) == text
