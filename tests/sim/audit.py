"""A simulated node's audits, as `atoll.comm.allreduce.auditor` does them and `atoll.node.daemon.audits` begins
them, over a network that loses what is asked and answered; the receipts and the signatures under them are real.

A contributor's signature is made when it is first needed, in its name: who sends something else than it signed is
not among the liars here, as the owner would refuse that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from sim.truth import Contribution, Mean, digest, norm

from atoll.comm.allreduce.auditor import AuditFinding
from atoll.comm.bitmap import places
from atoll.comm.ids import NodeId, PublicKey
from atoll.comm.plan import Plan
from atoll.comm.proto import atoll_pb2 as pb
from atoll.comm.receipts import InputRecord, sign_input, sign_receipt, unpack_receipt
from atoll.comm.signatures import PrivateKey
from atoll.node.control.reports import plan_of

if TYPE_CHECKING:
    from sim.node import Node
    from sim.reduce import Reduce

AGAIN = 0.7  # seconds after which what was not answered is asked again
Key = tuple[int, int, int]  # round, chunk, attempt in which the chunk got its owner
KEYS: dict[PublicKey, PrivateKey] = {}


@cache
def key_of(host: str, at: float) -> PublicKey:
    """The key that a machine makes when it has none."""
    from cryptography.hazmat.primitives.asymmetric import ec

    secret = int.from_bytes(digest("key", host, at) * 2, "big") % (1 << 255) + 1
    key = PrivateKey(ec.derive_private_key(secret, ec.SECP256R1()))
    KEYS[key.public] = key
    return key.public


def content(c: int, contribution: Contribution) -> bytes:
    return digest("contribution", c, contribution)


@dataclass
class Running:
    """An audit at work."""

    order: pb.Audit
    plan: Plan
    until: float  # seconds, on the node's clock
    receipt: bytes | None = None
    inputs: dict[int, Contribution] = field(default_factory=dict)


class Audits:
    """The audits of one process, and what it shows to others'."""

    def __init__(self, node: "Node") -> None:
        self.node, self.world = node, node.world
        self._open: dict[Key, Running | None] = {}  # None: reported
        self.shows: list[str] = []  # to whom it would show something, as a leaf
        self._hidden: set[Key] = set()
        self._followed = (0, 0)  # incarnation and version of the newest view

    def follow(self, view: pb.View) -> None:
        at = view.incarnation, view.version
        if at < self._followed:  # here views may overtake each other, in a real stream they do not
            return
        self._followed = at
        self.shows = [donor.node_id for donor in view.auditors]
        wanted = {(view.plan.round, order.chunk, order.since): order for order in view.audits}
        for key in self._open.keys() - wanted.keys():
            del self._open[key]
        for key, order in wanted.items():
            if key not in self._open:
                plan = plan_of(view.plan)
                self._open[key] = Running(order, plan, self.node.clock + 0.9 * order.seconds)
                self._ask(key)

    def stop(self) -> None:
        self._open.clear()

    def _ask(self, key: Key) -> None:
        running = self._open.get(key)
        if running is None:
            return
        missing = self._missing(running)
        if self.node.clock >= running.until:
            receipts = () if running.receipt is None else (running.receipt,)
            self._report(key, running, AuditFinding(key[1], key[2], receipts=receipts, silent=(missing[0],)))
            return
        for place in missing:
            owner = running.receipt is None
            if (to := self._process(running.plan.members[place].node)) is not None:
                call = to.audits.show_receipt if owner else to.audits.show_input
                self.world.network.send(self.node, to, call, self.node, key, place)
        self.node.later(AGAIN, self._ask, key)

    def _missing(self, running: Running) -> list[int]:
        """Places of whom something is still to come."""
        if running.receipt is None:
            return [running.plan.owners[running.order.chunk]]
        return [place for place in places(running.order.inputs) if place not in running.inputs]

    def _process(self, node: NodeId) -> "Node | None":
        return next((n for n in self.world.nodes.values() if n.alive and n.me == node), None)

    # What others ask of this node

    def _reduce(self, asker: "Node", key: Key, place: int) -> "Reduce | None":
        reduce = self.node.plane.reduce
        if self.node.silent:
            return None
        if self.node.host.leaf and asker.me not in self.shows:
            return None
        if reduce is None or reduce.round != key[0] or all(m.node != asker.me for m in reduce.plan.members):
            return None
        return reduce if reduce.plan.index(self.node.me) == place else None

    def show_receipt(self, asker: "Node", key: Key, place: int) -> None:
        reduce = self._reduce(asker, key, place)
        made = None if reduce is None else reduce.merged.get(key[1])
        if self.node.host.lies_about("receipt"):
            self._hidden.add(key)
        if reduce is None or made is None or made[0] != key[2] or key in self._hidden:
            return
        if any(reduce.plan.members[at].gone for at, _, _ in made[1]):  # whose key this simulation would not know
            return
        plan, c = reduce.plan, key[1]
        records = []
        for at, found, inputs in made[1]:
            private = KEYS[plan.members[at].key]
            records.append(sign_input(private, plan.salt, c, at, found, inputs))
        private = KEYS[plan.members[place].key]
        receipt = sign_receipt(private, plan.salt, c, key[2], place, tuple(records), made[2])
        self.world.network.send(self.node, asker, asker.audits.receipt_came, key, receipt.pack())

    def show_input(self, asker: "Node", key: Key, place: int) -> None:
        reduce = self._reduce(asker, key, place)
        if reduce is None or reduce.contribution is None:
            return
        shown, plan = reduce.contribution, reduce.plan
        if key[1] not in plan.layered and self.node.host.lies_about("input"):  # else a relay had it
            shown = Contribution(self.node.me, (), b"another")
        record = sign_input(KEYS[plan.members[place].key], plan.salt, key[1], place, content(key[1], shown))
        self.world.network.send(self.node, asker, asker.audits.input_came, key, shown, record)

    # What comes of it

    def receipt_came(self, key: Key, receipt: bytes) -> None:
        running = self._open.get(key)
        if running is not None and running.receipt is None:
            running.receipt = receipt
            self._ask(key)

    def input_came(self, key: Key, shown: Contribution, record: InputRecord) -> None:
        running = self._open.get(key)
        if running is None or running.receipt is None or record.place in running.inputs:
            return
        sent = {r.place: r for r in unpack_receipt(running.receipt).records if not r.inputs}.get(record.place)
        if sent is not None and sent.digest != record.digest:
            finding = AuditFinding(key[1], key[2], receipts=(running.receipt,), shown=record.pack())
            self._report(key, running, finding)
            return
        running.inputs[record.place] = shown
        if not self._missing(running):
            self._recomputed(key, running)

    def _recomputed(self, key: Key, running: Running) -> None:
        assert running.receipt is not None
        members, inputs = running.plan.members, sorted(running.inputs)
        contributions = tuple(running.inputs[place] for place in inputs)
        weights = tuple((members[place].weight, members[place].scale) for place in inputs)
        mean = Mean(key[1], contributions, weights, running.plan.length)
        found = self.world.payload(mean)
        if self.node.host.lies_about("audit"):
            found = digest("a lie", found)
        norms = self._norms(key, running, contributions)
        self._report(key, running, AuditFinding(key[1], key[2], found, (running.receipt,), norms=norms))

    def _norms(self, key: Key, running: Running, contributions: Sequence[Contribution]) -> tuple[float, ...]:
        """The norms of what an owner merged, of a chunk that had no relays."""
        plan, chunks = running.plan, self.world.chunks(key[0])
        if not plan.looks_at_norms or key[1] in plan.layered:
            return ()
        part = math.sqrt(chunks.size(key[1]) / chunks.numel)
        return tuple(x.times * norm(x.node, len(x.samples)) * part for x in contributions)

    def _report(self, key: Key, running: Running, finding: AuditFinding) -> None:
        self._open[key] = None
        if not self.node.host.lies_about("mute"):
            self.node.reports.audited(running.plan, finding)
