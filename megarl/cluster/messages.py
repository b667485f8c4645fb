"""Messages from the driver to a rank: commands, executed in order, and notices, handled at once.

A rank waiting in a collective reads no command. So a thread reads all messages: it handles notices immediately, and
queues commands for the main thread.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO

from megarl.groups.cancelled import cancel

HEAD = struct.Struct("<Q")
"""Header of a message: the length of its pickle in bytes."""

_NOTICE = 1 << 63
"""Bit of the header set in notices and clear in commands."""


def pack(content: Any) -> bytes:
    """Return a command or an answer as bytes: a header, then a pickle."""
    body = pickle.dumps(content, protocol=5)
    return HEAD.pack(len(body)) + body


def pack_cancel(name: str, reason: str) -> bytes:
    """Return the notice cancelling the cross-world process group `name` on a rank."""
    body = pickle.dumps((name, reason), protocol=5)
    return HEAD.pack(_NOTICE | len(body)) + body


class Inbox:
    """Reader of the driver's messages to this rank. A thread handles notices; iterating yields the commands."""

    def __init__(self, connected: socket.socket) -> None:
        self._commands: SimpleQueue[bytes | Exception | None] = SimpleQueue()
        # The stream is never closed: closing would wait for the thread, and the thread reads until the driver leaves.
        stream = connected.makefile("rb")
        Thread(target=self._read, args=(stream,), name="inbox", daemon=True).start()

    def __iter__(self) -> Iterator[bytes]:
        """Yield the commands in order, until the driver closes the connection. Raises OSError if the connection
        breaks.
        """
        while (command := self._commands.get()) is not None:
            if isinstance(command, Exception):
                raise command
            yield command
            # Free a large batch now, not when the next command arrives.
            command = None

    def _read(self, stream: BinaryIO) -> None:
        try:
            while head := stream.read(HEAD.size):
                (size,) = HEAD.unpack(head)
                message = stream.read(size & ~_NOTICE)
                if size & _NOTICE:
                    cancel(*pickle.loads(message))
                else:
                    self._commands.put(message)
                # Free the message before the thread blocks in the next read.
                del message
        except Exception as error:
            self._commands.put(error)
        self._commands.put(None)
