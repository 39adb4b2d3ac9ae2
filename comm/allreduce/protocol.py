"""One member's side of the reduce of one round, without I/O: what happened goes in, what is to be done comes out.

    a chunk's owner    COLLECTING --all contributions are here--> MERGING --> SERVED: reported, sent to all
    a region's relay   COLLECTING --its region's are here--> MERGING --> AWAITED: its sum is sent
                                  --its sealed bytes are here--> SERVED: passed on
    everybody else     AWAITED: it contributed --its sealed bytes are here--> SEALED

A contribution that is refused leads from MERGING back to COLLECTING, a ledger that has other bytes from SEALED and
SERVED to AWAITED, a plan that gives the chunk another owner from everywhere to the beginning.

A chunk that is reduced in two levels has relays. A relay is to the members of its region what the owner is in a
flat reduce, and to the owner what a member is; the owner knows of each region's sum whose contributions are in it,
and takes each only from where it belongs.

A plan of the same round continues the one before (see `plan`): only chunks that got another owner start again,
all contributions are still at hand. What is late is recognised by the attempt in which the chunk got its owner,
and by its sender's place in the plan: a member that came back has another. Every frame carries both. Frames may be
lost with their connection, and come twice: `resync` says what is here, and what the other side then finds missing
it sends again.

A member has at most `window` contributions, or sums, at an owner or relay that were not merged there: this bounds
its memory. (Twice that for a moment, when chunks start anew at the same owner and it does not have that plan yet.)
They go out in the same order at all members, sums too, which may have to wait for one before them.

Sealed chunks are taken for what they should be until the coordinator finds that not all members hold the same. It
then tells the ledger's digests (`prove`): what differs is given up, reported with its giver, asked of others;
`ReportMissing` says at last what everybody was asked for in vain. What is sent to whom and when follows from the
calls alone, so the simulation runs this class as it is.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence

from atoll.comm.allreduce import dues
from atoll.comm.allreduce.chunk_record import ChunkRecord, ChunkState, SendWindow
from atoll.comm.allreduce.effects import (
    Effect,
    FrameVerdict,
    FreeContributions,
    FreeSealed,
    MergeChunk,
    ReportComplete,
    ReportForged,
    ReportMissing,
    ReportOrphans,
    ReportSeal,
    SendFrame,
    SumRegion,
)
from atoll.comm.allreduce.routes import Routes
from atoll.comm.bitmap import bit, bitmap
from atoll.comm.digest import root
from atoll.comm.ids import NodeId
from atoll.comm.plan import NOBODY, Plan
from atoll.comm.transport.frames import FrameKind

PULLS_AT_ONCE = 4  # sealed chunks of one late owner that others are asked for


class ReduceProtocol:
    """One member's part in one round. Call `replan` first; each call returns the effects to carry out, in
    order."""

    def __init__(self, me: NodeId, chunk_count: int, window: int) -> None:
        """`window`: contributions, or sums, that may be at one owner or relay before they are merged there."""
        self.me, self.chunk_count, self.window = me, chunk_count, max(window, 1)
        self.plan: Plan | None = None
        self._chunks = [ChunkRecord() for _ in range(chunk_count)]
        self._routes: Routes  # the plan's; there are none before the first `replan`
        self._entry_attempt = 0  # the first one that was seen with this member at this place
        self._windows: dict[NodeId, SendWindow] = {}  # by the owner or relay that contributions go to
        # Chunks in COLLECTING and MERGING, in the order in which they came to be here.
        self._collecting: dict[int, ChunkRecord] = {}
        self._missing_count = chunk_count  # chunks without a digest
        self._complete_attempt = -1  # the last one of which `ReportComplete` was said
        self._exhausted: set[int] = set()  # chunks that everybody was asked for in vain, in this attempt
        self._reported_missing: tuple[int, ...] = ()  # in this attempt

    # The plan

    def replan(self, plan: Plan) -> list[Effect]:
        """Go on under `plan`, which is valid, newer, and has this member in it."""
        out: list[Effect] = []
        routes, before, skipped = Routes(plan, self.me), dict[NodeId, int](), False
        if self.plan is not None:
            before, skipped = self._routes.places, plan.attempt > self.plan.attempt + 1
            if routes.place != before[self.me]:
                self._rejoin(plan, out)
        if routes.place != before.get(self.me):
            self._entry_attempt = plan.attempt
        self.plan, self._routes = plan, routes
        self._exhausted, self._reported_missing = set(), ()
        for node in before.keys() - routes.places.keys():
            self._windows.pop(node, None)
        for c, chunk in enumerate(self._chunks):
            since = plan.since[c] if plan.since else plan.attempt
            if since != chunk.since:
                self._reassign(c, plan.owners[c], since, out)
            elif chunk.ledger_digest is not None and chunk.digest is None:
                chunk.asked = []  # everybody may have been asked in vain
                out += self.pull(c) or self._exhaust(c)
        for node, place in routes.places.items():
            if before and before.get(node) != place and node != self.me:
                self._catch_up(node, place, skipped, out)
        for chunk in self._collecting.values():
            chunk.arrived -= routes.former  # a member that came back brings its contribution anew
        for c in list(self._collecting):
            out += self._merge_if_complete(c)
        for node, window in self._windows.items():
            # In the same order at all members: else two could wait with full windows for each other's.
            window.queue = deque(sorted(window.queue, key=lambda c: (self._chunks[c].since, c)))
            self._feed(node, out)
        if NOBODY in plan.owners:
            orphans = [c for c, owner in enumerate(plan.owners) if owner == NOBODY]
            out.append(ReportOrphans(tuple((c, d) for c in orphans if (d := self._chunks[c].digest) is not None)))
        self._report_progress(out)
        return out

    def _rejoin(self, plan: Plan, out: list[Effect]) -> None:
        """This member was left out for an attempt: what the others had of it is void, and chunks that had another
        owner meanwhile may have been sealed without it."""
        self._windows.clear()
        for c, chunk in enumerate(self._chunks):
            if chunk.digest is None:
                chunk.since = -1
            elif not plan.since or plan.since[c] != chunk.since:
                self._give_up(c, out)

    def _give_up(self, c: int, out: list[Effect]) -> None:
        """The sealed bytes that are here are void."""
        chunk = self._chunks[c]
        chunk.state, chunk.digest, chunk.giver = ChunkState.AWAITED, None, None
        self._missing_count += 1
        out.append(FreeSealed(c))

    def _catch_up(self, node: NodeId, place: int, skipped: bool, out: list[Effect]) -> None:
        """Send a member that has come what was sealed before it. It asks for what its first plan kept; which
        chunks these are is not known if that was skipped."""
        for c, chunk in enumerate(self._chunks):
            late = skipped or c not in self._routes.plan.kept
            if late and chunk.state is ChunkState.SERVED and self._routes.serves(c, place):
                out.append(SendFrame(node, FrameKind.SEALED, c, chunk.since))

    def _reassign(self, c: int, owner: int, since: int, out: list[Effect]) -> None:
        """The chunk has an owner, and starts from there, or is kept as it was sealed before."""
        routes, chunk = self._routes, self._chunks[c]
        kept = c in routes.plan.kept
        self._withdraw(c, chunk.source)
        if self._collecting.pop(c, None) is not None or chunk.relayed:
            out.append(FreeContributions(c))
        if not kept and chunk.digest is not None:
            self._give_up(c, out)
        self._chunks[c] = chunk = ChunkRecord(since=since, digest=chunk.digest, giver=chunk.giver)
        if chunk.digest is not None:
            chunk.state = ChunkState.SEALED
        if owner == NOBODY:
            return
        node, contributes = routes.source(c), routes.contributes(routes.place)
        chunk.source = node
        chunk.relayed = routes.plan.relays_for(c, routes.place)
        if kept:
            holder = routes.plan.members[owner].node
            if holder != self.me and chunk.digest is None and contributes:
                chunk.asked = [holder]
                out.append(SendFrame(holder, FrameKind.WANT, c, since))
            return
        if chunk.relayed or node == self.me:
            chunk.state, self._collecting[c] = ChunkState.COLLECTING, chunk
            chunk.arrived = {self._routes.place} if contributes else set()
        if chunk.relayed or (contributes and node != self.me):
            self._windows.setdefault(node, SendWindow()).queue.append(c)

    # Frames

    def verdict(self, node: NodeId, place: int, kind: FrameKind, c: int, since: int) -> FrameVerdict:
        """Decide on a frame about chunk `c` from `node`, which has this place in its own plan; `since`: the
        attempt in which the chunk got its owner there. HOLD: that plan is not here yet."""
        if self.plan is None or since > self.plan.attempt or place >= len(self.plan.members):
            return FrameVerdict.HOLD
        chunk = self._chunks[c]
        if since != chunk.since or self._routes.places.get(node) != place:
            return FrameVerdict.DISCARD
        useful = True
        if kind is FrameKind.CONTRIBUTION:
            useful = c in self._collecting and place not in chunk.arrived
            useful = useful and self._routes.contributes(place) and self._routes.contributes_here(c, place)
        elif kind is FrameKind.PARTIAL:
            useful = c in self._collecting and not chunk.relayed and place not in chunk.region_sums
            useful = useful and self._routes.plan.relays_for(c, place)
        elif kind is FrameKind.SEALED:
            useful = chunk.digest is None and (node == chunk.source or node in chunk.asked)
        return FrameVerdict.TAKE if useful else FrameVerdict.DISCARD

    def contribution_arrived(self, node: NodeId, c: int) -> list[Effect]:
        """Count a contribution of `node` to chunk `c`, whose verdict was TAKE and which is here."""
        self._collecting[c].arrived.add(self._routes.places[node])
        return self._merge_if_complete(c)

    def region_sum_arrived(self, node: NodeId, c: int, inputs: Sequence[int]) -> list[Effect] | None:
        """Count the sum that the relay `node` made of its region, whose verdict was TAKE and which is here;
        `inputs`: the places that it claims to hold. None: they are not all of its region, or counted already, and
        the sum is refused."""
        routes, chunk = self._routes, self._collecting[c]
        relay, region_of = routes.places[node], routes.plan.region
        if not inputs or any(
            region_of(i) != region_of(relay) or not routes.contributes(i) or i in chunk.arrived for i in inputs
        ):
            return None
        chunk.arrived.update(inputs)
        chunk.region_sums[relay] = tuple(inputs)
        return self._merge_if_complete(c)

    def contribution_refused(self, c: int, since: int, place: int) -> list[Effect] | None:
        """Take back a contribution, or a relay's sum, that turned out to be of no use in a merge: as if it had not
        come. None: the merge was void already, and nobody minds."""
        chunk = self._chunks[c]
        if since != chunk.since or chunk.state is not ChunkState.MERGING:
            return None
        chunk.state = ChunkState.COLLECTING
        chunk.arrived.difference_update(chunk.region_sums.pop(place, (place,)))
        return self._merge_if_complete(c)  # its sender may be gone

    def chunk_merged(self, c: int, since: int, inputs: Sequence[int], digest: bytes) -> list[Effect]:
        """Take it that chunk `c` is averaged and sealed here; no effects if it has got another owner meanwhile."""
        chunk = self._chunks[c]
        if since != chunk.since or chunk.state is not ChunkState.MERGING:
            return []
        relays = chunk.region_sums
        self._stop_collecting(c)
        chunk.state, chunk.digest = ChunkState.SERVED, digest
        self._missing_count -= 1
        out: list[Effect] = [ReportSeal(c, since, digest, tuple(inputs)), FreeContributions(c)]
        routes = self._routes
        more = len(self._collecting) >= self.window  # else nobody has contributions that wait for room
        for node, place in routes.places.items():
            if node != self.me:
                if more and (place in relays or (place in inputs and routes.contributes_here(c, place))):
                    out.append(SendFrame(node, FrameKind.MERGED, c, since))
                if routes.serves(c, place):
                    out.append(SendFrame(node, FrameKind.SEALED, c, since))
        self._report_progress(out)
        return out

    def region_summed(self, c: int, since: int, inputs: Sequence[int]) -> list[Effect]:
        """Take it that the contributions of this member's region to chunk `c` are averaged and encoded; no effects
        if the chunk started anew meanwhile, or is sealed."""
        chunk = self._chunks[c]
        if since != chunk.since or chunk.state is not ChunkState.MERGING:
            return []
        self._stop_collecting(c)
        chunk.state, chunk.summed = ChunkState.AWAITED, True
        out: list[Effect] = [FreeContributions(c)]
        more = len(self._collecting) >= self.window
        for node, place in self._routes.places.items():
            if more and node != self.me and place in inputs:
                out.append(SendFrame(node, FrameKind.MERGED, c, since))
        if chunk.source is not None:
            self._feed(chunk.source, out)
        return out

    def peer_merged(self, node: NodeId, c: int) -> list[Effect]:
        """Take it that the owner or relay `node` has made use of what this member sent of chunk `c`: there is room
        for more."""
        chunk = self._chunks[c]
        out: list[Effect] = [FreeContributions(c)] if chunk.summed and node == chunk.source else []
        if (window := self._windows.get(node)) is not None:
            window.in_flight.discard(c)
        self._feed(node, out)
        return out

    def sealed_arrived(self, c: int, digest: bytes, giver: NodeId | None = None) -> list[Effect]:
        """Take in sealed bytes of chunk `c` whose verdict was TAKE, whole and decodable; they are kept unless
        there is a `ReportForged` among the effects. `giver`: who sent them."""
        chunk, out = self._chunks[c], list[Effect]()
        if giver is not None:
            if chunk.ledger_digest not in (None, digest):
                return [ReportForged(c, giver), *self._ask_instead_of(giver, c)]
            chunk.giver = giver
        if chunk.relayed:
            if c in self._collecting:  # it was sealed without this region
                self._stop_collecting(c)
                out.append(FreeContributions(c))
            for node, place in self._routes.places.items():
                if node != self.me and self._routes.serves(c, place):
                    out.append(SendFrame(node, FrameKind.SEALED, c, chunk.since))
        chunk.state = ChunkState.SERVED if chunk.relayed else ChunkState.SEALED
        chunk.digest = digest
        chunk.asked.clear()
        self._missing_count -= 1
        if chunk.source is not None:  # it was sealed without this member, if that joined meanwhile
            self._withdraw(c, chunk.source)
            out += self.peer_merged(chunk.source, c)
        self._report_progress(out)
        return out

    def chunk_wanted(self, node: NodeId, c: int) -> list[Effect]:
        """Answer `node`, which asks for the sealed bytes of chunk `c`."""
        chunk = self._chunks[c]
        kind = FrameKind.LACK if chunk.digest is None else FrameKind.SEALED
        return [SendFrame(node, kind, c, chunk.since)]

    def chunk_lacked(self, node: NodeId, c: int) -> list[Effect]:
        """Ask somebody else for the sealed bytes of chunk `c`, which `node` was asked for and does not have."""
        return (self.pull(c) or self._exhaust(c)) if node in self._chunks[c].asked[-1:] else []

    def prove(self, ledger: Sequence[bytes]) -> list[Effect]:
        """Hold the sealed chunks to the ledger's digests, one for each chunk: give up those that differ, ask
        others for them, and say who gave them; say it when all are proven."""
        if all(chunk.ledger_digest == right for chunk, right in zip(self._chunks, ledger, strict=True)):
            return []
        out: list[Effect] = []
        for chunk, right in zip(self._chunks, ledger, strict=True):
            chunk.ledger_digest = right
        for c, chunk in enumerate(self._chunks):
            if chunk.state is ChunkState.AWAITED:  # its owner may have given it up
                out += self.pull(c) or self._exhaust(c)
            elif chunk.digest not in (None, chunk.ledger_digest):
                giver = chunk.giver
                self._give_up(c, out)
                chunk.asked = []
                if giver is None:
                    out += self.pull(c) or self._exhaust(c)
                else:
                    out += [ReportForged(c, giver), *self._ask_instead_of(giver, c)]
        self._complete_attempt = -1
        self._report_progress(out)
        return out

    # What is late

    @property
    def digests(self) -> list[bytes | None]:
        """The digest of each sealed chunk, None for one that is not here."""
        return [chunk.digest for chunk in self._chunks]

    def digest(self, c: int) -> bytes | None:
        """The digest of sealed chunk `c`; None: it is not here."""
        return self._chunks[c].digest

    @property
    def chunks_to_seal(self) -> int:
        """Chunks that this member owns and is still to seal."""
        return sum(not chunk.relayed for chunk in self._collecting.values())

    def source(self, c: int) -> NodeId | None:
        """The member from which sealed chunk `c` comes: its owner, or the relay that leads there; None: nobody
        owns it."""
        return self._chunks[c].source

    def missing(self) -> list[int]:
        """Sealed chunks that are to come to this member, and are not here."""
        return dues.missing(self._routes, self._chunks)

    def _ask_instead_of(self, node: NodeId, c: int) -> list[Effect]:
        """`node` gave what is not the sealed chunk: ask somebody else, unless that was done; it itself only if
        there is nobody."""
        asked = self._chunks[c].asked
        if asked and asked[-1] != node:
            return []
        if found := self.pull(c, node):
            return found
        return (self.pull(c) if node not in asked else []) or self._exhaust(c)

    def _exhaust(self, c: int) -> list[Effect]:
        """Nobody is left to ask for a chunk."""
        out: list[Effect] = []
        if self._chunks[c].ledger_digest is not None and self._chunks[c].digest is None:
            self._exhausted.add(c)
            self._report_progress(out)
        return out

    def pull(self, c: int, besides: NodeId | None = None) -> list[Effect]:
        """Ask the next member that might have sealed chunk `c`, other than `besides`; nobody twice, and of two
        levels nobody in another region, from where it comes once."""
        chunk = self._chunks[c]
        if chunk.state is not ChunkState.AWAITED:
            return []
        if (node := self._routes.donor(c, (*chunk.asked, besides))) is None:
            return []
        chunk.asked.append(node)
        return [SendFrame(node, FrameKind.WANT, c, chunk.since)]

    def pull_from(self, owners: Collection[NodeId]) -> list[Effect]:
        """Ask others for the sealed chunks that these owners or relays are late with: a few of each at once."""
        out: list[Effect] = []
        asked = dict.fromkeys(owners, 0)
        for c in self.missing():
            source = self._chunks[c].source
            if source in asked and asked[source] < PULLS_AT_ONCE:
                asked[source] += 1
                out += self.pull(c, source) or self.pull(c) or self._exhaust(c)  # who was asked last says nothing
        return out

    def contributors_due(self) -> Iterator[NodeId]:
        """Members of which a contribution is due (`dues.contributors_due`)."""
        return dues.contributors_due(self._routes, self._collecting, self.window)

    def holding_up(self) -> list[NodeId]:
        """Members that hold up a merge here (`dues.holding_up`)."""
        return dues.holding_up(self._routes, self._collecting)

    def dues(self) -> list[tuple[NodeId, str]]:
        """The members that this one waits for, each with what it is to bring, in words: "contributions", "region's
        sums", or "3 of its chunks". A member may be listed more than once."""
        return dues.dues(self._routes, self._chunks, self._collecting, self.window)

    # After a connection broke

    def resync_state(self, node: NodeId) -> tuple[bytes, bytes, bytes]:
        """The three bitmaps of a RESYNC for `node`, each of ceil(chunks / 8) bytes: chunks of which something of
        `node` is here to be merged, chunks that are merged or summed here, and chunks whose sealed bytes are
        here."""
        place, chunks, n = self._routes.places.get(node, -1), self._chunks, self.chunk_count
        here = (c for c, x in self._collecting.items() if place in x.arrived or place in x.region_sums)
        merged = (c for c, chunk in enumerate(chunks) if chunk.state is ChunkState.SERVED or chunk.summed)
        sealed = (c for c, chunk in enumerate(chunks) if chunk.digest is not None)
        return bitmap(here, n), bitmap(merged, n), bitmap(sealed, n)

    def resync(self, node: NodeId, attempt: int, here: bytes, merged: bytes, sealed: bytes) -> list[Effect]:
        """Send `node` again what it should have and does not, by its own account (`resync_state`) under
        `attempt`."""
        if self.plan is None or node not in self._routes.places:
            return []
        out: list[Effect] = []
        window = self._windows.get(node, SendWindow())
        for c in sorted(window.in_flight):
            # That it owns this chunk, or that this member came back: what it says of it means something else.
            unheard = max(self._chunks[c].since, self._entry_attempt) > attempt
            if bit(merged, c) and not unheard:
                window.in_flight.discard(c)
            elif not bit(here, c) or unheard:
                out.append(SendFrame(node, self._payload_kind(c), c, self._chunks[c].since))
        for c, chunk in enumerate(self._chunks):
            if chunk.state is ChunkState.SERVED and (chunk.since > attempt or not bit(sealed, c)):
                if self._routes.serves(c, self._routes.places[node]):
                    out.append(SendFrame(node, FrameKind.SEALED, c, chunk.since))
        for c, chunk in enumerate(self._chunks):
            if chunk.asked and chunk.asked[-1] == node:
                out.append(SendFrame(node, FrameKind.WANT, c, chunk.since))
        self._feed(node, out)
        return out

    # Parts of the above

    def _payload_kind(self, c: int) -> FrameKind:
        """What this member sends of the chunk."""
        return FrameKind.PARTIAL if self._chunks[c].relayed else FrameKind.CONTRIBUTION

    def _stop_collecting(self, c: int) -> None:
        """The chunk is merged or summed here, or was sealed without that; the caller sets its state."""
        chunk = self._collecting.pop(c)
        chunk.arrived, chunk.region_sums = set(), {}

    def _merge_if_complete(self, c: int) -> list[Effect]:
        chunk, due = self._chunks[c], self._routes.contributors
        if chunk.state is ChunkState.MERGING:
            return []
        if chunk.relayed:
            due = {place for place in due if self._routes.contributes_here(c, place)}
        if due <= chunk.arrived:
            if chunk.relayed and not chunk.arrived:
                return []  # there is nobody left in this region
            chunk.state, inputs = ChunkState.MERGING, tuple(sorted(chunk.arrived))
            if chunk.relayed:
                return [SumRegion(c, chunk.since, inputs)]
            return [MergeChunk(c, chunk.since, inputs, tuple(sorted(chunk.region_sums.items())))]
        return []

    def _withdraw(self, c: int, node: NodeId | None) -> None:
        """What this member contributes to the chunk is of no use to `node`."""
        if node is not None and (window := self._windows.get(node)) is not None:
            window.in_flight.discard(c)
            if c in window.queue:
                window.queue.remove(c)

    def _feed(self, node: NodeId, out: list[Effect]) -> None:
        """Send contributions and sums to `node` as long as there is room, and the next one is made."""
        if (window := self._windows.get(node)) is None:
            return
        queue, in_flight = window.queue, window.in_flight
        while queue and len(in_flight) < self.window and self._is_made(queue[0]):
            c = queue.popleft()
            in_flight.add(c)
            out.append(SendFrame(node, self._payload_kind(c), c, self._chunks[c].since))

    def _is_made(self, c: int) -> bool:
        return not self._chunks[c].relayed or self._chunks[c].summed  # this member's own contribution always is

    def _report_progress(self, out: list[Effect]) -> None:
        """Say it once in an attempt when all is here, or all that was not asked for in vain."""
        missing, attempt = self._missing_count, self._routes.plan.attempt
        if not missing and self._complete_attempt != attempt and self._routes.contributes(self._routes.place):
            self._complete_attempt = attempt
            proven = all(chunk.digest == chunk.ledger_digest for chunk in self._chunks)
            out.append(ReportComplete(root([d for d in self.digests if d is not None]), proven))
        elif missing and len(self._exhausted) >= missing:
            lacking = tuple(c for c, chunk in enumerate(self._chunks) if chunk.digest is None)
            if self._exhausted.issuperset(lacking) and lacking != self._reported_missing:
                self._reported_missing = lacking
                out.append(ReportMissing(lacking))
