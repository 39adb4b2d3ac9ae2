"""`atoll gateway`."""

import asyncio
from pathlib import Path

import click
import msgspec

from atoll.comm import log
from atoll.comm.descriptors import raise_limit
from atoll.comm.errors import AtollError, ConfigError
from atoll.comm.extras import demand
from atoll.comm.peer_names import host_and_port, peer_of_multiaddr
from atoll.node.gateway.stream_header import RelayLimits

STATE_DIR = Path("~/.atoll/gateway")
MEGABIT = 125e3  # bytes


@click.command()
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    default=STATE_DIR,
    show_default=True,
    help="The gateway's own folder: its key, and what it knows.",
)
@click.option(
    "--listen",
    multiple=True,
    metavar="MULTIADDR",
    help="Where others dial it, such as /ip4/0.0.0.0/tcp/4701; not given: nobody can.",
)
@click.option("--announce", multiple=True, metavar="MULTIADDR", help="As others dial it, if it is not --listen.")
@click.option(
    "--peer", "peers", multiple=True, metavar="MULTIADDR", help="A gateway to begin with, with its /p2p/."
)
@click.option(
    "--coordinator",
    type=click.Path(path_type=Path),
    help="State directory of the coordinator beside it, which nodes are to find and reach.",
)
@click.option("--relay", is_flag=True, help="Pass on what others send each other who cannot dial each other.")
@click.option(
    "--relay-streams",
    default=256,
    show_default=True,
    type=click.IntRange(1, 65536),
    help="Streams that it passes on at once.",
)
@click.option(
    "--relay-rate",
    default=0.0,
    show_default="all there is",
    type=click.FloatRange(0.0, 1e6),
    help="Mbit/s that it passes on, of all together.",
)
@click.option(
    "--observer",
    default=0,
    show_default="the one behind --listen's",
    type=click.IntRange(-1, 65535),
    help="Port of a relay where it tells peers as what it sees them, so that they may do without; -1: none.",
)
@click.option("--wire", default=-1, hidden=True, help="Descriptor of the socket to a daemon.")
@click.option("--entrance", default=-1, hidden=True, help="Descriptor of the socket from where it is to lead on.")
@log.level_option
@log.log_file_option
@click.option("--log-setup", default="", hidden=True, help="How the daemon wants it to log, as JSON.")
def gateway(
    state_dir: Path,
    listen: tuple[str, ...],
    announce: tuple[str, ...],
    peers: tuple[str, ...],
    coordinator: Path | None,
    relay: bool,
    relay_streams: int,
    relay_rate: float,
    observer: int,
    wire: int,
    entrance: int,
    log_level: str,
    log_file: str,
    log_setup: str,
) -> None:
    """Make members and coordinators reachable that cannot be dialled, by libp2p.

    A public machine runs it with --listen, and with --relay for those who cannot dial each other. Beside a
    coordinator it runs with --coordinator; `atoll invite --dht MULTIADDR` then makes URLs that name a gateway,
    with which nodes find the coordinator wherever it moves. A node that joins by such a URL starts its own.
    """
    for peer in peers:
        try:
            peer_of_multiaddr(peer)
        except ValueError as error:
            raise ConfigError(f"--peer: {error}") from None
    for multiaddr in (*listen, *announce):
        try:
            host_and_port(multiaddr)
        except ValueError as error:
            raise ConfigError(f"--listen, --announce: {error}") from None
    if relay and not listen:
        raise ConfigError("--relay needs --listen: others have to be able to dial a relay")
    if announce and not listen:
        raise ConfigError("--announce needs --listen")
    logs = log.LogSetup("gateway", log_level, log_file)
    # First: a node's gateway has no terminal to say what it lacks.
    log.setup(msgspec.json.decode(log_setup, type=log.LogSetup) if log_setup else logs)
    demand("atoll gateway", "hivemind")
    raise_limit()
    from atoll.node.gateway.gateway import Gateway, GatewayOptions

    streams = relay_streams if relay else 0
    options = GatewayOptions(
        state_dir.expanduser().absolute(),
        listen,
        announce,
        peers,
        coordinator.expanduser() if coordinator is not None else None,
        RelayLimits(streams=streams, rate=relay_rate * MEGABIT),
        observer,
        wire,
        entrance,
    )
    try:
        asyncio.run(Gateway(options).run())
    except* AtollError as errors:
        raise _first(errors) from None


def _first(group: BaseExceptionGroup[AtollError]) -> AtollError:
    for error in group.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    return ConfigError(str(group))
