"""Relay: a process on each node connecting all ranks of the node to the driver over one connection.

The driver thus has one connection per node instead of one per rank. The relay unpickles nothing. It proves the key of
the group's start to the driver, and the ranks prove the key to the relay, by the same handshake.

The driver sends a call as one batch: messages, each with its ranks. The relay returns their answers together once all
have arrived. After a short time it sends the answers present, so a failed or hanging rank does not hold up the
others' answers. Each rank's answers stay in order. An empty answer means that the rank has ended. The ranks also keep
direct connections to the driver, for notices and for requests of stacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.cluster.handshake import introduce, meet
from megarl.cluster.messages import HEAD
from megarl.processes.launcher import LaunchedProgram, python_call

BATCH = struct.Struct("<I")
"""Header of a batch: the number of its parts."""
PART = struct.Struct("<IQ")
"""Header of a batch's part: the number of its ranks, and the bytes of its message.

The ranks follow as uint32 numbers, then the message.
"""
ANSWER = struct.Struct("<IQ")
"""Header of an answer: its rank, and the bytes of its message. The message follows. 0 bytes: the rank has ended."""

_GATHER_SECONDS = 0.05
"""Seconds from the first answer to a call until the answers present are sent, even if others are missing."""
_LOOK_SECONDS = 1.0
"""Interval of checks, while ranks connect, for the end of the driver."""


def start(driver: tuple[str, int], key: bytes, address: str, ranks: Sequence[int]) -> None:
    """Start the relay of these ranks, on the interface with this address. It ends when the driver closes its end."""
    settings = json.dumps([*driver, address, *ranks])
    LaunchedProgram(python_call("megarl.cluster.relay:main", settings), secret=f"{key.hex()}\n".encode())


def main(settings: str) -> None:
    """Run the relay's process. The key is on standard input."""
    host, port, address, *ranks = json.loads(settings)
    key = bytes.fromhex(sys.stdin.readline())
    asyncio.run(_serve((host, port), key, address, ranks))


async def _serve(driver: tuple[str, int], key: bytes, address: str, ranks: Sequence[int]) -> None:
    """Connect to the driver, accept the node's ranks, and relay until the driver closes its end."""
    connections: dict[int, socket.socket] = {}

    def rank_of(introduction: dict[str, Any]) -> int:
        rank = int(introduction.get("rank", -1))
        if rank not in ranks or rank in connections:
            raise ValueError(f"rank {rank} is not one of this relay's ranks {ranks}, or has already connected")
        return rank

    with socket.create_server((address, 0), backlog=4096) as server:
        upward = socket.create_connection(driver)
        upward.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port, *_ = server.getsockname()
        introduce(upward, key, {"first_rank": ranks[0], "host": host, "port": port})
        server.setblocking(False)
        meeting = asyncio.create_task(meet(connections, server, key, len(ranks), rank_of))
        while not meeting.done():
            await asyncio.wait([meeting], timeout=_LOOK_SECONDS)
            # The driver has ended this start, so the missing ranks will never come.
            if _has_ended(upward):
                return
        meeting.result()
    reader, writer = await asyncio.open_connection(sock=upward)
    relay = _Relay(writer)
    await relay.add(connections)
    await relay.run(reader)


def _has_ended(connected: socket.socket) -> bool:
    """Return whether the other end has closed the connection and all its data has been read."""
    try:
        return not connected.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


@dataclass(slots=True, eq=False)
class _Batch:
    """Collects the answers to one call: the number of ranks still to answer, and the answers not yet sent to the
    driver."""

    num_awaited: int = 0
    gathered: list[bytes] = field(default_factory=list)


class _Relay:
    """Forwards messages between the driver's connection and the connections of the ranks."""

    def __init__(self, upward: asyncio.StreamWriter) -> None:
        self._upward = upward
        self._ranks: dict[int, asyncio.StreamWriter] = {}
        self._batches: dict[int, _Batch] = {}
        """The call in progress, or the last call, of each rank."""
        self._listening: set[asyncio.Task[None]] = set()

    async def add(self, connected: Mapping[int, socket.socket]) -> None:
        """Add the connections of all ranks. Each rank sends one answer first, without a command."""
        first = _Batch(len(connected))
        for rank, sock in connected.items():
            reader, self._ranks[rank] = await asyncio.open_connection(sock=sock)
            self._batches[rank] = first
            self._listening.add(asyncio.create_task(self._listen(rank, reader)))

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Forward the driver's batches to the ranks until the driver closes its connection.

        Then close the connections to the ranks, and wait until all ranks have closed theirs. The launcher kills ranks
        that do not.
        """
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                await self._pass_batch(reader)
        for writer in self._ranks.values():
            with contextlib.suppress(OSError):
                writer.write_eof()
        await asyncio.wait(self._listening)

    async def _pass_batch(self, reader: asyncio.StreamReader) -> None:
        """Read one batch from the driver and send its messages to the ranks."""
        (num_parts,) = BATCH.unpack(await reader.readexactly(BATCH.size))
        batch = _Batch()
        for _ in range(num_parts):
            num_ranks, size = PART.unpack(await reader.readexactly(PART.size))
            ranks = struct.unpack(f"<{num_ranks}I", await reader.readexactly(4 * num_ranks))
            message = await reader.readexactly(size)
            batch.num_awaited += num_ranks
            for rank in ranks:
                self._batches[rank] = batch
                self._ranks[rank].write(message)

    async def _listen(self, rank: int, reader: asyncio.StreamReader) -> None:
        """Collect the answers of a rank until it ends."""
        try:
            while True:
                (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                message = await reader.readexactly(size)
                self._take(rank, ANSWER.pack(rank, size), message)
        except (asyncio.IncompleteReadError, OSError):
            self._take(rank, ANSWER.pack(rank, 0))
            # Sent at once: a launcher ends all ranks after one, and only the order of these reports shows the first.
            self._send(self._batches[rank])

    def _take(self, rank: int, *answer: bytes) -> None:
        """Add a rank's answer to its call. Send the answers when all are present, or a short time after the first."""
        batch = self._batches[rank]
        batch.num_awaited -= 1
        if not batch.gathered:
            asyncio.get_running_loop().call_later(_GATHER_SECONDS, self._send, batch)
        batch.gathered += answer
        if batch.num_awaited <= 0:
            self._send(batch)

    def _send(self, batch: _Batch) -> None:
        """Send the collected answers of a call to the driver."""
        self._upward.write(b"".join(batch.gathered))
        batch.gathered.clear()
