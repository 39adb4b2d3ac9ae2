"""The run's configuration: what the operator writes, the coordinator checks and every node receives.

Files and dotlist overrides are read through OmegaConf on the operator's machine (`load_run`).
Over the wire it is plain JSON checked against the same dataclasses (`from_json`): text that came
from elsewhere is never given to OmegaConf, whose `${...}` would be resolved.
"""

import re
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec

from atoll.comm.config.outer import FragmentsConfig, OverlapConfig, rules_of
from atoll.comm.config.outer import OuterConfig as OuterConfig
from atoll.comm.errors import ConfigError

T = TypeVar("T")


class DataKind(StrEnum):
    STDLIB = "stdlib"  # the Python standard library's own source, as bytes
    BYTES = "bytes"  # a folder of text files on each node, as bytes
    TEXT = "text"  # a folder of text files on each node, through a tokenizer


class OptimizerName(StrEnum):
    ADAMW = "adamw"
    MUON = "muon"  # of matrices; embeddings, head, norms and biases by AdamW
    SGD = "sgd"  # without momentum


class CodecName(StrEnum):
    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"
    SPARSE = "sparse"  # the largest 1 of 64 elements, 2 bits each


class ScaleName(StrEnum):
    FP16 = "fp16"  # a share of the chunk's largest scale
    FP32 = "fp32"


class TlsMode(StrEnum):
    AUTO = "auto"  # on, unless the coordinator is on a loopback address only
    ON = "on"
    OFF = "off"


class WandbMode(StrEnum):
    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"
    AUTO = "auto"  # as WANDB_MODE says, else online when an API key is present, else offline


@dataclass
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, SwiGLU, grouped-query attention."""

    vocab_size: int = 256
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4  # fewer than heads: grouped-query attention
    ffn_dim: int = 344  # hidden width of SwiGLU
    seq_len: int = 128  # tokens
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    tied_head: bool = True  # the output head shares the embedding

    @property
    def n_params(self) -> int:
        """Parameters of the flat vector."""
        head_dim = self.dim // self.heads
        attention = self.dim * head_dim * 2 * (self.heads + self.kv_heads)
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tied_head else 2)
        return embeddings + self.layers * block + self.dim


@dataclass
class DataConfig:
    kind: DataKind = DataKind.STDLIB
    tokenizer: str = ""  # for kind=text: path of a tokenizer.json, the same on every node
    val_every: int = 20  # every n-th file is validation
    val_batches: int = 4  # batches in one evaluation of the anchor
    eval_every: int = 1  # rounds, or turns of all fragments, between evaluations of the anchor


PEAKS = {OptimizerName.ADAMW: 3e-3, OptimizerName.MUON: 1.2e-2, OptimizerName.SGD: 3e-3}  # docs/quality.md


@dataclass
class InnerConfig:
    """The optimizer on each node (`atoll.node.trainer.optimizer`): one learning rate for all parameters."""

    optimizer: OptimizerName = OptimizerName.MUON
    lr: float | None = None  # peak; null: what measures best for the optimizer and a model as small as the demo's
    min_lr: float | None = None  # at the end of the cosine; null: a tenth of the peak
    warmup_tokens: int = 20_000  # committed tokens
    decay_tokens: int = 1_000_000  # committed tokens at which the cosine reaches min_lr
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    muon_momentum: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0  # gradient norm
    batch_size: int = 8  # sequences a step and node, over all local ranks

    @property
    def peak(self) -> float:
        """The largest learning rate."""
        return PEAKS[self.optimizer] if self.lr is None else self.lr

    @property
    def least(self) -> float:
        """The learning rate that the cosine ends at."""
        return self.peak / 10 if self.min_lr is None else self.min_lr


@dataclass
class RoundsConfig:
    inner_steps: int = 100  # H: a round does not close before a quorum has taken so many; a turn of all fragments
    floor: int = 1  # inner steps that every contribution has at least
    ceiling: float = 2.0  # times inner_steps: a member that waits for others or for the coordinator takes no more
    total: int = 0  # rounds after which the run is finished; 0: until stopped
    quorum: float = 0.5  # share of active members that make a round close
    grace: float = 0.25  # of the quorum's inner time: how much longer those that will soon be there may take
    collect: float = 60.0  # seconds that a member told to finish may take at most
    reduce_timeout: float = 600.0  # seconds for one attempt of a reduce
    data_parallel: int = 0  # rounds at the start of the run that have one inner step: parameters are averaged

    @property
    def most_steps(self) -> int:
        """Inner steps that a member takes in one round at most."""
        return max(self.inner_steps, int(self.inner_steps * self.ceiling))


@dataclass
class ReduceConfig:
    codec: CodecName = CodecName.INT8
    block: int = 96  # elements that share one scale: 1 % less bytes than 64 with int8, a twentieth more error
    scales: ScaleName = ScaleName.FP16
    chunk: int = 524_160  # elements of one chunk: a multiple of what the codecs have in one part
    zstd: bool = True  # pack what is sent wherever that saves more time than it takes
    levels: int = 2  # 1: also what crosses slow links between regions goes straight to its owner

    @property
    def bytes_per_element(self) -> float:
        """Of an encoded vector."""
        scale = (2 if self.scales is ScaleName.FP16 else 4) / self.block
        sizes = {
            CodecName.FP32: 4.0,
            CodecName.BF16: 2.0,
            CodecName.INT8: 1 + scale,
            CodecName.INT4: 0.5 + scale,
            CodecName.SPARSE: (64 * 14 / 8 + 2) / 4096,
        }
        return sizes[self.codec]


@dataclass
class MembersConfig:
    start: int = 1  # active members the first round waits for
    minimum: int = 1  # fewer active members than this: the run waits
    lease: float = 20.0  # seconds of silence after which a member is gone
    reconnect: float = 2.0  # seconds a member whose connection broke has to come back
    stall: float = 300.0  # seconds without an inner step after which a trainer counts as hung


@dataclass
class SecurityConfig:
    tls: TlsMode = TlsMode.AUTO  # between nodes and coordinator, and between nodes


@dataclass
class CheckpointConfig:
    """What outlives the nodes' processes: snapshots of the outer state on their disks, and the rounds since."""

    copies: int = 0  # nodes that take snapshots; 0: every node
    every: int = 4  # rounds, or turns of all fragments, between two snapshots of a node
    patience: float = 300.0  # seconds to wait for a lost state to return, for each round that would be void
    remote: str = ""  # fsspec URL, such as s3://bucket/folder, where checkpoints go too; empty: nowhere
    remote_every: int = 16  # rounds, or turns, between two of them
    remote_keep: int = 3  # newest of them that stay


@dataclass
class WandbConfig:
    """What the config says is done, whatever wandb's environment variables say; where it says nothing, they count.
    The run's name in wandb is WANDB_NAME, else the config's `name`."""

    mode: WandbMode = WandbMode.AUTO  # auto: WANDB_MODE, else online when an API key is present, else offline
    project: str = ""  # empty: WANDB_PROJECT, else atoll
    entity: str = ""  # empty: WANDB_ENTITY, else the account's own


@dataclass
class RunConfig:
    name: str = "run"
    seed: int = 0
    init_from: str = ""  # checkpoint, or weights as safetensors, that the run begins with: path or fsspec URL
    init_momentum: bool = True  # with the checkpoint's outer momentum, if it has one
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    fragments: FragmentsConfig = field(default_factory=FragmentsConfig)
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    reduce: ReduceConfig = field(default_factory=ReduceConfig)
    members: MembersConfig = field(default_factory=MembersConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)

    def delay(self, round_: int) -> int:
        """Inner steps after which the anchor of this round is taken; 0: nodes wait for it."""
        return 0 if round_ <= self.rounds.data_parallel else self.overlap.delay

    @property
    def round_steps(self) -> float:
        """Inner steps of a round, on average over the fragments."""
        return self.rounds.inner_steps / (self.fragments.count if self.fragments.stagger else 1)


def load_run(path: Path, overrides: tuple[str, ...] = (), method: Path | None = None) -> RunConfig:
    """Read a run's YAML file, a method's over it, and dotlist overrides (`key.sub=value`) over both; raise
    `ConfigError` with a sentence."""
    config = load_dataclass(RunConfig, path, overrides, over=method)
    check(config)
    return config


def load_dataclass(schema: type[T], path: Path | None, overrides: tuple[str, ...], over: Path | None = None) -> T:
    """Merge `schema`'s defaults, a YAML file, one `over` it, and a dotlist; unknown keys and wrong types are
    `ConfigError`s."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    source = "the overrides"
    try:
        merged = OmegaConf.structured(schema)
        for file in (path, over):
            if file is not None:
                path, source = file, str(file)
                merged = OmegaConf.merge(merged, _fitted(schema, OmegaConf.load(file), source))
        source = "the overrides"
        merged = OmegaConf.merge(merged, _fitted(schema, _dotlist(overrides), source))
        loaded = OmegaConf.to_object(merged)
    except TypeError:
        raise ConfigError(f"{source} does not hold keys and values: write a YAML mapping") from None
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "?"
        reason = str(error.msg or error).splitlines()[0] if hasattr(error, "msg") else str(error).splitlines()[0]
        # OmegaConf lists the members' names; what is written are their values.
        reason = re.sub(r"expected one of \[.*\]", lambda found: found[0].lower(), reason)
        raise ConfigError(f"config key {key!r} in {source}: {reason}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from None
    except YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    assert isinstance(loaded, schema)
    return loaded


def _dotlist(overrides: tuple[str, ...]) -> Any:
    """What the overrides say; the one that cannot be read is named."""
    from omegaconf import OmegaConf
    from yaml import YAMLError

    said = OmegaConf.create()
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} has no '=': write key=value, for example outer.lr=0.5")
        try:
            said.merge_with_dotlist([override])
        except YAMLError as error:
            reason = getattr(error, "problem", None) or error
            raise ConfigError(f"override {override!r} is not valid YAML behind the '=': {reason}") from None
    return said


def _fitted(schema: type[Any], found: Any, source: str, above: str = "") -> Any:
    """`found` with words where the schema has words: YAML takes a bare on or off for true or false. A value in
    the place of a section is refused."""
    from omegaconf import DictConfig, OmegaConf

    for key, kind in get_type_hints(schema).items() if isinstance(found, DictConfig) else ():
        if key not in found or OmegaConf.is_interpolation(found, key) or not isinstance(kind, type):
            continue
        value = found.get(key)
        if is_dataclass(kind):
            if not isinstance(value, DictConfig):
                example = f"{above}{key}.{fields(kind)[0].name}=..."
                raise ConfigError(
                    f"config key '{above}{key}' in {source} is a section: set one of its keys, as in {example}"
                )
            _fitted(kind, value, source, f"{above}{key}.")
        elif isinstance(value, bool) and issubclass(kind, StrEnum):
            found[key] = "on" if value else "off"
    return found


def check(config: RunConfig) -> None:
    """Refuse values that no run can work with; raise `ConfigError` naming the key, the value and the remedy."""
    m = config.model
    positive: dict[str, float] = {
        "model.vocab_size": m.vocab_size,
        "model.dim": m.dim,
        "model.layers": m.layers,
        "model.heads": m.heads,
        "model.kv_heads": m.kv_heads,
        "model.ffn_dim": m.ffn_dim,
        "model.seq_len": m.seq_len,
        "data.val_batches": config.data.val_batches,
        "data.eval_every": config.data.eval_every,
        "inner.lr": config.inner.peak,
        "inner.batch_size": config.inner.batch_size,
        "inner.decay_tokens": config.inner.decay_tokens,
        "inner.clip": config.inner.clip,
        "outer.lr": config.outer.lr,
        "rounds.inner_steps": config.rounds.inner_steps,
        "rounds.floor": config.rounds.floor,
        "rounds.collect": config.rounds.collect,
        "rounds.reduce_timeout": config.rounds.reduce_timeout,
        "reduce.block": config.reduce.block,
        "reduce.chunk": config.reduce.chunk,
        "fragments.count": config.fragments.count,
        "members.start": config.members.start,
        "members.minimum": config.members.minimum,
        "members.lease": config.members.lease,
        "members.stall": config.members.stall,
        "checkpoint.every": config.checkpoint.every,
        "checkpoint.remote_every": config.checkpoint.remote_every,
        "checkpoint.remote_keep": config.checkpoint.remote_keep,
    }
    for key, value in positive.items():
        if not value > 0:
            raise ConfigError(f"{key} is {value}: it must be greater than 0")
    for section in ("model", "inner", "outer", "fragments", "overlap", "rounds", "members", "checkpoint"):
        for key, value in vars(getattr(config, section)).items():
            if isinstance(value, float) and not 0 <= value < float("inf"):
                raise ConfigError(f"{section}.{key} is {value}: it must be finite and not negative")
            if isinstance(value, int) and value > 1 << 42:
                raise ConfigError(f"{section}.{key} is {value}: no machine can hold that")
    rules: list[tuple[bool, str]] = [
        (bool(config.name.strip()), "name is empty: give the run a name"),
        (m.dim % m.heads == 0, f"model.dim {m.dim} is not a multiple of model.heads {m.heads}"),
        ((m.dim // m.heads) % 2 == 0, f"model.dim / model.heads is {m.dim / m.heads:g}: rotary needs it even"),
        (m.heads % m.kv_heads == 0, f"model.heads {m.heads} is not a multiple of model.kv_heads {m.kv_heads}"),
        (config.data.val_every >= 2, f"data.val_every is {config.data.val_every}: it must be 2 or more"),
        (0 <= config.seed < 1 << 63, f"seed is {config.seed}: it must be in 0 ... 2^63 - 1"),
        (config.reduce.levels in (1, 2), f"reduce.levels is {config.reduce.levels}: it must be 1 or 2"),
        (config.reduce.block % 2 == 0, f"reduce.block is {config.reduce.block}: it must be even"),
        (
            config.reduce.chunk >= config.reduce.block,
            f"reduce.chunk {config.reduce.chunk} is less than one reduce.block of {config.reduce.block}",
        ),
        (
            config.reduce.chunk <= 1 << 31,
            f"reduce.chunk is {config.reduce.chunk}: it must be 2^31 elements or fewer",
        ),
        (config.inner.beta1 < 1, f"inner.beta1 is {config.inner.beta1}: it must be in [0, 1)"),
        (config.inner.beta2 < 1, f"inner.beta2 is {config.inner.beta2}: it must be in [0, 1)"),
        (
            config.inner.muon_momentum < 1,
            f"inner.muon_momentum is {config.inner.muon_momentum}: it must be in [0, 1)",
        ),
        (
            config.inner.least <= config.inner.peak,
            f"inner.min_lr {config.inner.least:g} is above inner.lr {config.inner.peak:g}",
        ),
        (0 <= config.outer.momentum < 1, f"outer.momentum is {config.outer.momentum}: it must be in [0, 1)"),
        *rules_of(config.outer, config.fragments, config.overlap),
        (
            config.overlap.delay <= config.rounds.inner_steps,
            f"overlap.delay {config.overlap.delay} is above rounds.inner_steps {config.rounds.inner_steps}",
        ),
        (
            config.reduce.codec is not CodecName.SPARSE or config.outer.feedback > 0,
            "reduce.codec is sparse, which sends 1 of 64 elements, and outer.feedback is 0: set it to 0.95, "
            "or most of each delta is lost",
        ),
        (config.rounds.data_parallel >= 0, "rounds.data_parallel must not be negative"),
        (0 < config.rounds.quorum <= 1, f"rounds.quorum is {config.rounds.quorum}: it must be in (0, 1]"),
        (config.rounds.ceiling >= 1, f"rounds.ceiling is {config.rounds.ceiling}: it must be 1 or more"),
        (
            config.rounds.floor <= config.rounds.inner_steps,
            f"rounds.floor {config.rounds.floor} is above rounds.inner_steps {config.rounds.inner_steps}",
        ),
        (
            config.members.minimum <= config.members.start,
            f"members.minimum {config.members.minimum} is above members.start {config.members.start}",
        ),
        (
            config.checkpoint.copies >= 0,
            f"checkpoint.copies is {config.checkpoint.copies}: it must be 0 (every node) or more",
        ),
        *(
            rule
            for key, url in (("checkpoint.remote", config.checkpoint.remote), ("init_from", config.init_from))
            for rule in _url_rules(key, url)
        ),
        (config.rounds.total >= 0, f"rounds.total is {config.rounds.total}: it must not be negative"),
        (config.inner.warmup_tokens >= 0, "inner.warmup_tokens must not be negative"),
        (
            config.inner.warmup_tokens < config.inner.decay_tokens,
            f"inner.warmup_tokens {config.inner.warmup_tokens} must be below "
            f"inner.decay_tokens {config.inner.decay_tokens}",
        ),
        (
            config.data.kind is not DataKind.TEXT or bool(config.data.tokenizer),
            "data.kind is text but data.tokenizer is empty: give the path of a tokenizer.json",
        ),
        (
            config.data.kind is DataKind.TEXT or m.vocab_size >= 256,
            f"model.vocab_size is {m.vocab_size}: data.kind={config.data.kind} needs at least 256, one a byte",
        ),
    ]
    for holds, sentence in rules:
        if not holds:
            raise ConfigError(sentence)


def _url_rules(key: str, url: str) -> list[tuple[bool, str]]:
    """What holds for the URL of a store, and what to say where it does not."""
    scheme, there, _ = url.partition("://")
    return [
        ("::" not in url, f"{key} is {url!r}: it must be one URL, without '::'"),
        (
            not re.search("//[^/]*:[^/]*@", url),
            f"{key} has a password in it, and every node gets the run's config: give it to the machines that "
            "need it in their environment",
        ),
        (
            not there or scheme in _schemes(),
            f"{key} is {url!r}: no store is known whose URLs begin with {scheme}://, as those of s3:// do",
        ),
    ]


def _schemes() -> list[str]:
    from fsspec import available_protocols  # 0.1 s, which most runs never need

    known: list[str] = available_protocols()
    return known


def to_json(config: RunConfig) -> bytes:
    """The config as nodes receive it."""
    return msgspec.json.encode(config)


def from_json(data: bytes) -> RunConfig:
    """Decode a config that came over the wire; interpolation and unknown shapes are refused."""
    if b"${" in data:
        raise ConfigError("the run's config holds '${': a coordinator must send plain values")
    try:
        config = msgspec.json.decode(data, type=RunConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the run's config does not fit this version's schema: {error}") from None
    check(config)
    return config


def to_yaml(config: Any) -> str:
    """The resolved config for people to read."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.structured(config))
