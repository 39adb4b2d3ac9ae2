"""The worker, another machine of a node of several: it gives its devices to the trainer of the node whose daemon
runs elsewhere.

    atoll node worker HOST:PORT        where the node's `rendezvous=` is

Launchers of torch's elastic launcher meet there; what they have to do they hear from rank 0. A worker has no
state: one that is lost, or comes later, is a start of the trainer more. The machines of one node trust each other:
their links are a private network's.
"""

import asyncio
import contextlib
import logging
import math
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from atoll.comm import log as logs
from atoll.comm.cores import take_part
from atoll.comm.errors import ConfigError, ResourceError, Unreachable
from atoll.comm.invite import split_host_port
from atoll.comm.xdg import cache_dir
from atoll.node.config import NodeConfig, TrainerSpec
from atoll.node.daemon.state_dir import TRAINER_SPEC, exclusive, on_signals
from atoll.node.daemon.trainer_log import TrainerLog
from atoll.node.daemon.trainer_supervisor import end_launcher, exit_in_words

log = logging.getLogger("atoll.node")

RETRY_SECONDS = 1.0  # between two tries
WORD_SECONDS = 60.0  # between two lines that say for what this machine waits


class Worker:
    """One life of a worker. `run` returns when the node has left its run, or the worker was told to stop."""

    def __init__(self, host: str, config: NodeConfig, state_dir: Path, patience: float) -> None:
        """`host`: HOST:PORT of the machine with the daemon; `patience`: seconds for it to answer."""
        split_host_port(host, "HOST:PORT")
        if config.memory:
            raise ConfigError("memory= is for the machine with the node's daemon, which looks at it: leave it out")
        self._config, self._state_dir, self._patience = replace(config, rendezvous=host), state_dir, patience
        self._over = asyncio.Event()
        self._log = TrainerLog(state_dir)

    async def run(self) -> None:
        """Take part until the node has left its run. Raises `Unreachable` where its machine does not answer, and
        `ResourceError`."""
        at = self._config.rendezvous
        with exclusive(self._state_dir), take_part(), on_signals(self._over.set):
            await self._resolve()
            heard, said = time.monotonic(), -math.inf
            while not self._over.is_set():
                if await self._answers():
                    if await self._take_part() == 0:
                        log.info("told to stop" if self._over.is_set() else "the node has left its run")
                        return
                    heard, said = time.monotonic(), -math.inf
                elif (waited := time.monotonic() - heard) <= self._patience:
                    if time.monotonic() - said >= WORD_SECONDS:
                        log.info(f"waits for the node at {at}, up to {self._patience - waited:.0f} s")
                        said = time.monotonic()
                else:
                    raise Unreachable(
                        f"nobody answers at {at}: is the node there joined with machines=2 or more and "
                        f"rendezvous={at}, and does its firewall let this machine in?"
                    )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_SECONDS):
                        await self._over.wait()

    async def _resolve(self) -> None:
        """Raise `ConfigError` for a host that nobody knows."""
        host, port = split_host_port(self._config.rendezvous, "HOST:PORT")
        try:
            await asyncio.get_running_loop().getaddrinfo(host, port)
        except socket.gaierror as error:
            if error.errno == socket.EAI_NONAME:
                raise ConfigError(f"no address is known for {host}: {error.strerror}") from None

    async def _answers(self) -> bool:
        """Whether something listens at the node's rendezvous."""
        host, port = split_host_port(self._config.rendezvous, "HOST:PORT")
        try:
            async with asyncio.timeout(5.0):
                _, writer = await asyncio.open_connection(host, port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def _take_part(self) -> int:
        """One life of this machine's ranks; returns the launcher's exit code."""
        folder = self._state_dir
        cache, spec_file = cache_dir(folder.absolute()), folder / TRAINER_SPEC
        try:
            cache.mkdir(parents=True, exist_ok=True)
            how = msgspec.structs.replace(logs.beside("trainer"), file="")
            spec_file.write_bytes(msgspec.json.encode(TrainerSpec(node=self._config, cache=str(cache), log=how)))
        except OSError as error:
            raise ResourceError(f"cannot write {spec_file}: {error.strerror}") from None
        log.info(
            f"found the node at {self._config.rendezvous}: its trainer starts when it has its machines; where it "
            f"has all of them already, this one waits for one to go; what it prints is in {self._log.path}"
        )
        command = [sys.executable, "-P", "-m", "atoll.node.trainer.launcher", "--spec", str(spec_file)]
        await self._log.try_to_bound()
        with self._log.open() as out:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        ended, over = asyncio.create_task(process.wait()), asyncio.create_task(self._over.wait())
        bounding = asyncio.create_task(self._log.keep_bounded())
        try:
            await asyncio.wait((ended, over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
            bounding.cancel()
            await end_launcher(process)
        code = await ended
        if code and not self._over.is_set():
            words, path = self._log.last_words()
            log.warning(
                f"the trainer ended ({exit_in_words(code)}; {words.line or 'it said nothing'}, see {path}); this "
                "machine waits for the next one"
            )
        return 0 if self._over.is_set() else code
