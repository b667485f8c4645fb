"""Acceptance of a run's processes at a listening socket. Strangers (peers without the key) cause no delay."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from megarl.cluster.handshake import StrangerError, admit

STRANGERS = 64
"""Number of unproven connections that may wait at a time, in addition to the expected ones."""

_INTRODUCTION_SECONDS = 10
"""Limit on the handshake of a connection."""

Who = TypeVar("Who")


async def meet(
    met: dict[Who, socket.socket],
    server: socket.socket,
    key: bytes,
    count: int,
    parse: Callable[[dict[str, Any]], Who],
) -> None:
    """Accept connections, concurrently, until `met` holds `count` processes.

    `parse` turns the first message of a process into its key in `met`. It raises TypeError or ValueError for an
    unexpected message. `server` must be non-blocking, and the accepted sockets are as well. Raises OSError if
    connections cannot be accepted.
    """
    loop = asyncio.get_running_loop()
    complete: asyncio.Future[None] = loop.create_future()
    # Strangers may hold a few connections for a while, but must not use up this process's file descriptors.
    room = asyncio.Semaphore(count + STRANGERS)

    async def hear(connected: socket.socket) -> None:
        connected.setblocking(False)
        # Commands and answers are often short: Nagle's algorithm would delay them.
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
        # `met` is incomplete, so accepting failed: raise its error.
        accepting.result()
