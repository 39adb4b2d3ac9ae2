"""Files go where the XDG specification says, and to ~/.atoll where they are there already."""

from pathlib import Path

import pytest

from atoll.comm.xdg import cache_dir, config_home, default_state_dir


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_without_variables_they_are_below_the_home(home: Path) -> None:
    assert default_state_dir("node", {}) == home / ".local/state/atoll/node"
    assert cache_dir(default_state_dir("node", {}), {}) == home / ".cache/atoll/node"
    assert config_home({}) == home / ".config"


def test_variables_say_otherwise_unless_they_are_relative(home: Path) -> None:
    said = {"XDG_STATE_HOME": "/s", "XDG_CACHE_HOME": "/c", "XDG_CONFIG_HOME": "/f"}
    assert default_state_dir("coordinator", said) == Path("/s/atoll/coordinator")
    assert cache_dir(default_state_dir("node", said), said) == Path("/c/atoll/node")
    assert config_home(said) == Path("/f")
    assert default_state_dir("node", {"XDG_STATE_HOME": "here"}) == home / ".local/state/atoll/node"


def test_a_folder_of_before_goes_on_being_used_with_its_cache(home: Path) -> None:
    (home / ".atoll" / "node").mkdir(parents=True)
    assert default_state_dir("node", {"XDG_STATE_HOME": "/s"}) == home / ".atoll/node"
    assert cache_dir(home / ".atoll" / "node", {}) == home / ".atoll/node/cache"
    assert default_state_dir("coordinator", {}) == home / ".local/state/atoll/coordinator"


def test_a_folder_that_was_named_keeps_its_cache_inside(home: Path) -> None:
    assert cache_dir(Path("/data/ada"), {}) == Path("/data/ada/cache")
