"""Messages between the driver, its agents and the ranks.

A rank executes commands in order and handles notices at once. A rank in a collective reads no command. So a thread
reads all messages, and queues the commands for the main thread.

The driver sends an agent batches. A batch is one call on one node; each of its parts is a message with its receiving
processes. The agent returns all answers together, or those present a short time after the first. So a hanging rank does
not delay its neighbours' answers. Control messages to and from the agent itself are JSON.
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
"""Header of a message: the bytes of its pickle."""

_NOTICE = 1 << 63
"""Bit of the header that marks a notice."""
BATCH = struct.Struct("<I")
"""Header of a batch: its number of parts, or `CONTROL`, or `NOTICE`."""
PART = struct.Struct("<IQ")
"""Header of a part: its number of receiving processes, and the bytes of the message.

The processes' numbers follow as uint32, then the message.
"""
ANSWER = struct.Struct("<IQ")
"""Header of an answer: the process number, or `AGENT`, and the bytes of the message that follows."""
LENGTH = struct.Struct("<Q")
"""Header of a control message to an agent: its bytes."""
CONTROL = 0xFFFFFFFF
"""Value in place of a number of parts: a control message follows, `LENGTH` and then JSON."""
NOTICE = 0xFFFFFFFE
"""Value in place of a number of parts: one part without an answer follows. Ranks read it even during a call."""
AGENT = 0xFFFFFFFF
"""Value in place of a process number: a control message of the agent follows, in JSON."""


def pack(content: Any) -> bytes:
    body = pickle.dumps(content, protocol=5)
    return HEAD.pack(len(body)) + body


def pack_cancel(name: str, reason: str) -> bytes:
    """Encode the notice that cancels a cross-world process group."""
    body = pickle.dumps((name, reason), protocol=5)
    return HEAD.pack(_NOTICE | len(body)) + body


def pack_control(message: dict[str, Any]) -> bytes:
    text = json.dumps(message).encode()
    return BATCH.pack(CONTROL) + LENGTH.pack(len(text)) + text


def pack_event(message: dict[str, Any]) -> bytes:
    text = json.dumps(message).encode()
    return ANSWER.pack(AGENT, len(text)) + text


class Inbox:
    """The driver's messages to this rank. Iterating yields commands in order.

    A thread handles notices at once. A notice cancels a process group and has no answer.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._commands: SimpleQueue[bytes | Exception | None] = SimpleQueue()
        # Never closed: closing would wait for the thread, and the thread reads until the driver disconnects.
        stream = connected.makefile("rb")
        Thread(target=self._read_commands, args=(stream,), name="inbox", daemon=True).start()

    def __iter__(self) -> Iterator[bytes]:
        """Yield commands until the driver closes the connection. Raises OSError if it breaks."""
        while (command := self._commands.get()) is not None:
            if isinstance(command, Exception):
                raise command
            yield command
            # Free a large batch now, not when the next command arrives.
            command = None

    def _read_commands(self, stream: BinaryIO) -> None:
        """Queue the commands of the driver until the connection ends. Execute cancellations at once, in this thread."""
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
