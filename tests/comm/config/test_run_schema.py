"""configs/run.schema.json takes what an editor should take, and marks what no run can have."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest
import yaml

from atoll import configs

SHIPPED = sorted(configs.FOLDER.rglob("*.yaml"))
# YAML 1.2's core schema, by which editors read: there `on` and 4_000 are texts, which PyYAML reads otherwise.
CORE = {
    "null": r"(?:~|null|Null|NULL|)",
    "bool": r"(?:true|True|TRUE|false|False|FALSE)",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?",
}


class CoreLoader(yaml.SafeLoader):
    """Reads YAML as its version 1.2 has it."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


for tag, pattern in CORE.items():
    CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^{pattern}$"), None)


@pytest.fixture(scope="module")
def validate() -> Callable[[Any], Any]:
    found: Callable[[Any], Any] = fastjsonschema.compile(
        json.loads((configs.FOLDER / "run.schema.json").read_text())
    )
    return found


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_shipped_file_names_it_and_is_valid(file: Path, validate: Callable[[Any], Any]) -> None:
    text = file.read_text()
    named = re.match(r"# yaml-language-server: \$schema=(.+)\n", text)
    assert named and (file.parent / named[1]).resolve() == configs.FOLDER.resolve() / "run.schema.json"
    validate(yaml.load(text, CoreLoader))  # raises where it is not


@pytest.mark.parametrize(
    "run",
    [
        "model: hf://org/name",
        "model: {dim: 256}",
        "security: {tls: on}",
        "inner: {lr: 1e-3}",
        "inner: {lr: null}",
        "data: {kind: dataset, mixture: [{url: https://a, digest: ab, weight: 2}]}",
    ],
)
def test_what_a_run_may_say_is_valid(run: str, validate: Callable[[Any], Any]) -> None:
    validate(yaml.load(run, CoreLoader))


@pytest.mark.parametrize(
    ("run", "where"),
    [
        ("round: {inner_steps: 3}", r"must not contain .*'round'"),
        ("rounds: {iner_steps: 3}", r"data\.rounds must not contain .*'iner_steps'"),
        ("data: {mixture: [{link: a}]}", r"data\.data\.mixture\[0\] must not contain .*'link'"),
        ("rounds: {inner_steps: many}", r"data\.rounds\.inner_steps must be integer"),
        ("rounds: {inner_steps: 1.5}", r"data\.rounds\.inner_steps must be integer"),
        ("reduce: {codec: int9}", r"data\.reduce\.codec must be one of"),
        ("model: {dim: wide}", r"data\.model"),
        ("wandb: {tags: one}", r"data\.wandb\.tags must be array"),
        ("rounds: 5", r"data\.rounds must be object"),
    ],
)
def test_another_key_and_another_type_are_not(run: str, where: str, validate: Callable[[Any], Any]) -> None:
    with pytest.raises(fastjsonschema.JsonSchemaException, match=where):
        validate(yaml.load(run, CoreLoader))
