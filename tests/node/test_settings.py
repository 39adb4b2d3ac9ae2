"""Settings come from node.yaml, the environment and the command line; the last word counts."""

from pathlib import Path

import pytest

from atoll.comm.errors import ConfigError
from atoll.node.config import Device
from atoll.node.settings import load_settings


def test_each_place_is_over_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text("threads: 1\nupload: 10\ncache: 3\n")
    environment = {"ATOLL_NODE_THREADS": "2", "ATOLL_NODE_UPLOAD": "20", "ATOLL_NODE_DEVICE": "cpu"}
    found = load_settings(tmp_path, ("threads=3",), environment)
    assert (found.threads, found.upload, found.cache, found.device) == (3, 20.0, 3.0, Device.CPU)


def test_an_empty_variable_and_others_variables_are_none(tmp_path: Path) -> None:
    found = load_settings(tmp_path, (), {"ATOLL_NODE_THREADS": "", "ATOLL_STREAMS": "7", "ATOLL_NODE_JOIN": "x"})
    assert (found.threads, found.streams) == (0, 0)


def test_a_setting_of_the_environment_is_checked_as_any(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="threads"):
        load_settings(tmp_path, (), {"ATOLL_NODE_THREADS": "many"})
    with pytest.raises(ConfigError, match="threads is -1"):
        load_settings(tmp_path, (), {"ATOLL_NODE_THREADS": "-1"})
    assert load_settings(tmp_path, (), {"ATOLL_NODE_TITAN": "[--a.b=c]"}).titan == ["--a.b=c"]
