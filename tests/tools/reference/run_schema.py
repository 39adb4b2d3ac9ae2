"""Draws configs/run.schema.json, by which editors complete and check a run's YAML file: the keys of `RunConfig`
with their types, defaults, and meanings, which are the comments at the fields.

Everything is where it is used, without references: so it means the same in all drafts of JSON Schema, of which
editors know different ones.
"""

import json
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import msgspec
from reference.config import meaning

from atoll.comm.config.run import RunConfig

TITLE = "A run of Atoll"
NAMED_MODEL = "A Hugging Face folder or hf://ORG/NAME, whose config.json says all keys of the section."


def schema() -> dict[str, Any]:
    """The schema as an object. What OmegaConf would make of `${...}` it does not know."""
    (found,), parts = msgspec.json.schema_components([RunConfig], ref_template="{name}")

    def inlined(of: Any) -> Any:
        match of:
            case {"$ref": str(name), **rest}:
                return inlined(parts[name]) | rest
            case dict():
                return {key: inlined(value) for key, value in of.items()}
            case list():
                return [inlined(value) for value in of]
            case _:
                return of

    whole = _explained(inlined(found), RunConfig)
    model = whole["properties"]["model"]
    whole["properties"]["model"] = {
        "description": model["description"],
        "anyOf": [{"type": "string", "description": NAMED_MODEL}, model],
    }
    return {"$schema": "http://json-schema.org/draft-07/schema#"} | whole | {"title": TITLE}


def _explained(section: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """The section with the meanings of its keys, and closed: another key is a mistake."""
    keys = section["properties"]
    for item in fields(kind):
        of = get_type_hints(kind)[item.name]
        for inner in (of, *get_args(of)):
            if isinstance(inner, type) and is_dataclass(inner):
                _explained(keys[item.name] if inner is of else keys[item.name]["items"], inner)
        if said := meaning(kind, item.name):
            keys[item.name].pop("title", None)
            keys[item.name]["description"] = said
    section["additionalProperties"] = False
    section["description"] = " ".join(section["description"].split())
    return section


def draw() -> str:
    """The text of the file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"
