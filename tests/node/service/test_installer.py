"""`atoll node install-service` writes what systemd starts, and `uninstall` takes it away. systemctl is another
program, and here one that writes down what it is told."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.exit_codes import ExitCode
from atoll.node.cli import node
from atoll.node.daemon import control_socket
from atoll.node.service.detach import NotStarted
from atoll.node.service.installer import Manager, service_name
from atoll.node.service.uninstall import NotConfirmed

URL = "atoll://SECRET@127.0.0.1:4700/reef"


class System:
    """A user's folders, and a systemctl that notes its arguments and ends with `code`."""

    def __init__(self, home: Path) -> None:
        self.home, self.bin = home, home / "bin"
        self.bin.mkdir()
        self.told = home / "told"
        self.install(0)

    def install(self, code: int, version: int = 255, node_code: int = 0) -> None:
        """`node_code`: with which a node that is started ends."""
        script = self.bin / "systemctl"
        script.write_text(
            f'#!/bin/sh\necho "$@" >> {self.told}\n[ "$1" = --version ] && echo systemd {version} && exit 0\n'
            f'[ "$2" = show ] && echo {node_code} && exit 0\n'
            f'[ "$2" = restart ] && [ {node_code} != 0 ] && exit 1\n'
            f"[ {code} = 0 ] || echo Failed to connect to bus >&2\nexit {code}\n"
        )
        script.chmod(0o755)

    def calls(self) -> list[str]:
        return [line for line in self.told.read_text().splitlines() if line != "--version"]

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(node, list(words), catch_exceptions=False, auto_envvar_prefix="ATOLL_NODE")

    @property
    def units(self) -> Path:
        return self.home / ".config" / "systemd" / "user"


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    found = System(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{found.bin}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return found


def exec_start(unit: Path) -> str:
    return next(line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))


def test_the_unit_joins_with_the_same_options_and_the_secret_is_in_its_own_file(system: System) -> None:
    options = ("--name", "ada lovelace", "--leaf", "threads=2")
    said = system.run("install-service", URL, *options, "--", "sh", "train.sh", "50%")
    unit, state = system.units / "atoll-node.service", system.home / ".local/state/atoll/node"
    assert said.exit_code == 0 and f"wrote {unit}" in said.output
    assert "systemctl --user enable --now atoll-node" in said.output and "loginctl enable-linger" in said.output
    assert "SECRET" not in unit.read_text()
    kept = state / "join-url"
    assert kept.read_text() == f"{URL}\n" and stat.S_IMODE(kept.stat().st_mode) == 0o600
    line = exec_start(unit)
    begin, end = f'"node" "join" "@{kept}" "--state-dir={state}"', '"threads=2" "--" "sh" "train.sh" "50%%"'
    assert begin in line and '"--leaf" "--name=ada lovelace"' in line and line.endswith(end)
    assert "--now" not in line and "--patience" not in line, "what was not said is not repeated"
    assert "RestartSteps=" in unit.read_text() and system.calls() == []


def test_what_the_environment_says_is_in_the_unit(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_NODE_INSTALL_SERVICE_PATIENCE", "7")
    monkeypatch.setenv("ATOLL_NODE_DEVICE", "cpu")
    system.install(0, version=252)
    (system.home / "url").write_text(URL)
    system.run("install-service", "@url", "--state-dir", "ada")
    (unit,) = system.units.glob("atoll-node-ada-*.service")
    assert '"--patience=7.0"' in exec_start(unit) and '"device=cpu"' in exec_start(unit)
    assert (system.home / "ada" / "join-url").read_text() == f"{URL}\n"
    assert "RestartSteps" not in unit.read_text(), "this systemd does not know them"
    assert f'Environment="PATH={system.bin}:' in unit.read_text()


def test_now_starts_it_and_what_fails_is_said(system: System) -> None:
    said = system.run("install-service", URL, "--now")
    assert said.exit_code == 0 and "runs as a service" in said.output
    assert system.calls() == ["--user daemon-reload", "--user enable atoll-node", "--user restart atoll-node"]
    system.install(1)
    with pytest.raises(ResourceError, match="Failed to connect to bus; .*not started.*--detach"):
        system.run("install-service", URL, "--now")
    system.install(0, node_code=5)
    with pytest.raises(NotStarted, match="exit code 5, refused by the other side") as failed:
        system.run("install-service", URL, "--now")
    assert failed.value.exit_code is ExitCode.REFUSED and "again" not in str(failed.value)
    system.install(0, node_code=7)
    with pytest.raises(NotStarted, match="exit code 7, refused for now, and is started again") as failed:
        system.run("install-service", URL, "--now")
    assert failed.value.exit_code is ExitCode.NOT_NOW


def test_a_node_that_runs_already_is_told_of_for_the_service_begins_when_it_has_ended(system: System) -> None:
    state = system.home / "ada"
    state.mkdir()
    words = ("install-service", URL, "--state-dir", str(state))
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(state / control_socket.NAME))
        daemon.listen()
        said = system.run(*words)
        assert said.exit_code == 0
        assert "a node runs already in" in said.output and "atoll node finish" in said.output
    assert "runs already" not in system.run(*words).output


def test_nothing_is_written_for_a_join_that_cannot_be_or_without_systemd(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong: list[tuple[str, ...]] = [("no-url",), (URL, "threads=-1"), (URL, "--leaf", "--advertise", "a:1")]
    for words in wrong:
        with pytest.raises(ConfigError):
            system.run("install-service", *words)
    monkeypatch.setenv("PATH", "/no/such/folder")
    with pytest.raises(ResourceError, match="there is no systemctl here.*--detach"):
        system.run("install-service", URL)
    assert not (system.home / ".config").exists() and not (system.home / ".local").exists()


def test_uninstalling_leaves_nothing_of_it(system: System) -> None:
    before = sorted(system.home.rglob("*"))
    system.run("install-service", URL)
    (system.units / "default.target.wants").mkdir()
    link = system.units / "default.target.wants" / "atoll-node.service"
    link.symlink_to(system.units / "atoll-node.service")
    said = system.run("uninstall", "--yes")
    assert said.exit_code == 0 and "removed the service atoll-node" in said.output
    assert "--user disable --now atoll-node" in system.calls()
    left = {path for path in system.home.rglob("*") if not path.is_dir()} - set(before)
    assert left == {system.told}
    assert not (system.home / ".local/state/atoll").exists()


def test_each_state_directory_has_a_service_of_its_own(system: System) -> None:
    places = [system.home / ".local/state/atoll/node", Path("/data/ada"), Path("/other/ada"), Path("/data/a b$%")]
    names = [service_name(place) for place in places]
    assert names[0] == "atoll-node" and len(set(names)) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_") for name in names)


def test_on_macos_it_is_a_launch_agent(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager("darwin")
    assert manager.file("atoll-node") == system.home / "Library/LaunchAgents/atoll-node.plist"
    with pytest.raises(ResourceError, match="there is no launchctl here"):
        manager.check()
    assert any("launchctl bootstrap" in line for line in manager.next_steps("atoll-node", False))


@pytest.fixture
def refuse() -> Callable[[System, Path], str]:
    def uninstall(system: System, folder: Path) -> str:
        with pytest.raises(ConfigError) as refused:
            system.run("uninstall", "--yes", "--state-dir", str(folder))
        return str(refused.value)

    return uninstall


def test_what_is_not_a_nodes_state_directory_is_not_removed(
    system: System, refuse: Callable[[System, Path], str]
) -> None:
    folder = system.home / "photos"
    assert "there is no node in" in refuse(system, folder)
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "session").write_text("of a film\n")
    assert "is no node's state directory" in refuse(system, folder)
    (folder / "session").write_text("127.0.0.1:1 reef\nsecret.1\nada\n")
    (folder / "journal.sqlite").touch()
    assert "is a coordinator's" in refuse(system, folder)
    assert (folder / "journal.sqlite").exists() and (folder / "session").exists()


def test_what_is_no_nodes_stays_and_the_folder_with_it(system: System) -> None:
    """A home, with another node's folder in it, was given as the state directory."""
    others = ("notes.txt", "cache/thumbnails/a.png", "logs/of-another-program.log", "node/session", "node/lock")
    for name in others:
        (system.home / name).parent.mkdir(exist_ok=True, parents=True)
        (system.home / name).write_text("127.0.0.1:1 reef\nsecret.2\neve\n")
    before = {path for path in system.home.rglob("*") if not path.is_dir()}
    for name in ("session", "logs/node.log", "cache/micro_batch.json", f"outer/{'0' * 32}/residual"):
        (system.home / name).parent.mkdir(exist_ok=True, parents=True)
        (system.home / name).write_text("127.0.0.1:1 reef\nsecret.1\nada\n")
    said = system.run("uninstall", "--yes", "--state-dir", ".")
    assert said.exit_code == 0 and "which stays:" in said.output and "and 2 more in it" in said.output
    assert {path for path in system.home.rglob("*") if not path.is_dir()} == before


def test_what_has_not_joined_yet_is_removed_too(system: System) -> None:
    folder = system.home / "ada"
    folder.mkdir()
    for name in ("lock", "tls.pem"):
        (folder / name).touch()
    assert system.run("uninstall", "--yes", "--state-dir", str(folder)).exit_code == 0
    assert not folder.exists()


@pytest.mark.parametrize("answer", ["n\n", ""], ids=["no", "nobody is there to answer"])
def test_one_is_asked_before_anything_goes(answer: str, system: System) -> None:
    system.run("install-service", URL)
    said = CliRunner().invoke(node, ["uninstall"], input=answer)
    assert isinstance(said.exception, NotConfirmed) and "Remove all of this?" in said.output
    assert str(said.exception) == "nothing was removed" and said.exception.exit_code is ExitCode.INTERRUPTED
    assert (system.units / "atoll-node.service").exists()


def test_settings_of_the_owners_own_hand_are_named_before_they_go(system: System) -> None:
    system.run("install-service", URL)
    settings = system.home / ".local/state/atoll/node/node.yaml"
    assert "node.yaml" not in CliRunner().invoke(node, ["uninstall"], input="n\n").output
    settings.write_text("threads: 2\n")
    assert "your own node.yaml" in CliRunner().invoke(node, ["uninstall"], input="n\n").output
