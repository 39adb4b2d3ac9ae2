"""The volunteer's choices for their own machine; nothing here comes from or goes to the network."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import unquote

from atoll.comm.config.run import RunConfig
from atoll.comm.cores import core_share
from atoll.comm.errors import ConfigError, ResourceError
from atoll.comm.invite import split_host_port
from atoll.comm.log import LogSetup

# Environment variable: the file, JSON, in which a daemon says all that its trainer needs (`TrainerSpec`).
SPEC = "ATOLL_TRAINER"


class Device(StrEnum):
    """The device that a trainer computes on."""

    AUTO = "auto"  # cuda if there is one; on a Mac mps, where torch can
    CPU = "cpu"
    CUDA = "cuda"
    MPS = "mps"  # Apple's GPU, which shares the processor's memory


class Checkpointing(StrEnum):
    """Parts of a block that its backward pass computes again, so that it need not be kept."""

    AUTO = "auto"  # as little as memory allows
    NONE = "none"
    SELECTIVE = "selective"  # all but attention and every other matrix product
    FULL = "full"  # everything


@dataclass
class NodeConfig:
    """The volunteer's settings of one node, read from STATE_DIR/node.yaml, then from `key=value` on the command
    line."""

    device: Device = Device.AUTO
    # local ranks (W) that share the model; on CUDA one a GPU. 0: all GPUs, or 1 on a CPU
    ranks: int = 0
    machines: int = 1  # that this node's trainer runs on: this one, and others with `atoll node worker`
    machines_min: int = 0  # fewest of them with which it trains while others are gone; 0: all
    rendezvous: str = ""  # HOST:PORT of this machine, at which the others come
    threads: int = 0  # CPU threads of each rank; 0: this node's share of the usable cores, over its ranks
    bf16: bool | None = None  # mixed precision: bf16 compute, fp32 parameters and reduction; null: on CUDA
    compile: bool | None = None  # torch.compile each block; null: on CUDA
    micro_batch: int = 0  # sequences in one forward pass of each rank; 0: measured
    checkpointing: Checkpointing = Checkpointing.AUTO  # of activations
    upload: float = 0.0  # Mbit/s to peers at most; 0: no limit
    download: float = 0.0  # Mbit/s from peers at most; 0: no limit
    streams: int = 0  # TCP streams to each peer; 0: as many as measurements say
    congestion: str = ""  # TCP congestion control towards peers, such as bbr or cubic; empty: what suits the path
    durable: bool = True  # keep the run's state, and the rounds since, in the state directory
    disk: float = 0.0  # GB of it that they may take; 0: what they need, about 80 bytes a parameter
    relay: bool = False  # pass on what members send each other that cannot be dialled: of a node that can be
    relay_port: int = 0  # at which they dial it for that; 0: any, and the same at each start
    relay_streams: int = 64  # that it passes on at once, at most
    relay_rate: float = 0.0  # Mbit/s that it passes on, all together; 0: no limit, or half of upload
    files: bool = False  # the run may keep checkpoints in this machine's files, or begin with some of them
    # beginnings of URLs, such as s3://bucket/ or https://data.example.org/: where the run may have this node fetch
    # data and weights, and keep checkpoints; empty: in any public store
    stores: list[str] = field(default_factory=list)
    # folder of text files, for a run whose data.kind is bytes; of kind dataset: one that holds the run's data set
    data: str = ""
    cache: float = 20.0  # GB of disk for what was fetched of the run's data sets, at most; 0: nothing is kept
    model: str = ""  # "package.module:function" that builds your own model from the run's ModelConfig
    # torchtitan's own settings on this machine, after those of a run whose engine it is: parallelism, micro-batch
    titan: list[str] = field(default_factory=list)
    base: str = ""  # folder with the frozen weights of a run that trains LoRA adapters; empty: where the run says
    # seconds between copies of what a trainer has of a round, which a crash spares: in memory where that has room,
    # else on the disk, and then as rarely as it takes to write 100 GB a day; 0: none
    copy_interval: float = 60.0
    # Limits, which `atoll node limits` changes while the node runs; in that order of weight when several apply.

    hours: str = ""  # of the day in which it trains, such as 22:00-07:00, by this machine's clock; empty: all
    daily: float = 0.0  # GB a day that the exchange with peers may take, up and down together; 0: no limit
    monthly: float = 0.0  # GB a month, the same; 0: no limit
    battery: bool = True  # train on battery
    metered: bool = True  # train on a link that NetworkManager says is metered
    idle_only: bool = False  # train only while nobody else uses this machine
    gpu_temperature: float = 0.0  # degrees Celsius above which no GPU is worked further; 0: no limit
    gpu_duty: float = 1.0  # share of the time that the trainer computes, GPU or not: it rests between inner steps
    memory: float = 0.0  # GB that the processes of this node may take together, beside GPUs' memory; 0: no limit
    max_restarts: int = 5  # trainer crashes without a finished round in between, before the node gives up

    def demand_store(self, key: str, url: str) -> None:
        """Raise `ResourceError` where a run's `key` names a store that `stores` does not allow. A path, or a file,
        is for `files` to allow."""
        if self.stores and "://" in url and not _is_within(url, self.stores):
            raise ResourceError(
                f"the run's {key} is {url.partition('?')[0]!r}, and this node's owner allows "
                f"stores={','.join(self.stores)}: add it to these, or take part in another run"
            )


def _is_within(url: str, stores: Sequence[str]) -> bool:
    """Whether a URL is one of the stores, or of something in one of them, whatever reads it: what readers may take
    for something else is in none."""
    path = url.partition("?")[0].replace("\\", "/")
    if path in stores:
        return True
    odd = not url.isascii() or not url.isprintable() or any(sign in url for sign in " #")
    if odd or "::" in url or "@refs/" in url or ".." in unquote(path).split("/"):
        return False
    return any(path == store.rstrip("/") or path.startswith(store.rstrip("/") + "/") for store in stores)


@dataclass
class TrainerSpec:
    """All a trainer needs to start; the daemon writes it as JSON into the state directory."""

    run: RunConfig = field(default_factory=RunConfig)
    node: NodeConfig = field(default_factory=NodeConfig)
    channel: str = ""  # path of the daemon's unix socket
    cache: str = ""  # folder for fetched data, and for what was measured
    moments: str = ""  # folder for the inner optimizer's state; empty: it is not kept
    command: tuple[str, ...] = ()  # the volunteer's own trainer; empty: the built-in one
    lan: bool = False  # the run's data may be in this machine's own network, where its coordinator is
    log: LogSetup = LogSetup("trainer")  # to stderr, which is the trainer's log


def threads_of(config: NodeConfig) -> tuple[int, str]:
    """CPU threads of each local rank, as things are now on this machine; and why so many."""
    if config.threads:
        return config.threads, "threads= says so"
    share = core_share()
    ranks = f", {config.ranks} ranks" if config.ranks > 1 else ""
    return share.threads(max(config.ranks, 1)), f"{share}{ranks}"


def check(config: NodeConfig) -> None:
    """Raise `ConfigError` for the first setting that is out of its range."""
    if not 0 <= config.ranks <= 1024:
        raise ConfigError(f"ranks is {config.ranks}: it must be 0 (automatic) or in 1 ... 1024")
    if config.micro_batch < 0:
        raise ConfigError(f"micro_batch is {config.micro_batch}: it must be 0 (measured) or more")
    if config.machines < 1 or not 0 <= config.machines_min <= config.machines:
        raise ConfigError(
            f"machines is {config.machines} and machines_min {config.machines_min}: the former must be 1 or more, "
            "the latter in 0 ... machines"
        )
    if config.machines > 1 and not config.rendezvous:
        raise ConfigError(
            f"machines is {config.machines} and rendezvous is empty: give the HOST:PORT of this machine at which "
            "the others come (atoll node worker HOST:PORT)"
        )
    if config.rendezvous:
        split_host_port(config.rendezvous, "rendezvous")
    if not 0 <= config.copy_interval < 1e9:
        raise ConfigError(
            f"copy_interval is {config.copy_interval:g}: it must be 0 (no copies) or a number of seconds"
        )
    if config.max_restarts < 0:
        raise ConfigError(f"max_restarts is {config.max_restarts}: it must be 0 or more")
    for key, rate in (("upload", config.upload), ("download", config.download)):
        if not 0 <= rate < 1e9:
            raise ConfigError(f"{key} is {rate:g}: it must be 0 (no limit) or a number of Mbit/s")
    for key, amount in (("daily", config.daily), ("monthly", config.monthly), ("memory", config.memory)):
        if not 0 <= amount < 1e9:
            raise ConfigError(f"{key} is {amount:g}: it must be 0 (no limit) or a number of GB")
    if not 0.01 <= config.gpu_duty <= 1:
        raise ConfigError(f"gpu_duty is {config.gpu_duty:g}: it must be a share of the time, 0.01 ... 1")
    if not (config.gpu_temperature == 0 or 30 <= config.gpu_temperature <= 120):
        raise ConfigError(
            f"gpu_temperature is {config.gpu_temperature:g}: it must be 0 (no limit) or 30 ... 120 degrees Celsius"
        )
    if not 0 <= config.relay_rate < 1e9:
        raise ConfigError(f"relay_rate is {config.relay_rate:g}: it must be 0 (no limit) or a number of Mbit/s")
    if not 1 <= config.relay_streams <= 65536:
        raise ConfigError(f"relay_streams is {config.relay_streams}: it must be in 1 ... 65536")
    if not 0 <= config.relay_port <= 65535:
        raise ConfigError(f"relay_port is {config.relay_port}: it must be 0 (any) or a port")
    if not 0 <= config.streams <= 16:
        raise ConfigError(f"streams is {config.streams}: it must be 0 (automatic) or 1 ... 16")
    if not 0 <= config.disk < 1e9:
        raise ConfigError(f"disk is {config.disk:g}: it must be 0 (what is needed) or a number of GB")
    if not 0 <= config.cache < 1e9:
        raise ConfigError(f"cache is {config.cache:g}: it must be 0 (keep nothing) or a number of GB")
    if not 0 <= config.threads <= 1024:  # of more, no trainer could be started any more
        raise ConfigError(f"threads is {config.threads}: it must be 0 (automatic) or in 1 ... 1024")
    for beginning in config.stores:
        if "://" not in beginning:
            raise ConfigError(f"stores has {beginning!r}: write beginnings of URLs, such as s3://bucket/")
    for setting in config.titan:
        if not setting.startswith("--") and ":" not in setting:
            raise ConfigError(
                f"titan has {setting!r}: write --section.key=value, as torchtitan's command line has it"
            )
    if config.model and ":" not in config.model:
        raise ConfigError(f"model is {config.model!r}: write package.module:function")
