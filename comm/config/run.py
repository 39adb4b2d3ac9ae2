"""The run's configuration: what the operator writes, the coordinator checks and every node receives.

Each section says its own rules (`atoll.comm.config.rules`), the run those between sections. Files and overrides
are read by `atoll.comm.config.load`; over the wire the configuration is plain JSON checked against the same
dataclasses (`from_json`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf, sqrt
from typing import assert_never

import msgspec

from atoll.comm.config.data import DataConfig, DataKind
from atoll.comm.config.engine import Engine, TitanConfig
from atoll.comm.config.hf import HfConfig
from atoll.comm.config.model import ModelConfig
from atoll.comm.config.outer import FragmentsConfig, MergeName, OuterConfig, OverlapConfig
from atoll.comm.config.plugin import Plugin, PluginGroup, package_rules
from atoll.comm.config.rules import Rule, positive, representable, store_url
from atoll.comm.config.security import SecurityConfig
from atoll.comm.decode_errors import DECODE_ERRORS
from atoll.comm.errors import ConfigError

MAX_TAG = 64  # characters, by wandb's own rule


class OptimizerName(StrEnum):
    """The inner optimizers."""

    ADAMW = "adamw"
    MUON = "muon"  # of matrices; embeddings, head, norms and biases by AdamW
    SGD = "sgd"  # without momentum


class CodecName(StrEnum):
    """The formats in which deltas travel (`atoll.comm.codecs`)."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"
    SPARSE = "sparse"  # the largest 1 of 64 elements, 2 bits each


class ScaleName(StrEnum):
    """The formats of a block's scale in the integer codecs."""

    FP16 = "fp16"  # a share of the chunk's largest scale
    FP32 = "fp32"


class WandbMode(StrEnum):
    """The ways in which the coordinator's metrics go to Weights & Biases."""

    ONLINE = "online"
    OFFLINE = "offline"
    DISABLED = "disabled"
    AUTO = "auto"  # as WANDB_MODE says, else online when an API key is present, else offline


# The peak learning rate where the config gives none: what measures best for a model as small as the demo's
# (docs/quality.md).
DEFAULT_PEAK_LR = {OptimizerName.ADAMW: 3e-3, OptimizerName.MUON: 1.2e-2, OptimizerName.SGD: 3e-3}


@dataclass
class InnerConfig:
    """The optimizer on each node (`atoll.node.trainer.optimizer`): one learning rate for all parameters."""

    optimizer: OptimizerName = OptimizerName.MUON
    lr: float | None = None  # peak; null: what measures best for the optimizer and a model as small as the demo's
    min_lr: float | None = None  # at the end of the cosine; null: a tenth of the peak
    warmup_tokens: int = 20_000  # committed tokens
    decay_tokens: int = 1_000_000  # committed tokens at which the cosine reaches min_lr
    beta1: float = 0.9  # adamw: decay of the first moment in a step
    beta2: float = 0.95  # adamw: decay of the second moment in a step
    eps: float = 1e-8  # adamw: added to the root of the second moment
    muon_momentum: float = 0.95  # muon: decay of the momentum in a step
    weight_decay: float = 0.1  # of matrices, times the learning rate; with sgd of all parameters
    clip: float = 1.0  # gradient norm
    batch_size: int = 8  # sequences a step and node, over all local ranks

    @property
    def peak_lr(self) -> float:
        """The largest learning rate, at the end of the warm-up."""
        return DEFAULT_PEAK_LR[self.optimizer] if self.lr is None else self.lr

    @property
    def final_lr(self) -> float:
        """The learning rate that the cosine ends at."""
        return self.peak_lr / 10 if self.min_lr is None else self.min_lr

    def rules(self) -> Iterator[Rule]:
        """Rules of the optimizer's coefficients and of the learning rate's schedule."""
        yield from positive(
            "inner", lr=self.peak_lr, batch_size=self.batch_size, decay_tokens=self.decay_tokens, clip=self.clip
        )
        yield from representable("inner", self)
        for key in ("beta1", "beta2", "muon_momentum"):
            yield getattr(self, key) < 1, f"inner.{key} is {getattr(self, key)}: it must be in [0, 1)"
        yield (
            self.final_lr <= self.peak_lr,
            f"inner.min_lr {self.final_lr:g} is above inner.lr {self.peak_lr:g}",
        )
        yield self.warmup_tokens >= 0, "inner.warmup_tokens must not be negative"
        yield (
            self.warmup_tokens < self.decay_tokens,
            f"inner.warmup_tokens {self.warmup_tokens} must be below inner.decay_tokens {self.decay_tokens}",
        )


@dataclass
class RoundsConfig:
    """The inner steps of a round, its quorum, and how long its parts may take."""

    inner_steps: int = 100  # H: a round does not close before a quorum has taken so many; a turn of all fragments
    floor: int = 1  # inner steps that a member takes at least when its round closes; its owner's pause knows none
    ceiling: float = 2.0  # times inner_steps: a member that waits for others or for the coordinator takes no more
    total: int = 0  # rounds after which the run is finished; 0: until stopped
    # number of a member, in the order of joining, without which the run does not end: it has more rounds than
    # `total` until one of them has that member's contribution; 0: none
    until_member: int = 0
    quorum: float = 0.5  # share of active members that make a round close
    grace: float = 0.25  # of the quorum's inner time: how much longer those that will soon be there may take
    # seconds that a member told to finish may take at most; a tenth of the quorum's inner time if that is less
    # (and more than 5)
    collect: float = 60.0
    # seconds for one attempt of a reduce until all chunks are sealed, and as much until all members hold them
    reduce_timeout: float = 600.0
    data_parallel: int = 0  # rounds at the start of the run that have one inner step: parameters are averaged

    @property
    def max_steps(self) -> int:
        """The largest number of inner steps that a member takes in one round."""
        return max(self.inner_steps, int(self.inner_steps * self.ceiling))

    def rules(self) -> Iterator[Rule]:
        """Rules of a round's steps, deadlines and quorum."""
        yield from positive(
            "rounds",
            inner_steps=self.inner_steps,
            floor=self.floor,
            collect=self.collect,
            reduce_timeout=self.reduce_timeout,
        )
        yield from representable("rounds", self)
        yield self.data_parallel >= 0, "rounds.data_parallel must not be negative"
        yield 0 < self.quorum <= 1, f"rounds.quorum is {self.quorum}: it must be in (0, 1]"
        yield self.ceiling >= 1, f"rounds.ceiling is {self.ceiling}: it must be 1 or more"
        yield (
            self.floor <= self.inner_steps,
            f"rounds.floor {self.floor} is above rounds.inner_steps {self.inner_steps}",
        )
        yield self.total >= 0, f"rounds.total is {self.total}: it must not be negative"
        yield self.until_member >= 0, f"rounds.until_member is {self.until_member}: it must not be negative"


@dataclass
class ReduceConfig:
    """Encoding, chunks and transfer of deltas."""

    codec: CodecName = CodecName.INT8
    block: int = 96  # elements that share one scale: 1 % less bytes than 64 with int8, a twentieth more error
    scales: ScaleName = ScaleName.FP16
    chunk: int = 524_160  # elements of one chunk: a multiple of what the codecs have in one part
    zstd: bool = True  # pack what is sent wherever that saves more time than it takes
    levels: int = 2  # 1: also what crosses slow links between regions goes straight to its owner

    @property
    def bytes_per_element(self) -> float:
        """Bytes that each element of an encoded vector takes, on average."""
        scale = (2 if self.scales is ScaleName.FP16 else 4) / self.block
        match self.codec:
            case CodecName.FP32:
                return 4.0
            case CodecName.BF16:
                return 2.0
            case CodecName.INT8:
                return 1 + scale
            case CodecName.INT4:
                return 0.5 + scale
            case CodecName.SPARSE:
                return (64 * 14 / 8 + 2) / 4096
            case _:
                assert_never(self.codec)

    @property
    def norm_growth(self) -> float:
        """The part by which encoding may lengthen a vector's l2 norm at most.

        An element of a block is off by half a step of its scale s at most, and by s / 2**15 besides; s is the
        block's absmax over the levels, and its share of the largest is rounded up by 2**-10 of it. A block of b
        elements is no shorter than its absmax, so it is off by sqrt(b) (1/2 + 2**-15) (1 + 2**-10) / levels of its
        length. (A share below 2**-14 may be rounded up by more: by 2**-24 of the largest scale, which is twenty
        times less than the 2**-10 allow the block that has it.)
        """
        off = (0.5 + 2.0**-15) * (1 + 2.0**-9) * sqrt(self.block)
        match self.codec:
            case CodecName.FP32:
                return 0.0
            case CodecName.BF16:
                return 2.0**-9
            case CodecName.INT8:
                return off / 127
            case CodecName.INT4:
                return off / 7
            case CodecName.SPARSE:
                return inf  # of no use: nobody encodes a mean with it
            case _:
                assert_never(self.codec)

    def rules(self) -> Iterator[Rule]:
        """Rules of blocks and chunks."""
        yield from positive("reduce", block=self.block, chunk=self.chunk)
        yield self.levels in (1, 2), f"reduce.levels is {self.levels}: it must be 1 or 2"
        yield self.block % 2 == 0, f"reduce.block is {self.block}: it must be even"
        yield (
            self.chunk >= self.block,
            f"reduce.chunk {self.chunk} is less than one reduce.block of {self.block}",
        )
        yield self.chunk <= 1 << 31, f"reduce.chunk is {self.chunk}: it must be 2^31 elements or fewer"


@dataclass
class MembersConfig:
    """Numbers of members that a run needs, and deadlines after which one counts as gone."""

    start: int = 1  # active members the first round waits for
    minimum: int = 1  # fewer active members than this: the run waits
    lease: float = 20.0  # seconds of silence after which a member is gone
    reconnect: float = 2.0  # seconds a member whose connection broke has to come back
    stall: float = 300.0  # seconds without an inner step after which a trainer counts as hung

    def rules(self) -> Iterator[Rule]:
        """Rules of the members' numbers and deadlines."""
        yield from positive("members", start=self.start, minimum=self.minimum, lease=self.lease, stall=self.stall)
        yield from representable("members", self)
        yield (
            self.minimum <= self.start,
            f"members.minimum {self.minimum} is above members.start {self.start}",
        )


@dataclass
class CheckpointConfig:
    """Copies of the outer state that outlive the nodes' processes: snapshots on their disks, the rounds since, and
    checkpoints in a store."""

    copies: int = 0  # nodes that take snapshots; 0: every node
    every: int = 4  # rounds, or turns of all fragments, between two snapshots of a node
    patience: float = 300.0  # seconds to wait for a lost state to return, for each round that would be void
    remote: str = ""  # fsspec URL, such as s3://bucket/folder, where checkpoints go too; empty: nowhere
    remote_every: int = 16  # rounds, or turns, between two of them
    remote_keep: int = 3  # newest of them that stay

    def rules(self) -> Iterator[Rule]:
        """Rules of the checkpoints' numbers and of their store."""
        yield from positive(
            "checkpoint", every=self.every, remote_every=self.remote_every, remote_keep=self.remote_keep
        )
        yield from representable("checkpoint", self)
        yield self.copies >= 0, f"checkpoint.copies is {self.copies}: it must be 0 (every node) or more"
        yield from store_url("checkpoint.remote", self.remote)
        yield (
            not self.remote.startswith(("http://", "https://")),
            f"checkpoint.remote is {self.remote!r}: a web server takes no checkpoints; give a store such as s3://",
        )


@dataclass
class WandbConfig:
    """The run's place in Weights & Biases. What the config leaves open, wandb's environment variables say;
    the run's name there is WANDB_NAME, else the config's `name`. May differ at each start of the coordinator;
    nodes see it, as all of the config.
    """

    mode: WandbMode = WandbMode.AUTO  # auto: WANDB_MODE, else online when an API key is present, else offline
    project: str = ""  # empty: WANDB_PROJECT, else atoll
    entity: str = ""  # empty: WANDB_ENTITY, else the account's own
    group: str = ""  # of runs that are shown as one; empty: WANDB_RUN_GROUP
    tags: list[str] = field(default_factory=list)  # empty: WANDB_TAGS
    notes: str = ""  # empty: WANDB_NOTES
    artifacts: bool = False  # each checkpoint in checkpoint.remote is an artifact, which refers to it there

    def rules(self) -> Iterator[Rule]:
        """Rules of what wandb takes."""
        for tag in self.tags:
            yield (
                0 < len(tag) <= MAX_TAG,
                f"wandb.tags has {tag[:80]!r}: a tag has 1 to {MAX_TAG} characters",
            )


@dataclass
class FiguresConfig:
    """Where the coordinator writes each round's figures besides: what wandb gets, in its state directory. May
    differ at each start of the coordinator."""

    jsonl: bool = False  # figures.jsonl: one JSON object a round, one a line
    tensorboard: bool = False  # the folder tensorboard, for `tensorboard --logdir`


@dataclass
class RunConfig:
    """The configuration of a run, the same on every machine; `check` has passed wherever it is used."""

    name: str = "run"  # what people call it; part of join URLs and of names of checkpoints
    seed: int = 0  # of the first parameters and of the order of samples
    init_from: str = ""  # checkpoint, or weights as safetensors, that the run begins with: path or fsspec URL
    init_momentum: bool = True  # with the checkpoint's outer momentum, if it has one
    engine: Engine = Engine.BUILTIN  # computes the inner steps
    # NAME or NAME==VERSION of the packages that have model.plugin, data.plugin and outer.plugin: who lacks one is
    # told to install it, and no other package's is taken; empty: any package's is
    plugin_packages: list[str] = field(default_factory=list)
    model: ModelConfig = field(default_factory=ModelConfig)
    titan: TitanConfig = field(default_factory=TitanConfig)  # the model, where the engine is torchtitan
    hf: HfConfig = field(default_factory=HfConfig)  # the model, where the engine is hf
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
    figures: FiguresConfig = field(default_factory=FiguresConfig)

    def delay(self, round_: int) -> int:
        """Inner steps after which the anchor of this round is taken; 0: nodes wait for it."""
        return 0 if round_ <= self.rounds.data_parallel else self.overlap.delay

    @property
    def decoder(self) -> bool:
        """Whether the model is Atoll's own decoder, of the sizes that `model` says."""
        return self.engine is Engine.BUILTIN and not self.model.plugin

    @property
    def own_models(self) -> bool:
        """Whether nodes bring a model that the config does not describe."""
        return self.security.own_models or self.data.kind is DataKind.SCRIPT

    @property
    def remakes_beginning(self) -> bool:
        """Whether every node makes the same state 0, bit for bit: that of weights in a store, or what Atoll's own
        code draws from the run's seed. Another engine's depends on the processor, a script's on itself."""
        return bool(self.init_from) or (self.engine is Engine.BUILTIN and not self.own_models)

    def plugin(self, group: PluginGroup) -> Plugin | None:
        """The plugin of a group that the run names; None: this part of it is Atoll's own."""
        match group:
            case PluginGroup.MODELS:
                key, name = "model.plugin", self.model.plugin
            case PluginGroup.DATA:
                key, name = "data.plugin", self.data.plugin
            case PluginGroup.OUTER:
                key, name = "outer.plugin", self.outer.plugin
            case _:
                assert_never(group)
        return Plugin(group, key, name, tuple(self.plugin_packages)) if name else None

    @property
    def round_steps(self) -> float:
        """Inner steps of a round, on average over the fragments."""
        return self.rounds.inner_steps / (self.fragments.count if self.fragments.stagger else 1)

    def rules(self) -> Iterator[Rule]:
        """Rules of each section, and then those between sections."""
        yield bool(self.name.strip()), "name is empty: give the run a name"
        yield 0 <= self.seed < 1 << 63, f"seed is {self.seed}: it must be in 0 ... 2^63 - 1"
        yield from store_url("init_from", self.init_from)
        yield from package_rules(self.plugin_packages)
        for section in (
            self.model,
            self.data,
            self.inner,
            self.outer,
            self.fragments,
            self.overlap,
            self.rounds,
            self.reduce,
            self.members,
            self.security,
            self.checkpoint,
            self.wandb,
        ):
            yield from section.rules()
        yield (
            self.data.kind not in (DataKind.STDLIB, DataKind.BYTES) or self.model.vocab_size >= 256,
            f"model.vocab_size is {self.model.vocab_size}: data.kind={self.data.kind} needs at least 256, "
            "one a byte",
        )
        yield (
            self.engine is Engine.BUILTIN or not self.model.plugin,
            f"model.plugin is {self.model.plugin}, and engine is {self.engine}, whose models it trains: leave out "
            "one of them",
        )
        if self.engine is Engine.HF:
            yield from self.hf.rules(self.model.seq_len, self.model.vocab_size)
            yield (
                self.data.kind is not DataKind.SCRIPT,
                "data.kind is script, and engine is hf, which trains on the run's text: set another kind",
            )
        if self.engine is Engine.TORCHTITAN:
            yield from self.titan.rules()
            yield (
                self.data.kind is not DataKind.SCRIPT,
                "data.kind is script, and engine is torchtitan, which trains on the run's text: set another kind",
            )
            yield (
                self.inner.optimizer is OptimizerName.ADAMW,
                f"inner.optimizer is {self.inner.optimizer}, and engine is torchtitan, which trains with adamw: "
                "set inner.optimizer=adamw, and inner.lr to its learning rate",
            )
        yield (
            not self.wandb.artifacts or bool(self.checkpoint.remote),
            "wandb.artifacts is set, and checkpoint.remote is empty: artifacts refer to checkpoints in a store, "
            "set checkpoint.remote to its URL",
        )
        yield (
            self.overlap.delay <= self.rounds.inner_steps,
            f"overlap.delay {self.overlap.delay} is above rounds.inner_steps {self.rounds.inner_steps}",
        )
        yield (
            self.security.replay == 0
            or not (self.overlap.delay or self.fragments.count > 1 or self.outer.feedback),
            "security.replay is set, and deltas have work of other rounds in them: set overlap.delay=0, "
            "fragments.count=1 and outer.feedback=0",
        )
        yield (
            self.security.replay == 0 or self.data.kind is not DataKind.SCRIPT,
            "security.replay is set, and data.kind is script: which steps a script takes only its node knows",
        )
        yield (
            self.reduce.codec is not CodecName.SPARSE or self.outer.feedback > 0,
            "reduce.codec is sparse, which sends 1 of 64 elements, and outer.feedback is 0: set it to 0.95, "
            "or most of each delta is lost",
        )
        yield (
            self.reduce.codec is not CodecName.SPARSE or self.outer.merge is not MergeName.TRIMMED,
            "reduce.codec is sparse, whose deltas have few elements in common, and outer.merge is trimmed, which "
            "would leave nearly all of them out: set outer.merge=centered",
        )


def check(config: RunConfig) -> None:
    """Refuse values that no run can work with. Raises `ConfigError` naming the key, the value and the remedy."""
    for holds, sentence in config.rules():
        if not holds:
            raise ConfigError(sentence)


def to_json(config: RunConfig) -> bytes:
    """Encode the config as nodes receive it."""
    return msgspec.json.encode(config)


def from_json(data: bytes) -> RunConfig:
    """Decode and check a config that came over the wire. Raises `ConfigError` for interpolation, for what does not
    fit the schema, and for values that `check` refuses."""
    if b"${" in data:
        raise ConfigError("the run's config holds '${': a coordinator must send plain values")
    try:
        config = msgspec.json.decode(data, type=RunConfig)
    except DECODE_ERRORS as error:
        raise ConfigError(f"the run's config does not fit this version's schema: {error}") from None
    check(config)
    return config
