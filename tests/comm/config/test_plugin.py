"""Plugins that a run's config names: which entry point is taken, and what is said where none is."""

import sys
from pathlib import Path

import pytest
from plugin_packages import write_package

from atoll.comm.config.data import DataConfig, DataKind
from atoll.comm.config.engine import Engine, TitanConfig
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.outer import OuterConfig
from atoll.comm.config.plugin import Plugin, PluginGroup
from atoll.comm.config.run import RunConfig, check, from_json, to_json
from atoll.comm.errors import ConfigError, ResourceError

GROUP = PluginGroup.MODELS


def plugin(*packages: str) -> Plugin:
    return Plugin(GROUP, "model.plugin", "reef", packages)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_missing_plugin_is_named_with_its_group_and_what_to_install(path: Path) -> None:
    write_package(path, "other-group", "atoll.data", "reef = other_group:build")
    write_package(path, "other-name", GROUP, "atoll = other_name:build")
    with pytest.raises(ResourceError) as refused:
        plugin("reef-models==1.2").find()
    assert str(refused.value) == (
        "model.plugin is reef, and no package on this machine has the entry point reef in the group atoll.models: "
        "install what the run's operator names (reef-models==1.2) here if you trust it; a node installs none by "
        "itself"
    )
    with pytest.raises(ResourceError, match="ask the run's operator which package has it"):
        plugin().call()


def test_two_packages_with_the_name_are_both_named(path: Path) -> None:
    write_package(path, "reef-a", GROUP, "reef = reef_a:build")
    write_package(path, "reef-b", GROUP, "reef = reef_b:build")
    with pytest.raises(ResourceError, match=r"reef-[ab] and reef-[ab] each have the entry point reef") as refused:
        plugin().find()
    assert "reef-a" in str(refused.value) and "reef-b" in str(refused.value)


def test_only_a_package_that_the_run_names_is_taken_where_it_names_any(path: Path) -> None:
    write_package(path, "Reef_Models", GROUP, "reef = reef_models:build", version="1.2")
    for packages in ((), ("reef-models",), ("reef.models==1.2",), ("corals", "REEF-MODELS==1.2")):
        assert plugin(*packages).find().value == "reef_models:build"
        assert plugin(*packages).package == "Reef_Models==1.2"
    for packages in (("reef-models==1.3",), ("corals",)):
        with pytest.raises(ResourceError, match=r"is of Reef_Models==1.2 on this machine: install what the run's"):
            plugin(*packages).find()
        assert plugin(*packages).package == ""


def test_looking_imports_nothing_and_calling_imports_the_entry_points_module_alone(path: Path) -> None:
    code = "def build(*arguments): return arguments\ndef broken(*arguments): raise RuntimeError('no heads')\n"
    write_package(path, "reef-models", GROUP, "reef = reef_module:build", code)
    write_package(path, "reef-data", PluginGroup.DATA, "reef = reef_data_module:build", "raise SystemExit")
    plugin().find()
    assert "reef_module" not in sys.modules
    assert plugin().call(1, "two") == (1, "two")
    assert sys.modules.pop("reef_module") and "reef_data_module" not in sys.modules


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def build(): raise RuntimeError('no heads')", "RuntimeError: no heads"),
        ("import no_such_module_of_reefs", "No module named 'no_such_module_of_reefs'"),
        ("", "has no attribute 'build'"),
    ],
)
def test_a_plugin_that_fails_is_named(code: str, reason: str, path: Path) -> None:
    write_package(path, "reef-models", GROUP, "reef = failing_reef:build", code)
    with pytest.raises(ConfigError, match=rf"model.plugin=reef \(entry point of the group .* failed: .*{reason}"):
        plugin().call()
    sys.modules.pop("failing_reef", None)


def test_a_run_says_its_plugins_to_every_node() -> None:
    run = RunConfig(
        model=ModelConfig(plugin="reef", dim=99, vocab_size=7),  # sizes that the built-in decoder cannot have
        data=DataConfig(kind=DataKind.PLUGIN, plugin="texts"),
        outer=OuterConfig(plugin="tide"),
        plugin_packages=["reef-models==1.2"],
    )
    received = from_json(to_json(run))
    assert received == run and not received.decoder
    found = [received.plugin(group) for group in PluginGroup]
    assert [(p.key, p.name, p.packages) for p in found if p is not None] == [
        ("model.plugin", "reef", ("reef-models==1.2",)),
        ("data.plugin", "texts", ("reef-models==1.2",)),
        ("outer.plugin", "tide", ("reef-models==1.2",)),
    ]
    assert [RunConfig().plugin(group) for group in PluginGroup] == [None] * 3


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (
            RunConfig(model=ModelConfig(plugin="os; rm")),
            "model.plugin is 'os; rm': write the name of an entry point",
        ),
        (RunConfig(outer=OuterConfig(plugin="a\nb")), r"outer.plugin is 'a\\nb': write the name"),
        (RunConfig(data=DataConfig(plugin="texts")), "data.kind is stdlib, and data.plugin is 'texts'"),
        (RunConfig(data=DataConfig(kind=DataKind.PLUGIN)), "data.kind is plugin, and data.plugin is ''"),
        (
            RunConfig(plugin_packages=["reef && rm"]),
            "plugin_packages has 'reef && rm': write the name of a package",
        ),
        (RunConfig(plugin_packages=["--index-url=x"]), "plugin_packages has '--index-url=x'"),
        (
            RunConfig(
                engine=Engine.TORCHTITAN, titan=TitanConfig(config="llama3_8b"), model=ModelConfig(plugin="reef")
            ),
            "model.plugin is reef, and engine is torchtitan, whose models it trains",
        ),
    ],
)
def test_what_cannot_be_a_plugin_is_refused(run: RunConfig, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(run)
