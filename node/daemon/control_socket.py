"""The daemon's local control socket, in its state directory: one request line, one JSON answer.

A request is a word, as `status` and `leave`, or a JSON list of a word and its arguments, as `["limits",
"upload=20"]`. A no is answered with the sentence and the exit code of the error behind it.
"""

import asyncio
import contextlib
import json
import os
import shlex
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.comm.errors import AtollError, ResourceError, Unreachable, error_told
from atoll.comm.readiness import say_ready
from atoll.comm.xdg import default_state_dir
from atoll.node.state_files import ENDING, SESSION

NAME = "daemon.sock"
TIMEOUT = 5.0  # seconds
MAX_ANSWER_BYTES = 16 << 20
Verb = Callable[[Sequence[str]], dict[str, Any]]  # of the arguments makes the answer, or raises `AtollError`


@contextlib.asynccontextmanager
async def serve(
    state_dir: Path,
    status: Callable[[], dict[str, Any]],
    leave: Callable[[], None],
    verbs: Mapping[str, Verb] | None = None,
) -> AsyncIterator[None]:
    """Answer `status`, `leave` and the other `verbs` while the context lasts. The node has joined: who started it
    hears that."""
    others = verbs or {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            verb, *arguments = words(await asyncio.wait_for(reader.readline(), TIMEOUT))
            said: dict[str, Any] = {"ok": True}
            if verb == "status":
                said |= status()
            elif verb == "leave":
                leave()
            elif verb in others:
                try:
                    said |= others[verb](arguments)
                except AtollError as error:
                    said = {"ok": False, "error": str(error), "exit_code": error.exit_code}
            else:
                said = {"ok": False, "error": f"this node knows no request {verb!r}"}
            writer.write(json.dumps(said).encode() + b"\n")
            await writer.drain()
        except (TimeoutError, ConnectionError, ValueError, RecursionError):
            pass  # whoever asked is gone, or is not one of ours: no UTF-8, or a line without an end
        finally:
            writer.close()

    refuse_second(state_dir)
    path = state_dir / NAME
    path.unlink(missing_ok=True)
    try:
        server = await asyncio.start_unix_server(answer, _short(path))
    except OSError as error:
        raise ResourceError(f"no control socket in {state_dir} ({error}): give a shorter --state-dir") from None
    os.chmod(path, 0o600)
    say_ready("has joined its run")
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


def words(line: bytes) -> list[str]:
    """A request's words. Raises `ValueError` for what is none."""
    text = line.decode().strip()
    if not text.startswith("["):
        return [text]
    request = json.loads(text)
    if not request or not all(isinstance(word, str) for word in request):
        raise ValueError("a request is a list of words")
    return list(request)


def runs(state_dir: Path) -> bool:
    """Whether a daemon that has joined lives in this state directory."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(_short(state_dir / NAME))
        except OSError:
            return False
    return True


def refuse_second(state_dir: Path) -> None:
    """Raise `ResourceError` if a daemon lives in this state directory."""
    if not runs(state_dir):
        return
    raise ResourceError(
        f"a node of yours runs already in {state_dir}: `{command('status', state_dir)}` shows it; another one "
        "beside it needs another --state-dir"
    )


def command(verb: str, state_dir: Path) -> str:
    """The command line that asks the node with this state directory."""
    usual = state_dir == default_state_dir("node")
    return f"atoll node {verb}" if usual else f"atoll node {verb} --state-dir {shlex.quote(str(state_dir))}"


def ask(state_dir: Path, verb: str, *arguments: str) -> dict[str, Any]:
    """Send one request to the running daemon, and return its answer. Raises `Unreachable` if there is none,
    the error that it says if it does not do what is asked: for a value that cannot be `ConfigError`, as a command
    that finds it itself."""
    request = json.dumps([verb, *arguments]) if arguments else verb
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT)
        try:
            connection.connect(_short(state_dir / NAME))
            connection.sendall(request.encode() + b"\n")
            said = json.loads(connection.makefile("rb").readline(MAX_ANSWER_BYTES))
            if not isinstance(said, dict) or "ok" not in said:
                raise ValueError("what it says is no answer")
        except (FileNotFoundError, ConnectionRefusedError):
            raise Unreachable(f"{_absence(state_dir)} `atoll node join URL` starts one") from None
        except (OSError, ValueError, RecursionError) as error:
            why = getattr(error, "strerror", None) or error
            raise Unreachable(
                f"the node in {state_dir} gives no answer ({why}): try again; if it stays so, its log may say why"
            ) from None
    if not said.pop("ok"):
        raise error_told(said.get("exit_code"), str(said.get("error", "")))
    return said


def _absence(state_dir: Path) -> str:
    """Why no node answers, as far as its state directory tells."""
    try:
        file = state_dir / ENDING
        sentence = file.read_text()
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(file.stat().st_mtime))
        return f"no node runs in {state_dir} any more; its last word, of {at}: {sentence}."
    except (OSError, ValueError):  # one was killed, say
        pass
    if (state_dir / SESSION).exists():
        return f"the node that was in {state_dir} does not run, or has not joined again yet:"
    return f"no node runs in {state_dir}, or it has not joined yet: is --state-dir right?"


def _short(path: Path) -> str:
    """Unix socket paths end at 107 bytes, of macOS at 103: a relative one is often short enough where the absolute
    is not."""
    absolute = str(path.absolute())
    return absolute if len(os.fsencode(absolute)) <= 103 else os.path.relpath(absolute)
