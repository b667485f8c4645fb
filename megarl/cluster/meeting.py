"""Where processes of a run connect to one of them: strangers neither delay nor enter."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from megarl.cluster.handshake import StrangerError, admit

STRANGERS = 64
"""So many connections that prove nothing may wait at a time, beside those that are expected."""

_INTRODUCTION_SECONDS = 10

Who = TypeVar("Who")


async def meet(
    met: dict[Who, socket.socket],
    server: socket.socket,
    key: bytes,
    count: int,
    parse: Callable[[dict[str, Any]], Who],
) -> None:
    """Accept connections, concurrently, until `met` has `count` processes, each by what `parse` makes of its message.

    `server` must be non-blocking; so are the sockets. `parse` raises TypeError or ValueError for a message of nobody
    who is expected. Raises OSError where connections cannot be accepted.
    """
    loop = asyncio.get_running_loop()
    complete: asyncio.Future[None] = loop.create_future()
    # Strangers may hold a connection each for a while, not all descriptors of this process.
    room = asyncio.Semaphore(count + STRANGERS)

    async def hear(connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            told = await asyncio.wait_for(admit(connected, key), _INTRODUCTION_SECONDS)
            met[parse(told)] = connected
        except (StrangerError, OSError, ValueError, TypeError, TimeoutError):
            connected.close()
        except asyncio.CancelledError:
            connected.close()
            raise
        finally:
            room.release()
        if len(met) == count and not complete.done():
            complete.set_result(None)

    async def accept() -> None:
        async with asyncio.TaskGroup() as heard:
            while True:
                await room.acquire()
                connected, _ = await loop.sock_accept(server)
                heard.create_task(hear(connected))

    accepting = asyncio.create_task(accept())
    try:
        await asyncio.wait([accepting, complete], return_when=asyncio.FIRST_COMPLETED)
    finally:
        accepting.cancel()
        await asyncio.wait([accepting])
    if not complete.done():
        accepting.result()
