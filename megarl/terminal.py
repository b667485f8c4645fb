"""The terminal: what data, models or ranks say cannot command it, and a run goes on when it is closed."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment

_SEQUENCE = re.compile(
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC: titles, links, the clipboard
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c]*(?:\x1b\\|\x9c)"  # DCS, SOS, PM, APC
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, the cursor
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tabs and line ends, marks that reverse the order of letters, halves of characters."""

_GONE = (errno.EIO, errno.EPIPE, errno.EBADF)
"""Errors of a terminal that was closed, or of a pipe whose reader has left."""


def printable(text: str) -> str:
    """The text without escape sequences and control characters; line ends and tabs stay."""
    return _CONTROL.sub("", _SEQUENCE.sub("", text.replace("\r\n", "\n")))


class Console(rich.console.Console):
    """A console of rich whose own colours are the only escape sequences that it writes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.push_render_hook(_PrintableOnly())

    def print(self, *objects: Any, **settings: Any) -> None:
        # Before rich highlights parts of a text, and so cuts through escape sequences.
        super().print(*(printable(shown) if isinstance(shown, str) else shown for shown in objects), **settings)


class Terminal(Console):
    """A console that prints nothing more once its terminal is closed or the reader of its pipe has left."""

    def print(self, *objects: Any, **options: Any) -> None:
        """See `Console.print`."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Have what is printed from now on, by whomever, go nowhere: rich would end the process."""
        self.quiet = True
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self.file.fileno())
        os.close(devnull)


def guard_logging() -> None:
    """Have log records that no handler was set up for, which go to the terminal, be printable."""
    if logging.lastResort is not None:
        logging.lastResort.addFilter(_printable_record)


def _printable_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


class _PrintableOnly(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Printable(renderable) for renderable in renderables]


class _Printable:
    """What it shows, as segments whose texts are printable."""

    def __init__(self, shown: ConsoleRenderable) -> None:
        self._shown = shown

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        segments: Iterable[Segment] = console.render(self._shown, options)
        for segment in segments:
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
