"""Join URLs are read back as they were written, and anything else is explained."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.comm.errors import ConfigError
from atoll.comm.ids import NO_PIN, Pin
from atoll.comm.invite import Invite, parse, split_host_port
from atoll.comm.transport.certificates import pin_of


@pytest.mark.parametrize("address", ["10.0.0.1:4700", "[2001:db8::1]:4700", "coordinator.example.org:1"])
def test_a_url_is_read_back_as_it_was_written(address: str) -> None:
    invite = Invite(address, "run with / and space", "a-token_0")
    assert parse(str(invite)) == invite
    pinned = replace(invite, pin=pin_of(b"a certificate"))
    assert parse(str(pinned)) == pinned and len(str(pinned)) - len(str(invite)) == 53


@pytest.mark.parametrize("pin", ["", "a", "a" * 51, "1" * 52, "a" * 53])
def test_a_pin_that_was_cut_or_mistyped_is_explained(pin: str) -> None:
    with pytest.raises(ConfigError, match="its pin has not 52 letters and digits"):
        parse(f"atoll://token:{pin}@host:1/run")


@pytest.mark.parametrize(
    "url", ["", "http://t@h:1/r", "atoll://h:1/r", "atoll://t@h/r", "atoll://t@h:1", "atoll://t@h:x/r"]
)
def test_anything_else_is_explained(url: str) -> None:
    with pytest.raises(ConfigError, match="atoll://TOKEN:PIN@HOST:PORT/RUN"):
        parse(url)


@pytest.mark.parametrize("text", ["4700", "host", "host:", "host:70000", "host:-1"])
def test_an_address_without_a_port_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--listen is"):
        split_host_port(text, "--listen")


PLACE = "/ip4/203.0.113.7/tcp/4701/p2p/12D3KooWEmQcoZWHUbkKswLwCvaZ7kp6mEZ7AQca18HovsZnoAEo"


def test_a_url_may_name_a_gateway_that_finds_the_coordinator() -> None:
    invite = Invite(f"dht{PLACE}", "run with / and space", "a-token_0", pin_of(b"a certificate"))
    assert parse(str(invite)) == invite and invite.rendezvous == (PLACE,)
    several = replace(invite, address=f"dht{PLACE},{PLACE}")
    assert parse(str(several)) == several and several.rendezvous == (PLACE, PLACE)
    assert Invite("dht:1", "run", "t").rendezvous == ()  # a host of that name
    with pytest.raises(ConfigError, match="it has no pin"):
        parse(str(replace(invite, pin=NO_PIN)))


@pytest.mark.parametrize(
    "place", ["", "/", "/ip4/1.2.3.4", PLACE[:-1], PLACE.replace("tcp", "udp"), PLACE + "/x", PLACE + ","]
)
def test_a_gateway_that_is_none_is_explained(place: str) -> None:
    with pytest.raises(ConfigError, match="is not a join URL"):
        parse(f"atoll://token:{pin_of(b'a certificate')}@dht{place}/run")


TOKENS = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_", min_size=1, max_size=43)
HOSTS = st.sampled_from(["10.0.0.1", "[2001:db8::1]", "coordinator.example.org", "localhost"])
PINS = st.sampled_from(["", *(pin_of(bytes([i])) for i in range(4))])


@given(HOSTS, st.integers(0, 65535), st.text(st.characters(exclude_categories=["Cs"]), min_size=1), TOKENS, PINS)
def test_any_invite_is_read_back_as_it_was_written(host: str, port: int, run: str, token: str, pin: str) -> None:
    invite = Invite(f"{host}:{port}", run, token, Pin(pin))
    assert parse(str(invite)) == invite


@given(st.one_of(st.text(), st.from_regex(r"atoll://[^@]*@[^/]*/.*")))
def test_any_text_is_an_invite_that_can_be_written_down_or_explained(text: str) -> None:
    try:
        invite = parse(text)
    except ConfigError as error:
        assert "atoll://TOKEN:PIN@HOST:PORT/RUN" in str(error)
    else:
        assert parse(str(invite)) == invite
