"""`atoll demo`: a whole run on this machine, with a node killed and another one joining on the way.

One coordinator and a few node daemons run as processes of their own and talk over loopback, as they would over
the internet. `play` is the story; `DemoProcesses` owns the processes; `Chaos` decides when a node dies and when
one joins; what is shown and what is left behind are in `display` and `report`.
"""

import json
import os
import re
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import click
import msgspec
import psutil

from atoll import configs
from atoll.comm.codecs.factory import codec_of
from atoll.comm.codecs.warm_up import warm_up
from atoll.comm.config.load import load_run
from atoll.comm.config.run import RunConfig
from atoll.comm.errors import AtollError, ConfigError, Unreachable
from atoll.comm.extras import demand, lacking
from atoll.comm.log import level_option
from atoll.coordinator.cli import fetch
from atoll.coordinator.demo import report
from atoll.coordinator.demo.display import Display, DisplayLine, LineKind, open_view, round_seconds, summary
from atoll.coordinator.demo.report import DemoStory, Mark, MarkKind
from atoll.coordinator.service.event_loop import sentence
from atoll.coordinator.state_machine.events import CommitRecord
from atoll.coordinator.tracking.wandb_settings import check_installed

COORDINATOR = "coordinator"
NAMES = "ada bo cy dee eve fay gus hal ivy jo kai lou max ned oz pia".split()
NODE_OPTIONS = ("device=cpu", "threads=1")  # the nodes share this machine
MIN_STARTUPS_LEFT = 2.5  # times its start-up that a node which joins needs at least until the last commit
MIN_ROUNDS = 8  # that leave time for a death and a recovery
POLL_INTERVAL = 0.2  # seconds
PROGRESS_TIMEOUT = 120.0  # seconds without a step or a commit
JOIN_TIMEOUT = 300.0  # seconds from the late node's start until it has contributed to a round
LEAVE_TIMEOUT = 20.0  # seconds; a daemon's time to end after the run did
STOP_TIMEOUT = 45.0  # seconds; the coordinator's, wandb's flush included
# Files of a node's state directory: with which it would come back, and that names its trainer's socket.
SESSION, TRAINER_SPEC = "session", "trainer.json"
MARK_VARIABLE = "ATOLL_DEMO"  # in the environment of everything a demo starts


class DemoFailed(AtollError):
    """The demo did not do what was asked of it; the text says why."""


@click.command()
@click.argument("overrides", nargs=-1)
@click.option("--nodes", default=4, show_default=True, type=click.IntRange(min=1), help="Daemons at the start.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help="Outer steps, or as many more as the late node takes to contribute; default: the demo's config.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("demo-out"),
    show_default=True,
    help="Folder for logs and results.",
)
@click.option("--no-chaos", is_flag=True, help="Kill no node and let none join later.")
@click.option("--json", "as_json", is_flag=True, help="Print report.json's object as the last line.")
@level_option
def demo(
    overrides: tuple[str, ...],
    nodes: int,
    rounds: int | None,
    out: Path,
    no_chaos: bool,
    as_json: bool,
    log_level: str,
) -> None:
    """Train a small model with real processes on this machine; kill one node, let another join.

    key=value OVERRIDES change the run's config. Leaves report.json, loss.png, rounds.jsonl, wandb/ and the logs
    in --out. What an earlier demo left there is replaced: it is deleted when this one starts.
    """
    asked = _overrides(nodes, rounds, overrides, chaos=not no_chaos)
    config = load_run(configs.DEMO, asked)
    _check(config, nodes, chaos=not no_chaos)
    demand("atoll demo", "torch", "numba")
    check_installed(config)
    _prepare(out)
    story = DemoStory(config.rounds.total, config.round_steps, config.model.n_params)
    with _stopped_by_signals():
        play(story, config, asked, nodes, Chaos.none() if no_chaos else Chaos.of(config), out, log_level)
    numbers = report.summarize(story)
    report.write(out, numbers, story.records)
    if no_picture := lacking("loss.png", "matplotlib"):
        click.echo(f"atoll: {no_picture}", err=True)
    else:
        report.draw(out / "loss.png", story)
    from rich.console import Console

    Console(soft_wrap=not sys.stdout.isatty()).print(summary(story, numbers, out))
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(numbers)))
    _judge(story, numbers, chaos=not no_chaos)


def play(
    story: DemoStory,
    config: RunConfig,
    overrides: tuple[str, ...],
    nodes: int,
    chaos: "Chaos",
    out: Path,
    log_level: str,
) -> None:
    """Play the demo, from its first process to its last. Raises `DemoFailed`."""
    compiling = Thread(target=warm_up, args=(codec_of(config), click.echo), name="compiler", daemon=True)
    compiling.start()  # on the core that is free until the nodes start, which would each have to
    with DemoProcesses(out, log_level) as fleet:
        fleet.start(
            COORDINATOR,
            *("coordinator", "start", str(configs.DEMO), "--state-dir", str(out / COORDINATOR)),
            *("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--log-level", log_level, *overrides),
        )
        page = fleet.page()
        url = fleet.invite(nodes + 1)
        for name in names(nodes):
            fleet.join(name, url)
        story.started = nodes
        compiling.join(PROGRESS_TIMEOUT)
        watch = DemoWatch(story, fleet, page)
        with open_view(page) as view:
            while not watch.finished:
                watch.poll()
                match chaos.due(story, time.monotonic()):
                    case MarkKind.KILLED, name:
                        fleet.kill(name)
                        watch.record_act(MarkKind.KILLED, name, f"SIGKILL for {name}: daemon and trainer are gone")
                    case MarkKind.JOINED, name:
                        fleet.join(name, url)
                        story.started += 1
                        watch.record_act(
                            MarkKind.JOINED, name, f"{name} starts: it will fetch the state from its peers"
                        )
                watch.show(view)
                time.sleep(POLL_INTERVAL)
            fleet.dismiss()
    if (out / COORDINATOR / "wandb").exists():
        shutil.move(out / COORDINATOR / "wandb", out / "wandb")


@dataclass
class Chaos:
    """The demo's faults: a node dies at 40 % of the rounds, in the middle of one, and one joins at 60 %, or
    earlier where starting up takes so long that it would not contribute any more."""

    kill_at: int | None  # committed rounds; None: no chaos
    join_at: int
    minimum: int  # members below which the run waits
    victim: str | None = None
    joined: bool = False
    round: tuple[int, float] = (0, 0.0)  # the round being trained, and since when
    startup: float = 0.0  # seconds from the start of the demo to the first inner step

    @classmethod
    def of(cls, config: RunConfig) -> "Chaos":
        """The faults of a run of this length."""
        total = config.rounds.total
        return cls(max(1, int(0.4 * total)), max(2, int(0.6 * total)), config.members.minimum)

    @classmethod
    def none(cls) -> "Chaos":
        return cls(None, 0, 0)

    def due(self, story: DemoStory, now: float) -> tuple[MarkKind, str] | None:
        """The fault to bring about now, as what happens and to which node; None: nothing. Each fault is returned
        once. `now`: seconds."""
        run = story.run
        if self.kill_at is None or run["phase"] == "finished":
            return None
        if run["phase"] == "inner" and run["round"] > self.round[0]:
            self.round = run["round"], now
            self.startup = self.startup or story.elapsed
        if self.victim is None:
            self.victim = self._victim(story, now)
            return None if self.victim is None else (MarkKind.KILLED, self.victim)
        if not self.joined and self._join_due(story):
            self.joined = True
            return MarkKind.JOINED, names(story.started + 1)[-1]
        return None

    def _victim(self, story: DemoStory, now: float) -> str | None:
        """The last one that joined, once it is in the middle of a round."""
        run = story.run
        if run["committed"] < (self.kill_at or 0) or run["phase"] != "inner" or not story.records:
            return None
        active = [m for m in by_age(run) if m["state"] == "active" and m["phase"] == "inner"]
        middle = 0.5 * story.records[-1].seconds["inner"]
        seen = middle >= POLL_INTERVAL  # else a round is over before the next look at it
        if len(active) < 2 or seen and now - self.round[1] < middle:
            return None
        return str(active[-1]["name"])

    def _join_due(self, story: DemoStory) -> bool:
        active = sum(m["state"] == "active" and m["name"] != self.victim for m in story.run["members"])
        left = (story.rounds - story.run["committed"]) * round_seconds(story)
        late = left < MIN_STARTUPS_LEFT * self.startup
        return bool(story.run["committed"] >= self.join_at or active < self.minimum or late)


class DemoWatch:
    """Follows the run through the coordinator's page into the story; ends a demo that makes no progress."""

    def __init__(self, story: DemoStory, fleet: "DemoProcesses", page: str) -> None:
        self._story, self._fleet, self._page = story, fleet, page
        self._begun = self._moved_at = self._acted_at = time.monotonic()
        self._progress: object = None
        self._heard: set[tuple[float, str]] = set()
        self._lines: list[DisplayLine] = [DisplayLine(time.time(), LineKind.ACT, f"the run's page is {page}")]

    @property
    def finished(self) -> bool:
        run = self._story.run
        return run.get("phase") == "finished" and len(self._story.records) == run["committed"]

    def poll(self) -> None:
        """Fetch what is new."""
        story, ended = self._story, self._fleet.ended()
        with suppress(Unreachable):  # for a moment, or its process ended: both are found out below
            since = story.records[-1].round if story.records else 0
            story.run = fetch(f"{self._page}/api/run")
            new = msgspec.convert(fetch(f"{self._page}/api/rounds?since={since}"), list[CommitRecord])
            self._take(story.run, new)
        story.elapsed = time.monotonic() - self._begun
        for name, code in ended.items():
            if code or name == COORDINATOR or story.run.get("phase") != "finished":
                raise self._fleet.failure(f"{name} ended with exit code {code} in the middle of the run", name)
        for name in story.names(MarkKind.JOINED) - story.recovered:
            if time.monotonic() - self._acted_at > JOIN_TIMEOUT:
                raise self._fleet.failure(f"{name} contributed to no round within {JOIN_TIMEOUT:g} s", name)
        if time.monotonic() - self._moved_at > PROGRESS_TIMEOUT:
            raise self._fleet.failure(
                f"the run made no progress for {PROGRESS_TIMEOUT:g} s: round {story.run.get('round')} is "
                f"{story.run.get('phase')} ({story.run.get('phase_reason')})"
            )

    def _take(self, run: dict[str, Any], new: list[CommitRecord]) -> None:
        story, name = self._story, {m["node_id"]: m["name"] for m in run["members"]}
        for said in run["events"]:
            key = (said["at"], said["sentence"])
            if key not in self._heard:
                self._heard.add(key)
                self._lines.append(
                    DisplayLine(said["at"], LineKind.NOTE, said["sentence"], name.get(said["node"], ""))
                )
        self._lines += [DisplayLine(time.time(), LineKind.COMMIT, sentence(record)) for record in new]
        story.records += new
        if run["committed"] and story.first_commit is None:
            story.first_commit = time.monotonic() - self._begun
        progress = (run["committed"], run["phase"], sum(m["inner_step"] for m in run["members"]))
        if progress != self._progress:
            self._progress, self._moved_at = progress, time.monotonic()

    def record_act(self, kind: MarkKind, name: str, what: str) -> None:
        """Take in something that the demo did itself."""
        self._acted_at = time.monotonic()
        self._story.marks.append(Mark(kind, name, self._story.run["round"]))
        self._lines.append(DisplayLine(time.time(), LineKind.ACT, what, name))

    def show(self, view: Display) -> None:
        lines, self._lines = sorted(self._lines, key=lambda line: line.at), []
        view.show(self._story, lines)


@dataclass
class DemoProcesses:
    """The processes of one demo. When it closes they end, and so does all that they started."""

    out: Path
    log_level: str  # of each of them
    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> "DemoProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        daemons = [process for name, process in self.processes.items() if name != COORDINATOR]
        with _deaf_to_signals():
            for group in (daemons, list(self.processes.values())):  # the coordinator hears their good-byes
                for process in group:
                    process.terminate()
                deadline = time.monotonic() + 5.0
                for process in group:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(max(deadline - time.monotonic(), 0.0))
            while left := list(marked(self.mark)):  # again: what was killed may just have started another
                for orphan in left:
                    with suppress(psutil.NoSuchProcess):
                        orphan.kill()
                psutil.wait_procs(left, timeout=1.0)
            for process in self.processes.values():
                process.wait()

    def start(self, name: str, *arguments: str) -> None:
        """Start an `atoll` command in a session of its own, so that Ctrl-C reaches the demo alone."""
        environment = os.environ | {MARK_VARIABLE: self.mark, "PYTHONUNBUFFERED": "1"}
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "atoll.comm.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def join(self, name: str, url: str) -> None:
        """Start a node daemon."""
        self.start(
            name,
            *("node", "join", url, "--state-dir", str(self.out / name)),
            *("--listen", "127.0.0.1:0", "--name", name, "--log-level", self.log_level, *NODE_OPTIONS),
        )

    def page(self) -> str:
        """The address of the coordinator's page, once it answers."""
        journal = (self.out / COORDINATOR / "journal.sqlite").resolve()
        deadline = time.monotonic() + PROGRESS_TIMEOUT
        while time.monotonic() < deadline and not self.ended():
            with suppress(sqlite3.OperationalError, Unreachable):  # not there yet
                with closing(sqlite3.connect(f"{journal.as_uri()}?mode=ro", uri=True)) as db:
                    found = db.execute("select value from meta where key = 'http'").fetchone()
                if found is not None:
                    fetch(f"{found[0]}/api/run")
                    return str(found[0])
            time.sleep(POLL_INTERVAL)
        raise self.failure("the coordinator did not come up", COORDINATOR)

    def invite(self, uses: int) -> str:
        """A join URL for `uses` nodes."""
        from atoll.coordinator.server import invite_url

        return str(invite_url(self.out / COORDINATOR, "demo", uses, time.time() + 86_400))

    def ended(self) -> dict[str, int]:
        """Processes that ended by themselves, with their exit codes."""
        polled = {name: process.poll() for name, process in self.processes.items()}
        return {name: code for name, code in polled.items() if code is not None}

    def kill(self, name: str) -> None:
        """SIGKILL for a daemon and all that it started, as when a machine loses its power. It never comes back, so
        the node that joins clears away what it left in memory; and nobody its socket, outside of its folder."""
        daemon = psutil.Process(self.processes[name].pid)
        for process in (daemon, *daemon.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.processes.pop(name).wait()
        (self.out / name / SESSION).unlink(missing_ok=True)
        with suppress(OSError):
            channel = Path(json.loads((self.out / name / TRAINER_SPEC).read_text())["channel"])
            channel.unlink(missing_ok=True)
            channel.parent.rmdir()

    def dismiss(self) -> None:
        """End the processes after the run: the daemons end by themselves, then the coordinator is told to. Raises
        `DemoFailed` where one ends with an error, or the coordinator does not end."""
        deadline = time.monotonic() + LEAVE_TIMEOUT
        for name, process in self.processes.items():
            if name != COORDINATOR:
                try:
                    code = process.wait(max(deadline - time.monotonic(), 0.0))
                except subprocess.TimeoutExpired:
                    click.echo(f"{name} did not end by itself within {LEAVE_TIMEOUT:g} s: it is stopped", err=True)
                    continue
                if code:
                    raise self.failure(f"{name} ended with exit code {code} after the run", name)
        coordinator = self.processes[COORDINATOR]
        coordinator.terminate()
        try:
            code = coordinator.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise self.failure(f"the coordinator did not stop within {STOP_TIMEOUT:g} s", COORDINATOR) from None
        if code:
            raise self.failure(f"the coordinator ended with exit code {code}", COORDINATOR)

    def failure(self, what: str, name: str = COORDINATOR) -> DemoFailed:
        """A failure with the end of the log that explains it."""
        log = self.log(name)
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        return DemoFailed(f"the demo failed: {what}. The end of {log}:\n{tail}")

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self.out / f"{name}.log"


def marked(mark: str) -> Iterator[psutil.Process]:
    """Living processes with this mark in their environment, orphans included."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK_VARIABLE) == mark:
                yield process


def names(count: int) -> list[str]:
    """`count` short names."""
    return [NAMES[i] if i < len(NAMES) else f"node{i + 1}" for i in range(count)]


def by_age(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The run's members in the order in which they joined."""
    return sorted(run["members"], key=lambda m: int(m["node_id"][1:]))


def _overrides(nodes: int, rounds: int | None, overrides: tuple[str, ...], chaos: bool) -> tuple[str, ...]:
    """The run's overrides: those that follow from the options, then the user's, which win. Where a node joins
    late the run has more rounds than were asked for if they are over before it is there."""
    minimum = min(load_run(configs.DEMO).members.minimum, nodes)
    total = () if rounds is None else (f"rounds.total={rounds}",)
    late = (f"rounds.until_member={nodes + 1}",) if chaos else ()
    return (f"members.start={nodes}", f"members.minimum={minimum}", *total, *late, *overrides)


def _check(config: RunConfig, nodes: int, chaos: bool) -> None:
    if not config.rounds.total:
        raise ConfigError("rounds.total is 0: a demo ends, give --rounds")
    if chaos and (nodes < 2 or config.rounds.total < MIN_ROUNDS):
        raise ConfigError(
            f"{nodes} nodes and {config.rounds.total} rounds leave no room to kill a node and let one join: "
            f"give at least 2 nodes and {MIN_ROUNDS} rounds, or --no-chaos"
        )


def _prepare(out: Path) -> None:
    """An empty folder for the demo's files; those of an earlier demo are removed, and nothing else is."""
    ours = re.compile(
        rf"(coordinator|{'|'.join(NAMES)}|node\d+)(\.log)?|wandb|report\.json|rounds\.jsonl|loss\.png"
    )
    found = sorted(out.iterdir()) if out.is_dir() else []
    strange = [path.name for path in found if not ours.fullmatch(path.name)]
    if out.exists() and not out.is_dir() or strange or found and not (out / "coordinator.log").exists():
        what = f"it holds {strange[0]}" if strange else "it is not an earlier demo's folder"
        raise ConfigError(f"--out {out} cannot be used, {what}: give another --out, or delete it")
    try:
        for path in found:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be used ({error}): give another --out") from None


def _judge(story: DemoStory, numbers: report.DemoReport, chaos: bool) -> None:
    """Raise when what was asked did not happen."""
    if not numbers.digests_equal:
        bad = ", ".join(str(r.round) for r in story.records if not r.digests_equal)
        raise DemoFailed(f"the demo failed: the nodes' states were not equal after round {bad}; see rounds.jsonl")
    if chaos and not numbers.nodes_killed:
        raise DemoFailed("the demo failed: the rounds were too short to kill a node in one: give more inner steps")
    if chaos and not numbers.nodes_recovered:
        raise DemoFailed("the demo failed: the run ended before the late node contributed to a round")


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP stop the demo as Ctrl-C does."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with _handling({signal.SIGTERM: stop, signal.SIGHUP: stop}):
        yield


@contextmanager
def _deaf_to_signals() -> Iterator[None]:
    """Cleaning up is not interrupted; it is bounded."""
    ignored = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with _handling(dict.fromkeys(ignored, signal.SIG_IGN)):
        yield


@contextmanager
def _handling(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
