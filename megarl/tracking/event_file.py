"""A synchronous writer of TensorBoard's event files; errors of TensorBoard's own, in its thread, go unnoticed."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

_numbers = itertools.count()


class EventFile:
    """A new event file in a folder. Every method raises OSError if it cannot be written.

    `purge_step`: TensorBoard discards this step and later ones of earlier files.
    """

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self.file = (folder / name).open("ab", buffering=0)
        self._records = RecordWriter(self.file)
        self._write(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._write(Event(step=purge_step, file_version="brain.Event:2"))
            self._write(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        """Add a step's scalars by name."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def add(self, summary: Any, step: int) -> None:
        """Add a summary, a message of TensorBoard's."""
        self._write(Event(step=step, summary=summary))

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Add a text in Markdown; its tag is `tag/text_summary`."""
        from torch.utils.tensorboard.summary import text as text_summary

        self._write(Event(step=step, summary=text_summary(tag, text)))

    def sync(self) -> None:
        """fsync what was added."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
