"""Synchronous writer of TensorBoard event files. TensorBoard's own writer loses errors in its thread."""

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
    """New event file in a folder. Every method raises OSError if it cannot write.

    `purge_step`: TensorBoard discards this step and later ones of earlier files.
    """

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard recognises event files by this prefix. The number separates files made in one second.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        # Unbuffered, so that a full disk is reported by the call that wrote.
        self.file = (folder / name).open("ab", buffering=0)
        self._records = RecordWriter(self.file)
        self._write(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._write(Event(step=purge_step, file_version="brain.Event:2"))
            # The same two events as in torch's SummaryWriter: TensorBoard purges on SessionLog.START.
            self._write(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        """Add a step's scalars by name."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def add(self, summary: Any, step: int) -> None:
        """Add a summary (a TensorBoard protobuf message)."""
        self._write(Event(step=step, summary=summary))

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Add a Markdown text. Its tag becomes `tag/text_summary`."""
        # Imported here: torch is needed for texts only.
        from torch.utils.tensorboard.summary import text as text_summary

        self._write(Event(step=step, summary=text_summary(tag, text)))

    def sync(self) -> None:
        """Fsync all added events."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        """Close the file."""
        self.file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
