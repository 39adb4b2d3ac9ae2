"""The volunteer's commands, `atoll node join|status|top|pause|resume|limits|finish|leave`, and those that install
a node and remove it."""

import asyncio
import json
import os
import shutil
import socket
import sys
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from atoll.comm import log
from atoll.comm.descriptors import raise_limit
from atoll.comm.durations import duration
from atoll.comm.errors import AtollError, ConfigError, ResourceError, atoll_error
from atoll.comm.extras import demand
from atoll.comm.invite import Invite, parse, split_host_port
from atoll.comm.options import json_option
from atoll.comm.terminal import say
from atoll.comm.xdg import default_state_dir
from atoll.node.config import Device, NodeConfig
from atoll.node.settings import load_settings
from atoll.node.state_files import SESSION
from atoll.node.status_words import limit_words, status_lines

VERIFIER = "verifier"  # the role
COMMAND = "atoll.node.command"  # key of a context's meta: what is behind --
state_dir_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    default=lambda: default_state_dir("node"),
    show_default="~/.local/state/atoll/node, or ~/.atoll/node where it is",
    envvar="ATOLL_NODE_STATE_DIR",
    help="The node's own folder.",
)


@dataclass(frozen=True, slots=True)
class CheckedJoin:
    """What `atoll node join` was told, and found to be possible."""

    invite: Invite
    url: str  # never @FILE
    config: NodeConfig
    state_dir: Path  # absolute
    listen: str
    command: tuple[str, ...]  # the volunteer's own trainer; empty: the built-in one


@click.group()
def node() -> None:
    """Take part in a run with this machine."""


class CommandBehindDashes(click.Command):
    """A command whose last part, behind `--`, is another command: `ctx.meta[COMMAND]`, as it stands there."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[COMMAND] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        pieces = [*self.collect_usage_pieces(ctx), "[-- COMMAND ...]"]
        formatter.write_usage(ctx.command_path, " ".join(pieces))


@node.command(cls=CommandBehindDashes)
@click.argument("url")
@click.argument("overrides", nargs=-1)
@state_dir_option
@click.option(
    "--listen", default="0.0.0.0:0", show_default=True, help="HOST:PORT of the data plane; port 0: any free."
)
@click.option("--advertise", default="", help="HOST:PORT that peers dial, when it is not the one listened on.")
@click.option("--leaf", is_flag=True, help="Peers cannot dial this machine (NAT, firewall): it dials them.")
@click.option(
    "--role",
    type=click.Choice(["trainer", "reducer", VERIFIER]),
    default="trainer",
    show_default=True,
    help="A reducer has no trainer: it only adds up the others' work, where they cannot dial each other. "
    "A verifier, whom the operator trusts, replays others' rounds and contributes nothing.",
)
@click.option(
    "--name", default="", show_default="as before, or the host's", help="The node's name, shown to everybody."
)
@click.option(
    "--patience",
    default=60.0,
    show_default=True,
    type=click.FloatRange(0.0, 1e9),
    help="Seconds to try for a coordinator at first.",
)
@click.option("--no-checks", is_flag=True, help="Do not look at this machine and at the way there first.")
@click.option(
    "--metrics",
    default="",
    metavar="[HOST:]PORT",
    help="Serve /metrics for Prometheus there; without HOST on 127.0.0.1. Not served unless given.",
)
@log.level_option
@log.log_file_option
@click.option(
    "--detach", is_flag=True, help="Run in the background, log to STATE_DIR/logs; return when it has joined."
)
@click.pass_context
def join(
    context: click.Context,
    url: str,
    overrides: tuple[str, ...],
    state_dir: Path,
    listen: str,
    advertise: str,
    leaf: bool,
    role: str,
    name: str,
    patience: float,
    no_checks: bool,
    metrics: str,
    log_level: str,
    log_file: str,
    detach: bool,
) -> None:
    """Join the run behind URL and train until it is finished.

    @FILE in place of URL reads it from a file, so that the token does not show in the list of processes.
    Settings of this machine are read from STATE_DIR/node.yaml and from key=value OVERRIDES:
    device, ranks, threads, bf16, compile, micro_batch, checkpointing, data, cache (20 GB), model, base, titan;
    machines, machines_min, rendezvous; max_restarts (5), copy_interval (60 s); upload, download (Mbit/s), streams,
    congestion; relay, relay_port, relay_streams, relay_rate (Mbit/s); durable, disk (GB), files, stores; hours,
    daily, monthly (GB), battery, metered, idle_only, memory (GB), gpu_temperature, gpu_duty. A command behind --
    takes neither device=cuda (or mps) nor ranks: it has its own. Limits, from hours on, are explained by
    `atoll node limits --help`.

    COMMAND trains in the place of the built-in trainer: `-- python train.py`, or `-- torchrun --standalone
    --nproc-per-node 8 train.py`, a script that calls atoll.node.participant.participate.
    """
    if not detach:
        # First: a service may have no other place for a sentence.
        log.setup(log.LogSetup("node", log_level, log_file))
    checked = check_join(context)
    invite, config, command = checked.invite, checked.config, checked.command
    log.about(run=invite.run)
    state_dir, listen = checked.state_dir, checked.listen
    demand("a node", *(["numba"] if role == "reducer" else ["torch", "numba"]))
    from atoll.node.daemon.daemon import Daemon
    from atoll.node.daemon.join_checks import log_machine
    from atoll.node.daemon.reducer import Reducer
    from atoll.node.daemon.state_dir import JoinOptions, load_name

    if detach:
        _detach(context, checked)
        return
    name = name or load_name(state_dir / SESSION, invite) or socket.gethostname()
    try:
        trains_as = VERIFIER if role == VERIFIER else ""
        looks = not no_checks
        options = JoinOptions(
            state_dir, listen, advertise, name, patience, leaf, command, trains_as, looks, metrics
        )
        life = Reducer if role == "reducer" else Daemon
        raise_limit()
        if looks:
            log_machine(config, state_dir, leaf)
        asyncio.run(life(invite, config, options).run())
    except* AtollError as errors:
        raise atoll_error(errors) or errors from None


def _detach(context: click.Context, checked: CheckedJoin) -> None:
    from atoll.node.daemon.control_socket import refuse_second
    from atoll.node.service.detach import LOG_FILE, start_detached

    refuse_second(checked.state_dir)
    log_file = Path(context.params["log_file"] or checked.state_dir / LOG_FILE).absolute()
    words = _words(context, checked, frozenset({"detach", "log_file"}))
    at = words.index("--") if "--" in words else len(words)
    process = start_detached([*words[:at], f"--log-file={log_file}", *words[at:]], log_file, os.environ)
    click.echo(f"the node has joined and runs in the background (process {process}); its log is {log_file}")


def _words(context: click.Context, checked: CheckedJoin, without: frozenset[str]) -> list[str]:
    from atoll.node.service.join_command import join_words, keep_url

    url_file = keep_url(checked.state_dir, checked.url)
    return join_words(context, url_file, checked.state_dir, checked.command, os.environ, without)


@click.pass_context
def _install_service(context: click.Context, /, now: bool, **_: Any) -> None:
    """Have this machine join the run behind URL by itself, now or at the next login, and again after a crash.

    The options are those of `atoll node join`; the URL is kept in a file that only you can read. On Linux this is
    a service of your systemd, on macOS a launch agent; no root is needed. A service that is there already is
    replaced.
    """
    from atoll.node.daemon.control_socket import command, refuse_second, runs
    from atoll.node.service.detach import LOG_FILE
    from atoll.node.service.installer import KEPT_VARIABLES, Manager, service_name
    from atoll.node.service.systemd import Service

    checked, manager = check_join(context), Manager()
    manager.check()
    name = service_name(checked.state_dir)
    if now and not manager.file(name).exists():  # the service's own is started anew
        refuse_second(checked.state_dir)
    words = _words(context, checked, frozenset({"now"}))
    kept = {variable: os.environ[variable] for variable in KEPT_VARIABLES if os.environ.get(variable)}
    service = Service(name, tuple(words), kept, Path.cwd(), checked.state_dir / LOG_FILE)
    click.echo(f"wrote {manager.write(service)}")
    if now:
        manager.start(name)
        click.echo("the node has joined and runs as a service")
    elif runs(checked.state_dir):
        ending = command("finish", checked.state_dir)
        where = f"a node runs already in {checked.state_dir}"
        click.echo(f"{where}: end it first (`{ending}`), the service cannot run beside it")
    for line in manager.next_steps(name, now):
        click.echo(line)


node.add_command(
    CommandBehindDashes(
        "install-service",
        callback=_install_service,
        help=_install_service.__doc__,
        params=[
            *(copy(param) for param in join.params if param.name != "detach"),  # its variables have other names
            click.Option(["--now"], is_flag=True, help="Start it, too; return when it has joined."),
        ],
    )
)


@node.command()
@state_dir_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def uninstall(state_dir: Path, yes: bool) -> None:
    """Let the daemon leave, and remove everything of this node but the program: service, state, settings, cache.

    What it trained and has not contributed is lost; its name and its part in the run stay where they are.
    """
    from atoll.node.service.uninstall import Installed, NotConfirmed, check_removable
    from atoll.node.service.uninstall import uninstall as remove

    found = Installed(state_dir.expanduser().absolute())
    check_removable(found)
    for line in found.lines():
        say(line)
    if not yes and not _agrees("Remove all of this?"):
        raise NotConfirmed("nothing was removed")
    for line in remove(found):
        say(line)
    click.echo("the program is still there: remove its clone or virtual environment, or `pip uninstall atoll`")


def _agrees(question: str) -> bool:
    """Whether the question is answered with yes: who ends it, or is not there, does not."""
    try:
        return click.confirm(question)
    except click.Abort:
        click.echo()
        return False


@node.command()
@click.argument("host", metavar="HOST:PORT")
@click.argument("overrides", nargs=-1)
@state_dir_option
@click.option(
    "--patience",
    default=600.0,
    show_default=True,
    type=click.FloatRange(0.0, 1e9),
    help="Seconds to wait for the node's machine.",
)
@log.level_option
@log.log_file_option
def worker(
    host: str, overrides: tuple[str, ...], state_dir: Path, patience: float, log_level: str, log_file: str
) -> None:
    """Give this machine to the trainer of a node of several machines.

    HOST:PORT is the `rendezvous` that the node was joined with, on the machine that has its daemon. Settings of
    this machine (device, ranks, threads, bf16, compile, data, model) are read as `atoll node join` reads them. The
    machines of a node trust each other: use a private network.
    """
    log.setup(log.LogSetup("worker", log_level, log_file))
    state_dir = state_dir.expanduser()
    config = load_settings(state_dir, overrides)
    demand("a node", "torch", "numba")
    from atoll.node.daemon.worker import Worker

    asyncio.run(Worker(host, config, state_dir, patience).run())


@node.command()
@state_dir_option
@json_option
def status(state_dir: Path, as_json: bool) -> None:
    """Show what the daemon of this machine is doing."""
    from atoll.node.daemon.control_socket import ask

    said = ask(state_dir.expanduser(), "status")
    if as_json:
        click.echo(json.dumps(said))
        return
    if away := said.pop("coordinator_away_s", 0):
        click.echo(f"the coordinator has not answered for {away:,.0f} s; what it told before that:")
    for label, value in status_lines(said):
        say(f"{label:>18}  {value}")


@node.command()
@state_dir_option
def top(state_dir: Path) -> None:
    """Watch the daemon of this machine in a terminal: its progress, the run's, the exchange, what counted.

    The view is made anew each second; q ends it, and not the daemon.
    """
    demand("atoll node top", "textual")
    from atoll.node.daemon.control_socket import ask
    from atoll.node.top import Top

    drawn_on = sys.__stdout__ if sys.platform == "win32" else sys.__stderr__  # by its library
    streams = (sys.stdin, drawn_on)
    if "TEXTUAL_DRIVER" not in os.environ and not all(of is not None and of.isatty() for of in streams):
        raise ConfigError(
            "atoll node top needs a terminal for keys and picture: without one see `atoll node status`"
        )
    folder = state_dir.expanduser()
    Top(lambda: ask(folder, "status")).run()


@node.command()
@state_dir_option
def leave(state_dir: Path) -> None:
    """Let the daemon leave the run and stop, at once: what it has trained in this round is lost."""
    from atoll.node.daemon.control_socket import ask

    ask(state_dir.expanduser(), "leave")
    click.echo("the node leaves the run")


def check_join(context: click.Context) -> CheckedJoin:
    """The parameters of a join. Raises `ConfigError`, `ResourceError`."""
    given = context.params
    command, leaf, advertise, role = context.meta.get(COMMAND), given["leaf"], given["advertise"], given["role"]
    if command is not None:
        check_command(command, role)
    url = text_of(given["url"])
    invite = parse(url)
    listen = given["listen"]
    split_host_port(listen, "--listen")
    if leaf and (advertise or role != "trainer"):
        other = "--advertise" if advertise else f"--role {role}"
        raise ConfigError(
            f"--leaf says that nobody can dial this machine, {other} needs it to be dialled: give one"
        )
    if leaf:
        listen = "127.0.0.1:0"
    if advertise:
        split_host_port(advertise, "--advertise")
    if metrics := given["metrics"]:
        split_host_port(metrics if ":" in metrics else f":{metrics}", "--metrics")
    state_dir = given["state_dir"].expanduser().absolute()  # a script may go elsewhere
    if state_dir.exists() and not state_dir.is_dir():
        raise ResourceError(f"cannot use the state directory {state_dir}: it is a file; give another --state-dir")
    config = load_settings(state_dir, given["overrides"])
    if command and config.machines > 1:
        raise ConfigError(
            f"machines is {config.machines} and there is a command behind --: a script of several machines is "
            "started on them by torchrun, srun or the like, not by atoll node worker"
        )
    if command and (config.device in (Device.CUDA, Device.MPS) or config.ranks):
        raise ConfigError(
            "`device=cuda`, `device=mps` and `ranks` are of the built-in trainer, there is a command behind --: "
            "a script chooses its devices itself, torchrun starts its ranks (`device=cpu` hides the GPUs from it)"
        )
    return CheckedJoin(invite, url, config, state_dir, listen, command or ())


@node.command()
@state_dir_option
def finish(state_dir: Path) -> None:
    """Let the daemon leave the run and stop, once what it has trained is committed."""
    from atoll.node.daemon.control_socket import ask

    ask(state_dir.expanduser(), "finish")
    click.echo("the node leaves the run once what it has trained is committed")


@node.command()
@click.option("--for", "span", default="", help="For how long: 90s, 30m, 2h, 7d; else until it is resumed.")
@state_dir_option
def pause(span: str, state_dir: Path) -> None:
    """Let the machine train no more for now. What it has trained counts; it stays a member of the run."""
    from atoll.node.daemon.control_socket import ask

    seconds = (str(duration("--for", span)),) if span else ()
    said = ask(state_dir.expanduser(), "pause", *seconds)
    click.echo(f"the node pauses: {said['paused']}")


@node.command()
@state_dir_option
def resume(state_dir: Path) -> None:
    """Let the machine train again, as far as its limits do."""
    from atoll.node.daemon.control_socket import ask

    said = ask(state_dir.expanduser(), "resume")
    click.echo(f"the node stays paused: {said['paused']}" if said["paused"] else "the node trains again")


@node.command()
@click.argument("settings", nargs=-1, metavar="[KEY=VALUE]...")
@state_dir_option
@json_option
def limits(settings: tuple[str, ...], state_dir: Path, as_json: bool) -> None:
    """Show the limits of the running node, or change some of them. What is told here is kept, above
    STATE_DIR/node.yaml and the command line, until `KEY=` takes it back.

    hours=22:00-07:00 of the day; daily=, monthly= GB of the exchange with peers, up and down; upload=, download=
    Mbit/s; battery=false, metered=false, idle_only=true; memory= GB; gpu_temperature= degrees Celsius; gpu_duty=
    share of the time, 0.01 to 1, and threads=, both from the next round on.
    """
    from atoll.node.daemon.control_socket import ask

    said = ask(state_dir.expanduser(), "limits", *settings)
    if as_json:
        click.echo(json.dumps(said))
        return
    for key, value in said["limits"].items():
        click.echo(f"{key:>18}  {limit_words(key, value)}{'  (told to the node)' * (key in said['told'])}")
    if said["paused"]:
        click.echo(f"the node pauses: {said['paused']}")


def check_command(command: tuple[str, ...], role: str) -> None:
    """Raise `ConfigError` for a trainer's command that cannot be one."""
    if not command or not command[0]:
        raise ConfigError("there is no command behind --: write `-- python train.py`")
    if role == "reducer":
        raise ConfigError("--role reducer has no trainer, and a command behind -- is one: give one of them")
    if shutil.which(command[0]) is None:
        where = "there is no such file" if "/" in command[0] else "there is none in the folders of PATH"
        raise ConfigError(f"cannot start the command {command[0]}: {where}, or it cannot be executed")


def invite_of(url: str) -> Invite:
    """The invite of a join URL as the command line has it, which may be @FILE. Raises `ConfigError`."""
    return parse(text_of(url))


def text_of(url: str) -> str:
    """A join URL as it is in the file, where the command line has @FILE. Raises `ConfigError`."""
    if not url.startswith("@"):
        return url
    try:
        return Path(url[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot read the join URL from {url[1:]} ({why}): give the URL, or @ and a file that has it"
        ) from None
