"""A node's way into a run: it looks first, says what it has found, and joins if this machine can take part.

One that cannot refuses itself: it uses up no invite, and nobody sees a member come and go. What the coordinator
does not tell before the join is looked at after it. Called by the daemon.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from atoll.comm.config.engine import Engine
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import ResourceError
from atoll.comm.proto import atoll_pb2 as pb
from atoll.node.config import Device, NodeConfig
from atoll.node.daemon.join_checks import log_run
from atoll.node.daemon.session import CoordinatorSession
from atoll.node.daemon.state_dir import JoinOptions
from atoll.node.data.source import check_source
from atoll.node.devices import Gpu, gpus, resolve
from atoll.node.engine_check import check_engine
from atoll.node.outer.method import outer_schedule
from atoll.node.outer.vector_folders import bytes_in_memory, clear_others
from atoll.node.preflight import (
    beginning_out_of_reach,
    check_compiler,
    check_device,
    check_memory,
    check_network,
    check_ranks,
    check_stores,
)

log = logging.getLogger("atoll.node")


async def enter(member: CoordinatorSession, config: NodeConfig) -> tuple[pb.JoinReply, NodeConfig]:
    """Join the run. Returns the coordinator's answer, and the settings with which this node takes part. Raises
    what the join raises, and `AtollError` for what this machine lacks: after the join only where the run could not
    be looked at before, or has become another one."""
    options, looked = member.options, None

    def settled(run: RunConfig) -> NodeConfig:
        found = settings_for(run, config, options)
        if options.checks:
            log_run(run, found, options.state_dir, member.invite)
        return found

    if options.checks and (sight := await member.look(options.role)) is not None:
        looked = sight.run, settled(sight.run)
    reply = await member.join(options.role)
    if looked is not None and looked[0] == member.run:
        return reply, looked[1]
    return reply, settled(member.run)


def settings_for(run: RunConfig, config: NodeConfig, options: JoinOptions) -> NodeConfig:
    """The settings with which this machine takes part in the run: a value for each that was left open. Raises
    `AtollError` where it cannot take part."""
    check_network(config)
    check_stores(run, config)
    if sentence := beginning_out_of_reach(run, config):
        log.warning(sentence)
    outer_schedule(run)  # raises where the run's is of a package that is not here
    if options.command:  # a script chooses its devices, has its own data, and says how large its model is
        return config
    check_engine(run, config)  # what the volunteer has set, not what follows from it
    check_device(config)
    found = () if config.device is Device.CPU else gpus()
    config, devices = resolve(config, run.inner.batch_size, found)
    if devices and run.engine is not Engine.TORCHTITAN:
        log.info(devices)
    if config.machines == 1:
        check_ranks(run.inner.batch_size, config.ranks)
    check_source(run, config)
    if run.decoder:
        check_room(run, config, options.state_dir, found)
    if config.compile:
        check_compiler()
    return config


def check_room(
    run: RunConfig, config: NodeConfig, state_dir: Path, found: Sequence[Gpu] = (), n_params: int = 0
) -> None:
    """`check_memory`, for which what dead nodes of this machine have left in memory goes if it must. Raises
    `ResourceError`."""
    own = bytes_in_memory(state_dir)  # of an earlier life: it is taken over, or removed
    try:
        check_memory(run, config, found, n_params, own)
    except ResourceError:
        if not (size := clear_others(state_dir)):
            raise
        log.info(f"removed {size / 1e9:.1f} GB from memory that other nodes of this machine had left there")
        check_memory(run, config, found, n_params, own)
