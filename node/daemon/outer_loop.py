"""The node's outer loop, from its trainer's first hello on: the outer state, in memory and on disk, and the
participation in the reduces.

The daemon calls it by these: `restore` and `close`; `begin_training`, `begin_encoding`; `start_reduce`,
`stop_reduce`, `verify_seals`; `stop_recovery`; and `apply`, `recover`, `fall_back`, `renumber`, `load_initial`,
which move the state in one worker thread and emit `StateMoved` or `MoveFailed`. The machine
(`atoll.node.state_machine`) decides when; nothing here does.
"""

import asyncio
import hashlib
import logging
import shlex
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from atoll.comm import log as log_setup
from atoll.comm.allreduce.auditor import Auditor
from atoll.comm.allreduce.delta_samples import DeltaSamples
from atoll.comm.codecs.factory import make_codec
from atoll.comm.config.engine import Engine
from atoll.comm.ids import NodeId, Pin, Round
from atoll.comm.incidents import IncidentKind
from atoll.comm.plan import Plan
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.status_line import bar
from atoll.node.checkpoint.checkpoint_files import CheckpointLocation
from atoll.node.checkpoint.checkpointer import Checkpointer
from atoll.node.checkpoint.disk_budget import DiskBudget
from atoll.node.checkpoint.initial_state import InitialStateLoader
from atoll.node.checkpoint.run_manifest import RunManifest
from atoll.node.checkpoint.uploader import Uploader
from atoll.node.control.reports import Reports, plan_of
from atoll.node.daemon.audits import Audits
from atoll.node.daemon.replays import Replays
from atoll.node.daemon.round import RoundParticipation
from atoll.node.daemon.session import CoordinatorSession
from atoll.node.daemon.state_server import StateServer
from atoll.node.outer.layout import fragments_and_chunks
from atoll.node.outer.method import (
    anchor_adoption,
    error_feedback,
    left_out_adoption,
    outer_schedule,
    seal_format,
    staleness_tracker,
)
from atoll.node.outer.repair import ChunkCondition, repair_chunk
from atoll.node.outer.residual import Residual
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.state import OuterState
from atoll.node.recovery.recovery import Donor, DonorsSilent, RecoveryProgress, RoundMovedOn, Target, recover
from atoll.node.state_machine import effects as ef
from atoll.node.state_machine import events as ev
from atoll.node.state_machine.state import Work
from atoll.node.trainer_channel import Attach, Hello

Emit = Callable[[ev.Event], None]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
T = TypeVar("T")

SHORTEST_PAUSE, LONGEST_PAUSE = 0.2, 3.0  # seconds between two tries to recover; the longest where nobody answers

log = logging.getLogger("atoll.node")


class OuterLoop:
    """Allocates the vectors that the trainer attaches. `restore` it, `close` it."""

    def __init__(
        self, member: CoordinatorSession, hello: Hello, server: StateServer, emit: Emit, spawn: Spawn
    ) -> None:
        """`server`: to be filled for peers; `emit` hands the machine an event; `spawn` starts a task."""
        self._member, self._run, self._config = member, member.run, member.config
        self._emit, self._spawn, self.hello = emit, spawn, hello
        self._worker = ThreadPoolExecutor(1, "arithmetic")
        vectors = SharedVectors.create(hello.numel, member.options.state_dir, owner=self._whose())
        fragments, chunks = fragments_and_chunks(self._run, hello.layout)
        self.codec = make_codec(self._run.reduce.codec, self._run.reduce.block, self._run.reduce.scales)
        sealing, schedule = seal_format(self._run, *fragments), outer_schedule(self._run)
        staleness = staleness_tracker(self._run.outer, chunks.fragment_count)
        self.outer = OuterState(vectors, chunks, sealing, schedule, staleness, left_out_adoption(self._run.outer))
        if self._run.security.outliers and self._run.outer.clip:
            self.outer.samples = DeltaSamples(self.codec, chunks)
        place = self._place(chunks.fragment_count)
        self.durable = Checkpointer(self.outer, member.plane.peers.buffers.give, place)
        self._server = server
        server.fill(self.outer, self.durable)
        self.uploads: Uploader | None = None  # where the run has a remote store
        self._residual: Residual | None = None  # with error feedback
        if (feedback := error_feedback(self._run.outer)) is not None:
            where = None if place is None else (place.folder, place.run)
            self._residual = Residual(feedback, vectors, chunks, self.codec, where)
        self.participation = RoundParticipation(
            member.plane,
            self.outer,
            self.codec,
            [seal_format(self._run, fragment) for fragment in fragments],
            hello.layout,
            self._residual,
            ReduceReports(self, member, emit),
            self.compute,
            spawn,
            self._emit_unusable,
            None if self._run.security.audits == 0 else member.signer,
        )

        def auditor(plan: Plan) -> Auditor:
            return self.participation.auditor(plan, member.me)

        self.audits = Audits(member.reports, spawn, auditor)
        self.replays = Replays(member.reports, self.outer, self.codec, self.compute, spawn, auditor)
        self._unwritten = False  # the state came from an earlier daemon's memory, and its disk had an older one
        self.stranded, self._pause = "", SHORTEST_PAUSE  # why it cannot recover, and seconds until it tries again
        self.recovering: RecoveryProgress | None = None  # how far that is, while it is under way
        self._halt = asyncio.Event()  # it is to stop
        if self._run.checkpoint.remote and place is not None:
            self.uploads = self._begin_uploads(place)

    @property
    def trouble(self) -> str:
        """The troubles of disk, recovery and uploads, in words that may be shown to others: of this machine's disk
        they name no folder. Empty: there are none."""
        troubles = [self.stranded] if self.stranded else []
        troubles += self.durable.troubles
        if self.uploads is not None and self.uploads.trouble:
            troubles.append(f"it can send no checkpoint to the remote store: {self.uploads.trouble}")
        return "; ".join(troubles)

    async def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)
        await self.durable.close()
        if self._residual is not None:
            self._residual.close()
        self.outer.vectors.close()

    async def compute(self, work: Callable[[], Any]) -> Any:
        """Call a function in the thread that does the state's arithmetic."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)

    def _whose(self) -> str:
        """Tells vectors of this run and model from others."""
        return f"{self._member.mark.hex()} {self.layout_digest.hex()} {self._run.reduce.chunk}"

    @property
    def layout(self) -> pb.LayoutReported:
        """The trainer's model, as the coordinator compares it between nodes."""
        fragments = self.outer.chunks.fragments
        return pb.LayoutReported(
            numel=self.hello.numel,
            digest=self.layout_digest,
            fragments=fragments,
            no_evaluation=not self.hello.evaluates,
        )

    @property
    def attachment(self) -> Attach:
        """The order that tells the trainer the files of its vectors, anchor and local, and their number of
        elements."""
        vectors = self.outer.vectors
        return Attach(vectors.path("anchor"), vectors.path("local"), self.hello.numel, vectors.copies())

    @property
    def layout_digest(self) -> bytes:
        return hashlib.blake2b(msgspec.json.encode(self.hello.layout), digest_size=16).digest()

    def _place(self, parts: int) -> CheckpointLocation | None:
        """Where the state is kept, if it is. `parts`: rounds that a whole model takes."""
        config, hello, mark = self._config, self.hello, self._member.mark
        if not config.durable:
            return None
        folder = self._member.options.state_dir / "outer" / mark.hex()
        build = config.model or shlex.join(self._member.options.command)
        manifest, every = RunManifest(self._run, build), self._run.checkpoint.every * parts
        limit = DiskBudget.divide(config.disk * 1e9, hello.numel, self._run.inner.optimizer).outer
        return CheckpointLocation(folder, mark, hello.layout, every, limit, manifest=manifest)

    def _begin_uploads(self, place: CheckpointLocation) -> Uploader:
        """For when it is this node's turn."""
        spare = self._member.plane.peers.spare.take
        uploads = Uploader(
            place.folder, self._run.checkpoint, spare, self._config.files, self._member.private_addresses
        )
        self.durable.on_snapshot(uploads.snapshot_taken)
        self._spawn(uploads.run())
        return uploads

    def follow(self, view: pb.View) -> None:
        """Do what the view asks of this node beside the round's steps: audit sealed chunks; of its disk, take
        snapshots or not, send checkpoints or not."""
        self.audits.follow(view)
        self.durable.take_snapshots(view.keeps)
        if self._unwritten and view.committed == self.outer.round:
            self._unwritten = False
            self.durable.finalized(view.committed, view.tokens)
        if self.uploads is not None:
            self.uploads.turn = view.upload
            if view.state_digest:
                self.uploads.record_digest(view.committed, view.state_digest)

    # The outer state

    async def restore(self) -> None:
        """Begin with what an earlier life left on the disk, or had fetched since."""
        outer, began = self.outer, time.monotonic()
        await self.compute(partial(self.durable.restore, keep_newer=True))
        outer.resume()
        round_, on_disk = outer.round, outer.round <= self.durable.durable_round
        where = "on this node's disk" if on_disk else "still in this node's memory"
        self._unwritten = not on_disk
        if self._residual is not None:
            self._residual.restore()
            if self._residual.round:
                log.info(f"what the wire had left out after round {self._residual.round} is on this node's disk")
        self._report_spoiled()
        if round_ >= 0:
            digest_ = await self._settle()
            took = time.monotonic() - began
            log.info(f"the state of round {round_} is {where}: loaded in {took:.1f} s")
            self._emit(ev.StateMoved(round_, digest_))

    async def fall_back(self, before: int = 0) -> None:
        """Take the state that the disk brings back, though newer chunks are here: nobody has their others now, or
        nobody can tell whether they are right, and a state from `before` that round is wanted."""
        if before:
            self.participation.stop()
            self.participation.forget()
            await self.durable.wait_idle()
            round_ = await self.compute(partial(self.durable.restore_before, before))
        else:
            round_ = await self.compute(self.durable.restore) if self.durable.durable_round >= 0 else -1
        if round_ < 0:
            self._emit(ev.MoveFailed(self.outer.round))
            return
        log.info(f"the newest state cannot be had: goes back to that of round {round_}, on this node's disk")
        self._emit(ev.StateMoved(round_, await self._settle()))

    async def load_initial(self, progress: Callable[[float], None]) -> None:
        """Make state 0 of what the run's config names; calls `progress` with the share that is done, 0 to 1."""
        outer, url, config = self.outer, self._run.init_from, self._config
        config.demand_store("init_from", url)
        log.info(f"first member: the run begins with {url}")
        builtin = self._run.decoder and not (config.model or self._member.options.command)
        model = self._run.model if builtin else None
        anchor, momentum = outer.vectors.anchor, outer.vectors.momentum
        of_hf = self._run.engine is Engine.HF and not self._member.options.command
        hf = self._run.hf if of_hf else None
        may_be = config.files, self._member.private_addresses
        loading = InitialStateLoader(self.hello.layout, model, anchor, momentum, progress, *may_be, hf)
        outer.clear()
        begun = await self.compute(lambda: loading.load(url, self._run.init_momentum))
        log.info(f"state 0 is {begun.what}")
        await self.initialised(begun.momentum)

    async def initialised(self, momentum: bool = False) -> None:
        """Settle state 0, whose anchor is written."""
        self.durable.distrust()  # it may have one that was made before, and went with all others who had it
        await self.compute(lambda: self.outer.initialise(momentum))
        await self._settled(0, alone=True)

    async def apply(self, view: pb.View) -> None:
        """Step by what the committed round has sealed, if all of it is here."""
        outer, sealed = self.outer, self.participation.sealed(view.sealed)
        if sealed is None:
            self._emit(ev.MoveFailed(outer.round))
            return
        self.participation.stop()
        update, fragment = (
            self.participation.residual_update(view),
            outer.fragment_schedule.fragment(view.committed),
        )

        def work() -> None:
            if update is not None:
                update()
            for c, payload in zip(outer.chunks.fragment_range(fragment), sealed.chunks, strict=True):
                outer.apply(c, payload)
            outer.advance_unchanged(view.committed)
            if outer.chunks.fragment_count > 1:
                outer.adopt_fragment(fragment, anchor_adoption(self._run.overlap))

        if self.participation.members == 2:
            await self.inspect(view.committed)  # no majority could tell who is right
        await self.compute(work)
        self.durable.record_round(view.committed, sealed.chunks, sealed.digests)
        self.participation.forget()
        await self._settled(view.tokens)

    async def inspect(self, round_: int) -> None:
        """Look whether what the round exchanges of the state is what it was, and mend it."""
        outer = self.outer
        chunks = outer.chunks.fragment_range(outer.fragment_schedule.fragment(round_))
        found = {c: await self.compute(partial(repair_chunk, outer, self.durable, c)) for c in chunks}
        wrong = [c for c, condition in found.items() if condition is not ChunkCondition.INTACT]
        if wrong:
            whole = all(found[c] is ChunkCondition.REPAIRED for c in wrong)
            how = "mended from the disk" if whole else "the disk cannot mend them"
            log.warning(f"chunks {wrong} of the state of round {outer.round} changed in memory: {how}")
            self._member.accountant.record(IncidentKind.STATE_CHANGED, value=len(wrong))
            self._member.reports.repaired(outer.round, len(wrong), whole)
        self._report_spoiled()

    def _report_spoiled(self) -> None:
        if files := self.durable.newly_damaged():
            round_ = self.outer.round
            self._member.reports.repaired(max(round_, 0), len(files), round_ >= 0, disk=True)

    async def recover(self, order: ef.Recover) -> None:
        """Get the newest state from its holders."""
        outer, view, plane = self.outer, order.view, self._member.plane
        self.participation.stop()
        update = self.participation.residual_update(view)
        self.participation.forget()
        if update is not None:
            await self.compute(update)
        if order.differs:
            log.warning(f"its state of round {view.committed} is not the run's: fetches the chunks that differ")
            self._member.accountant.record(IncidentKind.STATE_DIFFERED)
            outer.distrust()
            self.durable.distrust()
        if order.rebase:
            await self.compute(outer.set_work_aside)
        donors = tuple(Donor(NodeId(d.node_id), d.address, Pin(d.pin), d.name) for d in view.donors)
        target = Target(Round(view.committed), view.state_digest, donors)
        started, before = time.monotonic(), plane.bytes_down
        try:
            stats = await unless(self._halt, recover(outer, target, plane, self._worker, self._on_recovery))
        except RoundMovedOn as moved:
            await asyncio.sleep(self._again(moved))  # the next view may name other donors
            self._emit(ev.MoveFailed(outer.round))
            return
        finally:
            self._halt.clear()
            self.recovering = None
            log_setup.status_line.show("")
        if stats is None:
            log.info("recovering: stopped to save bytes; what came is kept")
            self._emit(ev.MoveFailed(await self.compute(lambda: outer.round)))
            return
        size, seconds = plane.bytes_down - before, time.monotonic() - started
        for round_, chunks in stats.sealed_rounds.items():
            payloads = [np.frombuffer(chunk.payload, np.uint8) for chunk in chunks]
            self.durable.record_round(round_, payloads, [chunk.digest for chunk in chunks])
        log.info(
            f"has the state of round {view.committed}: fetched {stats.fetched} of {stats.chunks} chunks, "
            f"{size / 1e6:.2f} MB in {seconds:.2f} s"
        )
        await self._settled(view.tokens)

    def stop_recovery(self) -> None:
        """End the recovery under way; what came of it stays, and `MoveFailed` is emitted."""
        self._halt.set()

    def _again(self, moved: RoundMovedOn) -> float:
        """Says that a recovery failed, once for as long as it fails for the same reason; returns after how many
        seconds to try again."""
        if not isinstance(moved, DonorsSilent):
            log.info(f"recovering: {moved}; trying again")
            self.stranded, self._pause = "", SHORTEST_PAUSE
            return SHORTEST_PAUSE
        if str(moved) != self.stranded:
            log.warning(f"recovering: {moved}; trying again until somebody does")
        self.stranded, self._pause = str(moved), min(2 * self._pause, LONGEST_PAUSE)
        return self._pause

    def _on_recovery(self, recovery: RecoveryProgress) -> None:
        self.recovering = recovery
        log_setup.status_line.show(f"recovering {bar(recovery.present / recovery.chunks)}  {recovery}")

    async def renumber(self, view: pb.View) -> None:
        """Give the state the number of the view's committed round: the rounds in between are void."""
        outer, round_ = self.outer, view.committed
        log.info(
            f"the rounds after {outer.round} up to {round_} are void: goes on from the state of {outer.round}"
        )
        self.durable.drop_rounds_after(outer.round)
        await self.compute(lambda: outer.renumber(round_))
        await self._settled(view.tokens, alone=True)

    async def _settled(self, tokens: int, alone: bool = False) -> None:
        """The state stands still again, with so many tokens committed. `alone`: no peer had it before."""
        digest_ = await self._settle()
        self.durable.finalized(self.outer.round, tokens, alone)
        self._emit(ev.StateMoved(self.outer.round, digest_))

    async def _settle(self) -> bytes:
        digest_: bytes = await self.compute(self.outer.finalize)
        self.outer.vectors.say_at_work()
        self.stranded, self._pause = "", SHORTEST_PAUSE  # however the state came
        self._server.settled()
        return digest_

    # The reduce

    def begin_training(self, order: ef.OrderTraining) -> None:
        """Forget what was encoded of the steps before: those that begin are encoded anew."""
        if (update := self.participation.residual_update(order.view)) is not None:
            self._spawn(self.compute(update))
        self.participation.forget()
        if self.outer.staleness is not None and not order.keeps_uncounted:
            self.outer.staleness.restart()

    def begin_encoding(self, work: Work) -> None:
        """Begin to encode what this node brings to a round, and emit `EncodingBegun`: once the disk has the round
        before; and where deltas are clipped, with the norm of what was encoded."""
        self.durable.release_buffers()
        self.participation.encode(work)
        if self._run.outer.clip or self.durable.is_pending(work.round - 1):
            self._spawn(self._emit_in_time(work))
        else:
            self._emit_encoded(work, work.norm)

    async def _emit_in_time(self, work: Work) -> None:
        await self.durable.wait_durable(work.round - 1)
        norm = await self.participation.norm(work) if self._run.outer.clip else work.norm
        if norm is not None:
            self._emit_encoded(work, norm)

    def _emit_encoded(self, work: Work, norm: float) -> None:
        damping = 1.0 if self.outer.staleness is None else self.outer.staleness.damping(work.round)
        self._emit(ev.EncodingBegun(work, norm, damping))

    def _emit_unusable(self, work: Work, sentence: str) -> None:
        log.warning(f"{sentence}: nothing of its work of round {work.round} is used, the trainer begins anew")
        self._emit(ev.EncodingFailed(work, sentence))

    def start_reduce(self, wire: pb.Plan, work: Work) -> None:
        """Take part in the round's reduce under this plan, or go on under it."""
        self.participation.begin(plan_of(wire), self._member.me, work)

    def stop_reduce(self) -> None:
        """Leave the reduce under way, if there is one."""
        self.participation.stop()

    def verify_seals(self, view: pb.View) -> None:
        """Compare the sealed chunks that are here with the ledger's digests, which the view has."""
        self.participation.verify_seals(view.plan.round, view.ledger)


async def unless(halted: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns, or raises; None where it is ended first, by `halted`."""
    working, halting = asyncio.create_task(work), asyncio.create_task(halted.wait())
    try:
        await asyncio.wait((working, halting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, halting):
            task.cancel()
        await asyncio.gather(working, halting, return_exceptions=True)


def on_disk(outer_loop: OuterLoop | None) -> dict[str, Any]:
    """The rounds on this node's disk and in the remote store, for `atoll node status`."""
    durable = outer_loop.durable if outer_loop is not None else None
    uploads = outer_loop.uploads if outer_loop is not None else None
    return {
        "disk_round": durable.durable_round if durable is not None else -1,
        "disk_bytes": durable.disk_bytes if durable is not None else 0,
        "disk_trouble": durable.trouble if durable is not None else "",
        "remote_round": uploads.newest if uploads is not None else -1,
        "remote_trouble": uploads.trouble if uploads is not None else "",
    }


def how_far(recovery: RecoveryProgress | None) -> dict[str, Any] | None:
    """A recovery's progress, for `atoll node status`."""
    if recovery is None:
        return None
    return {
        "chunks": recovery.present,
        "of": recovery.chunks,
        "bytes_per_s": recovery.rate,
        "seconds_left": recovery.seconds_left,
        "from": recovery.donors,
    }


class ReduceReports(Reports):
    """The reports of a member that contributes: it holds the sealed chunks, too."""

    def __init__(self, outer_loop: OuterLoop, member: CoordinatorSession, emit: Emit) -> None:
        """`emit` hands the machine an event."""
        super().__init__(member.reports.control)
        self.remember = member.accountant.record
        self._outer_loop, self._peers, self._emit = outer_loop, member.plane.peers, emit
        self._member = member

    def orphans(self, plan: Plan, here: tuple[tuple[int, bytes], ...]) -> None:
        self.orphans_found(plan, here)

    def held(self, plan: Plan, root: bytes, proven: bool) -> None:
        self._emit(ev.AttemptComplete((plan.round, plan.attempt), root))
        participation, peers = self._outer_loop.participation, self._peers
        complete = pb.ReduceComplete(
            digest=root,
            proven=proven,
            bytes_up=participation.bytes_up,
            bytes_down=participation.bytes_down,
            rate_up=peers.rate_up,
            rate_down=peers.rate_down,
            rate_inside=peers.estimator.rate_inside,
            rate_outside=peers.estimator.rate_outside,
            incidents=self._member.accountant.incidents(),
        )
        for node, seconds in peers.round_trips().items():
            complete.round_trips.add(node_id=node, seconds=seconds)
        members = [member.node for member in plan.members]
        for node, (up, down) in peers.seen_rates(members, self._member.me).items():
            complete.seen.add(node_id=node, up=up, down=down)
        self.reduce_complete(plan, complete)
