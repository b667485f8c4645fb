"""Output to the terminal. Escape sequences in texts of data, models and ranks are removed. A run survives a closed
terminal.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment

# Escape sequences in a sample could retitle the terminal, write its clipboard or hide text. Both forms, with ESC and
# with 8-bit controls (C1), are removed.
_SEQUENCE = re.compile(
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC: titles, links, the clipboard
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c]*(?:\x1b\\|\x9c)"  # DCS, SOS, PM, APC
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, the cursor
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters never printed: control characters except tab and line feed, bidirectional controls, lone surrogates."""

_GONE = (errno.EIO, errno.EPIPE, errno.EBADF)
"""Error numbers of writing to a closed terminal, or to a pipe without a reader."""


def printable(text: str) -> str:
    """Remove escape sequences and control characters, except line ends and tabs."""
    return _CONTROL.sub("", _SEQUENCE.sub("", text.replace("\r\n", "\n")))


class Console(rich.console.Console):
    """Console of the library Rich. It prints no escape sequences except its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.push_render_hook(_PrintableOnly())

    def print(self, *objects: Any, **settings: Any) -> None:
        # Texts are cleaned before Rich highlights parts of them: a highlight could split an escape sequence, and
        # the filter would miss it.
        super().print(*(printable(item) if isinstance(item, str) else item for item in objects), **settings)


class Terminal(Console):
    """Console that silently stops printing once its terminal, or the reader of its pipe, is gone."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self.on_broken_pipe()

    def __exit__(self, *raised: Any) -> None:
        """Write the last state of a progress line."""
        try:
            super().__exit__(*raised)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self.on_broken_pipe()

    def show_cursor(self, show: bool = True) -> bool:
        """Keep the cursor visible: a killed process could not show it again."""
        return False

    def on_broken_pipe(self) -> None:
        """Discard all further output after a broken pipe. Rich would end the process instead."""
        self.quiet = True
        # The descriptor itself is redirected, because libraries and child processes write to it too.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self.file.fileno())
        os.close(devnull)


class FirstOfEachKind:
    """Shows only the first notice of each kind. Callers count repeated events themselves."""

    def __init__(self, show: Callable[[str], object]) -> None:
        self._show = show
        self._kinds: set[str] = set()

    def tell(self, kind: str, text: str) -> None:
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._show(text)


def guard_logging() -> None:
    """Print log records of loggers without a handler, without escape sequences."""
    if logging.lastResort is not None:
        logging.lastResort.addFilter(_printable_record)


def _printable_record(record: logging.LogRecord) -> bool:
    # The arguments are already in the message, and formatting it twice would fail on a % sign.
    record.msg, record.args = printable(record.getMessage()), ()
    return True


class _PrintableOnly(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Printable(renderable) for renderable in renderables]


class _Printable:
    """A Rich renderable whose texts have no escape sequences."""

    def __init__(self, renderable: ConsoleRenderable) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        segments: Iterable[Segment] = console.render(self._renderable, options)
        for segment in segments:
            # Control segments come from Rich itself, for a live line.
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
