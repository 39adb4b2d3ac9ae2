"""Machines behind routers that translate addresses, as network namespaces. They take root, `ip` and `nft`.

home 1 -- router 1 --.                               the addresses between them are of the internet: what is
home 2 -- router 2 --+-- bridge -- public 1, 2, ...  behind a router is not reached from there
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

NETWORK = "11.77.93"
BRIDGE = "atoll-nat"
PUBLICS = 4
# A cone shows a port alike to all destinations, where it can; a symmetric NAT takes another one for each.
CONE, SYMMETRIC = "masquerade", "masquerade random,fully-random"
RULES = """
table ip translation {{
 chain out {{
  type nat hook postrouting priority 100;
  oifname "wan" {kind}
 }}
}}
table ip guard {{
 chain through {{
  type filter hook forward priority 0; policy drop;
  iifname "home" accept
  ct state established,related accept
 }}
 chain itself {{
  type filter hook input priority 0; policy accept;
  iifname "wan" ct state new drop
 }}
}}
"""


@dataclass(frozen=True)
class Machine:
    """One network namespace."""

    space: str
    address: str

    @property
    def through(self) -> tuple[str, ...]:
        """The command that runs another one on this machine."""
        return ("ip", "netns", "exec", self.space)


@dataclass(frozen=True)
class Internet:
    """The machines of a test."""

    publics: tuple[Machine, ...]
    homes: tuple[Machine, ...]


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


def _public(i: int) -> Machine:
    return Machine(f"atoll-p{i}", f"{NETWORK}.{i}")


def _home(i: int) -> Machine:
    return Machine(f"atoll-h{i}", f"192.168.{50 + i}.2")


def _attach(space: str, address: str) -> None:
    _ip(f"netns add {space}")
    _ip(f"link add {space}-w type veth peer name wan netns {space}")
    _ip(f"link set {space}-w master {BRIDGE} up")
    for words in (f"address add {address}/24 dev wan", "link set wan up", "link set lo up"):
        _ip(f"-n {space} {words}")


def _make_home(i: int, kind: str) -> Machine:
    router, home = f"atoll-r{i}", _home(i)
    lan = home.address.rpartition(".")[0]
    _attach(router, f"{NETWORK}.1{i}")
    _ip(f"netns add {home.space}")
    _ip(f"-n {router} link add home type veth peer name wan netns {home.space}")
    for space, address, device in ((router, f"{lan}.1", "home"), (home.space, home.address, "wan")):
        _ip(f"-n {space} address add {address}/24 dev {device}")
        _ip(f"-n {space} link set {device} up")
    _ip(f"-n {home.space} link set lo up")
    _ip(f"-n {home.space} route add default via {lan}.1")
    inside = ("ip", "netns", "exec", router)
    subprocess.run([*inside, "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
    subprocess.run([*inside, "nft", "-f", "-"], input=RULES.format(kind=kind), text=True, check=True)
    return home


@contextmanager
def internet(kinds: Sequence[str] = (CONE, SYMMETRIC)) -> Iterator[Internet]:
    """PUBLICS public machines, and a home behind a NAT of each of these kinds."""
    _clear()
    _ip(f"link add {BRIDGE} type bridge")
    _ip(f"link set {BRIDGE} up")
    try:
        publics = tuple(_public(i) for i in range(1, PUBLICS + 1))
        for machine in publics:
            _attach(machine.space, machine.address)
        yield Internet(publics, tuple(_make_home(i, kind) for i, kind in enumerate(kinds, 1)))
    finally:
        _clear()


def _clear() -> None:
    spaces = [_public(i).space for i in range(1, PUBLICS + 1)]
    spaces += [name for i in range(1, 4) for name in (f"atoll-r{i}", _home(i).space)]
    links = [f"link del {space}-w" for space in spaces]  # a namespace goes when its last process has
    for words in (*links, *(f"netns del {space}" for space in spaces), f"link del {BRIDGE}"):
        subprocess.run(["ip", *words.split()], check=False, capture_output=True)
