"""The snapshots of one run on a node's disk, and which of its files are damaged.

A file that is found not to be what was written does not count as a state any more (`sound`, `reach`), and is told
once to whoever asks (`DamageLog.drain`). A damaged snapshot's other chunks are used until a better one is there;
then it is removed.
"""

import logging
import threading
from collections import deque
from collections.abc import Collection
from pathlib import Path

from atoll.comm.chunks import Chunks
from atoll.node.checkpoint import snapshots
from atoll.node.checkpoint.policy import retained
from atoll.node.checkpoint.snapshots import Snapshot, TensorShapes

log = logging.getLogger("atoll.node")


class DamageLog:
    """Files that changed on the disk since they were written. Threads may report while another one drains."""

    def __init__(self) -> None:
        self._names = deque[str]()

    def report(self, path: Path, reason: str) -> None:
        """Log that the file is not what was written, and keep its name for `drain`."""
        log.warning(f"{path.name} changed on the disk ({reason}): it is not used")
        self._names.append(path.name)

    def drain(self) -> list[str]:
        """Names of the files that were reported since the last call."""
        return [self._names.popleft() for _ in range(len(self._names))]


class SnapshotSet:
    """All snapshots of a run in a folder. Read by any thread, changed by one at a time."""

    def __init__(self, folder: Path, run: bytes, layout: TensorShapes, chunks: Chunks, damage: DamageLog) -> None:
        """Look at what `folder` has; nothing is changed there. `run`: 16 bytes. Raises `OSError`."""
        self._chunks, self._damage = chunks, damage
        self._lock = threading.Lock()  # held while the set changes
        self.newest_first = snapshots.find(folder, run, layout, chunks)
        self._damaged = set(
            snapshots.unreadable(folder, self.newest_first)
        )  # paths, also of files that are no snapshot
        self.replacing = False  # one is being written, and older ones may be removed meanwhile
        for path in sorted(self._damaged):
            if (other := snapshots.other_format(path)) is None:
                damage.report(path, "its header is damaged, or of another run")
                continue
            log.warning(
                f"{path.name} is not used, {other}: this node takes the state from its peers; where none of them "
                "has it, start the version of atoll that wrote it"
            )

    @property
    def size(self) -> int:
        """Bytes of all snapshots."""
        return sum(snapshot.size for snapshot in self.newest_first)

    @property
    def sound(self) -> list[Snapshot]:
        """The snapshots of which no chunk is known to be damaged, the newest first."""
        return [s for s in self.newest_first if s.path not in self._damaged]

    @property
    def has_damage(self) -> bool:
        """Whether a file is damaged that a new snapshot would replace."""
        return bool(self._damaged)

    def reach(self, rounds: Collection[int]) -> int:
        """The newest round whose state the sound snapshots and the sealed bytes of `rounds` bring back; -1:
        none."""
        logged = set(rounds)
        return max((snapshot.reach(logged) for snapshot in self.sound), default=-1)

    def read(self, snapshot: Snapshot, c: int) -> bytes | None:
        """Anchor, then momentum of chunk `c`, fp32; None if they are not what was written, which damages the
        snapshot."""
        data = snapshot.chunk(c, self._chunks)
        if data is None and not self.replacing:  # else it may just be going
            with self._lock:
                if snapshot in self.newest_first and snapshot.path not in self._damaged:
                    self._damaged.add(snapshot.path)
                    self._damage.report(snapshot.path, f"chunk {c} is not what was written")
        return data

    def add(self, new: Snapshot, replace_all: bool) -> None:
        """Add a snapshot that was written, and remove those that it makes useless: what is damaged, and the oldest
        beyond `SNAPSHOTS_RETAINED`; with `replace_all` all older ones, which may be of a state that is not the
        run's."""
        with self._lock:
            older = [s for s in self.newest_first if s.path != new.path]
            sound = [s for s in older if s.path not in self._damaged]
            staying = retained(sound, replace_all)
            useless = self._damaged | {s.path for s in older if s not in staying}
            snapshots.remove(useless - {new.path})
            self.newest_first, self._damaged = [new, *staying], set()

    def remove_one(self, rounds: Collection[int]) -> bool:
        """Remove one file to make room: one that cannot be read as a snapshot; else the oldest snapshot but the
        one that, with the sealed bytes of `rounds`, brings back the newest state. False: there is none to
        remove."""
        with self._lock:
            path = next(iter(self._damaged - {s.path for s in self.newest_first}), None)
            if path is None and len(self.newest_first) > 1:
                logged = set(rounds)
                best = max(self.sound, key=lambda s: s.reach(logged), default=None)
                worst = next(s for s in reversed(self.newest_first) if s is not best)
                self.newest_first.remove(worst)
                path = worst.path
            if path is None:
                return False
            self._damaged.discard(path)
            snapshots.remove([path])
            return True
