"""What the coordinator asks of wandb: by the config, then wandb's environment variables, then what is usual."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from atoll.comm.config.run import RunConfig, WandbMode, check
from atoll.comm.errors import ConfigError
from atoll.coordinator.tracking import wandb_settings
from atoll.coordinator.tracking.wandb_settings import (
    code_version,
    init_arguments,
    init_settings,
    new_run_id,
    wandb_mode,
)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key and no settings of the person who runs the tests."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


def config(mode: WandbMode = WandbMode.OFFLINE) -> RunConfig:
    run = RunConfig(name="reef")
    run.wandb.mode = mode
    return run


@pytest.mark.parametrize(
    ("mode", "environment", "expected"),
    [
        (WandbMode.AUTO, {}, WandbMode.OFFLINE),
        (WandbMode.AUTO, {"WANDB_API_KEY": "k" * 40}, WandbMode.ONLINE),
        (WandbMode.AUTO, {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "disabled"}, WandbMode.DISABLED),
        (WandbMode.AUTO, {"WANDB_API_KEY": "k" * 40, "WANDB_MODE": "dryrun"}, WandbMode.OFFLINE),
        (WandbMode.AUTO, {"WANDB_MODE": "online"}, WandbMode.ONLINE),
        (WandbMode.AUTO, {"WANDB_MODE": ""}, WandbMode.OFFLINE),
        (WandbMode.OFFLINE, {"WANDB_MODE": "disabled"}, WandbMode.OFFLINE),
        (WandbMode.DISABLED, {"WANDB_MODE": "online"}, WandbMode.DISABLED),
    ],
)
def test_auto_is_what_the_environment_says_and_else_goes_by_the_key(
    mode: WandbMode,
    environment: dict[str, str],
    expected: WandbMode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wandb_mode(config(mode)) is expected


def test_a_mode_that_wandb_does_not_know_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    with pytest.raises(ConfigError, match="WANDB_MODE is 'sometimes': set it to online, offline or disabled"):
        wandb_mode(config(WandbMode.AUTO))


@pytest.mark.parametrize(
    ("environment", "settings", "expected"),
    [
        ({}, {}, {"project": "atoll", "name": "reef", "resume": "allow", "dir": "/state"}),
        ({}, {"project": "tides", "entity": "us"}, {"project": "tides", "entity": "us", "name": "reef"}),
        ({"WANDB_PROJECT": "sea", "WANDB_NAME": "shoal"}, {}, {"project": "sea", "name": "shoal"}),
        (
            {"WANDB_PROJECT": "sea", "WANDB_NAME": "shoal"},
            {"project": "tides"},
            {"project": "tides", "name": "shoal"},
        ),
        ({}, {"group": "g", "tags": ["a"], "notes": "n"}, {"group": "g", "tags": ["a"], "notes": "n"}),
        # None: wandb takes its own variables, or its defaults
        ({"WANDB_RUN_GROUP": "g"}, {}, {"entity": None, "group": None, "tags": None, "notes": None}),
        ({"WANDB_DIR": "/elsewhere", "WANDB_RESUME": "must"}, {}, {"dir": None, "resume": None}),
    ],
)
def test_the_config_counts_and_then_the_environment(
    environment: dict[str, str],
    settings: dict[str, object],
    expected: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run = config()
    for key, given in settings.items():
        setattr(run.wandb, key, given)
    found = init_arguments(run, Path("/state"), "ree5f001", WandbMode.OFFLINE)
    assert {name: found[name] for name in expected} == expected


def test_the_runs_config_is_wandbs_and_says_which_code_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_settings, "code_version", lambda: {"version": "1.2", "commit": "c0ffee"})
    found = init_arguments(config(), Path("/state"), "ree5f001", WandbMode.ONLINE)
    assert found["config"]["rounds"]["inner_steps"] == 100
    facts = found["config"]["atoll"]
    assert (facts["version"], facts["commit"]) == ("1.2", "c0ffee")
    assert re.fullmatch(r"[0-9a-f]{32}", facts["config_digest"])


@pytest.mark.parametrize(
    ("variable", "setting"),
    [
        ("WANDB_CONSOLE", "console"),
        ("WANDB_X_DISABLE_STATS", "x_disable_stats"),
        ("WANDB__DISABLE_STATS", "x_disable_stats"),
        ("WANDB_DISABLE_GIT", "disable_git"),
        ("WANDB_GIT_COMMIT", "git_commit"),
    ],
)
def test_a_setting_that_the_environment_has_is_left_to_it(
    variable: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb_settings, "code_version", lambda: {"commit": "c0ffee"})
    assert setting in init_settings({})
    assert init_settings({}).keys() - init_settings({variable: "x"}).keys() == {setting}


def test_the_settings_are_ones_that_wandb_knows() -> None:
    import wandb

    assert wandb.Settings.model_fields.keys() >= init_settings({}).keys()
    wandb.Settings(**init_settings({}))


def test_the_code_of_a_clone_has_its_commit_and_a_remote_without_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "coordinator" / "tracking" / "wandb_settings.py"
    module.parent.mkdir(parents=True)
    module.write_text("")

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", *who, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(wandb_settings, "__file__", str(module))
    code_version.cache_clear()
    assert "commit" not in code_version()  # no clone: whatever repository a folder above is, is not Atoll's
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    git("remote", "add", "origin", "https://me:secret@example.org/atoll.git")
    code_version.cache_clear()
    found = code_version()
    assert found["commit"] == git("rev-parse", "HEAD")
    assert found["remote_url"] == "https://example.org/atoll.git"
    assert "changed" not in found
    module.write_text("x = 1")
    code_version.cache_clear()
    assert "changed" in code_version()
    code_version.cache_clear()


def test_each_run_has_an_id_of_its_own() -> None:
    assert len({new_run_id() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tags": ["a" * 65]}, "a tag has 1 to 64 characters"),
        ({"tags": [""]}, "a tag has 1 to 64 characters"),
        ({"artifacts": True}, "wandb.artifacts is set, and checkpoint.remote is empty"),
    ],
)
def test_what_wandb_would_refuse_is_refused_before(settings: dict[str, object], sentence: str) -> None:
    run = config()
    for name, value in settings.items():
        setattr(run.wandb, name, value)
    with pytest.raises(ConfigError, match=sentence):
        check(run)
