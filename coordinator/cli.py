"""The operator's commands: `atoll coordinator start|check`, `atoll invite`, `atoll status`, `atoll replay`,
`atoll contributions`, `atoll blame`, `atoll ban`, `atoll pardon`."""

import asyncio
import json
import logging
import math
import shlex
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.comm import log
from atoll.comm.config.beginning import beginning, check_beginning
from atoll.comm.config.data import DataKind
from atoll.comm.config.engine import Engine
from atoll.comm.config.load import load_run, to_yaml
from atoll.comm.config.methods import check_real, simulated_only, undefended
from atoll.comm.config.round_time import exchanged_bytes, flops_per_round, tokens_per_step
from atoll.comm.config.run import RunConfig
from atoll.comm.config.shipped import method_file, run_file
from atoll.comm.durations import duration
from atoll.comm.errors import AtollError, ConfigError, Unreachable
from atoll.comm.options import json_option
from atoll.comm.peer_names import peer_of_multiaddr
from atoll.comm.terminal import plural, say, show_table
from atoll.comm.xdg import default_state_dir

if TYPE_CHECKING:
    from atoll.coordinator.monitor.blame import Blame

logger = logging.getLogger(__name__)
PAGE_ADDRESS, REPLAY_ADDRESS = "127.0.0.1:4701", "127.0.0.1:4702"
method_option = click.option(
    "--method", default="", help="A method's settings over RUN_YAML: a name, such as diloco, or a .yaml file."
)
state_dir_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    default=lambda: default_state_dir("coordinator"),
    show_default="~/.local/state/atoll/coordinator, or ~/.atoll/coordinator where it is",
    help="The coordinator's own folder, with the journal.",
)
LINKS = {"100 Mbit/s": 1e8, "500 Mbit/s": 5e8, "1 Gbit/s": 1e9}  # bits a second
PETAFLOPS = 1e15  # FLOP/s
ACCOUNTS_SHOWN = 50  # owners and nodes that `atoll contributions` shows


@click.group()
def coordinator() -> None:
    """Run the coordinator service of a run."""


@coordinator.command()
@click.argument("run_yaml", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@state_dir_option
@click.option("--listen", default="0.0.0.0:4700", show_default=True, help="HOST:PORT of the control plane.")
@click.option("--http", default=PAGE_ADDRESS, show_default=True, help="HOST:PORT of the read-only page.")
@click.option("--advertise", default="", help="HOST:PORT that nodes dial, when it is not the one listened on.")
@click.option(
    "--archive",
    default="",
    metavar="URL",
    help="Folder or store that older commit records are copied to, as s3://...",
)
@click.option(
    "--records",
    "gigabytes",
    default=1.5,
    show_default=True,
    type=click.FloatRange(0.01),
    help="GB of older commit records in the state directory: beyond, the oldest are only in --archive, or without "
    "what was known of single members.",
)
@click.option(
    "--records-age",
    default="",
    show_default="kept whole, however old",
    metavar="AGE",
    help="Age of commit records, such as 90d, beyond which likewise.",
)
@click.option(
    "--webhook",
    default="",
    envvar="ATOLL_WEBHOOK",
    show_envvar=True,
    metavar="URL",
    help="Where alerts are posted to as JSON: a stall, too few members, diverging states or losses, low goodput, "
    "a member that is out for what it did.",
)
@method_option
@log.level_option
@log.log_file_option
def start(
    run_yaml: Path,
    overrides: tuple[str, ...],
    state_dir: Path,
    listen: str,
    http: str,
    advertise: str,
    archive: str,
    gigabytes: float,
    records_age: str,
    webhook: str,
    method: str,
    log_level: str,
    log_file: str,
) -> None:
    """Serve the run described by RUN_YAML, with key=value OVERRIDES; `atoll invite` then makes join URLs.

    RUN_YAML is a file, or the name of a run that comes with Atoll: `atoll coordinator start demo`.
    """
    log.setup(log.LogSetup("coordinator", log_level, log_file))
    config = _load(run_yaml, overrides, method)
    log.about(run=config.name)
    check_real(config)
    # A server that does not answer keeps nobody waiting.
    threading.Thread(target=_warn_of_problems, args=(config,), name="check", daemon=True).start()
    from atoll.coordinator.history.record_store import opened
    from atoll.coordinator.monitor.webhook import checked_url
    from atoll.coordinator.server import ServerOptions, serve
    from atoll.coordinator.service.run_records import RecordOptions
    from atoll.coordinator.tracking.wandb_settings import check_installed

    check_installed(config)
    age = duration("--records-age", records_age) if records_age else math.inf
    records = RecordOptions(1e9 * gigabytes, age, opened(archive) if archive else None)
    webhook = checked_url(webhook) if webhook else ""
    asyncio.run(serve(config, ServerOptions(state_dir.expanduser(), listen, http, advertise, records, webhook)))


@coordinator.command("check")
@click.argument("run_yaml", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@method_option
@json_option
def check_(run_yaml: Path, overrides: tuple[str, ...], method: str, as_json: bool) -> None:
    """Validate RUN_YAML, a file or a shipped run's name, and print the resolved config; start nothing.

    Data sets are looked at where they can be reached: manifest, vocabulary, slices, whether the server knows
    ranges.
    """
    said = list[str]()
    config = _load(run_yaml, overrides, method, said.append)
    _look_ahead(config, lambda line: say(f"warning: {line}", err=True))
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(config).decode())
        return
    say(f"# the resolved config of {run_yaml}, all defaults in it; the last lines say what it comes to")
    say("# docs/config.md says what each key means, and of which 0 is no limit")
    click.echo(to_yaml(config).rstrip())
    own = config.data.kind is DataKind.SCRIPT
    if config.engine is Engine.TORCHTITAN:
        click.echo(
            f"# ok: torchtitan's {config.titan.config}; of model, only seq_len={config.model.seq_len} and "
            f"vocab_size={config.model.vocab_size} count"
        )
    elif config.engine is Engine.HF:
        lora = config.hf.lora
        what = f"LoRA adapters of rank {lora.rank}" if lora.rank else "every parameter"
        click.echo(
            f"# ok: transformers' {config.hf.architecture}, {what}; of model, only "
            f"seq_len={config.model.seq_len} and vocab_size={config.model.vocab_size} count"
        )
    elif config.model.plugin:
        click.echo(f"# ok: the model of the plugin {config.model.plugin}, which each node has installed")
    else:
        click.echo(f"# ok: {'each script has its own model' if own else f'{config.model.n_params:,} parameters'}")
    for line in (*said, f"the run {beginning(config)}"):
        say(f"# {line}")
    if config.decoder and not own:
        for line in (*round_lines(config), *schedule_lines(config)):
            click.echo(f"# {line}")
    if beyond := simulated_only(config):
        click.echo(f"# for `atoll simulate`: a coordinator does not carry out {', '.join(beyond)} yet")


@coordinator.command("wandb-view")
@state_dir_option
@json_option
def wandb_view(state_dir: Path, as_json: bool) -> None:
    """Save a view of the run in wandb, with losses, speed, goodput, the exchange and the events; print its URL.

    It goes where the run does, by its config and WANDB_*. Saved again, it is as it is here.
    """
    from atoll.coordinator.server import save_wandb_view

    url = save_wandb_view(state_dir.expanduser())
    click.echo(json.dumps({"url": url}) if as_json else url)


def round_lines(config: RunConfig) -> Iterator[str]:
    """The work of a node in a round, and an exchange between as many members as the run starts with, in words."""
    members = max(config.members.start, 2)
    work, sent = flops_per_round(config), exchanged_bytes(config, members)
    yield (
        f"a step is {tokens_per_step(config):,} tokens a node, a round {config.round_steps:g} steps of "
        f"{work / config.round_steps:.3g} FLOP: {short(work / PETAFLOPS)} s at 1 PFLOP/s"
    )
    seconds = (f"{short(8 * sent / bits)} s at {link}" for link, bits in LINKS.items())
    yield f"an exchange between {members} members is {short(sent / 1e6)} MB out and in: {', '.join(seconds)}"


def schedule_lines(config: RunConfig) -> Iterator[str]:
    """What to change where the learning rate is at its least for most of the run; nothing where the run's end is
    open."""
    rounds, members = config.rounds.total, config.members.start
    tokens = config.round_steps * tokens_per_step(config) * members  # of a round
    if rounds and (low := config.inner.decay_tokens / tokens) < rounds / 2:
        yield (
            f"the learning rate reaches its least, {config.inner.final_lr:g}, in round {math.ceil(low):,} of "
            f"{rounds:,} with {members} {plural('member', members)}: the whole run is about "
            f"inner.decay_tokens={rounds * tokens:.0f}"
        )


def short(value: float) -> str:
    """Three digits of a small number, all before the point of a large one."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@click.command()
@state_dir_option
@click.option(
    "--uses", default=1, show_default=True, type=click.IntRange(1, 1_000_000), help="Nodes the URL is good for."
)
@click.option("--expires", default="48h", show_default=True, help="For how long: 90s, 30m, 48h, 7d.")
@click.option("--name", default="", help="For whom; --list shows it, and `atoll contributions`.")
@click.option(
    "--role",
    "roles",
    multiple=True,
    help="trainer, reducer, or verifier, which is trusted; may be given again. Trainer and reducer if not given.",
)
@click.option(
    "--dht", multiple=True, metavar="MULTIADDR", help="Of a gateway that finds the coordinator wherever it is."
)
@click.option("--list", "list_", is_flag=True, help="Show all invites instead, and what is left of each.")
@click.option("--revoke", default="", metavar="NAME", help="End the invites of this name or number.")
@json_option
def invite(
    state_dir: Path,
    uses: int,
    expires: str,
    name: str,
    roles: tuple[str, ...],
    dht: tuple[str, ...],
    list_: bool,
    revoke: str,
    as_json: bool,
) -> None:
    """Print a join URL for the run in the state directory.

    An invite that is revoked lets no further node in; those that came with it stay. It also ends when a node that
    came with it is banned.
    """
    until = time.time() + duration("--expires", expires)
    from atoll.coordinator.server import invite_url, invites, revoke_invites

    if list_ or revoke:
        found = revoke_invites(state_dir.expanduser(), revoke) if revoke else invites(state_dir.expanduser())
        _echo_invites(found, as_json)
        return
    for multiaddr in dht:
        try:
            peer_of_multiaddr(multiaddr)
        except ValueError as error:
            raise ConfigError(f"--dht: {error}") from None
    url = invite_url(state_dir.expanduser(), name, uses, until, roles, dht)
    click.echo(json.dumps({"url": str(url), "uses": uses, "expires": until}) if as_json else str(url))


def _echo_invites(found: Sequence[Any], as_json: bool) -> None:
    import msgspec

    from atoll.coordinator.monitor.blame import invite_lines

    for line in map(msgspec.json.encode, found) if as_json else invite_lines(found, time.time()):
        click.echo(line)


@click.command()
@click.argument("what", default="", metavar="[NODE|ROUND]")
@click.option("--url", default="", metavar="HTTP_URL", help="The coordinator's page, or HOST:PORT.")
@click.option(
    "--state-dir", type=click.Path(path_type=Path), help="Of a run's coordinator, whether it runs or not."
)
@json_option
def blame(what: str, url: str, state_dir: Path | None, as_json: bool) -> None:
    """Print who or what was to blame for a round that was slow, or in which something failed; and what was held
    against nodes, with the evidence.

    ROUND is a number, NODE an id such as n3, a name, or the beginning of a key; without either, everything is
    printed. A verdict on a round is for people: nobody is charged for it. `atoll pardon NODE` takes back what was
    held against a node.

    With neither --url nor --state-dir it is the run that `atoll status` shows, by the page that its coordinator
    has on this machine; while there is none, the run in the coordinator's default folder. Stderr says which.
    """
    import msgspec

    from atoll.coordinator.monitor.blame import blame_lines, round_number, verdict_lines

    found, number = _blame(what, url, state_dir), round_number(what)
    missing = (
        f"round {number} is not committed, or not on record any more" if number and found.seconds is None else ""
    )
    if missing and not found.verdicts and not found.decisions:
        raise ConfigError(missing)
    if as_json:
        for each in found.verdicts:
            click.echo(json.dumps(msgspec.to_builtins(each)))
        for at, decision in found.decisions:
            click.echo(json.dumps({"at": at} | msgspec.to_builtins(decision)))
        return
    for line in (*verdict_lines(found.verdicts), *blame_lines(found.decisions)):
        say(line)
    if found.left_out:
        say(f"and {found.left_out} earlier: `atoll blame --state-dir DIR` on the coordinator's machine has all")
    if number and not found.verdicts:
        say(missing or f"there is no verdict on round {number}: it took {found.seconds:.1f} s")
    if found.decisions:
        return
    if not what or number:
        say("nothing was held against anybody")
    elif found.verdicts:
        say(f"nothing was held against {what}")
    else:
        say(f"no verdict and no decision names {what}")


def _blame(what: str, url: str, state_dir: Path | None) -> "Blame":
    """What is known about a round or a node, by a coordinator's page or by its folder."""
    from atoll.coordinator.server import journaled_blame

    if url and state_dir is not None:
        raise ConfigError("--url and --state-dir both say which run: give one")
    if state_dir is not None:
        return journaled_blame(state_dir.expanduser(), what)
    page = page_address(url, None)
    try:
        found = _blame_by_page(page, what)
    except Unreachable:
        if url or not (folder := default_state_dir("coordinator")).is_dir():
            raise
        found = journaled_blame(folder, what)
        say(f"run {found.run}, by {folder} (no page tells of it at {page})", err=True)
    else:
        say(f"run {found.run}, by the page at {page}", err=True)
    return found


def _blame_by_page(page: str, what: str) -> "Blame":
    import msgspec

    from atoll.coordinator.monitor.blame import Blame

    said = fetch(f"{page}/api/blame?{urllib.parse.urlencode({'about': what})}")
    try:
        return msgspec.convert(said, Blame)
    except msgspec.ValidationError as error:
        raise Unreachable(f"{page} is another version's, and does not tell who is to blame ({error})") from None


@click.command()
@click.argument("node")
@click.option("--reason", default="", help="Told to the node, and kept in the journal.")
@state_dir_option
@json_option
def ban(node: str, reason: str, state_dir: Path, as_json: bool) -> None:
    """Put a node out of the run for good, with its key, and end the invite that it came with. NODE is its id, such
    as n3, its name, or the beginning of its key. `atoll pardon NODE` takes it back.

    The coordinator of the run takes it within seconds, or at its next start.
    """
    from atoll.coordinator.server import ban_node

    _echo_ruling("banned", ban_node(state_dir.expanduser(), node, reason), as_json)


@click.command()
@click.argument("node")
@click.option("--reason", default="", help="Kept in the journal beside what it pardons.")
@state_dir_option
@json_option
def pardon(node: str, reason: str, state_dir: Path, as_json: bool) -> None:
    """Hold nothing against a node any more: a ban ends, its strikes are forgotten. NODE is as for `atoll blame`.

    The coordinator of the run takes it within seconds, or at its next start.
    """
    from atoll.coordinator.server import pardon_node

    _echo_ruling("pardoned", pardon_node(state_dir.expanduser(), node, reason), as_json)


def _echo_ruling(what: str, node: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({what: [node]}))
    else:
        click.echo(f"{node} is {what} as soon as the coordinator takes it: within seconds, or at its next start")


@click.command()
@click.argument("http_url", default="")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Of a coordinator on this machine.")
@click.option("--all", "all_", is_flag=True, help="Every member, however many there are, and those that left.")
@json_option
def status(http_url: str, state_dir: Path | None, all_: bool, as_json: bool) -> None:
    """Show a run as a table: members in trouble stand on top.

    HTTP_URL is the coordinator's page, or HOST:PORT; without it, where a coordinator on this machine has it by
    default.
    """
    with _hint_of_replay(http_url, state_dir):
        run = fetch(page_address(http_url, state_dir) + "/api/run")
    if as_json:
        click.echo(json.dumps(run))
        return
    from atoll.coordinator.monitor.terminal import show

    show(run, all_)


@click.command()
@click.argument("place", default=lambda: default_state_dir("coordinator"))
@click.option("--http", default=REPLAY_ADDRESS, show_default=True, help="HOST:PORT of the read-only page.")
@click.option("--terminal", is_flag=True, help="Show it here, as `atoll status` does, instead of in a page.")
@click.option("--round", "number", type=click.IntRange(1), help="Begin with the run as of this round; the last.")
@click.option("--all", "all_", is_flag=True, help="Every member, however many there are.")
@json_option
def replay(place: str, http: str, terminal: bool, number: int | None, all_: bool, as_json: bool) -> None:
    """Show a past run in the page that it had, with a scrubber over its rounds.

    PLACE is a coordinator's state directory (its default one, if none is given), or what `--archive` was: a
    folder, or a store's URL. In a terminal the keys left and right go by a round, page up and down by a tenth of
    the run, home and end to its ends; space plays, q ends it.
    """
    from atoll.coordinator.monitor.replay import opened
    from atoll.coordinator.monitor.run_answers import RunAnswers

    with opened(place) as past:
        answers = RunAnswers(past)
        if as_json:
            import msgspec

            click.echo(msgspec.json.encode(answers.past(number or answers.last)).decode())
        elif terminal:
            from atoll.coordinator.monitor.terminal_replay import scrub

            scrub(answers, number or answers.last, all_)
        else:
            from atoll.coordinator.server import serve_past

            serve_past(past, http, number)


@click.command()
@click.argument("http_url", default="")
@click.option("--state-dir", type=click.Path(path_type=Path), help="Of a coordinator on this machine.")
@click.option("--all", "all_", is_flag=True, help="Every owner and node, however many there are.")
@json_option
def contributions(http_url: str, state_dir: Path | None, all_: bool, as_json: bool) -> None:
    """Show how many tokens and rounds of a run are of which owner and node, of all who ever contributed.

    HTTP_URL is as for `atoll status`. An owner is the name of an invite (`atoll invite --name`); a node is known
    by its key, whatever it calls itself.
    """
    url = f"{page_address(http_url, state_dir)}/api/contributions"
    with _hint_of_replay(http_url, state_dir):
        said = all_accounts(url) if all_ or as_json else fetch(f"{url}?limit={ACCOUNTS_SHOWN}")
    if as_json:
        click.echo(json.dumps(said))
        return

    from atoll.coordinator.monitor.contributions import contribution_summary, nodes_table, owners_table

    say(contribution_summary(said))
    for what, table in (("owners", owners_table(said)), ("nodes", nodes_table(said))):
        if said[what]:
            click.echo()
            show_table(table)
        if more := said[f"{what}_total"] - len(said[what]):
            click.echo(f"and {more} more: --all shows them")


def all_accounts(url: str) -> dict[str, Any]:
    """The answer of `/api/contributions` with all accounts, asked for page by page."""
    said: dict[str, Any] = fetch(url)
    while page := max(len(said["owners"]), len(said["nodes"])):
        more = fetch(f"{url}?offset={page}")
        if not more["owners"] and not more["nodes"]:
            break
        for what in ("owners", "nodes"):
            said[what] += more[what]
    return said


@contextmanager
def _hint_of_replay(http_url: str, state_dir: Path | None) -> Iterator[None]:
    """Where no page answers, say how the run of this state directory, or the default one, is looked at."""
    try:
        yield
    except Unreachable as error:
        folder = state_dir or default_state_dir("coordinator")
        if http_url or (state_dir is None and not folder.is_dir()):
            raise
        place = "" if state_dir is None else f" {shlex.quote(str(state_dir))}"
        raise Unreachable(
            f"{error} Started again with its command it goes on; `atoll replay{place}` shows the run as it was"
        ) from None


def page_address(http_url: str, state_dir: Path | None) -> str:
    """The URL of a coordinator's page, without a slash at its end: the one given, or where a coordinator on this
    machine has it."""
    if state_dir is not None and not http_url:
        from atoll.coordinator.server import page_url

        http_url = page_url(state_dir.expanduser())
    http_url = http_url or PAGE_ADDRESS
    return (http_url if "://" in http_url else f"http://{http_url}").rstrip("/")


def _load(
    run_yaml: Path, overrides: tuple[str, ...], method: str, tell: Callable[[str], None] = logger.info
) -> RunConfig:
    file = run_file(run_yaml)
    return load_run(file, overrides, method_file(method, file) if method else None, tell)


def _look_ahead(config: RunConfig, warn: Callable[[str], None]) -> None:
    """Raise the `ConfigError` with which the run's nodes would end, as far as it can be seen from here."""
    check_beginning(config, warn)
    if sentence := undefended(config):
        warn(sentence)
    for entry in entry_points(group="atoll.checks"):
        entry.load()(config, warn)


def _warn_of_problems(config: RunConfig) -> None:
    try:
        _look_ahead(config, logger.warning)
    except AtollError as error:
        logger.warning(f"nodes will end with: {error}")


def fetch(url: str, timeout: float = 5.0) -> Any:
    """GET a JSON document of the coordinator's page."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no http:// URL and no HOST:PORT: the coordinator says its own at its start")
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return json.load(answer)
    except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        raise Unreachable(
            f"no coordinator's page at {url} ({reason}): is it running, is the port right?"
        ) from None
