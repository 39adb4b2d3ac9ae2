"""What is run: a case is a method with settings under conditions. Data; no torch.

With a length and a seed it is a *trial*. Its figures are kept together with all that decides them, so a case that
is changed is run again, and one that is only renamed is not.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from atoll.comm.config.load import load_run
from atoll.comm.config.run import RunConfig
from atoll.comm.config.shipped import method_file
from atoll.node.simulate.conditions import Conditions

RUN = Path(__file__).parent / "run.yaml"
ALGORITHM = 1  # raise it when the same config gives other figures: all is run again then
NODES = 4
NAMED = ("name", "members", "checkpoint", "security", "wandb", "figures")  # sections that no figure depends on


@dataclass(frozen=True)
class Case:
    key: str
    title: str
    settings: tuple[str, ...] = ()
    method: str = ""  # of configs/methods; "": none
    parallel: bool = False  # data parallelism: gradients averaged in each step
    real: bool = False  # in real processes, not simulated
    bf16: bool = True  # computes in bf16, with parameters, optimizers and evaluations in fp32; else all in fp32
    together: float = 0.1  # share of the steps that begin so
    steps: int = 0  # inner steps of a node; 0: as many as all cases are given
    conditions: tuple[tuple[str, Any], ...] = ()  # of `Conditions`


@dataclass(frozen=True)
class Size:
    """Of the model."""

    key: str
    title: str
    params: str
    settings: tuple[str, ...] = ()


DEMO = Size("demo", "the demo's model, 0.82M parameters", "0.82M")
EIGHTH = Size(
    *("eighth", "an eighth of it, 0.12M parameters", "0.12M"),
    tuple(f"model.{key}" for key in ("dim=64", "layers=2", "heads=2", "kv_heads=2", "ffn_dim=172")),
)
SIZES = {size.key: size for size in (DEMO, EIGHTH)}


@dataclass(frozen=True)
class Trial:
    case: Case
    steps: int
    seed: int
    run: RunConfig = field(repr=False)
    conditions: Conditions = field(repr=False)

    @cached_property
    def decides(self) -> dict[str, Any]:
        """All that its figures depend on, as it is written to JSON."""
        how = {
            "algorithm": ALGORITHM,
            "parallel": self.case.parallel,
            "real": self.case.real,
            "bf16": self.case.bf16,
        }
        return how | {"conditions": self._conditions(), "run": self._deciding(self.run)}

    def is_told_by(self, decided: Mapping[str, Any]) -> bool:
        """Whether figures that `decided` led to are this trial's. A setting that did not exist then must have its
        default, which is what it was without it."""
        return _same(decided, self.decides, self._default)

    @cached_property
    def _default(self) -> dict[str, Any]:
        conditions = asdict(Conditions(NODES, self.steps))
        return {"real": False, "bf16": False, "run": self._deciding(RunConfig()), "conditions": conditions}

    def _deciding(self, run: RunConfig) -> dict[str, Any]:
        sections = {section: value for section, value in asdict(run).items() if section not in NAMED}
        if self.case.parallel:  # the rest means nothing to it
            return {section: sections[section] for section in ("seed", "model", "data", "inner")}
        return sections

    def _conditions(self) -> dict[str, Any]:
        found = asdict(self.conditions)
        return found | {"speeds": list(found["speeds"])}


def _same(then: Any, now: Any, default: Any) -> bool:
    if not isinstance(now, Mapping) or not isinstance(then, Mapping):
        return bool(then == now)
    if set(then) - set(now):
        return False
    inner = default if isinstance(default, Mapping) else {}
    return all(
        _same(then[key], value, inner.get(key)) if key in then else value == inner.get(key)
        for key, value in now.items()
    )


@cache
def trial(case: Case, steps: int, seed: int, size: Size = DEMO) -> Trial:
    """The case at `steps` inner steps of a node, with the schedule stretched to them."""
    run, steps = _loaded(case, size), case.steps or steps
    tokens = steps * NODES * run.inner.batch_size * run.model.seq_len
    inner = replace(run.inner, decay_tokens=tokens, warmup_tokens=tokens // 20)
    rounds = replace(run.rounds, data_parallel=round(case.together * steps))
    conditions = Conditions(NODES, steps, **dict(case.conditions))
    conditions.check()
    return Trial(case, steps, seed, replace(run, seed=seed, inner=inner, rounds=rounds), conditions)


@cache
def _loaded(case: Case, size: Size) -> RunConfig:
    return load_run(RUN, (*size.settings, *case.settings), method_file(case.method, RUN) if case.method else None)


def varied(case: Case, key: str, title: str, *settings: str, **conditions: Any) -> Case:
    """The same with more settings and other conditions."""
    merged = tuple({**dict(case.conditions), **conditions}.items())
    return replace(case, key=key, title=title, settings=(*case.settings, *settings), conditions=merged)
