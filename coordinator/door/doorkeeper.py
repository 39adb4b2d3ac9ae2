"""The process at the coordinator's public ports, which has nothing to lose: `python -m ...doorkeeper SPEC`.

    accept --> a place among the strangers --> spliced to the service --- prove ---> a member's connection
       `--> closed: its address came too often           `--> closed: deadline, or displaced by others

gRPC takes whatever connects and cannot limit connections, or what comes in over them, by address. So the service
listens at a socket in a private folder, and this process accepts for it: it closes what is too much before the
service has spent a microsecond on it, holds strangers to few bytes and a short time, and splices the rest without
looking into it. Who a connection belongs to only the service can tell (calls carry sessions, under TLS), and it
says so, a line each, over the wire between them:

    prove NUMBER NODE    the connection is that member's ("-": of one that showed a token, and has no id yet)
    revoke NODE          no member any more: its connections are strangers' again
    shun ADDRESS SECONDS no caller is accepted from there meanwhile, and its strangers are closed
    known ADDRESS        members come from there
    allow NUMBER BYTES   so many bytes more over the connection are the service's own wish, and cost it nothing
    ping                 answered with "pong"

and hears `gone NUMBER`. The process ends when that wire does. It imports neither asyncio nor grpc.
"""

import errno
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress

import msgspec

from atoll.comm import log as logs
from atoll.comm.descriptors import raise_limit
from atoll.comm.rate_limits import TokenBuckets
from atoll.comm.strangers import Strangers, network_of
from atoll.coordinator.door.ports import DoorSpec, PortLimits
from atoll.coordinator.door.splice import READ_BYTES, STRANGER_READ_BYTES, Splice

ACCEPTS_AT_ONCE = 16  # connections, before those that are open are served again
SWEEP_INTERVAL = 0.25  # seconds between two looks at deadlines
PAUSE_STEP = 0.05  # seconds; who is to wait is looked at so often
MAX_KNOWN = 4096  # addresses that members came from
MAX_SHUNNED = 4096  # addresses
SHUN_DELAY = 0.5  # seconds until a shunned address's strangers are closed: they may read the answer
ACCEPT_PAUSE = 0.1  # seconds without accepting when the process is out of descriptors
UNSENT_LIMIT = 1 << 20  # bytes that wait for the service to read them; then it hangs, and they are dropped
# SO_LINGER, of the listening sockets, from which Linux gives it to what they accept: closing sends a reset, and
# nothing lingers in the kernel. Who is admitted loses it.
RESET, LINGER = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)
Handler = Callable[[int, float], None]


class Port:
    """One public port: its listening socket, and who is at it."""

    def __init__(self, sock: socket.socket, path: str, limits: PortLimits) -> None:
        self.sock, self.path, self.limits = sock, path, limits
        self.strangers = Strangers[Splice](limits.strangers)
        self.regulars = Strangers[Splice](limits.regulars)
        self.invitees = Strangers[Splice](limits.invitees)
        self.newcomers = TokenBuckets(limits.newcomers)
        self.address_bytes = TokenBuckets(limits.address_bytes)
        self.stranger_bytes = TokenBuckets(limits.stranger_bytes)
        self.member_bytes = TokenBuckets(limits.member_bytes)

    def leave(self, splice: Splice) -> None:
        """Take a connection out of whichever places it has among the strangers."""
        for places in (self.strangers, self.regulars, self.invitees):
            places.leave(splice)


class Doorkeeper:
    """The event loop of the door."""

    def __init__(self, generation: int, folder: str, wire: socket.socket, ports: list[Port]) -> None:
        self._folder, self._wire, self._ports = folder, wire, ports
        self._selector = selectors.DefaultSelector()
        self._listening = {port.sock for port in ports}
        self._prefix, self._count = generation, 0
        self._splices: dict[str, Splice] = {}
        self._members: dict[str, list[Splice]] = {}
        self._member_networks: OrderedDict[str, None] = OrderedDict()
        self._bans: dict[str, float] = {}  # address: seconds, until when
        self._deadlines: dict[Splice, float] = {}  # strangers: seconds, when each is closed
        self._paused: dict[Splice, float] = {}  # seconds, until when
        self._accept_again_at = 0.0
        self._words, self._unsent = b"", b""
        wire.setblocking(False)
        self._selector.register(wire, selectors.EVENT_READ, self._hear)
        for number, port in enumerate(ports):
            port.sock.setblocking(False)
            port.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._selector.register(port.sock, selectors.EVENT_READ, self._acceptor(number))

    def run(self) -> None:
        """Serve until the wire ends."""
        swept_at = time.monotonic()
        while self._wire.fileno() >= 0:
            ready = self._selector.select(PAUSE_STEP if self._paused else SWEEP_INTERVAL)
            now = time.monotonic()
            ready.sort(key=lambda found: found[0].fileobj in self._listening)  # who is inside is served first
            for key, mask in ready:
                key.data(mask, now)
            self._resume(now)
            if now - swept_at >= SWEEP_INTERVAL:
                swept_at = now
                self._sweep(now)

    # Connections

    def _acceptor(self, number: int) -> Handler:
        port = self._ports[number]

        def accept(_: int, now: float) -> None:
            for _ in range(ACCEPTS_AT_ONCE):
                try:
                    client, address = port.sock.accept()
                except BlockingIOError:
                    return
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        self._selector.unregister(port.sock)
                        self._accept_again_at = now + ACCEPT_PAUSE
                        return
                    continue  # it is gone already
                if not self._admit(port, number, client, _origin(address), now):
                    client.close()

        return accept

    def _admit(self, port: Port, number: int, client: socket.socket, address: tuple[str, int], now: float) -> bool:
        network = network_of(address[0])
        if port.limits.tells_origin and network in self._bans:
            return False
        places = port.regulars if network in self._member_networks else port.strangers
        if places.exhausted(network, now) or not port.newcomers.take("", now):
            return False
        self._count += 1
        name = f"{self._prefix}.{self._count}"
        if (service := self._to_service(port, name, address)) is None:
            return False
        client.setblocking(False)
        if client.family != socket.AF_UNIX:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
        splice = Splice(name, number, network, client, service)
        displaced = places.admit(splice, network, now).displaced
        self._splices[name] = splice
        self._deadlines[splice] = now + port.limits.deadline
        self._selector.register(client, selectors.EVENT_READ, self._mover(splice, client))
        self._selector.register(service, selectors.EVENT_READ, self._mover(splice, service))
        if displaced is not None:
            self._end(displaced)
        return True

    def _to_service(self, port: Port, name: str, address: tuple[str, int]) -> socket.socket | None:
        """A connection to the service; None: it takes none now. Its own name says whose it is."""
        service = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        service.setblocking(False)
        path = f"{self._folder}/{name},{address[0]},{address[1]}"
        try:
            if port.limits.tells_origin:
                service.bind(path)
            service.connect(port.path)
        except OSError:
            service.close()
            return None
        finally:
            if port.limits.tells_origin:
                with suppress(OSError):
                    os.unlink(path)
        return service

    def _mover(self, splice: Splice, sock: socket.socket) -> Handler:
        reading, writing = (splice.up, splice.down) if sock is splice.client else (splice.down, splice.up)

        def move(mask: int, now: float) -> None:
            if splice.number not in self._splices:
                return  # closed by an event before this one
            try:
                if mask & selectors.EVENT_WRITE:
                    writing.write()
                if mask & selectors.EVENT_READ:
                    proven = reading is splice.down or splice.owner or splice.allowance
                    size = reading.read(READ_BYTES if proven else STRANGER_READ_BYTES)
                    if reading is splice.up and not self._charge(splice, size, now):
                        return self._end(splice)
            except OSError:
                return self._end(splice)
            self._look(splice)

        return move

    def _look(self, splice: Splice) -> None:
        """Wait for what the connection waits for now."""
        if splice.over:
            return self._end(splice)
        for sock in (splice.client, splice.service):
            wanted, key = splice.interest(sock), self._selector.get_map().get(sock)
            if key is None:
                if wanted:
                    self._selector.register(sock, wanted, self._mover(splice, sock))
            elif not wanted:
                self._selector.unregister(sock)
            elif wanted != key.events:
                self._selector.modify(sock, wanted, key.data)

    def _end(self, splice: Splice) -> None:
        if self._splices.pop(splice.number, None) is None:
            return
        self._ports[splice.port].leave(splice)
        self._deadlines.pop(splice, None)
        self._paused.pop(splice, None)
        self._disown(splice)
        for sock in (splice.client, splice.service):
            if sock in self._selector.get_map():
                self._selector.unregister(sock)
        if not splice.over:
            with suppress(OSError):
                splice.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        splice.close()
        self._say(f"gone {splice.number}")

    # Limits

    def _charge(self, splice: Splice, size: int, now: float) -> bool:
        """Count bytes from the client, and let it wait if they were too many. Returns False where it is to go."""
        port = self._ports[splice.port]
        wanted = min(size, splice.allowance)
        splice.allowance -= wanted
        size -= wanted
        if wanted and not size:
            return True
        if splice.owner:
            wait = port.member_bytes.spend(splice.owner, now, size)
        else:
            splice.spent += size
            wait = port.address_bytes.spend(splice.address, now, size)
            wait = max(wait, port.stranger_bytes.spend("", now, size))
        if wait > 0:
            splice.paused = True
            self._paused[splice] = now + wait
        return splice.spent <= port.limits.connection_bytes

    def _resume(self, now: float) -> None:
        for splice in [s for s, until in self._paused.items() if until <= now]:
            self._go_on(splice)

    def _go_on(self, splice: Splice) -> None:
        if self._paused.pop(splice, None) is not None:
            splice.paused = False
            self._look(splice)

    def _sweep(self, now: float) -> None:
        for splice in [s for s, at in self._deadlines.items() if at <= now]:
            self._end(splice)
        for address in [a for a, until in self._bans.items() if until <= now]:
            del self._bans[address]
        if self._accept_again_at and now >= self._accept_again_at:
            self._accept_again_at = 0.0
            for number, port in enumerate(self._ports):
                if port.sock not in self._selector.get_map():
                    self._selector.register(port.sock, selectors.EVENT_READ, self._acceptor(number))

    # The wire

    def _hear(self, mask: int, now: float) -> None:
        if mask & selectors.EVENT_WRITE:
            self._say("")
        if not mask & selectors.EVENT_READ:
            return
        try:
            data = self._wire.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._wire.close()  # ends `run`
            return
        *lines, self._words = (self._words + data).split(b"\n")
        for line in lines:
            self._obey(line.decode().split(), now)

    def _obey(self, words: list[str], now: float) -> None:
        match words:
            case ["prove", number, node] if (splice := self._splices.get(number)) is not None:
                self._prove(splice, "" if node == "-" else node, now)
            case ["allow", number, size] if (splice := self._splices.get(number)) is not None:
                splice.allowance = int(size)
                if splice.allowance:
                    self._go_on(splice)
            case ["revoke", node]:
                for splice in list(self._members.get(node, ())):
                    self._revoke(splice, now)
            case ["shun", host, seconds]:
                self._shun(network_of(host), now, float(seconds))
            case ["known", host]:
                self._know(network_of(host))
            case ["ping"]:
                self._say("pong")
            case _:
                pass  # of a connection that is gone

    def _prove(self, splice: Splice, owner: str, now: float) -> None:
        port = self._ports[splice.port]
        for places in (port.strangers, port.regulars):
            places.prove(splice, now)
        port.invitees.leave(splice)
        port.address_bytes.refund(splice.address, now, splice.spent)
        port.stranger_bytes.refund("", now, splice.spent)
        splice.spent = 0
        self._go_on(splice)
        self._disown(splice)
        if not owner:
            self._deadlines[splice] = now + port.limits.invitee_deadline
            displaced = port.invitees.admit(splice, splice.address, now, charge=False).displaced
            if displaced is not None:
                self._end(displaced)
            return
        self._know(splice.address)
        self._deadlines.pop(splice, None)
        splice.owner = owner
        mine = self._members.setdefault(owner, [])
        mine.append(splice)
        if len(mine) > port.limits.member_connections:
            self._end(mine[0])

    def _disown(self, splice: Splice) -> None:
        if splice.owner is not None:
            mine = self._members[splice.owner]
            mine.remove(splice)
            if not mine:
                del self._members[splice.owner]
            splice.owner = None

    def _revoke(self, splice: Splice, now: float) -> None:
        port = self._ports[splice.port]
        self._disown(splice)
        self._deadlines[splice] = now + port.limits.deadline
        displaced = port.regulars.admit(splice, splice.address, now, charge=False).displaced
        if displaced is not None:
            self._end(displaced)

    def _shun(self, address: str, now: float, seconds: float) -> None:
        if len(self._bans) < MAX_SHUNNED:
            self._bans[address] = now + seconds
        for port in (port for port in self._ports if port.limits.tells_origin):
            for splice in (*port.strangers.of(address), *port.regulars.of(address)):
                self._deadlines[splice] = min(self._deadlines[splice], now + SHUN_DELAY)

    def _know(self, address: str) -> None:
        self._member_networks[address] = None
        self._member_networks.move_to_end(address)
        if len(self._member_networks) > MAX_KNOWN:
            self._member_networks.popitem(last=False)

    def _say(self, line: str) -> None:
        """Tell the service, which may be busy: what it does not read waits."""
        if line and len(self._unsent) < UNSENT_LIMIT:
            self._unsent += line.encode() + b"\n"
        with suppress(OSError):
            self._unsent = self._unsent[self._wire.send(self._unsent) :]
        if self._wire.fileno() >= 0:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
            if self._selector.get_key(self._wire).events != events:
                self._selector.modify(self._wire, events, self._hear)


def _origin(address: tuple[str, int] | str | bytes) -> tuple[str, int]:
    """Host and port that a connection comes from; one by a gateway has them in its name."""
    if isinstance(address, tuple):
        return address
    parts = (address if isinstance(address, str) else "").rpartition("/")[2].split(",")
    return (parts[1], int(parts[2])) if len(parts) == 3 and parts[2].isdecimal() else ("127.0.0.1", 0)


def main(spec: str) -> None:
    """Be the door that `spec` (JSON, made by `FrontDoor`) describes, until its wire ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the service ends first, and then this
        signal.signal(number, signal.SIG_IGN)
    raise_limit()
    asked = msgspec.json.decode(spec, type=DoorSpec)
    logs.setup(asked.log)
    ports = [Port(socket.socket(fileno=port.descriptor), port.path, port.limits) for port in asked.ports]
    Doorkeeper(asked.generation, asked.folder, socket.socket(fileno=asked.wire), ports).run()
    shutil.rmtree(asked.folder, ignore_errors=True)  # the service may have been killed


if __name__ == "__main__":
    main(sys.argv[1])
