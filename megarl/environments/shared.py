"""Objects, such as processes and connections, that all attempts share until their event loop ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary


class Closable(Protocol):
    async def close(self) -> None: ...


Shared = TypeVar("Shared", bound=Closable)
Result = TypeVar("Result")

# By event loop: asyncio's processes and connections cannot be used in another loop.
_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, Any]] = WeakKeyDictionary()


def get_shared(key: Hashable, make: Callable[[], Shared]) -> Shared:
    """Return this event loop's object for `key`, made at the first call."""
    objects = _SHARED.setdefault(asyncio.get_running_loop(), {})
    if key not in objects:
        objects[key] = make()
    return cast(Shared, objects[key])


async def close_shared() -> None:
    for part in _SHARED.pop(asyncio.get_running_loop(), {}).values():
        await part.close()


def run_alone(make: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run the coroutine from `make` in a new event loop, then close the objects shared in this loop."""

    async def run_and_close() -> Result:
        try:
            return await make()
        finally:
            await close_shared()

    return asyncio.run(run_and_close())
