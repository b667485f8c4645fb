"""Driver's end of a connection, to one rank or to the relay of a node's ranks (`relay`).

A relay gets one message for all ranks of its node, and one read may take all their answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.cluster.messages import HEAD
from megarl.cluster.rank_handle import Answers, RankHandle
from megarl.cluster.relay import ANSWER, BATCH, PART

_SHORT_BYTES = 1 << 16
"""Bytes below which the parts of a message are joined, for fewer system calls.

Joining longer ones would copy them. asyncio still copies what the socket does not take at once.
"""


@dataclass(slots=True, eq=False)
class _Batch:
    """RPC in flight on one connection. `whole` completes with the last answer, or fails with the first error."""

    answers: Answers
    num_awaited: int
    whole: asyncio.Future[None]

    def take(self, handle: RankHandle, message: memoryview) -> None:
        """Take a rank's answer. It fails with the error raised by decoding it."""
        answer = self.answers[handle]
        if answer.done():  # cancelled, because the group is ending
            return
        try:
            answer.set_result(handle.content(message))
        except Exception as error:
            self.fail(handle, error)
        self.num_awaited -= 1
        if not self.num_awaited and not self.whole.done():
            self.whole.set_result(None)

    def fail(self, handle: RankHandle, error: Exception) -> None:
        """Fail a rank's answer, and with it the whole batch."""
        # Each error is marked as retrieved: the waiting call may have left already, at another connection's error.
        self.answers[handle].set_exception(error)
        self.answers[handle].exception()
        if not self.whole.done():
            self.whole.set_exception(error)
            self.whole.exception()


class Connection(asyncio.Protocol):
    """Connection of the driver to one rank, or to the relay of several, through a connected socket. Call `open` first.

    `is_lost` says whether the connection has ended. `cut_off` are ranks that a call could not reach for that reason.
    With a relay, the ranks themselves may be alive.
    """

    def __init__(self, connected: socket.socket, handles: Sequence[RankHandle], *, is_relay: bool = False) -> None:
        self.socket, self.is_relay = connected, is_relay
        self.cut_off: set[RankHandle] = set()
        self._handles = {handle.rank: handle for handle in handles}
        self._first = handles[0]
        self._batches: dict[RankHandle, _Batch] = {}
        """Batch in flight by rank, until the rank's answer arrives."""
        self._ended: set[RankHandle] = set()
        self.is_lost = False
        self._losses: set[asyncio.Task[None]] = set()
        self._unread = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    async def open(self) -> None:
        """Start to read and write."""
        await asyncio.get_running_loop().create_connection(lambda: self, sock=self.socket)

    def ask(self, messages: Mapping[RankHandle, bytes], answers: Answers) -> asyncio.Future[None]:
        """Send a command to each of these ranks. Its answer fails if the method raised, or if the rank is lost.

        Returns a future. It completes after all answers, and fails with the first failure. So a call to a thousand
        ranks waits for one future per node.
        """
        batch = _Batch(answers, len(messages), asyncio.get_running_loop().create_future())
        self._batches |= dict.fromkeys(messages, batch)
        lost = set(messages) if self.is_lost else self._ended & messages.keys()
        for handle in lost:
            self._lose(handle)
        left = {handle: message for handle, message in messages.items() if handle not in lost} if lost else messages
        if left:
            self.send(*(_pack_batch(left) if self.is_relay else left.values()))
            # Ranks answer once unasked, perhaps before the first call.
            if self._unread:
                self._take_answers()
        return batch.whole

    def send(self, *parts: bytes) -> None:
        """Send a message, after all earlier ones. Does nothing if the connection has ended."""
        if self._transport is None:
            return
        if sum(map(len, parts)) < _SHORT_BYTES:
            parts = (b"".join(parts),)
        for part in parts:
            self._transport.write(memoryview(part))

    def dismiss(self) -> None:
        """Make the ranks leave, by the end of the stream."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """End the connection once the processes are known to have ended. Ranks with a call in progress are lost."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the connection. Repeated calls are allowed."""
        self._batches.clear()
        for losing in self._losses:
            losing.cancel()
        if self._transport is not None:
            self._transport.abort()
        else:
            self.socket.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unread += data
        self._take_answers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport, self.is_lost = None, True
        if isinstance(exc, OSError):
            self._read_rest()
        for handle in list(self._batches):
            self._lose(handle)

    def _read_rest(self) -> None:
        """Take answers that arrived before a failure of the connection, such as that of writing to an ended rank.

        asyncio does not read them, and closes the socket only after `connection_lost`.
        """
        with contextlib.suppress(OSError):
            while data := self.socket.recv(_SHORT_BYTES):
                self._unread += data
        self._take_answers()

    def _take_answers(self) -> None:
        """Deliver the complete answers to the calls waiting for them."""
        # Local variables: this loop is most of the driver's work in a short call of a thousand ranks.
        is_relay, handles, batches = self.is_relay, self._handles, self._batches
        head = ANSWER if is_relay else HEAD
        unpack, head_bytes = head.unpack_from, head.size
        view = memoryview(self._unread)
        num_bytes, start = len(view), 0
        while num_bytes - start >= head_bytes:
            if is_relay:
                rank, size = unpack(view, start)
                handle = handles[rank]
            else:
                (size,) = unpack(view, start)
                handle = self._first
            end = start + head_bytes + size
            if end > num_bytes:
                break
            if size:
                if (batch := batches.pop(handle, None)) is None:
                    break
                batch.take(handle, view[end - size : end])
            else:
                self._ended.add(handle)
                self._lose(handle)
            start = end
        if start:
            # A new buffer: one with views of it cannot be shortened.
            self._unread = bytearray(view[start:])

    def _lose(self, handle: RankHandle) -> None:
        """Report a rank as lost to the call waiting for it, if any."""

        async def fail(batch: _Batch) -> None:
            error = await handle.lost()
            if not batch.answers[handle].done():
                batch.fail(handle, error)

        if (batch := self._batches.pop(handle, None)) is not None:
            if handle not in self._ended:
                self.cut_off.add(handle)
            self._losses.add(asyncio.create_task(fail(batch)))


def _pack_batch(messages: Mapping[RankHandle, bytes]) -> list[bytes]:
    """Return the parts of a batch of commands. A command common to several ranks is in it once."""
    # Keyed by identity, because comparing long messages would be slow.
    ranks: defaultdict[int, list[int]] = defaultdict(list)
    for handle, message in messages.items():
        ranks[id(message)].append(handle.rank)
    distinct = {id(message): message for message in messages.values()}
    parts: list[bytes] = []
    head = BATCH.pack(len(ranks))
    for number, receivers in ranks.items():
        message = distinct[number]
        # One write for the heads, and one for a long message.
        head += PART.pack(len(receivers), len(message)) + struct.pack(f"<{len(receivers)}I", *receivers)
        parts += [head, message]
        head = b""
    return parts
