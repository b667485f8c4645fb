"""Messages from the driver to a rank: commands, carried out one after the other, and notices, which reach it at once.

A rank that waits in a collective reads no command. So a thread reads for it: notices take effect there, and commands
wait for their turn.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any, BinaryIO

from megarl.platform.broken_bridges import break_off

HEAD = struct.Struct("<Q")
"""The head of a message: the length of its pickle in bytes."""

_NOTICE = 1 << 63
"""This bit of the head tells a notice from a command."""


def pack(content: Any) -> bytes:
    """A message: head and pickle."""
    body = pickle.dumps(content, protocol=5)
    return HEAD.pack(len(body)) + body


def pack_broken(name: str, reason: str) -> bytes:
    """The notice that a bridge is broken off."""
    body = pickle.dumps((name, reason), protocol=5)
    return HEAD.pack(_NOTICE | len(body)) + body


class Inbox:
    """The driver's messages to this rank: a thread lets notices take effect, the commands are iterated over."""

    def __init__(self, connected: socket.socket) -> None:
        self._commands: SimpleQueue[bytes | Exception | None] = SimpleQueue()
        # Never closed: closing it would wait for the thread, which reads until the driver closes its end.
        stream = connected.makefile("rb")
        Thread(target=self._read, args=(stream,), name="inbox", daemon=True).start()

    def __iter__(self) -> Iterator[bytes]:
        """The commands in their order, until the driver closes its end. Raises OSError where the connection breaks."""
        while (command := self._commands.get()) is not None:
            if isinstance(command, Exception):
                raise command
            yield command
            command = None  # a batch is not held until the next command has come

    def _read(self, stream: BinaryIO) -> None:
        try:
            while head := stream.read(HEAD.size):
                (size,) = HEAD.unpack(head)
                message = stream.read(size & ~_NOTICE)
                if size & _NOTICE:
                    break_off(*pickle.loads(message))
                else:
                    self._commands.put(message)
                del message
        except Exception as error:
            self._commands.put(error)
        self._commands.put(None)
