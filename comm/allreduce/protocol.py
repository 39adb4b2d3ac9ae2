"""One member's side of the reduce of one round, without I/O: what happened goes in, what is to be done comes out.

    at a chunk's owner    collecting --every contribution is here--> merging --> sealed: reported, sent to all
    everywhere else       contributed ----------------------------> awaited --> here

of a chunk that is reduced in two levels,

    at a region's relay   collecting --its region's are here--> summing --> summed: sent to the owner
                                                                            --> here: passed on

A relay is to the members of its region what the owner is in a flat reduce, and to the owner what a member is; the
owner knows of each region's sum whose contributions are in it, and takes each only from where it belongs.

A plan of the same round continues the one before (see `plan`): only chunks that got another owner start again,
all contributions are still at hand. What is late is recognised by the attempt in which the chunk got its owner,
and by its sender's place in the plan: a member that came back has another. Every frame carries both. Frames may be
lost with their connection, and come twice: `resync` says what is here, and what the other side then finds missing
it sends again.

A member has at most `window` contributions, or sums, at an owner or relay that were not merged there: this bounds
its memory. (Twice that for a moment, when chunks start anew at the same owner and it does not have that plan yet.)
They go out in the same order at all members, sums too, which may have to wait for one before them.

Sealed chunks are taken for what they should be until the coordinator finds that not all members hold the same. It
tells the ledger's digests then (`prove`): what differs is given up, and comes again from somebody else. Of whom it
came so is told, and at last what is `ReportMissing`, where everybody was asked in vain.
Whatever is sent to whom and when follows from the calls, so the simulation of the protocol runs this class.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum

from atoll.comm.allreduce.effects import (
    Effect,
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
from atoll.comm.bitmap import bit, bitmap
from atoll.comm.digest import root
from atoll.comm.ids import NodeId
from atoll.comm.plan import NOBODY, Plan
from atoll.comm.transport.frames import FrameKind


class FrameVerdict(Enum):
    """What to do with a frame whose header has come."""

    TAKE = "take"
    HOLD = "hold"  # its sender has a newer plan: decide when that is here
    DISCARD = "discard"  # it is late, or comes twice


class ReduceProtocol:
    def __init__(self, me: NodeId, chunks: int, window: int) -> None:
        self.me, self.chunks, self.window = me, chunks, max(window, 1)
        self.plan: Plan | None = None
        self.digests: list[bytes | None] = [None] * chunks  # of the sealed chunks that are here
        self._ledger: list[bytes | None] = [None] * chunks  # what they are to be, where that was told
        self._givers: dict[int, NodeId] = {}  # from whom they are
        self._place = -1  # of this member in the plan
        self._entered = 0  # the first attempt that was seen with it at this place
        self._here: dict[NodeId, int] = {}  # places of all members that are not gone
        self._up: list[NodeId | None] = [None] * chunks  # a chunk's owner, or the relay that leads there
        self._since = [-1] * chunks
        self._arrived: dict[int, set[int]] = {}  # places whose contributions are here, to chunks to be merged here
        self._partials: dict[int, dict[int, tuple[int, ...]]] = {}  # by relay: those that are here in its sum
        self._merging: set[int] = set()
        self._relayed: set[int] = set()  # chunks that are summed here, and owned elsewhere
        self._summed: set[int] = set()  # of these, those that are
        self._mine: set[int] = set()  # sealed here, or relayed: others get them from here
        self._queue: dict[NodeId, deque[int]] = {}  # chunks whose contributions, or sums, were not sent yet
        self._out: dict[NodeId, set[int]] = {}  # sent, and not merged yet
        self._asked: dict[int, list[NodeId]] = {}  # whom for the sealed chunk
        self._lacking = chunks  # sealed chunks that are not here
        self._told = -1  # the last attempt for which this member held everything
        self._vain: set[int] = (
            set()
        )  # chunks that everybody was asked for in this attempt, and gave otherwise or not
        self._missed: tuple[int, ...] = ()  # what was said in this attempt to be lacking

    # The plan

    def replan(self, plan: Plan) -> list[Effect]:
        """Go on under `plan`, which is valid, newer, and has this member in it."""
        out: list[Effect] = []
        if self.plan is not None and plan.index(self.me) != self._place:
            self._come_back(plan, out)
        if plan.index(self.me) != self._place:
            self._entered = plan.attempt
        before, skipped = self._here, self.plan is not None and plan.attempt > self.plan.attempt + 1
        self.plan, self._place = plan, plan.index(self.me)
        self._vain, self._missed = set(), ()
        self._here = {m.node: i for i, m in enumerate(plan.members) if not m.gone}
        for node in before.keys() - self._here.keys():
            self._queue.pop(node, None)
            self._out.pop(node, None)
        for c in range(self.chunks):
            since = plan.since[c] if plan.since else plan.attempt
            if since != self._since[c]:
                self._reassign(c, plan.owners[c], since, out)
            elif self._ledger[c] is not None and self.digests[c] is None:
                self._asked[c] = []  # everybody may have been asked in vain
                out += self.pull(c) or self._in_vain(c)
        for node, place in self._here.items():
            if before and before.get(node) != place and node != self.me:
                # It asks for what its first plan kept; which chunks these are is not known if that was skipped.
                late = self._mine if skipped else self._mine - plan.kept
                late = {c for c in late if self._gives(c, place)}
                out += [SendFrame(node, FrameKind.SEALED, c, self._since[c]) for c in sorted(late)]
        again = {i for i, m in enumerate(plan.members) if m.gone and m.node in self._here}
        for arrived in self._arrived.values():
            arrived -= again  # a member that came back brings its contribution anew
        for c in list(self._arrived):
            self._merge_if_complete(c, out)
        for node, queue in list(self._queue.items()):
            # In the same order at all members: else two could wait with full windows for each other's.
            self._queue[node] = deque(sorted(queue, key=lambda c: (self._since[c], c)))
            self._feed(node, out)
        if NOBODY in plan.owners:
            orphans = [c for c, owner in enumerate(plan.owners) if owner == NOBODY]
            out.append(ReportOrphans(tuple((c, d) for c in orphans if (d := self.digests[c]) is not None)))
        self._complete(out)
        return out

    def _come_back(self, plan: Plan, out: list[Effect]) -> None:
        """This member was left out for an attempt: what the others had of it is void, and chunks that had another
        owner meanwhile may have been sealed without it."""
        self._queue.clear()
        self._out.clear()
        for c, digest in enumerate(self.digests):
            if digest is None:
                self._since[c] = -1
            elif not plan.since or plan.since[c] != self._since[c]:
                self.digests[c] = None
                self._lacking += 1
                out.append(FreeSealed(c))

    def _reassign(self, c: int, owner: int, since: int, out: list[Effect]) -> None:
        """The chunk has an owner, and starts from there, or is kept as it was sealed before."""
        assert self.plan is not None
        if (old := self._up[c]) is not None:
            self._out.get(old, set()).discard(c)
            if c in (queue := self._queue.get(old, deque())):
                queue.remove(c)
        if self._arrived.pop(c, None) is not None or c in self._relayed:
            out.append(FreeContributions(c))
        self._partials.pop(c, None)
        for chunks in (self._merging, self._relayed, self._summed, self._mine):
            chunks.discard(c)
        self._asked.pop(c, None)
        kept = c in self.plan.kept
        if not kept and self.digests[c] is not None:
            self.digests[c] = None
            self._lacking += 1
            out.append(FreeSealed(c))
        self._ledger[c], self._since[c] = None, since
        if owner == NOBODY:
            self._up[c] = None
            return
        node = self._up[c] = self.plan.members[self.plan.towards(c, self._place)].node
        contributes = self._contributes(self._place)
        if relays := self.plan.relays_for(c, self._place):
            self._relayed.add(c)
        if kept:
            holder = self.plan.members[owner].node
            if holder != self.me and self.digests[c] is None and contributes:
                self._asked[c] = [holder]
                out.append(SendFrame(holder, FrameKind.WANT, c, since))
            return
        if relays or node == self.me:
            self._arrived[c] = {self._place} if contributes else set()
            self._partials[c] = {}
        if relays or (contributes and node != self.me):
            self._queue.setdefault(node, deque()).append(c)

    # Frames

    def verdict(self, node: NodeId, place: int, kind: FrameKind, c: int, since: int) -> FrameVerdict:
        """Whether a frame about chunk `c`, of `node` at this place in its plan, is of use."""
        if self.plan is None or since > self.plan.attempt or place >= len(self.plan.members):
            return FrameVerdict.HOLD
        if since != self._since[c] or self._here.get(node) != place:
            return FrameVerdict.DISCARD
        useful = True
        if kind is FrameKind.CONTRIBUTION:
            arrived = self._arrived.get(c)
            useful = arrived is not None and place not in arrived and self._contributes(place)
            useful = useful and self._sums_for(c, place)
        elif kind is FrameKind.PARTIAL:
            useful = c not in self._relayed and place not in self._partials.get(c, {place: ()})
            useful = useful and self.plan.relays_for(c, place)
        elif kind is FrameKind.SEALED:
            useful = self.digests[c] is None and (node == self._up[c] or node in self._asked.get(c, ()))
        return FrameVerdict.TAKE if useful else FrameVerdict.DISCARD

    def contribution(self, node: NodeId, c: int) -> list[Effect]:
        """A contribution to chunk `c` that is to be taken is here."""
        out: list[Effect] = []
        self._arrived[c].add(self._here[node])
        self._merge_if_complete(c, out)
        return out

    def partial(self, node: NodeId, c: int, inputs: Sequence[int]) -> list[Effect] | None:
        """The sum of a relay's region that is to be taken is here, of these places; None: not of its region."""
        assert self.plan is not None
        relay, here = self._here[node], self._arrived[c]
        region = self.plan.region(relay)
        if not inputs or any(
            self.plan.region(i) != region or not self._contributes(i) or i in here for i in inputs
        ):
            return None
        out: list[Effect] = []
        here.update(inputs)
        self._partials[c][relay] = tuple(inputs)
        self._merge_if_complete(c, out)
        return out

    def refused(self, c: int, since: int, place: int) -> list[Effect] | None:
        """A contribution, or a relay's sum, turned out to be of no use: as if it had not come. None: nobody minds
        any more."""
        if since != self._since[c] or c not in self._merging:
            return None
        out: list[Effect] = []
        self._merging.discard(c)
        self._arrived[c].difference_update(self._partials[c].pop(place, (place,)))
        self._merge_if_complete(c, out)  # its sender may be gone
        return out

    def merged(self, c: int, since: int, inputs: Sequence[int], digest: bytes) -> list[Effect]:
        """Chunk `c` is averaged and encoded; nothing comes of it if it has got another owner meanwhile."""
        if since != self._since[c] or c not in self._merging:
            return []
        assert self.plan is not None
        self._merging.discard(c)
        relays = self._partials.pop(c)
        del self._arrived[c]
        self._mine.add(c)
        self.digests[c] = digest
        self._lacking -= 1
        out: list[Effect] = [ReportSeal(c, since, digest, tuple(inputs)), FreeContributions(c)]
        more = len(self._arrived) >= self.window  # else nobody has contributions that wait for room
        for node, place in self._here.items():
            if node != self.me:
                if more and (place in relays or (place in inputs and self._sums_for(c, place))):
                    out.append(SendFrame(node, FrameKind.MERGED, c, since))
                if self._gives(c, place):
                    out.append(SendFrame(node, FrameKind.SEALED, c, since))
        self._complete(out)
        return out

    def summed(self, c: int, since: int, inputs: Sequence[int]) -> list[Effect]:
        """The contributions of this member's region to chunk `c` are averaged and encoded; nothing comes of it if
        the chunk started anew, or is sealed."""
        if since != self._since[c] or c not in self._merging:
            return []
        self._merging.discard(c)
        del self._arrived[c], self._partials[c]
        self._summed.add(c)
        out: list[Effect] = [FreeContributions(c)]
        more = len(self._arrived) >= self.window
        for node, place in self._here.items():
            if more and node != self.me and place in inputs:
                out.append(SendFrame(node, FrameKind.MERGED, c, since))
        if (up := self._up[c]) is not None:
            self._feed(up, out)
        return out

    def is_merged(self, node: NodeId, c: int) -> list[Effect]:
        """The owner or relay has made use of what this member sent: there is room for more."""
        out: list[Effect] = [FreeContributions(c)] if c in self._summed and node == self._up[c] else []
        self._out.get(node, set()).discard(c)
        self._feed(node, out)
        return out

    def sealed(self, c: int, digest: bytes, giver: NodeId | None = None) -> list[Effect]:
        """A sealed chunk that is to be taken is here, whole and decodable; unless it is `ReportForged`."""
        out: list[Effect] = []
        if giver is not None:
            if self._ledger[c] not in (None, digest):
                return [ReportForged(c, giver), *self._beside(giver, c)]
            self._givers[c] = giver
        self.digests[c] = digest
        self._lacking -= 1
        self._asked.pop(c, None)
        if c in self._relayed:
            if self._arrived.pop(c, None) is not None:  # it was sealed without this region
                del self._partials[c]
                self._merging.discard(c)
                out.append(FreeContributions(c))
            self._mine.add(c)
            for node, place in self._here.items():
                if node != self.me and self._gives(c, place):
                    out.append(SendFrame(node, FrameKind.SEALED, c, self._since[c]))
        if (up := self._up[c]) is not None:  # it was sealed without this member, if that joined meanwhile
            if c in (queue := self._queue.get(up, deque())):
                queue.remove(c)
            out += self.is_merged(up, c)
        self._complete(out)
        return out

    def wanted(self, node: NodeId, c: int) -> list[Effect]:
        """A member asks for a sealed chunk."""
        kind = FrameKind.LACK if self.digests[c] is None else FrameKind.SEALED
        return [SendFrame(node, kind, c, self._since[c])]

    def lacked(self, node: NodeId, c: int) -> list[Effect]:
        """A member that was asked for a sealed chunk does not have it."""
        return (self.pull(c) or self._in_vain(c)) if self._asked.get(c, [])[-1:] == [node] else []

    def prove(self, ledger: Sequence[bytes]) -> list[Effect]:
        """These are the ledger's digests, of all chunks: hold what they say, and say so."""
        assert self.plan is not None
        if self._ledger == list(ledger):
            return []
        out: list[Effect] = []
        self._ledger = list(ledger)
        for c, right in enumerate(ledger):
            if self.digests[c] is None and c not in self._arrived:  # its owner may have given it up
                out += self.pull(c) or self._in_vain(c)
            elif self.digests[c] not in (None, right):
                self.digests[c] = None
                self._lacking += 1
                self._mine.discard(c)
                out.append(FreeSealed(c))
                self._asked[c] = []
                giver = self._givers.pop(c, None)
                asked = self._beside(giver, c) if giver is not None else self.pull(c) or self._in_vain(c)
                out += asked if giver is None else [ReportForged(c, giver), *asked]
        self._told = -1
        self._complete(out)
        return out

    # What is late

    @property
    def unsealed(self) -> int:
        """Chunks that this member is still to seal."""
        return len(self._arrived.keys() - self._relayed)

    def up(self, c: int) -> NodeId | None:
        """Where the sealed chunk comes from: its owner, or its relay."""
        return self._up[c]

    def lacking(self) -> list[int]:
        """Sealed chunks that are to be here, and are not."""
        assert self.plan is not None
        late = (c for c in range(self.chunks) if self.digests[c] is None and c not in self._arrived)
        return [c for c in late if self._contributes(self._place) or c in self._relayed]

    def _beside(self, node: NodeId, c: int) -> list[Effect]:
        """`node` gave what is not the sealed chunk: ask somebody else, unless that was done; it itself only if
        there is nobody."""
        asked = self._asked.setdefault(c, [])
        if asked and asked[-1] != node:
            return []
        if found := self.pull(c, node):
            return found
        return (self.pull(c) if node not in asked else []) or self._in_vain(c)

    def _in_vain(self, c: int) -> list[Effect]:
        """Nobody is left to ask for a chunk."""
        out: list[Effect] = []
        if self._ledger[c] is not None and self.digests[c] is None:
            self._vain.add(c)
            self._complete(out)
        return out

    def pull(self, c: int, beside: NodeId | None = None) -> list[Effect]:
        """Ask the next member that might have the sealed chunk, other than `beside`; nobody twice, and of two
        levels nobody in another region, from where it comes once."""
        assert self.plan is not None
        if self.digests[c] is not None or c in self._arrived:
            return []
        asked = self._asked.setdefault(c, [])
        able = [
            n
            for n, i in self._here.items()
            if n not in (self.me, beside) and n not in asked and not self.plan.members[i].leaf
        ]
        if c in self.plan.layered and (region := self.plan.region(self._place)) >= 0:
            able = [n for n in able if self.plan.region(self._here[n]) == region]
        if not able:
            return []
        node = able[(c + self._place) % len(able)]  # not everybody the same one
        asked.append(node)
        return [SendFrame(node, FrameKind.WANT, c, self._since[c])]

    def owing(self) -> Iterator[NodeId]:
        """Members of which a contribution is due: they have not filled their window."""
        assert self.plan is not None
        for node, place in self._here.items():
            if node == self.me or not self._contributes(place):
                continue
            due = [arrived for c, arrived in self._arrived.items() if self._sums_for(c, place)]
            if sum(place in arrived for arrived in due) < min(self.window, len(due)):
                yield node

    def awaiting(self) -> list[tuple[NodeId, str]]:
        """Whom this member waits for, with what."""
        assert self.plan is not None
        owed: dict[NodeId, list[int]] = {}
        for c in self.lacking():
            if (up := self._up[c]) is not None and up != self.me:
                owed.setdefault(up, []).append(c)
        late = [(node, "contributions") for node in self.owing()]
        late += [(node, "region's sums") for node in self._summing()]
        return late + [(node, f"{len(cs)} of its chunks") for node, cs in owed.items()]

    # After a connection broke

    def state(self, node: NodeId) -> tuple[bytes, bytes, bytes]:
        """For a RESYNC: what of `node` is here to be merged, what is merged, and sealed chunks that are here."""
        place = self._here.get(node, -1)
        here = (c for c, arrived in self._arrived.items() if place in arrived or place in self._partials[c])
        sealed = (c for c, digest in enumerate(self.digests) if digest is not None)
        merged = self._mine | self._summed
        return bitmap(here, self.chunks), bitmap(merged, self.chunks), bitmap(sealed, self.chunks)

    def resync(self, node: NodeId, attempt: int, here: bytes, merged: bytes, sealed: bytes) -> list[Effect]:
        """Send `node` again what it should have and does not, by its own account under `attempt`."""
        if self.plan is None or node not in self._here:
            return []
        out: list[Effect] = []
        for c in sorted(self._out.get(node, ())):
            # That it owns this chunk, or that this member came back: what it says of it means something else.
            unheard = max(self._since[c], self._entered) > attempt
            if bit(merged, c) and not unheard:
                self._out[node].discard(c)
            elif not bit(here, c) or unheard:
                out.append(SendFrame(node, self._kind(c), c, self._since[c]))
        for c in sorted(self._mine):
            if (self._since[c] > attempt or not bit(sealed, c)) and self._gives(c, self._here[node]):
                out.append(SendFrame(node, FrameKind.SEALED, c, self._since[c]))
        for c, asked in self._asked.items():
            if asked[-1:] == [node]:
                out.append(SendFrame(node, FrameKind.WANT, c, self._since[c]))
        self._feed(node, out)
        return out

    # Parts of the above

    def _contributes(self, place: int) -> bool:
        assert self.plan is not None
        return self.plan.members[place].weight > 0

    def _sums_for(self, c: int, place: int) -> bool:
        """Whether contributions of the member at `place` to this chunk come here."""
        assert self.plan is not None
        return self.plan.towards(c, place) == self._place and not self.plan.relays_for(c, place)

    def _gives(self, c: int, place: int) -> bool:
        """Whether the member at `place` has the sealed chunk from here."""
        assert self.plan is not None
        receives = self._contributes(place) or self.plan.relays_for(c, place)
        return receives and self.plan.towards(c, place) == self._place

    def _summing(self) -> Iterator[NodeId]:
        """Relays of which a sum is due."""
        assert self.plan is not None
        if not self.plan.layered:
            return
        for node, place in self._here.items():
            late = (
                c for c, partials in self._partials.items() if c not in self._relayed and place not in partials
            )
            if any(self.plan.relays_for(c, place) for c in late):
                yield node

    def _kind(self, c: int) -> FrameKind:
        """What this member sends of the chunk."""
        return FrameKind.PARTIAL if c in self._relayed else FrameKind.CONTRIBUTION

    def _merge_if_complete(self, c: int, out: list[Effect]) -> None:
        if c in self._merging:
            return
        arrived, relayed = self._arrived[c], c in self._relayed
        if all(
            place in arrived
            for place in self._here.values()
            if self._contributes(place) and (not relayed or self._sums_for(c, place))
        ):
            if relayed and not arrived:
                return  # there is nobody left in this region
            self._merging.add(c)
            inputs, since = tuple(sorted(arrived)), self._since[c]
            sums = tuple(sorted(self._partials[c].items()))
            out.append(SumRegion(c, since, inputs) if relayed else MergeChunk(c, since, inputs, sums))

    def _feed(self, node: NodeId, out: list[Effect]) -> None:
        """Send contributions and sums to `node` as long as there is room, and the next one is made."""
        queue, sent = self._queue.get(node), self._out.setdefault(node, set())
        while queue and len(sent) < self.window and (queue[0] not in self._relayed or queue[0] in self._summed):
            c = queue.popleft()
            sent.add(c)
            out.append(SendFrame(node, self._kind(c), c, self._since[c]))

    def _complete(self, out: list[Effect]) -> None:
        assert self.plan is not None
        if not self._lacking and self._told != self.plan.attempt and self._contributes(self._place):
            self._told = self.plan.attempt
            out.append(
                ReportComplete(root([d for d in self.digests if d is not None]), self.digests == self._ledger)
            )
        elif self._lacking and len(self._vain) >= self._lacking:
            lacking = tuple(c for c, digest in enumerate(self.digests) if digest is None)
            if self._vain.issuperset(lacking) and lacking != self._missed:
                self._missed = lacking
                out.append(ReportMissing(lacking))
