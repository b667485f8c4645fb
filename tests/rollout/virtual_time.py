"""An event loop whose clock jumps to the next timer: hours of simulated sampling take no time."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class _Jumping(selectors.SelectSelector):
    """Instead of waiting for so long, turns the clock on by it."""

    seconds = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.seconds += timeout or 0.0
        return super().select(0.0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its `time` moves only while all tasks wait, by as much as the first of them has to."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.seconds
