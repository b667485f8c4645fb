"""The terminal: texts of data, models and ranks cannot send it escape sequences; a run survives its closing."""

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

_SEQUENCE = re.compile(
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # OSC: titles, links, the clipboard
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c]*(?:\x1b\\|\x9c)"  # DCS, SOS, PM, APC
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, the cursor
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and line feed, bidirectional controls, lone surrogates."""

_GONE = (errno.EIO, errno.EPIPE, errno.EBADF)
"""Errors of a terminal that was closed, or of a pipe whose reader has left."""


def printable(text: str) -> str:
    """The text without escape sequences and control characters; line ends and tabs stay."""
    return _CONTROL.sub("", _SEQUENCE.sub("", text.replace("\r\n", "\n")))


class Console(rich.console.Console):
    """A rich console that writes no escape sequences but its own styles."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.push_render_hook(_PrintableOnly())

    def print(self, *objects: Any, **settings: Any) -> None:
        # Before rich highlights parts of a text, and so cuts through escape sequences.
        super().print(*(printable(shown) if isinstance(shown, str) else shown for shown in objects), **settings)


class Terminal(Console):
    """A console that stops printing, without an error, once its terminal or its pipe's reader is gone."""

    def print(self, *objects: Any, **options: Any) -> None:
        """See `Console.print`."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self.on_broken_pipe()

    def __exit__(self, *raised: Any) -> None:
        """See `Console.print`: what a live line writes is written here."""
        try:
            super().__exit__(*raised)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self.on_broken_pipe()

    def show_cursor(self, show: bool = True) -> bool:
        """The cursor stays under a live line: a process that is killed could not bring it back."""
        return False

    def on_broken_pipe(self) -> None:
        """Discard all further output of the process; rich would end it."""
        self.quiet = True
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, self.file.fileno())
        os.close(devnull)


class FirstOfEachKind:
    """Shows the first text of each kind; who tells of things counts them all where they happen."""

    def __init__(self, show: Callable[[str], object]) -> None:
        self._show = show
        self._kinds: set[str] = set()

    def tell(self, kind: str, text: str) -> None:
        """Show a text, unless one of its kind was shown."""
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._show(text)


def guard_logging() -> None:
    """Make log records without a handler of their own, which go to the terminal, printable."""
    if logging.lastResort is not None:
        logging.lastResort.addFilter(_printable_record)


def _printable_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


class _PrintableOnly(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Printable(renderable) for renderable in renderables]


class _Printable:
    """A renderable whose segments have printable texts."""

    def __init__(self, shown: ConsoleRenderable) -> None:
        self._shown = shown

    def __rich_console__(self, console: rich.console.Console, options: ConsoleOptions) -> RenderResult:
        segments: Iterable[Segment] = console.render(self._shown, options)
        for segment in segments:
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
