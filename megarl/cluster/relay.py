"""The relay of a node: one connection to the driver for all ranks of the node, so that the driver speaks to nodes.

A process of its own that unpickles nothing. It proves the key of the group's start to the driver, and the ranks prove
it to the relay, by the same handshake. What the driver sends of a call comes as one batch: messages, each with the
ranks that it is for. Their answers go back together when all have come, or after a moment those that have: a rank that
fails, or that is awaited in vain, must not hide what the others said. Their order per rank stays. An empty answer says
that the rank ended. The ranks keep their connections to the driver, which reaches them there when they are to show
their stacks, and with notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.cluster.handshake import introduce
from megarl.cluster.meeting import meet
from megarl.cluster.messages import HEAD

BATCH = struct.Struct("<I")
"""The head of a batch: how many parts follow."""
PART = struct.Struct("<IQ")
"""The head of a part: to how many ranks it goes, and its bytes. The ranks follow, as uint32, then the message."""
ANSWER = struct.Struct("<IQ")
"""The head of an answer: its rank, and the bytes of the message that follows; 0: the rank has ended."""

_GATHER_SECONDS = 0.05
_LOOK_SECONDS = 1.0
_PROGRAM = """
import json, sys
told = json.loads(sys.stdin.readline())
sys.path[:] = told.pop("path")
from megarl.cluster.relay import main
main(**told)
"""


def start(driver: tuple[str, int], key: bytes, address: str, ranks: Sequence[int]) -> None:
    """Start the relay of these ranks, on the interface with this address. It ends when the driver closes its end."""
    told = {"path": sys.path, "driver": driver, "key": key.hex(), "address": address, "ranks": list(ranks)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM], stdin=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(json.dumps(told) + "\n")


def main(driver: tuple[str, int], key: str, address: str, ranks: Sequence[int]) -> None:
    """The main function of the process."""
    asyncio.run(_serve((driver[0], driver[1]), bytes.fromhex(key), address, ranks))


async def _serve(driver: tuple[str, int], key: bytes, address: str, ranks: Sequence[int]) -> None:
    met: dict[int, socket.socket] = {}

    def rank_of(told: dict[str, Any]) -> int:
        rank = int(told.get("rank", -1))
        if rank not in ranks or rank in met:
            raise ValueError(f"{rank} is none of ranks {ranks}, or is here already")
        return rank

    with socket.create_server((address, 0), backlog=4096) as server:
        upward = socket.create_connection(driver)
        upward.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        host, port, *_ = server.getsockname()
        introduce(upward, key, {"first_rank": ranks[0], "host": host, "port": port})
        server.setblocking(False)
        meeting = asyncio.create_task(meet(met, server, key, len(ranks), rank_of))
        while not meeting.done():
            await asyncio.wait([meeting], timeout=_LOOK_SECONDS)
            if _has_ended(upward):
                return
        meeting.result()
    reader, writer = await asyncio.open_connection(sock=upward)
    relay = _Relay(writer)
    await relay.add(met)
    await relay.run(reader)


def _has_ended(connected: socket.socket) -> bool:
    """Whether the other end of a connection is closed, and nothing that it sent is unread."""
    try:
        return not connected.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


@dataclass(slots=True, eq=False)
class _Batch:
    """A call under way: how many of its ranks have not answered, and the answers that have not been sent."""

    num_awaited: int = 0
    gathered: list[bytes] = field(default_factory=list)


class _Relay:
    def __init__(self, upward: asyncio.StreamWriter) -> None:
        self._upward = upward
        self._ranks: dict[int, asyncio.StreamWriter] = {}
        self._batches: dict[int, _Batch] = {}
        """The batch that each rank works for, or worked for last."""
        self._listening: set[asyncio.Task[None]] = set()

    async def add(self, connected: Mapping[int, socket.socket]) -> None:
        """Take in all ranks, each of which answers once unasked."""
        first = _Batch(len(connected))
        for rank, sock in connected.items():
            reader, self._ranks[rank] = await asyncio.open_connection(sock=sock)
            self._batches[rank] = first
            self._listening.add(asyncio.create_task(self._listen(rank, reader)))

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Pass on what the driver sends, until it closes its end; then close the ranks' ends, and wait until they left.

        A rank that does not leave is killed by the launcher.
        """
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                await self._pass_batch(reader)
        for writer in self._ranks.values():
            with contextlib.suppress(OSError):
                writer.write_eof()
        await asyncio.wait(self._listening)

    async def _pass_batch(self, reader: asyncio.StreamReader) -> None:
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
        """Take a rank's answers until it ends."""
        try:
            while True:
                (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                message = await reader.readexactly(size)
                self._take(rank, ANSWER.pack(rank, size), message)
        except (asyncio.IncompleteReadError, OSError):
            self._take(rank, ANSWER.pack(rank, 0))
            # At once: launchers end all ranks when one has ended, and who was first is told by the order of the news.
            self._send(self._batches[rank])

    def _take(self, rank: int, *answer: bytes) -> None:
        batch = self._batches[rank]
        batch.num_awaited -= 1
        if not batch.gathered:
            asyncio.get_running_loop().call_later(_GATHER_SECONDS, self._send, batch)
        batch.gathered += answer
        if batch.num_awaited <= 0:
            self._send(batch)

    def _send(self, batch: _Batch) -> None:
        self._upward.write(b"".join(batch.gathered))
        batch.gathered.clear()
