"""Restores the outer state from the files on the disk: the whole of it (`restore`), or one chunk
(`chunk_history`).

A snapshot's chunk of round k, brought forward by the sealed bytes of the later rounds of its fragment, is that
chunk of the newest round, bit for bit. Both functions block: they are for the thread that does the state's
arithmetic.
"""

from collections.abc import Callable, Sequence

from atoll.comm.byte_view import Octets
from atoll.node.checkpoint.checkpoint_files import CheckpointFiles
from atoll.node.outer.state import OuterState


def restore(outer: OuterState, files: CheckpointFiles, keep_newer: bool) -> int:
    """Bring `outer` to the newest round that the disk can; returns that round, or -1 if the disk cannot, though
    chunks of the state may be there. `keep_newer`: newer chunks, which an earlier daemon left in memory, stay."""
    durable = files.durable_round
    if keep_newer:
        outer.resume(durable)
    for c in range(outer.chunks.count):
        if not (keep_newer and outer.chunk_rounds[c] > durable):
            _load_chunk(outer, files, c, durable)
    round_ = min(outer.chunk_rounds)
    while round_ >= 0 and _replay_round(outer, files, round_ + 1):
        round_ += 1
    return outer.round


def restore_before(outer: OuterState, files: CheckpointFiles, round_: int) -> int:
    """Bring `outer` back to the newest round before `round_` that a snapshot and the log have; returns that round.
    -1: no snapshot is of before it, and nothing was touched; or files are damaged, and no state is whole."""
    for snapshot in files.snapshots.newest_first:
        if max(snapshot.at) >= round_:
            continue
        outer.clear()
        for c in range(outer.chunks.count):
            if (data := files.snapshots.read(snapshot, c)) is not None:
                outer.replace_chunk(c, snapshot.at[c], data)
        last = min(outer.chunk_rounds)
        while 0 <= last < round_ - 1 and _replay_round(outer, files, last + 1):
            last += 1
        return outer.round
    return -1


def _load_chunk(outer: OuterState, files: CheckpointFiles, c: int, durable: int) -> None:
    # A snapshot may have the chunk as of a round that did not reach the log: then from one before it.
    for snapshot in sorted(files.snapshots.newest_first, key=lambda s: s.at[c] > durable):
        if (data := files.snapshots.read(snapshot, c)) is not None:
            outer.replace_chunk(c, snapshot.at[c], data)
            return


def _replay_round(outer: OuterState, files: CheckpointFiles, round_: int) -> bool:
    """Bring all chunks that lag to `round_`, or none."""
    if min(outer.chunk_rounds) >= round_ or round_ not in files.log:
        return False
    fragment = outer.chunks.fragment_range(outer.fragment_schedule.fragment(round_))
    lagging = [c for c in fragment if outer.chunk_rounds[c] < round_]
    payloads = list[bytes]()
    for c in lagging:
        payload = files.log.read(round_, c - fragment.start)
        if payload is None:
            files.report_damaged_round(round_)
            return False
        payloads.append(payload)
    for c, payload in zip(lagging, payloads, strict=True):
        outer.apply(c, payload)  # its digest says that it was committed
    outer.advance_unchanged(round_)
    return True


def chunk_history(
    outer: OuterState,
    files: CheckpointFiles,
    read_sealed: Callable[[int, int], Octets | None],
    c: int,
    round_: int,
) -> tuple[int, bytes, Sequence[Octets]] | None:
    """Chunk `c` as a snapshot has it, and what brought it to `round_` (`atoll.node.outer.repair.ChunkHistories`).
    `read_sealed(k, i)` gives the sealed bytes of round k's chunk i, counted within its fragment."""
    fragment, i = outer.chunks.place(c)
    for snapshot in files.snapshots.newest_first:
        rounds = outer.fragment_schedule.rounds(fragment, snapshot.at[c], round_)
        payloads = [payload for k in rounds if (payload := read_sealed(k, i)) is not None]
        data = files.snapshots.read(snapshot, c) if len(payloads) == len(rounds) else None
        if data is not None and snapshot.at[c] <= round_:
            return snapshot.at[c], data, payloads
    return None
