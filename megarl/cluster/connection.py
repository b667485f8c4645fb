"""The driver's end of a connection to one rank, or to the relay process serving all ranks of a node.

A relay gets one message for all ranks of its node, and one read may return all their answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megarl.cluster.messages import HEAD
from megarl.cluster.rank_handle import Answers, RankHandle
from megarl.cluster.relay import ANSWER, BATCH, PART

_SHORT_BYTES = 1 << 16
"""Message parts below this size in bytes are joined, to save system calls.

Joining longer ones would cost a copy. asyncio still copies what the socket does not accept at once.
"""


@dataclass(slots=True, eq=False)
class _Batch:
    """Answers that one call still expects on one connection.

    `whole` completes with the last answer, or fails with the first error.
    """

    answers: Answers
    num_awaited: int
    whole: asyncio.Future[None]

    def take(self, handle: RankHandle, message: memoryview) -> None:
        """Decode a rank's answer and complete its future. If decoding raises an error, the future fails with it."""
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
        """Fail the future of a rank's answer, and with it the whole call on this connection."""
        # Each error is marked as retrieved: the waiting call may have left already, at another connection's error.
        self.answers[handle].set_exception(error)
        self.answers[handle].exception()
        if not self.whole.done():
            self.whole.set_exception(error)
            self.whole.exception()


class Connection(asyncio.Protocol):
    """The driver's connection to one rank, or to the relay of several ranks. Call `open` first.

    `is_lost` says whether the connection has ended. `cut_off` holds the ranks that calls could not reach after that.
    Behind a relay, the ranks themselves may still be alive.
    """

    def __init__(
        self,
        connected: socket.socket,
        handles: Sequence[RankHandle],
        *,
        is_relay: bool = False,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare a connection to the ranks `handles`. `on_end` is called when it has ended."""
        self.socket, self.is_relay, self._on_end = connected, is_relay, on_end
        self.cut_off: set[RankHandle] = set()
        self._handles = {handle.rank: handle for handle in handles}
        self._first = handles[0]
        self._batches: dict[RankHandle, _Batch] = {}
        """Call in progress by rank, until the rank's answer arrives."""
        self._num_abandoned: Counter[RankHandle] = Counter()
        """Number of answers still to come that nobody awaits any more, by rank."""
        self._ended: set[RankHandle] = set()
        self.is_lost = False
        self._losses: set[asyncio.Task[None]] = set()
        self._unread = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    async def open(self) -> None:
        """Start reading and writing."""
        await asyncio.get_running_loop().create_connection(lambda: self, sock=self.socket)

    def ask(self, messages: Mapping[RankHandle, bytes], answers: Answers) -> asyncio.Future[None]:
        """Send a command to each of these ranks. Returns a future for all answers together.

        The future completes after the last answer, and fails with the first failure: the method raised, or the rank is
        lost. A call to a thousand ranks thus waits for one future per node. The single answers complete in `answers`.
        """
        batch = _Batch(answers, len(messages), asyncio.get_running_loop().create_future())
        self._batches |= dict.fromkeys(messages, batch)
        lost = set(messages) if self.is_lost else self._ended & messages.keys()
        for handle in lost:
            self._lose(handle)
        reachable = (
            {handle: message for handle, message in messages.items() if handle not in lost} if lost else messages
        )
        if reachable:
            self.send(*(_pack_batch(reachable) if self.is_relay else reachable.values()))
            # Ranks answer once unasked, perhaps before the first call.
            if self._unread:
                self._take_answers()
        return batch.whole

    def abandon(self, handle: RankHandle) -> None:
        """Stop waiting for a rank's answer to the call in progress, if there is one. It is dropped when it arrives."""
        if self._batches.pop(handle, None) is not None:
            self._num_abandoned[handle] += 1

    def send(self, *parts: bytes) -> None:
        """Send a message after all earlier ones. Does nothing if the connection has ended."""
        if self._transport is None:
            return
        if sum(map(len, parts)) < _SHORT_BYTES:
            parts = (b"".join(parts),)
        for part in parts:
            self._transport.write(memoryview(part))

    def dismiss(self) -> None:
        """Ask the ranks to exit, by closing the stream of commands."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """End the connection after its processes have ended. Calls in progress report their ranks as lost."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Close the connection and free its resources. Repeated calls are allowed."""
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
        self._on_end()
        for handle in list(self._batches):
            self._lose(handle)

    def _read_rest(self) -> None:
        """Read the answers that arrived before the connection failed, for example in writing to a rank that had ended.

        asyncio does not read them, and it closes the socket only after `connection_lost`.
        """
        with contextlib.suppress(OSError):
            while data := self.socket.recv(_SHORT_BYTES):
                self._unread += data
        self._take_answers()

    def _take_answers(self) -> None:
        """Pass each complete answer received so far to the call expecting it."""
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
                if self._num_abandoned[handle]:
                    self._num_abandoned[handle] -= 1
                    start = end
                    continue
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
        """Fail the call in progress on a rank, if there is one, because the rank is lost."""

        async def fail(batch: _Batch) -> None:
            error = await handle.lost()
            if not batch.answers[handle].done():
                batch.fail(handle, error)

        if (batch := self._batches.pop(handle, None)) is not None:
            if handle not in self._ended:
                self.cut_off.add(handle)
            self._losses.add(asyncio.create_task(fail(batch)))


def _pack_batch(messages: Mapping[RankHandle, bytes]) -> list[bytes]:
    """Return the message parts of a batch of commands. A command sent to several ranks is contained once."""
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
