"""Driver's end of a node's relay (`relay`): one message for all ranks of the node, one read for their answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from megarl.cluster.rank_handle import Answers, RankHandle
from megarl.cluster.relay import ANSWER, BATCH, PART

_READ_BYTES = _SHORT_BYTES = 1 << 16
"""Bytes of one read, and the size below which the parts of a message are joined before they are sent."""
_MOST_BUFFERS = 64
"""Buffers given to one system call, far below the kernel's limit."""


@dataclass(slots=True, eq=False)
class _Batch:
    """RPC in flight to one node. `whole` completes with the last answer, or fails with the first error."""

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
        self.answers[handle].set_exception(error)
        if not self.whole.done():
            self.whole.set_exception(error)
            # Marks the error as retrieved: the waiting call may have left already, at another node's error.
            self.whole.exception()


class Relayed:
    """Ranks of a node behind its relay. `handles` are keyed by rank.

    `cut_off` are ranks that a call could not reach because the relay had ended. The ranks themselves may be alive.
    """

    def __init__(self, handles: Mapping[int, RankHandle], connected: socket.socket) -> None:
        self.cut_off: set[RankHandle] = set()
        self._is_lost = False
        self.socket = connected
        self._handles = handles
        self._awaited: dict[RankHandle, _Batch] = {}
        self._ended: set[RankHandle] = set()
        self._losses: set[asyncio.Task[None]] = set()
        self._unread = bytearray()
        self._unsent: deque[memoryview] = deque()
        self._loop = asyncio.get_running_loop()
        self._is_read = self._is_waiting_to_write = False

    def ask(self, messages: Mapping[RankHandle, bytes], answers: Answers) -> asyncio.Future[None]:
        """Send a command each to ranks of the node. Their `answers` complete or fail as in `RankHandle.ask`.

        Returns a future. It completes after all answers, and fails with the first failure. So a call to a thousand
        ranks waits for one future per node.
        """
        batch = _Batch(answers, len(messages), self._loop.create_future())
        self._awaited |= dict.fromkeys(messages, batch)
        # Ranks answer once unasked. Reading starts only now, when a call waits for these answers.
        if not self._is_read:
            self._loop.add_reader(self.socket, self._read)
            self._is_read = True
        if gone := set(messages) if self._is_lost else self._ended & messages.keys():
            for handle in gone:
                self._lose(handle)
            messages = {handle: message for handle, message in messages.items() if handle not in gone}
        if messages:
            self._send(_batch(messages))
        return batch.whole

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
        if self.socket.fileno() >= 0:
            self._loop.remove_reader(self.socket)
            self._loop.remove_writer(self.socket)
            self.socket.close()

    def _send(self, parts: list[bytes]) -> None:
        """Queue a message, and start to send it if nothing else is being sent."""
        is_sending = bool(self._unsent)
        # Long messages are not copied. Short parts are joined, for fewer system calls.
        if sum(map(len, parts)) < _SHORT_BYTES:
            parts = [b"".join(parts)]
        self._unsent += [memoryview(part) for part in parts if part]
        if not is_sending:
            self._write()

    def _write(self) -> None:
        """Send as much as the connection takes now, and the remainder when it takes more."""
        try:
            while self._unsent:
                self._drop(self.socket.sendmsg(list(islice(self._unsent, _MOST_BUFFERS))))
        except BlockingIOError:
            self._loop.add_writer(self.socket, self._write)
            self._is_waiting_to_write = True
            return
        except OSError:
            self._unsent.clear()  # `_read` meets the same failure and reports it
        if self._is_waiting_to_write:
            self._is_waiting_to_write = not self._loop.remove_writer(self.socket)

    def _drop(self, num_sent: int) -> None:
        """Drop sent bytes from the queue."""
        while num_sent:
            first = self._unsent.popleft()
            if num_sent < len(first):
                self._unsent.appendleft(first[num_sent:])
                return
            num_sent -= len(first)

    def _read(self) -> None:
        """Read what has arrived. If the relay has ended, all ranks with a call in progress are lost."""
        try:
            received = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._loop.remove_reader(self.socket)
            self._is_lost = True
            for handle in list(self._awaited):
                self._lose(handle)
            return
        self._unread += received
        self._take_answers()

    def _take_answers(self) -> None:
        """Deliver the complete answers to the calls waiting for them."""
        view, start = memoryview(self._unread), 0
        while len(view) - start >= ANSWER.size:
            rank, size = ANSWER.unpack_from(view, start)
            end = start + ANSWER.size + size
            if end > len(view):
                break
            handle = self._handles[rank]
            if size:
                self._awaited.pop(handle).take(handle, view[end - size : end])
            else:
                self._ended.add(handle)
                self._lose(handle)
            start = end
        if start:
            # A new buffer: one with views of it cannot be shortened.
            self._unread = bytearray(view[start:])

    def _lose(self, handle: RankHandle) -> None:
        """Report a rank as lost to the call waiting for it, if any."""

        async def tell(batch: _Batch) -> None:
            error = await handle.lost()
            if not batch.answers[handle].done():
                batch.fail(handle, error)

        if (batch := self._awaited.pop(handle, None)) is not None:
            if handle not in self._ended:
                self.cut_off.add(handle)
            self._losses.add(asyncio.create_task(tell(batch)))


def _batch(messages: Mapping[RankHandle, bytes]) -> list[bytes]:
    """Return the parts of a batch of commands. A command common to several ranks is in it once."""
    # Compared by identity, because comparing long messages would be slow.
    distinct = {id(message): message for message in messages.values()}
    ranks: defaultdict[int, list[int]] = defaultdict(list)
    if len(distinct) == 1:
        ranks[next(iter(distinct))] = [handle.rank for handle in messages]
    else:
        for handle, message in messages.items():
            ranks[id(message)].append(handle.rank)
    parts = [BATCH.pack(len(ranks))]
    for number, whose in ranks.items():
        message = distinct[number]
        parts += [PART.pack(len(whose), len(message)), struct.pack(f"<{len(whose)}I", *whose), message]
    return parts
