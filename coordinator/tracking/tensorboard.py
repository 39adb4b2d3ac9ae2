"""Figures as TensorBoard's event files, by tensorboardX: one event a round, with a scalar for each figure.

Each process begins a file of its own; TensorBoard shows all of a folder as one run. An event that a killed process
left unfinished is cut off when the next one begins, so that what follows is read.

A file is frames of: length (8 bytes, little-endian), CRC of it (4), the event, CRC of it (4).
"""

import struct
from pathlib import Path
from typing import Any

from atoll.coordinator.tracking.figures import Row

FOLDER = "tensorboard"  # in the state directory
PREFIX = "events"  # of the files' names; the library goes on with ".out.tfevents"
LENGTH, CRC = struct.Struct("<Q"), 4  # bytes
MAX_EVENT_BYTES = 16 << 20


class TensorBoard:
    """The folder, opened to go on with. A `Sink`."""

    def __init__(self, folder: Path) -> None:
        """Raises `OSError`."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self.last = max((self._last_step(file) for file in sorted(folder.glob(f"{PREFIX}.*"))), default=0)
        self._writer = EventsWriter(str(folder / PREFIX), f".{self.last}")

    def write(self, row: Row) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        event = self._event(
            wall_time=row["committed_at"], step=int(row["round"]), summary=self._summary(value=values)
        )
        self._writer.write_event(event)
        self.last = int(row["round"])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _last_step(self, file: Path) -> int:
        """The step of the last whole event of a file; what is behind it is cut off."""
        body, end, size = b"", 0, file.stat().st_size
        with open(file, "r+b") as frames:
            while len(head := frames.read(LENGTH.size)) == LENGTH.size:
                (length,) = LENGTH.unpack(head)
                after = end + LENGTH.size + CRC + length + CRC
                if length > MAX_EVENT_BYTES or after > size:
                    break
                frames.seek(CRC, 1)
                body, end = frames.read(length), after
                frames.seek(CRC, 1)
            if end < size:
                frames.truncate(end)
        event: Any = self._event.FromString(body)
        return int(event.step)
