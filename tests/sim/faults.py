"""What goes wrong in a seed: a few kinds of faults, drawn for the seed, at drawn moments."""

import random
from typing import TYPE_CHECKING

from sim.engine import Call
from sim.truth import next_state, root

from atoll.coordinator.state_machine import rollback
from atoll.node.state_machine import events as node_ev

if TYPE_CHECKING:
    from sim.node import Node
    from sim.world import World

CRASHES = (
    "before the write",
    "in the write",
    "after the write",
    "before the effects",
    "in the snapshot",
    "after the snapshot",
    "at once",
)
LIES = (
    "seal",  # another digest than that of the bytes
    "bytes",  # others to some members than to the rest
    "held",  # another root
    "owner",  # of chunks that are others'
    "seal again",
    "stale",  # under attempts in which it did not get the chunk
    "empty",  # with no contribution in it
    "orphans",  # other digests than it has
    "contribution",  # one that cannot be decoded
    "front",
    "samples",
    "norm",  # its delta is longer than it tells
    "frame",  # another's delta is longer than that one told
    "turned",  # its delta is turned against the last round's
    "slander",  # another's delta is turned
    "rate",  # that no link has
    "audit",  # what others sealed comes to something else
    "receipt",  # it has none for an auditor
    "input",  # that it contributed something else
)
SPEEDS = (1.0, 1.0, 1.0, 0.9, 0.7, 0.5, 0.2)  # of trainers


class Faults:
    def __init__(self, world: "World") -> None:
        self.world, self.rng = world, world.rng
        self._over = False
        self._undo: list[Call] = []
        kinds: list[Call] = [
            self.crash,
            self.crash,
            self.crash_trainer,
            self.hang_trainer,
            self.sicken,
            self.stop,
            self.leave,
            self.join,
            self.break_connection,
            self.break_connections,
            self.halve,
            self.flip_bit,
            self.lie,
            self.partition,
            self.partition,
            self.deafen,
            self.crash_coordinator,
            self.crash_coordinator,
            self.stop_coordinator,
            self.at_commit,
            self.at_commit,
            self.fill_disk,
            self.weather,
        ]
        self._kinds = self.rng.sample(kinds, self.rng.randint(3, 8))
        self._wishes = random.Random(f"wishes {self.world.seed}")  # of owners: apart, too
        self._thrift = random.Random(f"thrift {self.world.seed}")  # the same of their bytes
        self._every = self.rng.choice([1.0, 2.0, 4.0])  # seconds, on average

    def begin(self) -> None:
        self.world.network.loss = self.rng.choice([0.0, 0.01, 0.03])
        self.world.network.doubled = self.rng.choice([0.0, 0.02, 0.1])
        self.world.network.slow = self.rng.choice([0.0, 0.005, 0.03])
        if self.world.reducers:
            self._kinds += [self.crash_reducer, self.stop_reducer, self.sicken_reducer]
        self._schedule()
        if self._wishes.random() < 0.4:
            for _ in range(self._wishes.randint(3, 40)):
                wish = self._wishes.choice([self.pause, self.pause, self.pause, self.finish])
                self.world.engine.after(self._wishes.uniform(1, 60), wish)
        if self._thrift.random() < 0.4:
            for _ in range(self._thrift.randint(1, 15)):
                self.world.engine.after(self._thrift.uniform(1, 60), self.run_out_of_bytes)
        if self.world.disks:
            for _ in range(self.world.luck.randint(1, 4)):
                self.world.engine.after(self.world.luck.uniform(2, 60), self.cut_power)

    def end(self) -> None:
        """Everything works again, but for what is gone for ever."""
        self._over = True
        network = self.world.network
        network.loss = network.doubled = network.slow = 0.0
        for undo in self._undo:
            undo()
        for host in self.world.hosts.values():
            host.lies.clear()
        self.world.service.crash_at = ""

    def _schedule(self) -> None:
        self.world.engine.after(self.rng.expovariate(1 / self._every), self._strike)

    def _strike(self) -> None:
        if not self._over:
            self.rng.choice(self._kinds)()
            self._schedule()

    def undo_after(self, seconds: float, undo: Call) -> None:
        """Undo it after so many seconds, or when the faults end."""
        done = False

        def once() -> None:
            nonlocal done
            if not done:
                done = True
                undo()

        self._undo.append(once)
        self.world.engine.after(seconds, once)

    # Nodes

    def crash(self) -> None:
        node = self._victim()
        if node is None or not self.may_go([node]):
            return
        host = node.host
        self.world.kill(node, silent=self.rng.random() < 0.3)
        fate = self.rng.random()
        if fate < 0.15 and self._may_stay_away(1):
            host.gone = True
        else:
            if fate < 0.25:
                host.session = ""
            self.undo_after(
                self.rng.choice([0.2, self.rng.uniform(0, 3), self.rng.uniform(0, 15)]),
                lambda: self._up(host.name),
            )

    def _up(self, name: str) -> None:
        world = self.world
        if not world.nodes[name].alive:
            world.start(world.hosts[name])

    def crash_trainer(self) -> None:
        if (node := self._victim()) is not None:
            node.say("loses its trainer")
            node.trainer.die()

    def hang_trainer(self, node: "Node | None" = None) -> None:
        if (node := node or self._victim()) is not None:
            node.say("has a trainer that hangs")
            node.trainer.hang()

    def sicken(self) -> None:
        """A trainer hangs for ever, under a daemon that does not see it: nothing that its run may wait for."""
        sick = sum(h.sick for h in self.world.hosts.values() if not h.role)
        if not sick and (node := self._victim()) is not None and self._may_stay_away(1):
            node.host.sick = True
            self.hang_trainer(node)

    def stop(self) -> None:
        """SIGSTOP, and after a while SIGCONT."""
        if (node := self._victim()) is not None:
            node.say("is stopped")
            node.stop()
            self.undo_after(self.rng.choice([0.5, self.rng.uniform(0, 4), self.rng.uniform(3, 12)]), node.resume)

    # Reducers, without which the run goes on, if need be as soon as they are back

    def crash_reducer(self) -> None:
        if reducers := self.world.reducers:
            node = self.rng.choice(reducers)
            self.world.kill(node, silent=self.rng.random() < 0.3)
            node.host.sick = False
            name = node.place
            self.undo_after(self.rng.uniform(0, 10), lambda: self._up(name))

    def stop_reducer(self) -> None:
        if reducers := [n for n in self.world.reducers if not n.stopped]:
            node = self.rng.choice(reducers)
            node.say("is stopped")
            node.stop()
            self.undo_after(self.rng.uniform(0, 8), node.resume)

    def sicken_reducer(self) -> None:
        """It merges nothing any more, and its daemon does not see it."""
        if reducers := self.world.reducers:
            node = self.rng.choice(reducers)
            node.say("merges nothing any more")
            node.host.sick = True
            self.undo_after(self.rng.uniform(5, 20), lambda: setattr(node.host, "sick", False))

    def leave(self) -> None:
        node = self._victim()
        if node is None or node.control.joining or not self.may_go([node]) or not self._may_stay_away(1):
            return
        node.say("leaves")
        node.control.leave("its operator stopped it")
        self.world.kill(node)
        if self.rng.random() < 0.5:
            name = node.place
            self.undo_after(self.rng.uniform(0, 10), lambda: self._up(name))
        else:
            node.host.gone = True

    # What owners want

    def pause(self) -> None:
        """For a while; some pause and resume again and again."""
        if (node := self._owned()) is None:
            return
        seconds = self._wishes.choice([0.05, self._wishes.uniform(0, 1), self._wishes.uniform(0, 15)])
        saves_bytes = self._wishes.random() < 0.2
        node.say(f"is paused for {seconds:.2f} s{', and saves bytes' * saves_bytes}")
        node.wish(node_ev.PauseChanged(True, saves_bytes))
        self.undo_after(seconds, lambda: node.wish(node_ev.PauseChanged(False)))

    def run_out_of_bytes(self) -> None:
        """In the middle of an exchange: a reducer's next, or that of a node whose state others have, too."""
        nodes = [n for n in (*self.world.living, *self.world.reducers) if not n.stopped and n.thrift is None]
        if self._over or not nodes:
            return
        node = self._thrift.choice(nodes)
        seconds = self._thrift.choice([0.02, self._thrift.uniform(0, 1), self._thrift.uniform(1, 12)])

        def gone() -> None:
            if not self._over:
                node.say(f"has no bytes left for {seconds:.2f} s")
                node.wish(node_ev.PauseChanged(True, saves_bytes=True))
                self.undo_after(seconds, lambda: node.wish(node_ev.PauseChanged(False)))

        node.thrift = gone

    def soon_in_an_exchange(self) -> float:
        """Seconds from its beginning."""
        return self._thrift.choice([0.0, self._thrift.uniform(0, 0.3), self._thrift.uniform(0, 2)])

    def finish(self) -> None:
        """It leaves after the commit; some come back."""
        node = self._owned()
        if node is None or node.control.joining or not self.may_go([node]) or not self._may_stay_away(1):
            return
        node.say("is to leave once what it trained is committed")
        node.wish(node_ev.PartingAsked())
        if self._wishes.random() < 0.5:
            self.undo_after(self._wishes.uniform(5, 20), lambda: self._up_again(node))
        else:
            node.host.gone = True

    def _up_again(self, node: "Node") -> None:
        """Once this life has ended, which may wait for a commit."""
        if node.alive:
            self.world.engine.after(1.0, lambda: self._up_again(node))
        else:
            self._up(node.place)

    def _owned(self) -> "Node | None":
        living = [n for n in self.world.living if not n.stopped and not n.host.gone]
        return self._wishes.choice(living) if living and not self._over else None

    def join(self) -> None:
        if len(self.world.living) < 12:
            self.world.add_host(self.rng.choice(SPEEDS))

    def halve(self) -> None:
        """Half of all nodes vanish at once."""
        living = self.world.living
        half = self.rng.sample(living, len(living) // 2)
        if not self.may_go(half):
            return
        for node in half:
            self.world.kill(node, silent=True)
            name = node.place
            self.undo_after(self.rng.uniform(1, 20), lambda name=name: self._up(name))

    def flip_bit(self) -> None:
        """Where two others have the state: nobody could tell which of two is right."""
        node, living = self._victim(), self.world.living
        if node is None or not self.world.durable.committed or any(self._wrong(n) for n in living):
            return
        if sum(self._keeps(n) for n in living if n is not node) >= 2:
            node.say("will compute a wrong bit")
            node.flip = True

    def lie(self) -> None:
        node = self._victim()
        if node is not None and len(self.world.durable.round.participants) >= 3 and self._may_stay_away(1):
            lie = self.rng.choice(LIES)
            node.say(f"will lie: {lie}")
            node.host.lies.append(lie)
            node.host.liar = True

    # The network

    def break_connection(self) -> None:
        """Between two members."""
        links = [link for n in self.world.living for peer in n.plane.peers.values() for link in peer.links]
        if links:
            link = self.rng.choice(links)
            link.ends[0].say(f"and {link.ends[1].me} lose their connection")
            link.snap()

    def break_connections(self) -> None:
        """One that breaks again and again."""
        for _ in range(self.rng.randint(2, 10)):
            soon = self.rng.uniform(0, 4)
            self.world.engine.after(soon, lambda: None if self._over else self.break_connection())

    def partition(self) -> None:
        world, rng = self.world, self.rng
        places = ["coordinator", *(n.place for n in (*world.living, *world.reducers))]
        here = set(rng.sample(places, rng.randint(1, max(1, len(places) // 2))))
        there = [p for p in places if p not in here]
        if not there:
            return  # nobody is left to be cut off
        if rng.random() < 0.5:
            there = rng.sample(there, rng.randint(1, len(there)))
        one_way = rng.random() < 0.3
        cut = {(a, b) for a in here for b in there} | (set() if one_way else {(b, a) for a in here for b in there})
        self._cut(cut, rng.choice([0.5, rng.uniform(0, 4), rng.uniform(2, 12)]))

    def _cut(self, cut: set[tuple[str, str]], seconds: float) -> None:
        world = self.world
        said = ", ".join(f"{a}->{b}" for a, b in sorted(cut))
        world.say(f"cut: {said}")
        world.network.cut |= cut

        def heal() -> None:
            world.network.cut -= cut
            world.say(f"healed: {said}")

        self.undo_after(seconds, heal)

    def deafen(self) -> None:
        """A stream of views silently stops."""
        streams = list(self.world.service.streams.values())
        if streams:
            stream = self.rng.choice(streams)
            stream.deaf = True
            self.world.say(f"the stream of {stream.node} is half-open")

    def weather(self) -> None:
        network = self.world.network
        before = network.loss, network.doubled, network.slow
        network.loss, network.doubled, network.slow = 0.2, 0.2, 0.2

        def calm() -> None:
            network.loss, network.doubled, network.slow = (0.0, 0.0, 0.0) if self._over else before

        self.undo_after(self.rng.uniform(0.5, 3), calm)

    def cut_power(self) -> None:
        """Everything is gone at once but what is on disks; then everything starts again."""
        world, luck = self.world, self.world.luck
        if self._over or not world.service.alive or any(self._wrong(n) for n in world.living):
            return
        k, truth = world.durable.committed, world.truth
        disks = [h.disk for h in world.hosts.values() if not h.gone and h.disk is not None]
        states = {disk.state() for disk in disks}
        lies = world.durable.round.number in truth.lied or any(n.host.lies for n in world.living)
        if lies or (k and not states & {(j, state) for j, state in enumerate(truth.states)}):
            return  # nobody could bring anything
        world.say(f"power is cut; disks have {sorted(r for r, _ in states)} of {k}")
        for node in (*world.living, *world.reducers):
            world.kill(node, silent=True)
            name, away = node.place, luck.choice([0.5, luck.uniform(0, 15)])
            self.undo_after(away, lambda name=name: self._up(name))
        world.coordinator_dies("with everybody", away=luck.uniform(0, 10))

    # The coordinator

    def crash_coordinator(self) -> None:
        how = self.rng.choice(CRASHES)
        if how == "at once":
            self.world.coordinator_dies(how)
        else:
            self.world.service.crash_at = how

    def stop_coordinator(self) -> None:
        """SIGSTOP, and after a while SIGCONT."""
        service = self.world.service
        self.world.say("the coordinator is stopped")
        service.stop()
        self.undo_after(self.rng.uniform(0.5, 12), service.resume)

    def fill_disk(self) -> None:
        service = self.world.service
        if not service.alive:
            return
        self.world.say("the disk is full")
        database = service.journal._db
        database.execute("vacuum")
        database.execute("pragma max_page_count = 1")

        def empty() -> None:
            if service.alive:
                self.world.say("the disk has room")
                database.execute("pragma max_page_count = 1000000")

        self.undo_after(self.rng.uniform(0.5, 6), empty)

    # The moment that matters most

    def at_commit(self) -> None:
        """Something happens as soon as the next round is committed."""
        happens = self.rng.choice([self._sever_one, self._sever_all, self._crash_some, self.crash_coordinator])
        soon = self.rng.choice([0.0, self.rng.uniform(0, 0.15)])
        self.world.on_commit.append(
            lambda: self.world.engine.after(soon, lambda: None if self._over else happens())
        )

    def _sever_one(self) -> None:
        if (node := self._victim()) is not None:
            self._cut({("coordinator", node.place), (node.place, "coordinator")}, self.rng.uniform(3, 10))

    def _sever_all(self) -> None:
        hosts = self.world.hosts
        self._cut({(a, b) for h in hosts for a, b in ((h, "coordinator"), ("coordinator", h))}, 10.0)

    def _crash_some(self) -> None:
        """More than half of the members, and they are back at once."""
        members = [n for n in self.world.living if n.me in self.world.durable.makers]
        some = self.rng.sample(members, max(0, len(members) - self.rng.randint(1, 2)))
        if some and self.may_go(some):
            for node in some:
                self.world.kill(node, silent=True)
                self.undo_after(self.rng.uniform(0.1, 0.5), lambda name=node.place: self._up(name))

    # Who may be hit

    def _victim(self) -> "Node | None":
        living = [n for n in self.world.living if not n.stopped]
        return self.rng.choice(living) if living else None

    def may_go(self, nodes: list["Node"]) -> bool:
        """Whether the run's state survives without them: nobody can bring back what nobody holds."""
        world, state = self.world, self.world.durable
        rest = [n for n in world.living if n not in nodes]
        if not rest or any(self._wrong(n) for n in world.living):  # two may have voted for two states
            return False
        ledger, here = state.round.ledger, state.members.here
        lies = state.round.number in world.truth.lied or any(n.host.lies for n in world.living)
        if ledger.attempt and lies:  # the victim may be put out, and the round be committed by the liar alone
            return False
        partners = {n for n in ledger.members if n in ledger.contributions}
        if ledger.attempt and not any(n.me in partners and here[n.me].life == n.control.life for n in rest):
            return False
        if rollback.is_in_doubt(state) and self._go_with_the_state_before(nodes, rest):
            return False  # so few have the newest that the run may be about to go back to that
        return state.committed == 0 or any(self._keeps(n) for n in rest)

    def _go_with_the_state_before(self, nodes: list["Node"], rest: list["Node"]) -> bool:
        """Whether some of these have what the run had a round ago, and nobody else."""
        k = self.world.durable.committed - 1
        before = k, self.world.truth.states[k]
        return any(n.state == before for n in nodes) and not any(n.state == before for n in rest)

    def _wrong(self, node: "Node") -> bool:
        return node.flip or (node.me in self.world.truth.flipped and node.state[1] not in self.world.truth.states)

    def _keeps(self, node: "Node") -> bool:
        """It has the run's state, or can make it from what it holds."""
        k, truth, (round_, state) = self.world.durable.committed, self.world.truth, node.state
        if node.flip:
            return False
        if round_ == k - 1 and node.plane.held and root(node.plane.held) == truth.roots[k - 1]:
            round_, state = k, next_state(state, truth.roots[k - 1])
        return round_ == k and state == truth.states[k]

    def _may_stay_away(self, count: int) -> bool:
        staying = [h for h in self.world.hosts.values() if not (h.gone or h.sick or h.role)]
        dialled = [h for h in staying if not h.leaf]
        return len(staying) - count >= max(self.world.config.members.start, 3) and len(dialled) > count
