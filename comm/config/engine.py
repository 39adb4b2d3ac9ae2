"""The engine of a run's inner loop: who computes the steps, and what the run says to one that is not built in.

A run's config comes from elsewhere, and torchtitan's settings can name code and files. So the run may only choose
one of torchtitan's own models, and say how it is computed (`TitanConfig.rules`); a volunteer's own settings
(`atoll.node.config.NodeConfig.titan`) are not bounded. What it says of a model of transformers' is in
`atoll.comm.config.hf`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from atoll.comm.config.rules import Rule


class Engine(StrEnum):
    """The training loops behind a run's nodes."""

    BUILTIN = "builtin"  # Atoll's own model and loop (`atoll.node.trainer`)
    TORCHTITAN = "torchtitan"  # a model of torchtitan's, in its `Trainer` (`atoll.node.engines.torchtitan`)
    HF = "hf"  # a model of transformers', whole or by LoRA adapters (`atoll.node.engines.hf`)


# Sections of torchtitan's settings, and single ones, that say how a model is computed and touch no file.
TITAN_SECTIONS = ("activation_checkpoint", "compile", "parallelism", "training")
TITAN_SETTINGS = ("debug.deterministic", "debug.moe_force_load_balance", "optimizer.implementation")
# What the run's own config says, or what Atoll needs as it is.
TITAN_FIXED = {
    "training.seq_len": "model.seq_len says it",
    "training.global_batch_size": "inner.batch_size says it",
    "training.max_norm": "inner.clip says it",
    "training.steps": "rounds.total says how long the run goes on",
    "training.dtype": "parameters are fp32; training.mixed_precision_param says what is computed in",
    "parallelism.pipeline_parallel_schedule_csv": "it names a file",
}


@dataclass
class TitanConfig:
    """The model that a run with `engine: torchtitan` trains, by its names in torchtitan; of the run's `model`
    section only `seq_len` and `vocab_size` count then."""

    module: str = "llama3"  # a folder of torchtitan.models
    config: str = ""  # a function of its config_registry, such as llama3_8b
    # torchtitan's own command-line settings, such as --training.local_batch_size=2, which is the micro-batch
    settings: list[str] = field(default_factory=list)

    def rules(self) -> Iterator[Rule]:
        """Rules of names and settings, as far as they can be checked without torchtitan."""
        yield (
            bool(self.config),
            "engine is torchtitan and titan.config is empty: name one of its configurations, such as llama3_8b",
        )
        for key, name in (("module", self.module), ("config", self.config)):
            yield (
                re.fullmatch(r"[a-z][a-z0-9_]*", name) is not None,
                f"titan.{key} is {name!r}: write a name of torchtitan's, such as llama3 and llama3_8b",
            )
        for setting in self.settings:
            yield from _setting_rules(setting)


def _setting_rules(setting: str) -> Iterator[Rule]:
    """Rules of one of torchtitan's settings: `--SECTION.KEY=VALUE`, `--SECTION.KEY` or `SECTION:CHOICE`."""
    found = re.fullmatch(r"(?:--(?P<key>[\w.-]+)(?:=.*)?|(?P<section>[\w-]+):[\w-]+)", setting, re.DOTALL)
    yield (
        found is not None,
        f"titan.settings has {setting!r}: write --section.key=value, as torchtitan's command line has it",
    )
    assert found is not None
    key = (found["key"] or found["section"]).replace("-", "_")
    section = key.split(".")[0].removeprefix("no_")
    plain = ".".join(part.removeprefix("no_") for part in key.split("."))
    yield (
        section in TITAN_SECTIONS or plain in TITAN_SETTINGS,
        f"titan.settings has {setting!r}: a run says settings of {', '.join(TITAN_SECTIONS)}, and "
        f"{', '.join(TITAN_SETTINGS)}; a node's own titan= may say more",
    )
    yield plain not in TITAN_FIXED, f"titan.settings has {setting!r}: {TITAN_FIXED.get(plain, '')}"
