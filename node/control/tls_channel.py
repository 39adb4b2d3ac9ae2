"""The way to the coordinator: a gRPC channel that trusts the one certificate whose pin the join URL carries.

The certificate itself comes from the coordinator, over a first connection that nothing is said on. From then on
gRPC refuses any other, at each reconnection too. Without a pin the channel is not encrypted.
"""

import asyncio
import ssl

import grpc

from atoll.comm.errors import Refused, Unreachable
from atoll.comm.invite import Invite, split_host_port
from atoll.comm.transport.certificates import NAME, pin_of
from atoll.comm.transport.connection import os_reason

DEADLINE = 10.0  # seconds for the connection and its handshake
ASK = "ask the operator for a new join URL"


class OtherCoordinator(Refused):
    """What answers at the coordinator's address is not the coordinator of the join URL's pin."""


async def channel(invite: Invite, options: list[tuple[str, int]]) -> grpc.aio.Channel:
    """A channel to the invite's coordinator, over TLS if its URL has a pin. Raises, if so, `OtherCoordinator`,
    `Unreachable` if nothing answers there."""
    if not invite.pin:
        return grpc.aio.insecure_channel(invite.address, options=options)
    shown = await _certificate(invite.address)
    if shown is None:
        raise OtherCoordinator(
            f"the coordinator at {invite.address} does not speak TLS and the join URL has a pin: "
            f"is the port right (its page has another)? Else {ASK}"
        )
    if pin_of(shown) != invite.pin:
        raise OtherCoordinator(
            f"what answers at {invite.address} shows another certificate than the join URL's: another coordinator "
            f"runs there now, or somebody is in between; {ASK}"
        )
    credentials = grpc.ssl_channel_credentials(ssl.DER_cert_to_PEM_cert(shown).encode())
    named = [*options, ("grpc.ssl_target_name_override", NAME)]
    return grpc.aio.secure_channel(invite.address, credentials, options=named)


async def check_plain(invite: Invite) -> None:
    """Raise `Refused` if the coordinator speaks TLS: why a call failed on a channel without it."""
    try:
        shown = await _certificate(invite.address)
    except Unreachable:
        return
    if shown is not None:
        raise Refused(f"the coordinator at {invite.address} speaks TLS and the join URL has no pin: {ASK}")


async def _certificate(address: str) -> bytes | None:
    """What is shown there (DER); None: it does not speak TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    host, port = split_host_port(address, "the join URL's address")
    try:
        async with asyncio.timeout(DEADLINE):
            _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=NAME)
    except TimeoutError:
        raise Unreachable(f"nothing came from {address} for {DEADLINE:g} s") from None
    except ssl.SSLEOFError as error:
        raise Unreachable(f"{address} ended the connection") from error
    except ssl.SSLError:
        return None
    except OSError as error:
        raise Unreachable(os_reason(error)) from None
    try:
        return writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
    finally:
        writer.transport.abort()
