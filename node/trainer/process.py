"""The trainer, the process of one local rank: `python -m atoll.node.trainer.process --spec FILE`, started by
`atoll.node.trainer.launcher`.

Rank 0 holds the channel to the daemon and passes each command to the other ranks; all ranks carry it out
together. A trainer lives as long as its daemon: a closed channel ends it in order, and the kernel ends it
when the launcher dies. What a restart would not cure (a wrong config, too little memory) is told to the
daemon as `Failed`; anything else is a crash, which the daemon answers with a new trainer.
"""

import argparse
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, assert_never

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from atoll.comm.child_process import LAUNCHER, die_with_parent
from atoll.comm.errors import AtollError, ConfigError, ResourceError, Unreachable
from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.node import trainer_channel
from atoll.node.checkpoint.disk_budget import DiskBudget
from atoll.node.config import Device, NodeConfig, TrainerSpec, threads_of
from atoll.node.data import Source, open_source
from atoll.node.outer.layout import flat_order, fragments_and_chunks
from atoll.node.outer.method import anchor_adoption
from atoll.node.trainer.flat_vector import (
    FlatLayout,
    adopt_shards,
    copy_shards,
    layout_of,
    map_vector,
    read_shards,
    restore_shards,
    shapes_of,
    squared_distances,
    write_shards,
)
from atoll.node.trainer.inner_loop import LearnerState, RankGroup, evaluate, train
from atoll.node.trainer.model import blocks_of, build, build_custom, init_parameters
from atoll.node.trainer.optimizer import make_optimizer
from atoll.node.trainer.optimizer_checkpoint import OptimizerCheckpoint
from atoll.node.trainer.optimizer_files import OptimizerFiles
from atoll.node.trainer_channel import TrainerEnd
from atoll.outer_opt.overlap import rebase

COLLECTIVE_TIMEOUT = timedelta(days=10)  # ranks wait in one while the daemon has nothing for them to do


class Diverged(AtollError):
    """The parameters are not finite any more, and of no use."""


class RankBroadcast:
    """The daemon's commands in the same order on every rank; answers go out from rank 0."""

    def __init__(self, ranks: RankGroup, link: TrainerEnd | None) -> None:
        """`link`: rank 0's channel, None on the others."""
        assert (ranks.rank == 0) == (link is not None)
        self._ranks, self._link = ranks, link

    @property
    def has_link(self) -> bool:
        """Whether this is the rank that the daemon hears."""
        return self._link is not None

    def next_command(self) -> trainer_channel.ToTrainer:
        """Wait for the daemon's next command; every rank must call it."""
        message = self._link.next_command() if self._link else None
        return message if self._ranks.size == 1 and message else self._broadcast(message)

    def _broadcast(self, message: trainer_channel.ToTrainer | None) -> trainer_channel.ToTrainer:
        data = list(msgspec.json.encode(message)) if message else []
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0)
        text = torch.zeros(int(length), dtype=torch.uint8)
        text[: len(data)] = torch.tensor(data, dtype=torch.uint8)
        dist.broadcast(text, 0)
        command: trainer_channel.ToTrainer = msgspec.json.decode(
            text.numpy().tobytes(), type=trainer_channel.ToTrainer
        )
        return command

    def has_command(self) -> bool:
        """Whether a command of the daemon waits; only rank 0 knows, on the other ranks it is always False."""
        return self._link.has_command() if self._link else False

    def send(self, message: trainer_channel.ToDaemon) -> None:
        """Tell the daemon; of no effect on the other ranks."""
        if self._link:
            self._link.send(message)


@dataclass(frozen=True)
class MappedVectors:
    """The flat vectors shared with the daemon, (numel,) fp32 each."""

    anchor: Tensor
    local: Tensor


def main(spec_path: str, group: str) -> None:
    """Be local rank `RANK` of `WORLD_SIZE`, who meet in the file `group`; return when the daemon is gone."""
    die_with_parent(signal.SIGKILL, int(os.environ.get(LAUNCHER, "0")) or None)
    for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(sign, signal.SIG_DFL)  # a forked rank inherits the launcher's
    spec = msgspec.json.decode(Path(spec_path).read_bytes(), type=TrainerSpec)
    ranks = RankGroup(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
    try:
        commands = RankBroadcast(ranks, connect(spec.channel) if ranks.rank == 0 else None)
        with report_failures(spec.channel, commands):
            device = choose_device(spec.node, ranks)
            with rank_process_group(ranks, device, group):
                learner, layout = build_learner(spec, ranks, device)
                commands.send(trainer_channel.Hello(os.getpid(), ranks.size, layout.numel, shapes_of(layout)))
                with optimizer_checkpoint(spec, learner, layout, commands) as optimizer_state:
                    serve(commands, learner, layout, optimizer_state, partial(share_cores, spec.node))
    except AtollError as error:
        print(f"trainer rank {ranks.rank}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception:  # a crash: here, because the launcher would print it with a prefix on each line
        print(f"trainer rank {ranks.rank}: {traceback.format_exc()}", file=sys.stderr)
        sys.exit(1)


def connect(path: str) -> TrainerEnd:
    """Connect to the daemon's socket. Raises `Unreachable`."""
    try:
        return TrainerEnd(path)
    except OSError as error:
        raise Unreachable(f"the daemon does not answer at {path}: {error.strerror}") from error


@contextmanager
def report_failures(channel: str, commands: RankBroadcast) -> Iterator[None]:
    """Tell the daemon what a restart would not cure, as `Failed`, and raise it as an `AtollError`. A rank with no
    link to the daemon makes one: rank 0 may not have failed."""

    def report(sentence: str) -> None:
        if commands.has_link:
            commands.send(trainer_channel.Failed(sentence))
            return
        with suppress(AtollError):  # the daemon is gone
            connect(channel).send(trainer_channel.Failed(sentence))

    try:
        yield
    except AtollError as error:
        report(str(error))
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        sentence = (
            f"the trainer ran out of memory ({str(error).partition('. ')[0]}): share the model among more "
            "local ranks (ranks=), or join a run with a smaller model or batch"
        )
        report(sentence)
        raise ResourceError(sentence) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error says that memory has run out. Torch has a class for a GPU's memory only; for the host's it
    raises a plain RuntimeError."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def choose_device(node: NodeConfig, ranks: RankGroup) -> torch.device:
    """The device of this rank: one GPU a rank, or the CPU. Raises `ResourceError` if the machine lacks it."""
    if node.device is Device.CPU or (node.device is Device.AUTO and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise ResourceError(
            "device=cuda but this machine has no CUDA device: set device=cpu, or install a CUDA build of torch"
        )
    if ranks.size > count:
        devices = f"{count} CUDA device{'s' if count > 1 else ''}"
        raise ResourceError(f"ranks={ranks.size} but this machine has {devices}: set ranks={count}")
    torch.cuda.set_device(ranks.rank)
    return torch.device("cuda", ranks.rank)


@contextmanager
def rank_process_group(ranks: RankGroup, device: torch.device, meeting_file: str) -> Iterator[None]:
    """The process group of this node's ranks, who meet in a file."""
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{meeting_file}",
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=COLLECTIVE_TIMEOUT,
        **options,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_learner(spec: TrainerSpec, ranks: RankGroup, device: torch.device) -> tuple[LearnerState, FlatLayout]:
    """Data, model and optimizer; the parameters hold nothing yet."""
    ranks.share(spec.run.inner.batch_size)
    source = open_source_on_ranks(spec, ranks)
    model = build_model(spec, ranks, device)
    layout = layout_of(model)
    names = [name for name, _ in flat_order(spec.run, shapes_of(layout))]
    learner = LearnerState(spec.run, ranks, device, source, model, make_optimizer(model, spec.run.inner))
    return learner, layout_of(model, names)


def open_source_on_ranks(spec: TrainerSpec, ranks: RankGroup) -> Source:
    """Open the data; rank 0 first, since it may tokenise the text that the others then find in the cache. Raises
    `AtollError` as `open_source` does."""
    if ranks.rank == 0:
        source = open_source(spec.run, spec.node, Path(spec.cache))
    ranks.barrier()
    return source if ranks.rank == 0 else open_source(spec.run, spec.node, Path(spec.cache))


def build_model(spec: TrainerSpec, ranks: RankGroup, device: torch.device) -> nn.Module:
    """The model on its device, without values; only the volunteer's own has those of its buffers."""
    if spec.node.model:
        model = build_custom(spec.node.model, spec.run.model)
    else:
        with torch.device("meta"):
            model = build(spec.run.model)
    blocks = blocks_of(model)
    if spec.node.compile:
        for block in blocks or [model]:
            block.compile()
    shard_model(model, blocks, ranks, device, spec.node.bf16)
    return model.to(device) if spec.node.model else model.to_empty(device=device)


def shard_model(
    model: nn.Module, blocks: list[nn.Module], ranks: RankGroup, device: torch.device, bf16: bool
) -> None:
    """Shard block by block, then the rest: one block's parameters at a time are gathered. One rank in fp32 has
    nothing to share out, and keeps plain parameters: FSDP's hooks take a sixth of a small model's step."""
    if ranks.size == 1 and not bf16:
        return
    mesh = init_device_mesh(device.type, (ranks.size,), mesh_dim_names=("shard",))
    policy = MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32 if bf16 else None)
    for module in (*blocks, model):  # the root last
        fully_shard(module, mesh=mesh, mp_policy=policy)


@contextmanager
def optimizer_checkpoint(
    spec: TrainerSpec, learner: LearnerState, layout: FlatLayout, commands: RankBroadcast
) -> Iterator[OptimizerCheckpoint]:
    """The inner optimizer's state on disk; what is being written when the trainer ends is finished."""
    limit = DiskBudget.divide(spec.node.disk * 1e9, layout.numel, spec.run.inner.optimizer).inner
    files = OptimizerFiles(Path(spec.moments), limit) if spec.moments else None
    fragments, _ = fragments_and_chunks(spec.run, shapes_of(layout))
    every = spec.run.checkpoint.every * len(fragments)
    checkpoint = OptimizerCheckpoint(
        learner, files, every, lambda sentence: commands.send(trainer_channel.LogLine(sentence))
    )
    try:
        yield checkpoint
    finally:
        checkpoint.close()


def share_cores(node: NodeConfig) -> None:
    """Compute with this node's share of the machine's cores: other nodes come and go."""
    threads, _ = threads_of(node)
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)


def serve(
    commands: RankBroadcast,
    learner: LearnerState,
    layout: FlatLayout,
    optimizer_state: OptimizerCheckpoint,
    before_round: Callable[[], None],
) -> None:
    """Carry out the daemon's commands until it says stop or is gone; `before_round` is called before each round,
    whether it is ordered or gone on to."""
    io: SharedMemoryIO | None = None
    unfinished: trainer_channel.ToTrainer | None = None  # a command that ended the training
    while True:
        command, unfinished = unfinished or commands.next_command(), None
        match command:
            case trainer_channel.Attach():
                vectors = attach(command, layout)
                io = SharedMemoryIO(commands, learner, layout, vectors, optimizer_state, before_round)
            case trainer_channel.Initialise(seed=seed):
                assert io, "Initialise before Attach"
                io.initialise(seed)
            case trainer_channel.Train():
                assert io, "Train before Attach"
                before_round()
                optimizer_state.restore(command)
                unfinished = train(learner, command, io)
            case trainer_channel.Evaluate(round=number):
                assert io, "Evaluate before Attach"
                io.evaluate(number)
            case trainer_channel.Finish():
                pass  # its round was ready when it came
            case trainer_channel.Stop():
                return
            case other:
                assert_never(other)


def attach(command: trainer_channel.Attach, layout: FlatLayout) -> MappedVectors:
    """Map the vectors that the daemon shares. Raises `ConfigError` if they are of another model."""
    if command.numel != layout.numel:
        raise ConfigError(
            f"the run's flat vector has {command.numel} parameters, this node's model {layout.numel}: "
            "model= must build the model that the run's other nodes train"
        )
    return MappedVectors(map_vector(command.anchor, command.numel), map_vector(command.local, command.numel))


class SharedMemoryIO:
    """The model between its parameters and the vectors that the daemon shares (`inner_loop.TrainerIO`)."""

    def __init__(
        self,
        commands: RankBroadcast,
        learner: LearnerState,
        layout: FlatLayout,
        vectors: MappedVectors,
        optimizer_state: OptimizerCheckpoint,
        after_round: Callable[[], None],
    ) -> None:
        """`after_round` is called at each hand-over, from which training may go on ahead."""
        self._learner, self._layout, self._vectors = learner, layout, vectors
        self._after_round = after_round
        self._optimizer_state = optimizer_state
        self._adopt = anchor_adoption(learner.run.overlap)
        self._sent: list[Tensor] = []  # this rank's shards at the last hand-over from which it went ahead
        self._sent_round = 0  # of the last hand-over
        fragments, _ = fragments_and_chunks(learner.run, shapes_of(layout))
        self._fragment_schedule = FragmentSchedule(len(fragments))
        self._slot_fragments = [p for p, fragment in enumerate(fragments) for _ in fragment.tensors]
        self.next_command, self.has_command = commands.next_command, commands.has_command
        self.send = commands.send

    def initialise(self, seed: int) -> None:
        """Write the run's initial parameters into the anchor, and say so."""
        init_parameters(self._learner.model, seed)
        write_shards(self._learner.model, self._layout, self._vectors.anchor)
        self._learner.ranks.barrier()
        self.send(trainer_channel.Initialised())

    def load(self, resume: bool) -> None:
        """Copy the anchor, or with `resume` the local vector, into this rank's shards."""
        vector = self._vectors.local if resume else self._vectors.anchor
        read_shards(self._learner.model, self._layout, vector)

    def hand_over(self, ready: trainer_channel.Ready) -> None:
        """Write this rank's shards to the local vector, keep a copy if training goes on ahead, send `ready` with
        the l2 norm of the exchanged parameters' distance from the anchor, and have the moments saved if that is
        due. Raises `Diverged` where a parameter is not finite."""
        self._after_round()
        model, vectors = self._learner.model, self._vectors
        write_shards(model, self._layout, vectors.local)
        if ready.ahead:
            self._sent = copy_shards(model, self._layout, into=self._sent)
        self._sent_round = ready.round
        # What follows is also: every rank has written its shards.
        norm = distance_from_anchor(self._learner, self._layout, vectors.anchor, self._exchanged(ready.round))
        self.send(msgspec.structs.replace(ready, norm=norm))
        self._optimizer_state.save_if_due(ready.round)

    def take_state(self, order: trainer_channel.Train) -> None:
        """Adopt the new anchor under the training since the hand-over, or the local vector where the order resumes
        it. Of a committed round only its fragment has a new anchor; other fragments have one if later rounds were
        missed. The daemon touches neither vector before the next hand-over."""
        model, layout, vectors, sent = self._learner.model, self._layout, self._vectors, self._sent
        exchanged = self._exchanged(self._sent_round)
        if order.resume:
            adopt_shards(model, layout, vectors.local, sent, rebase)
        else:
            adopt_shards(model, layout, vectors.anchor, sent, self._adopt, exchanged)
            if order.rebased:
                adopt_shards(model, layout, vectors.local, sent, rebase, lambda slot: not exchanged(slot))

    def _exchanged(self, round_: int) -> Callable[[int], bool]:
        """Whether a slot is of the round's fragment."""
        fragment = self._fragment_schedule.fragment(round_)
        return lambda slot: self._slot_fragments[slot] == fragment

    def evaluate(self, round: int) -> None:
        """Measure the anchor's validation loss and send it; the parameters, and the model's mode, are then as
        before."""
        model = self._learner.model
        shards, training = copy_shards(model, self._layout), model.training
        read_shards(model, self._layout, self._vectors.anchor)
        evaluated = evaluate(self._learner, round)
        restore_shards(model, self._layout, shards)
        model.train(training)
        self.send(evaluated)


def distance_from_anchor(
    learner: LearnerState, layout: FlatLayout, anchor: Tensor, chosen: Callable[[int], bool]
) -> float:
    """L2 norm of what the parameters of chosen slots, all ranks', are away from the anchor; `Diverged` if that of
    any slot is not finite."""
    squares = learner.ranks.total(*squared_distances(learner.model, layout, anchor))
    for slot, square in zip(layout.slots, squares, strict=True):
        if not math.isfinite(square):
            raise Diverged(f"training diverged: {slot.name} holds NaN, infinity or values too large")
    return math.sqrt(sum(square for slot, square in enumerate(squares) if chosen(slot)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="One local rank of a trainer; started by atoll.node.trainer.launcher."
    )
    parser.add_argument("--spec", required=True, help="the daemon's TrainerSpec, JSON")
    parser.add_argument("--group", default="", help="file in which the local ranks meet")
    arguments = parser.parse_args()
    main(arguments.spec, arguments.group)
