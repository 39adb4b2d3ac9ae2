"""`atoll doctor`: whether this machine can take part in a run, check by check, before it joins one.

Nothing is started or changed. The coordinator of a join URL is asked what the run is, dials this machine for a
moment, and measures the link with it; no session begins, and the invite stays as it is.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import click

from atoll.comm.errors import Refused, Unreachable
from atoll.comm.extras import lacking
from atoll.comm.invite import Invite, split_host_port
from atoll.comm.options import json_option
from atoll.comm.terminal import say
from atoll.node.checks.check import Check
from atoll.node.checks.machine import machine_checks
from atoll.node.checks.needs import doings, run_checks
from atoll.node.checks.reach import (
    Listening,
    clock_check,
    coordinator_check,
    invite_check,
    rate_checks,
    reach_check_alone,
    reached_otherwise,
    sight_of,
    unreachable,
)
from atoll.node.cli import invite_of, state_dir_option
from atoll.node.config import NodeConfig
from atoll.node.control.checkup import CheckupClient
from atoll.node.settings import load_settings
from atoll.node.state_files import SESSION


@click.command()
@click.argument("url", required=False)
@click.argument("overrides", nargs=-1)
@state_dir_option
@click.option(
    "--listen", default="0.0.0.0:0", show_default=True, help="This and the next, as for `atoll node join`."
)
@click.option("--advertise", default="", help="HOST:PORT that peers would dial.")
@click.option(
    "--leaf", is_flag=True, help="As `atoll node join` would be given it: nobody is to dial this machine."
)
@json_option
def doctor(
    url: str | None,
    overrides: tuple[str, ...],
    state_dir: Path,
    listen: str,
    advertise: str,
    leaf: bool,
    as_json: bool,
) -> None:
    """Say whether this machine can take part, and if not, why.

    With the join URL of a run (@FILE reads it from a file) its coordinator is asked, too; no token is used up.
    OVERRIDES are the settings that `atoll node join` would be given.

    The exit code is 0 if all is well; else that of the first check that fails: 3 for a lack on this machine, or an
    address that peers cannot dial, 4 if the coordinator does not answer, 5 if it is another than the URL's, or
    would not let this machine in, 7 if it would not now.
    """
    if url and "=" in url and "://" not in url and not url.startswith("@"):  # no URL, and an override
        overrides, url = (url, *overrides), None
    invite = invite_of(url) if url else None
    listening = Listening(listen, advertise, leaf)
    for address, option in ((listen, "--listen"), (advertise, "--advertise")):
        if address:
            split_host_port(address, option)
    state_dir = state_dir.expanduser().absolute()
    config = load_settings(state_dir, overrides)
    checks = asyncio.run(_all(config, state_dir, invite, listening, show=not as_json))
    if as_json:
        shown = [{k: v for k, v in asdict(c).items() if k != "exit_code"} for c in checks]
        click.echo(json.dumps({"ok": all(c.ok for c in checks), "checks": shown}))
    raise SystemExit(next((c.exit_code for c in checks if not c.ok), 0))


async def _all(
    config: NodeConfig, state_dir: Path, invite: Invite | None, listening: Listening, show: bool
) -> list[Check]:
    """All checks in order; each is shown, if so, when it is made."""
    made = []
    for check in machine_checks(config, state_dir, listening.leaf):
        made.append(check)
        if show:
            _show(check)
    if invite is not None:
        async for check in coordinator_checks(invite, config, state_dir, listening):
            made.append(check)
            if show:
                _show(check)
    return made


async def coordinator_checks(
    invite: Invite, config: NodeConfig, state_dir: Path, listening: Listening
) -> AsyncIterator[Check]:
    """What the coordinator of a join URL says, and what its run needs of this machine."""
    from atoll.node.daemon.state_dir import load_session

    if invite.rendezvous:
        missing = lacking("a join URL that names a gateway", "hivemind")
        found = "is found through a gateway when the node joins: it was not asked"
        yield Check("coordinator", not missing, found, missing)
        return
    try:
        async with CheckupClient.opened(invite, load_session(state_dir / SESSION, invite)) as client:
            sight = await sight_of(client)
            if isinstance(sight, Check):
                yield sight
                return
            yield coordinator_check(invite, sight)
            yield invite_check(sight)
            yield clock_check(sight)
            for check in (
                *run_checks(sight.run, config, state_dir),
                *doings(sight.run, config, state_dir, invite),
            ):
                yield check
            yield reached_otherwise(await reach_check_alone(client, invite, listening), sight)
            async for check in rate_checks(client, sight.run, sight.members + 1, config):
                yield check
    except (Unreachable, Refused) as error:
        yield unreachable(error)


def _show(check: Check) -> None:
    say(f"{'ok' if check.ok else 'NO':>4}  {check.name:<12} {check.found}")
    if check.remedy:
        say(f"{'':>19}{check.remedy}")
