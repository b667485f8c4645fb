"""Processes and connections shared by all attempts of an event loop, until the loop's run ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

# Bytes of output retained, and characters of them shown in a message.
_KEPT_BYTES = 1 << 14
_SHOWN = 400


class Tail:
    """End of a process's output. It is read continuously, so the process never blocks on a full pipe."""

    def __init__(self, stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        self._kept = b""
        self._reading = asyncio.create_task(self._read(stream))

    def __str__(self) -> str:
        return " ".join(self._kept.decode(errors="replace").split())[-_SHOWN:]

    def close(self) -> None:
        self._reading.cancel()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while read := await stream.read(_KEPT_BYTES):
            self._kept = (self._kept + read)[-_KEPT_BYTES:]


class Closable(Protocol):
    async def close(self) -> None: ...


Shared = TypeVar("Shared", bound=Closable)

# By event loop: asyncio's processes and connections cannot be used in another loop.
_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, Any]] = WeakKeyDictionary()


def shared(key: Hashable, make: Callable[[], Shared]) -> Shared:
    """Return the object of this event loop under a key, made at first use."""
    known = _SHARED.setdefault(asyncio.get_running_loop(), {})
    if key not in known:
        known[key] = make()
    return cast(Shared, known[key])


async def close_shared() -> None:
    """Close all shared objects of this event loop."""
    for part in _SHARED.pop(asyncio.get_running_loop(), {}).values():
        await part.close()
