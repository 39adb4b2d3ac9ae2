"""What a node writes into its state directory and its cache: the one list.

A state directory may be a folder that has other things in it, too, and what uninstalling removes is what is on
this list, nothing else. Whoever has a node write a new file puts it here.
"""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from atoll.comm.xdg import cache_dir

SESSION = "session"  # by which the node comes back as the same one
WHEREABOUTS = "whereabouts.json"  # of the run's coordinator, and its gateways
LOCK = "lock"  # held by the daemon
ENDING = "ending"  # the sentence with which the latest one ended; not there while one runs
SETTINGS = "node.yaml"  # written by the owner alone
RELAY_PORT = "relay-port"  # at which it passes on what others send each other
HEX = "[0-9a-f]"
RUN = HEX * 32  # a run's id
# Patterns of names, of a file in a folder in the directory. `**` is all that a folder has which only a node makes.
STATE_FILES: tuple[str, ...] = (
    *(
        SESSION,
        WHEREABOUTS,
        LOCK,
        ENDING,
        RELAY_PORT,
        "tls.pem",
        "join-url",
        SETTINGS,
        "limits.json",
        "bytes.json",
        "daemon.sock",
    ),
    *("trainer.json", "trainer.log", "trainer.log.1", "trainer.launch/**", "flight-record-*"),
    *("logs/node.log", "logs/node.log.[0-9]", "logs/node-gateway.log", "logs/node-gateway.log.[0-9]"),
    *(f"outer/{RUN}/**", f"outer/{RUN}.json", f"inner/{RUN}/**", "vectors/atoll-????????/**"),
    *("gateway/identity", "gateway/identity.pid", "gateway/multiaddr", "gateway/published"),
    *("gateway/known", "gateway/coordinator-*"),
)
CACHE_FILES: tuple[str, ...] = (
    *("micro_batch.json", "torchtitan/**"),
    *("blocks/size", f"blocks/claims/{HEX}{HEX}", f"blocks/{HEX}{HEX}/{HEX * 32}"),
    f"blocks/{HEX}{HEX}/{HEX * 32}.new",
)
UNFINISHED = f".{HEX * 8}.new"  # behind the name of a file that was being written


def folders_of(state_dir: Path) -> dict[Path, tuple[str, ...]]:
    """The folders in which the node with this state directory writes, with the list of each: that one, and its
    cache where it is elsewhere; those that are there."""
    cache, lists = cache_dir(state_dir), {state_dir: STATE_FILES}
    if cache.is_relative_to(state_dir):
        inside = cache.relative_to(state_dir)
        lists[state_dir] += tuple(f"{inside}/{pattern}" for pattern in CACHE_FILES)
    else:
        lists[cache] = CACHE_FILES
    return {folder: patterns for folder, patterns in lists.items() if folder.is_dir()}


@dataclass
class Contents:
    """What is in a folder."""

    folder: Path
    files: list[Path] = field(default_factory=list)  # on the list, and links in the place of such
    whole: list[Path] = field(default_factory=list)  # folders that are a node's with all that is in them
    ways: list[Path] = field(
        default_factory=list
    )  # folders on the way to what is on the list, the innermost first
    others: list[Path] = field(default_factory=list)  # on no list, the outermost of each

    def remove(self) -> None:
        """Remove what is on the list; a folder on the way to it as well, if there is nothing else in it. Raises
        `OSError`."""
        for file in self.files:
            file.unlink(missing_ok=True)
        for folder in self.whole:
            shutil.rmtree(folder)
        for way in self.ways:
            if not any(way.iterdir()):
                way.rmdir()


def contents(folder: Path, patterns: Sequence[str]) -> Contents:
    """What is in a folder, by a list. No link is followed: what it leads to may be anybody's."""
    found = Contents(folder)
    _sort(folder, [PurePath(pattern).parts for pattern in patterns], found)
    return found


def _sort(folder: Path, patterns: Sequence[tuple[str, ...]], found: Contents) -> None:
    paths = list[Path]()
    with suppress(FileNotFoundError):  # it goes meanwhile
        paths = sorted(folder.iterdir())
    for path in paths:
        link, is_folder = path.is_symlink(), path.is_dir()
        ends = [rest for first, *rest in patterns if fnmatchcase(path.name, first)]
        unfinished = any(fnmatchcase(path.name, first + UNFINISHED) for first, *rest in patterns if not rest)
        if ["**"] in ends and is_folder and not link:
            found.whole.append(path)
        elif (ends and link) or (not is_folder and ([] in ends or unfinished)):
            found.files.append(path)
        elif any(ends) and is_folder and not link:
            _sort(path, [tuple(rest) for rest in ends if rest], found)
            found.ways.append(path)
        else:
            found.others.append(path)
