"""The terminal of the person who started a run. A run outlives it."""

from __future__ import annotations

import errno
import os
from typing import Any

from megarl.terminal import Console

_GONE = (errno.EIO, errno.EPIPE, errno.EBADF)


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
