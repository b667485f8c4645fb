"""TensorBoard tracker: scalars, sample texts, settings of the recipe."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.config.recipe import read
from megarl.tracking import hparams
from megarl.tracking.event_file import EventFile

_SAMPLES_SHOWN = 4
"""Number of samples shown per call."""


class TensorBoard:
    """Event files in `tensorboard/` of the run folder (see `trackers.RunTracker`)."""

    def __init__(self, folder: Path, resumed_step: int) -> None:
        self._last_step = resumed_step
        # For a resumed run, TensorBoard discards the steps after its checkpoint.
        self.events = EventFile(folder / "tensorboard", purge_step=resumed_step + 1 if resumed_step else None)
        # Also for a resumed run, because an earlier start may have ended before writing them.
        for summary in hparams.summaries(read(folder / "config.yaml", is_of_run=True).recipe):
            self.events.add(summary, resumed_step)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a step's scalars by name."""
        self.events.add_scalars(scalars, step)
        self._last_step = step

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Add the first records of each call as texts `samples/SET/NUMBER`."""
        for number, record in enumerate(records[:_SAMPLES_SHOWN]):
            self.events.add_text(f"samples/{record.get('set', 'train')}/{number}", _markdown(record), step)

    def unhealthy(self, step: int, rule: str, text: str) -> None:
        """Add a broken rule as the text `health/RULE`."""
        self.events.add_text(f"health/{rule}", text, step)

    def sync(self) -> None:
        """Fsync all added events."""
        self.events.sync()

    def close(self) -> None:
        """Close the file."""
        # A full disk must not hide the error that ended the run.
        with suppress(OSError):
            self.events.add(hparams.ended(), self._last_step)
        self.events.close()


def _markdown(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown: each field as a heading with its text as a code block."""
    fields = ((name, _text(value)) for name, value in record.items())
    # A code block, so that Markdown in a sample is shown as written.
    return "\n\n".join(f"**{name}**\n\n{textwrap.indent(text, '    ', lambda _: True)}" for name, text in fields)


def _text(value: Any) -> str:
    """Return a value as text: list items on lines of their own, a message as its role and content."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return "\n".join(map(_text, value))
    if not isinstance(value, Mapping):
        return repr(value)
    if isinstance(value.get("role"), str) and isinstance(value.get("content"), str):
        rest = {name: item for name, item in value.items() if name not in ("role", "content")}
        return f"{value['role']}: {value['content']}" + (f"\n  {rest}" if rest else "")
    return "\n".join(f"{name}: {_text(item)}" for name, item in value.items() if item is not None)
