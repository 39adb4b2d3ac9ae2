"""Machines behind routers that translate addresses, as network namespaces. They take root, `ip` and `nft`.

home 1 -- router 1 --.                      the addresses between them are of the internet, for what is behind
home 2 -- router 2 --+-- bridge -- public   a router is not reached from there, and libp2p looks at addresses
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

PUBLIC, NETWORK = "11.77.93.1", "11.77.93"
BRIDGE = "atoll-nat"
SPACES = ("atoll-pub", *(f"atoll-{kind}{i}" for i in (1, 2) for kind in ("r", "h")))
# The first keeps a port for all its host's destinations where it can, the second takes another one for each.
KINDS = {1: "masquerade", 2: "masquerade random,fully-random"}
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
}}
"""


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


def through(space: str) -> tuple[str, ...]:
    """The command that runs another one on this machine."""
    return ("ip", "netns", "exec", space)


def _attach(space: str, address: str) -> None:
    _ip(f"netns add {space}")
    _ip(f"link add {space}-w type veth peer name wan netns {space}")
    _ip(f"link set {space}-w master {BRIDGE} up")
    for words in (f"address add {address}/24 dev wan", "link set wan up", "link set lo up"):
        _ip(f"-n {space} {words}")


def _home(i: int) -> None:
    router, home, lan = f"atoll-r{i}", f"atoll-h{i}", f"192.168.{50 + i}"
    _attach(router, f"{NETWORK}.1{i}")
    _ip(f"netns add {home}")
    _ip(f"-n {router} link add home type veth peer name wan netns {home}")
    for space, address, device in ((router, f"{lan}.1", "home"), (home, f"{lan}.2", "wan")):
        _ip(f"-n {space} address add {address}/24 dev {device}")
        _ip(f"-n {space} link set {device} up")
    _ip(f"-n {home} link set lo up")
    _ip(f"-n {home} route add default via {lan}.1")
    subprocess.run([*through(router), "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
    rules = RULES.format(kind=KINDS[i])
    subprocess.run([*through(router), "nft", "-f", "-"], input=rules, text=True, check=True)


@contextmanager
def two_homes() -> Iterator[tuple[str, str, str]]:
    """The names of a public machine and of two homes' behind NATs of their own."""
    _clear()
    _ip(f"link add {BRIDGE} type bridge")
    _ip(f"link set {BRIDGE} up")
    try:
        _attach(SPACES[0], PUBLIC)
        _home(1)
        _home(2)
        yield "atoll-pub", "atoll-h1", "atoll-h2"
    finally:
        _clear()


def _clear() -> None:
    for words in (*(f"netns del {space}" for space in SPACES), f"link del {BRIDGE}"):
        subprocess.run(["ip", *words.split()], check=False, capture_output=True)
