"""TensorBoard tracker: scalars, sample texts, settings of the recipe."""

from __future__ import annotations

import itertools
import os
import socket
import textwrap
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.record_writer import RecordWriter

from megarl.config.recipe import read
from megarl.tracking.trackers import hparams

_numbers = itertools.count()


class EventFile:
    """A new TensorBoard event file in a folder. Each method raises OSError if writing fails.

    `purge_step`: TensorBoard ignores this step and later ones in earlier files of the folder.
    """

    def __init__(self, folder: Path, *, purge_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard recognises event files by this prefix. The number separates files created in the same second.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        # Unbuffered, so that the call itself reports a full disk.
        self.file = (folder / name).open("ab", buffering=0)
        self._records = RecordWriter(self.file)
        self._write(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._write(Event(step=purge_step, file_version="brain.Event:2"))
            # As in torch's SummaryWriter: TensorBoard discards later steps at SessionLog.START.
            self._write(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def add_scalars(self, scalars: Mapping[str, float], step: int) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(Event(step=step, summary=Summary(value=values)))

    def add(self, summary: Any, step: int) -> None:
        self._write(Event(step=step, summary=summary))

    def add_text(self, tag: str, text: str, step: int) -> None:
        """Add a Markdown text. Its tag becomes `tag/text_summary`."""
        # Imported here, because only texts need torch.
        from torch.utils.tensorboard.summary import text as text_summary

        self._write(Event(step=step, summary=text_summary(tag, text)))

    def sync(self) -> None:
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())


_SAMPLES_SHOWN = 4
"""Samples written per call of `samples`."""


class TensorBoard:
    """TensorBoard event files in `tensorboard/` of the run folder."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        self._last_step = resumed_step
        # In a resumed run, TensorBoard discards steps after the checkpoint.
        self.events = EventFile(folder / "tensorboard", purge_step=resumed_step + 1 if resumed_step else None)
        # Also in a resumed run: its earlier start may have ended before writing them.
        for summary in hparams.summaries(read(folder / "config.yaml", is_of_run=True).recipe):
            self.events.add(summary, resumed_step)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.events.add_scalars(scalars, step)
        self._last_step = step

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        for number, record in enumerate(records[:_SAMPLES_SHOWN]):
            self.events.add_text(f"samples/{record.get('set', 'train')}/{number}", _markdown(record), step)

    def unhealthy(self, step: int, rule: str, text: str) -> None:
        self.events.add_text(f"health/{rule}", text, step)

    def sync(self) -> None:
        self.events.sync()

    def close(self) -> None:
        # A full disk must not hide the error that ended the run.
        with suppress(OSError):
            self.events.add(hparams.end_summary(), self._last_step)
        self.events.close()


def _markdown(record: Mapping[str, Any]) -> str:
    fields = ((name, _text(value)) for name, value in record.items())
    # A code block, so that Markdown in a sample is shown as written.
    return "\n\n".join(f"**{name}**\n\n{textwrap.indent(text, '    ', lambda _: True)}" for name, text in fields)


def _text(value: Any) -> str:
    """Return a value as text: list items on separate lines, a message as its role and content."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return "\n".join(map(_text, value))
    if not isinstance(value, Mapping):
        return repr(value)
    if isinstance(value.get("role"), str) and isinstance(value.get("content"), str):
        other_fields = {name: item for name, item in value.items() if name not in ("role", "content")}
        return f"{value['role']}: {value['content']}" + (f"\n  {other_fields}" if other_fields else "")
    return "\n".join(f"{name}: {_text(item)}" for name, item in value.items() if item is not None)
