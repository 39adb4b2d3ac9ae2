"""What a joining node says of its machine, of the run and of the way there, in a few lines of its log.

Of the machine and of the run it speaks before it joins: what makes joining useless is refused there, with its exit
code, and nobody's member has come and gone. Of the way to the coordinator, which keeps nobody from joining, it
speaks while the trainer starts.
"""

import logging
from pathlib import Path

from atoll.comm.addresses import is_loopback
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import AtollError
from atoll.comm.invite import Invite, split_host_port
from atoll.node.checks.check import Check
from atoll.node.checks.machine import machine_checks
from atoll.node.checks.needs import doings, size_checks
from atoll.node.checks.reach import Unreached, clock_check, rate_checks, reach_check
from atoll.node.config import NodeConfig
from atoll.node.control.checkup import CheckupClient
from atoll.node.daemon.session import CoordinatorSession

log = logging.getLogger("atoll.node")
LATER_LOOKS = 2  # after the one before the join: the first call over a connection is a slow one
WSL = "wsl"  # what checks about it are called
SAID = ("python", "cores", "memory", "gpu", "disk")  # of the machine, when all is well


def log_machine(config: NodeConfig, state_dir: Path, leaf: bool = False) -> None:
    """Say what this machine is, and what is wrong with it. `leaf`: nobody is to dial it."""
    checks = list(machine_checks(config, state_dir, leaf))
    log.info("this machine: %s", "; ".join(f"{c.name} {c.found}" for c in checks if c.ok and c.name in SAID))
    for check in checks:
        if not check.ok or check.name.startswith(WSL):
            _tell(check)


def log_run(run: RunConfig, config: NodeConfig, state_dir: Path, invite: Invite) -> None:
    """Say what the run takes of this machine, and what its node will read, write and talk to."""
    for check in (*size_checks(run, config, state_dir), *doings(run, config, state_dir, invite)):
        _tell(check)


async def look_around(member: CoordinatorSession, rates: bool = True) -> None:
    """Ask the coordinator about the way to it; where that is on this machine itself there is none. Whatever goes
    wrong with that, the node goes on."""
    if is_loopback(split_host_port(member.invite.address, "the join URL's address")[0]):
        return
    try:
        unreached = await ask_around(member, rates)
        if unreached is not None and not member.gateway.run_gateways:
            await member.gateway.known.wait()  # the operator starts one
            await _reached_otherwise(member, unreached)
    except Exception:
        log.exception("the way to the coordinator is not known: a fault of this node")


async def ask_around(member: CoordinatorSession, rates: bool = True) -> Unreached | None:
    """Say whether the coordinator can dial this node, whose clock is wrong, how fast the link is, and how long an
    exchange will take. Returns that it cannot be dialled, where no other way was found either."""
    unreached = None
    try:
        async with CheckupClient.opened(
            member.control.invite, member.control.session, member.options.role
        ) as client:
            if not member.options.leaf:
                reach = await reach_check(client, member.address, member.plane.pin)
                unreached = reach if isinstance(reach, Unreached) else None
                if unreached is not None and await _reached_otherwise(member, unreached):
                    unreached = None
                else:
                    _tell(reach)
            sight = await client.look(LATER_LOOKS)
            clock = clock_check(sight)
            if clock.remedy:
                _tell(clock)
            if rates:
                async for check in rate_checks(client, sight.run, sight.members, member.config):
                    _tell(check)
    except AtollError as error:
        log.info("the way to the coordinator is not known: %s", error)
    return unreached


async def _reached_otherwise(member: CoordinatorSession, unreached: Check) -> bool:
    """Whether something has become of a node that nobody can dial; it is said."""
    if words := await member.find_another_way():
        log.info("%s, so %s", unreached, words)
    return bool(words)


def _tell(check: Check) -> None:
    if check.ok:
        log.info(str(check))
    else:
        log.warning(str(check))
