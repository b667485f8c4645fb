"""Messages between the driver, the agents of its nodes and the ranks.

A rank gets commands, executed in order, and notices, handled at once. A rank waiting in a collective reads no command.
So a thread reads all messages: it handles notices immediately, and queues commands for the main thread.

The driver sends batches to agents. A batch is one call on one node: parts, each a message with the processes that get
it. The agent returns the answers together once all have arrived, or a short time after the first one. So a rank that
fails or hangs does not hold up its neighbours' answers. Control messages to and from the agent itself are JSON.
"""

from __future__ import annotations

import json
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
BATCH = struct.Struct("<I")
"""Header of a batch: the number of its parts, or `CONTROL`, or `NOTICE`."""
PART = struct.Struct("<IQ")
"""Header of a batch's part: the number of its processes, and the bytes of its message.

The numbers of the processes follow as uint32, then the message.
"""
ANSWER = struct.Struct("<IQ")
"""Header of an answer: the number of its process, or `AGENT`, and the bytes of its message. The message follows."""
LENGTH = struct.Struct("<Q")
"""Header of a control message to an agent: its length in bytes."""
CONTROL = 0xFFFFFFFF
"""Number of parts that announces a control message: `LENGTH`, then JSON for the agent itself."""
NOTICE = 0xFFFFFFFE
"""Number of parts that announces one part without an answer. A rank reads it even while it executes a call."""
AGENT = 0xFFFFFFFF
"""Number of a process that announces a control message of the agent itself, in JSON."""


def pack(content: Any) -> bytes:
    """Return a command or an answer as bytes: a header, then a pickle."""
    body = pickle.dumps(content, protocol=5)
    return HEAD.pack(len(body)) + body


def pack_cancel(name: str, reason: str) -> bytes:
    """Return the notice cancelling the cross-world process group `name` on a rank."""
    body = pickle.dumps((name, reason), protocol=5)
    return HEAD.pack(_NOTICE | len(body)) + body


def pack_control(message: dict[str, Any]) -> bytes:
    """Return a control message to an agent as bytes."""
    text = json.dumps(message).encode()
    return BATCH.pack(CONTROL) + LENGTH.pack(len(text)) + text


def pack_event(message: dict[str, Any]) -> bytes:
    """Return a control message of an agent to the driver as bytes."""
    text = json.dumps(message).encode()
    return ANSWER.pack(AGENT, len(text)) + text


class Inbox:
    """Reader of the driver's messages to this rank. Iterating yields the commands in order.

    A notice cancels a process group. It needs no answer, so a thread handles it at once.
    """

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
