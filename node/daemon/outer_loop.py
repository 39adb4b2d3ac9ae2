"""What a node keeps of a run, from its trainer's first hello on: the outer state, in memory and on disk, and its
part in the reduces.

Moves the state when it is told to - apply, recover, renumber, begin - in one worker thread, and says where it
stands then. The machine (`atoll.node.state_machine`) decides when; nothing here does.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from atoll.comm.codecs.factory import make_codec
from atoll.comm.fragment_schedule import FragmentSchedule
from atoll.comm.ids import NodeId, Pin, Round
from atoll.comm.plan import Plan
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.transport.bandwidth import sample_round_trips
from atoll.node import state_machine
from atoll.node.checkpoint.checkpointer import Checkpointer, CheckpointLocation
from atoll.node.checkpoint.disk_budget import DiskBudget
from atoll.node.checkpoint.initial_state import InitialStateLoader
from atoll.node.checkpoint.run_manifest import RunManifest
from atoll.node.checkpoint.uploader import Uploader
from atoll.node.control.reports import Reports, plan_of
from atoll.node.daemon.round import RoundParticipation
from atoll.node.daemon.session import CoordinatorSession
from atoll.node.daemon.state_server import StateServer
from atoll.node.outer.layout import stretches
from atoll.node.outer.method import adopt_of, feedback_of, left_out_of, schedule_of, sealing_of
from atoll.node.outer.repair import mend
from atoll.node.outer.residual import Residual
from atoll.node.outer.shared_vectors import SharedVectors
from atoll.node.outer.staleness import StalenessTracker
from atoll.node.outer.state import OuterState
from atoll.node.recovery.recovery import Donor, DonorsSilent, RecoveryProgress, RoundMovedOn, Target, recover
from atoll.node.trainer_channel import Hello

Emit = Callable[[state_machine.Event], None]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

SOON, SELDOM = 0.2, 3.0  # seconds between two tries to recover: at least, and where nobody answers

log = logging.getLogger("atoll.node")


class OuterLoop:
    """Allocates the vectors that the trainer attaches. `restore` it, `close` it."""

    def __init__(
        self, member: CoordinatorSession, hello: Hello, shelf: StateServer, emit: Emit, spawn: Spawn
    ) -> None:
        """`shelf`: to be filled for peers; `emit` hands the machine an event; `spawn` starts a task."""
        self._member, self._run, self._config = member, member.run, member.config
        self._emit, self._spawn, self.hello = emit, spawn, hello
        self._worker = ThreadPoolExecutor(1, "arithmetic")
        vectors = SharedVectors.create(hello.numel, member.options.state_dir, whose=self._whose())
        fragments, chunks = stretches(self._run, hello.layout)
        self.codec = make_codec(self._run.reduce.codec, self._run.reduce.block, self._run.reduce.scales)
        gap = StalenessTracker(FragmentSchedule(chunks.fragment_count)) if self._run.outer.damping else None
        sealing, schedule = sealing_of(self._run, *fragments), schedule_of(self._run)
        self.outer = OuterState(vectors, chunks, sealing, schedule, gap, left_out_of(self._run.outer))
        place = self._place(chunks.fragment_count)
        self.durable = Checkpointer(self.outer, member.plane.peers.buffers.give, place)
        self._shelf = shelf
        shelf.fill(self.outer, self.durable)
        self.uploads: Uploader | None = None  # where the run has a remote store
        self._residual: Residual | None = None  # with error feedback
        if (feedback := feedback_of(self._run.outer)) is not None:
            where = None if place is None else (place.folder, place.run)
            self._residual = Residual(feedback, vectors, chunks, self.codec, where)
        self.part = RoundParticipation(
            member.plane,
            self.outer,
            self.codec,
            [sealing_of(self._run, fragment) for fragment in fragments],
            hello.layout,
            self._residual,
            _Outcome(self, member.reports),
            self.compute,
            spawn,
        )
        self._unwritten = False  # the state came from an earlier daemon's memory, and its disk had an older one
        self.stranded, self._pause = "", SOON  # why it cannot recover, and seconds until it tries again
        self.recovering: RecoveryProgress | None = None  # how far that is, while it is under way
        if self._run.checkpoint.remote and place is not None:
            self.uploads = self._begin_uploads(place)

    @property
    def trouble(self) -> str:
        """What does not work, in words that may be shown to others: of this machine's disk they name no folder."""
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
    def layout_digest(self) -> bytes:
        return hashlib.blake2b(msgspec.json.encode(self.hello.layout), digest_size=16).digest()

    def _place(self, parts: int) -> CheckpointLocation | None:
        """Where the state is kept, if it is. `parts`: rounds that a whole model takes."""
        config, hello, mark = self._config, self.hello, self._member.mark
        if not config.durable:
            return None
        folder = self._member.options.state_dir / "outer" / mark.hex()
        about, every = RunManifest(self._run, config.model), self._run.checkpoint.every * parts
        limit = DiskBudget.of(config.disk * 1e9, hello.numel, self._run.inner.optimizer).outer
        return CheckpointLocation(folder, mark, hello.layout, every, limit, about=about)

    def _begin_uploads(self, place: CheckpointLocation) -> Uploader:
        """For when it is this node's turn."""
        spare = self._member.plane.peers.spare.take
        uploads = Uploader(place.folder, self._run.checkpoint, spare, self._config.files)
        self.durable.on_snapshot = uploads.taken
        self._spawn(uploads.run())
        return uploads

    def told(self, view: pb.View) -> None:
        """What the coordinator asks of this node's disk."""
        self.durable.keeps = view.keeps
        if self._unwritten and view.committed == self.outer.round:
            self._unwritten = False
            self.durable.settled(view.committed, view.tokens)
        if self.uploads is not None:
            self.uploads.turn = view.upload
            if view.state_digest:
                self.uploads.told(view.committed, view.state_digest)

    # The outer state

    async def restore(self) -> None:
        """Begin with what an earlier life left on the disk, or had fetched since."""
        outer, began = self.outer, time.monotonic()
        await self.compute(partial(self.durable.restore, whole=False))
        outer.resume()
        round_, on_disk = outer.round, outer.round <= self.durable.proven
        where = "on this node's disk" if on_disk else "still in this node's memory"
        self._unwritten = not on_disk
        if self._residual is not None:
            self._residual.restore()
            if self._residual.at:
                log.info(f"what the wire had left out after round {self._residual.at} is on this node's disk")
        self._tell_spoiled()
        if round_ >= 0:
            digest_ = await self._settle()
            took = time.monotonic() - began
            log.info(f"the state of round {round_} is {where}: loaded in {took:.1f} s")
            self._emit(state_machine.StateMoved(round_, digest_))

    async def fall_back(self) -> None:
        """Take the state that the disk brings back, though newer chunks are here: nobody has their others now."""
        round_ = await self.compute(self.durable.restore) if self.durable.proven >= 0 else -1
        if round_ < 0:
            self._emit(state_machine.MoveFailed(self.outer.round))
            return
        log.info(f"nobody has the newest state any more: goes back to that of round {round_}, on this node's disk")
        self._emit(state_machine.StateMoved(round_, await self._settle()))

    async def begin(self, progress: Callable[[float], None]) -> None:
        """Make state_0 of what the run's config says. `progress` is told how much is done, 0 to 1."""
        outer, url, config = self.outer, self._run.init_from, self._config
        log.info(f"first member: the run begins with {url}")
        model = None if config.model else self._run.model
        anchor, momentum = outer.vectors.anchor, outer.vectors.momentum
        loading = InitialStateLoader(self.hello.layout, model, anchor, momentum, progress, config.files)
        outer.emptied()
        begun = await self.compute(lambda: loading.load(url, self._run.init_momentum))
        log.info(f"state 0 is {begun.what}")
        await self.initialised(begun.momentum)

    async def initialised(self, momentum: bool = False) -> None:
        """The anchor is state_0's."""
        self.durable.doubt()  # it may have one that was made before, and went with all others who had it
        await self.compute(lambda: self.outer.initialised(momentum))
        await self._settled(0, alone=True)

    async def apply(self, view: pb.View) -> None:
        """Step by what the committed round has sealed, if all of it is here."""
        outer, sealed = self.outer, self.part.sealed(view.sealed)
        if sealed is None:
            self._emit(state_machine.MoveFailed(outer.round))
            return
        self.part.stop()
        keep, fragment = self.part.keep(view), outer.turns.fragment(view.committed)

        def work() -> None:
            if keep is not None:
                keep()
            for c, payload in zip(outer.chunks.fragment_range(fragment), sealed.chunks, strict=True):
                outer.apply(c, payload)
            outer.pass_over(view.committed)
            if outer.chunks.fragment_count > 1:
                outer.take(fragment, adopt_of(self._run.overlap))

        if self.part.members == 2:
            await self.inspect(view.committed)  # no majority could tell who is right
        await self.compute(work)
        self.durable.committed(view.committed, sealed.chunks, sealed.digests)
        self.part.forget()
        await self._settled(view.tokens)

    async def inspect(self, round_: int) -> None:
        """Look whether what the round exchanges of the state is what it was, and mend it."""
        outer = self.outer
        chunks = outer.chunks.fragment_range(outer.turns.fragment(round_))
        found = {c: await self.compute(partial(mend, outer, self.durable, c)) for c in chunks}
        wrong = [c for c, mended in found.items() if mended is not None]
        if wrong:
            whole = all(found[c] for c in wrong)
            how = "mended from the disk" if whole else "the disk cannot mend them"
            log.warning(f"chunks {wrong} of the state of round {outer.round} changed in memory: {how}")
            mended = pb.StateRepaired(round=outer.round, chunks=len(wrong), whole=whole)
            self._member.reports.of_round(0, state_repaired=mended)
        self._tell_spoiled()

    def _tell_spoiled(self) -> None:
        if files := self.durable.spoiled():
            round_ = self.outer.round
            mended = pb.StateRepaired(round=max(round_, 0), chunks=len(files), whole=round_ >= 0, disk=True)
            self._member.reports.of_round(0, state_repaired=mended)

    async def recover(self, order: state_machine.Recover) -> None:
        """Get the newest state from its holders."""
        outer, view, plane = self.outer, order.view, self._member.plane
        self.part.stop()
        keep = self.part.keep(view)
        self.part.forget()
        if keep is not None:
            await self.compute(keep)
        if order.differs:
            log.warning(f"its state of round {view.committed} is not the run's: fetches the chunks that differ")
            outer.distrust()
            self.durable.doubt()
        if order.rebase:
            await self.compute(outer.set_aside)
        donors = tuple(Donor(NodeId(d.node_id), d.address, Pin(d.pin), d.name) for d in view.donors)
        target = Target(Round(view.committed), view.state_digest, donors)
        started, before = time.monotonic(), plane.bytes_down
        try:
            took = await recover(plane, outer, target, self._worker, self._on_recovery)
        except RoundMovedOn as moved:
            await asyncio.sleep(self._again(moved))  # the next view may name other donors
            self._emit(state_machine.MoveFailed(outer.round))
            return
        finally:
            self.recovering = None
        size, seconds = plane.bytes_down - before, time.monotonic() - started
        for round_, chunks in took.sealed.items():
            payloads = [np.frombuffer(chunk.payload, np.uint8) for chunk in chunks]
            self.durable.committed(round_, payloads, [chunk.digest for chunk in chunks])
        log.info(
            f"has the state of round {view.committed}: fetched {took.fetched} of {took.of} chunks, "
            f"{size / 1e6:.2f} MB in {seconds:.2f} s"
        )
        await self._settled(view.tokens)

    def _again(self, moved: RoundMovedOn) -> float:
        """Says that a recovery failed, once for as long as it fails for the same reason; returns after how many
        seconds to try again."""
        if not isinstance(moved, DonorsSilent):
            log.info(f"recovering: {moved}; trying again")
            self.stranded, self._pause = "", SOON
            return SOON
        if str(moved) != self.stranded:
            log.warning(f"recovering: {moved}; trying again until somebody does")
        self.stranded, self._pause = str(moved), min(2 * self._pause, SELDOM)
        return self._pause

    def _on_recovery(self, standing: RecoveryProgress) -> None:
        self.recovering = standing

    async def renumber(self, round_: int) -> None:
        """The rounds after this node's, up to `round_`, are void."""
        outer, view = self.outer, self._member.reports.view
        log.info(
            f"the rounds after {outer.round} up to {round_} are void: goes on from the state of {outer.round}"
        )
        self.durable.renumbered(outer.round)
        await self.compute(lambda: outer.renumber(round_))
        await self._settled(view.tokens if view is not None else 0, alone=True)

    async def _settled(self, tokens: int, alone: bool = False) -> None:
        """The state stands still again, with so many tokens committed. `alone`: no peer had it before."""
        digest_ = await self._settle()
        self.durable.settled(self.outer.round, tokens, alone)
        self._emit(state_machine.StateMoved(self.outer.round, digest_))

    async def _settle(self) -> bytes:
        digest_: bytes = await self.compute(self.outer.settle)
        self.stranded, self._pause = "", SOON  # however the state came
        self._shelf.settled()
        return digest_

    # The reduce

    def train_anew(self, view: pb.View | None, owed: bool) -> None:
        """New inner steps begin, `owed`: on top of some that are, if only of other fragments."""
        if view is not None and (keep := self.part.keep(view)) is not None:
            self._spawn(self.compute(keep))
        self.part.forget()  # what comes of these steps is encoded anew
        if self.outer.gap is not None and not owed:
            self.outer.gap.begun()

    def ready(self, ready: state_machine.Work, still: Callable[[], bool]) -> None:
        """Encode what this node brings to a round, and say that it is ready, if `still` says so by then."""
        self.durable.make_room()
        self.part.encode(ready)
        if self._run.outer.clip or self.durable.behind(ready.round - 1):
            self._spawn(self._report_in_time(ready, still))
        else:
            self._report(ready)

    async def _report_in_time(self, ready: state_machine.Work, still: Callable[[], bool]) -> None:
        """Once the disk has the last round; and where deltas are clipped, with the norm of what was encoded."""
        await self.durable.caught_up(ready.round - 1)
        norm = await self.part.norm(ready) if self._run.outer.clip else ready.norm
        if norm is not None and still():
            self._report(replace(ready, norm=norm))

    def _report(self, ready: state_machine.Work) -> None:
        report = pb.ContributionReady(
            steps=ready.steps,
            samples=ready.samples,
            loss=ready.loss,
            delta_norm=ready.norm,
            front=ready.front,
            damping=1.0 if self.outer.gap is None else self.outer.gap.damping(ready.round),
            fresh=ready.fresh,
        )
        self._member.reports.of_round(ready.round, contribution_ready=report)

    def reduce(self, wire: pb.Plan, me: NodeId, ready: state_machine.Work) -> None:
        """Take part under this plan."""
        self.part.begin(plan_of(wire), me, ready)

    def held(self, plan: Plan, root: bytes, proven: bool) -> None:
        """Every sealed chunk is here; `proven`: and is the ledger's."""
        peers = self._member.plane.peers
        self._emit(state_machine.ReduceHeld((plan.round, plan.attempt), root))
        held = pb.ReduceComplete(
            digest=root,
            proven=proven,
            bytes_up=self.part.bytes_up,
            bytes_down=self.part.bytes_down,
            rate_up=peers.up,
            rate_down=peers.down,
            rate_inside=peers.inside,
            rate_outside=peers.outside,
        )
        for node, seconds_ in sample_round_trips(peers.round_trips()).items():
            held.round_trips.add(node_id=node, seconds=seconds_)
        self._member.reports.of(plan, reduce_complete=held)


def on_disk(keeper: OuterLoop | None) -> dict[str, Any]:
    """What is kept where, for `atoll node status`."""
    durable = keeper.durable if keeper is not None else None
    uploads = keeper.uploads if keeper is not None else None
    return {
        "disk_round": durable.proven if durable is not None else -1,
        "disk_bytes": durable.size if durable is not None else 0,
        "disk_trouble": durable.trouble if durable is not None else "",
        "remote_round": uploads.newest if uploads is not None else -1,
        "remote_trouble": uploads.trouble if uploads is not None else "",
    }


def how_far(standing: RecoveryProgress | None) -> dict[str, Any] | None:
    """A recovery's progress, for `atoll node status`."""
    if standing is None:
        return None
    return {
        "chunks": standing.done,
        "of": standing.of,
        "bytes_per_s": standing.rate,
        "seconds_left": standing.seconds_left,
        "from": standing.givers,
    }


class _Outcome(Reports):
    """What the reduces of a member that holds the state tell."""

    def __init__(self, keeper: OuterLoop, reports: Reports) -> None:
        super().__init__(reports.control)
        self._keeper = keeper

    def orphans(self, plan: Plan, here: tuple[tuple[int, bytes], ...]) -> None:
        entries = [pb.Seal(chunk=c, digest=digest) for c, digest in here]
        self.of(plan, orphans_found=pb.OrphansFound(here=entries))

    def held(self, plan: Plan, root: bytes, proven: bool) -> None:
        self._keeper.held(plan, root, proven)
