"""One simulated run from its config to its figures: a fleet's, or the data-parallel baseline's.

`atoll simulate` and the quality harness call it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from atoll.comm.config.run import RunConfig
from atoll.node.config import NodeConfig
from atoll.node.data.samples import Source
from atoll.node.participant.lr_schedule import learning_rate
from atoll.node.simulate.conditions import Conditions
from atoll.node.simulate.defence import Decision, undefended
from atoll.node.simulate.fleet import SimulatedFleet
from atoll.node.simulate.learner import SimulatedTrainer, with_batch
from atoll.node.simulate.method import build_method
from atoll.node.simulate.state import RoundRecord

OnRecord = Callable[[RoundRecord], None]


@dataclass(frozen=True)
class RunOutcome:
    """The figures of a whole run; bytes are those that one node sends."""

    label: str
    nodes: int
    val_loss: float  # of the last anchor
    tokens: float  # that were committed
    rounds: int
    virtual_seconds: float
    utilisation: float  # the share of their time that nodes trained
    goodput: float  # committed tokens over those of nodes that never wait, fail or lose anything
    bytes_per_node: float
    fp32_allreduce_bytes: float  # that data parallelism sends for as many tokens
    inner_steps_lost: int  # with nodes that were killed
    wall_seconds: float
    records: tuple[RoundRecord, ...]
    decisions: tuple[Decision, ...] = ()  # what was held against members
    refused: int = 0  # contributions that owners refused for their bytes

    @property
    def reduction(self) -> float:
        """The factor by which a node sends less than in data parallelism in fp32; infinite if it sends nothing."""
        return self.fp32_allreduce_bytes / self.bytes_per_node if self.bytes_per_node else float("inf")


def fleet_of(
    run: RunConfig, node: NodeConfig, conditions: Conditions, source: Source, on_record: OnRecord
) -> SimulatedFleet:
    """The fleet of a run, at its start."""
    run = run if conditions.defence else undefended(run)
    start = SimulatedTrainer(run, node, source)
    start.initialise(run.seed)
    method, evaluator = build_method(run, start.tensors()), evaluator_of(run, node, source)
    return SimulatedFleet(
        run, conditions, method, lambda: SimulatedTrainer(run, node, source), evaluator, start, on_record
    )


def local_updates(
    label: str, run: RunConfig, node: NodeConfig, conditions: Conditions, source: Source, on_record: OnRecord
) -> RunOutcome:
    """Simulate a run of the config's method to its end. Raises `NonFinite` if training diverges."""
    began = time.perf_counter()
    fleet = fleet_of(run, node, conditions, source, on_record)
    fleet.simulate()
    nodes, tokens = conditions.nodes, run.inner.batch_size * run.model.seq_len
    last = fleet.records[-1]
    free = sum(n.speed for n in fleet.nodes) * last.time * tokens
    return RunOutcome(
        label,
        nodes,
        fleet.val_loss,
        last.tokens,
        sum(state.round for state in fleet.states),
        last.time,
        fleet.utilisation,
        last.tokens / free if free else 1.0,
        fleet.bytes_sent,
        gradient_bytes(fleet.numel, nodes) * last.tokens / (nodes * tokens),
        fleet.inner_steps_lost,
        time.perf_counter() - began,
        (*fleet.records[:-1], replace(last, val_loss=fleet.val_loss)),
        tuple(fleet.defence.decisions),
        fleet.refused,
    )


def data_parallel(
    label: str, run: RunConfig, node: NodeConfig, conditions: Conditions, source: Source, on_record: OnRecord
) -> RunOutcome:
    """Simulate the baseline: one model takes all nodes' sequences of a step as one batch, which is what nodes do
    that average their gradients at each step. Samples, tokens and learning rates are those of a run of local
    updates."""
    began, nodes = time.perf_counter(), conditions.nodes
    batch = nodes * run.inner.batch_size
    tokens = batch * run.model.seq_len
    trainer, evaluator = SimulatedTrainer(with_batch(run, batch), node, source), evaluator_of(run, node, source)
    trainer.initialise(run.seed)
    sent, records, losses = gradient_bytes(trainer.layout.numel, nodes), list[RoundRecord](), list[float]()
    every = run.rounds.inner_steps * run.data.eval_every
    seconds = conditions.step_seconds / min(conditions.speeds or (1.0,))
    for k in range(conditions.steps + 1):
        if k % every == 0 or k == conditions.steps:
            evaluator.flat[:] = trainer.flat
            mean = sum(losses) / len(losses) if losses else None
            record = RoundRecord(0, k, k * seconds, k * tokens, nodes, k * sent, mean, evaluator.validation_loss())
            records.append(record)
            on_record(record)
            losses.clear()
        if k < conditions.steps:
            losses.append(trainer.step(k * batch, learning_rate(run.inner, k * tokens)))
    last = records[-1]
    assert last.val_loss is not None
    free = sum(conditions.speed(n) for n in range(nodes)) * last.time * tokens / nodes
    return RunOutcome(
        label,
        nodes,
        last.val_loss,
        last.tokens,
        conditions.steps,
        last.time,
        1.0,
        last.tokens / free,
        last.bytes_sent,
        last.bytes_sent,
        0,
        time.perf_counter() - began,
        tuple(records),
    )


def evaluator_of(run: RunConfig, node: NodeConfig, source: Source) -> SimulatedTrainer:
    """The model that evaluates anchors: in fp32, whatever they are trained in."""
    return SimulatedTrainer(run, replace(node, bf16=False, compile=False), source)


def gradient_bytes(numel: int, nodes: int) -> float:
    """Bytes that a node sends in a ring or sharded all-reduce of fp32 gradients."""
    return 8.0 * numel * (nodes - 1) / nodes
