"""Messages between the driver and a reward process: JSON objects, each after its length.

Nothing that arrives is executed or unpickled, whoever wrote it.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

MAX_REPLY_BYTES = 64 << 10
"""A reply is three values or a shortened traceback."""

_LENGTH = struct.Struct("!I")
_PART_BYTES = 1 << 20

Patience = Callable[[], float]
"""Gives the seconds to wait before it is asked again; raises where there are none left. Without one, waits for ever."""


class FrameError(Exception):
    """What arrived is not a message of this protocol."""


class UnsendableError(Exception):
    """What is to be sent holds a value that JSON has not."""


def send(connection: socket.socket, message: dict[str, Any], patience: Patience | None = None) -> None:
    """Write a whole message.

    Raises UnsendableError, before anything is written, for what JSON cannot hold, OSError where nobody reads any more,
    and what `patience` raises.
    """
    try:
        payload = json.dumps(message, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsendableError(str(error)) from None
    rest = memoryview(_LENGTH.pack(len(payload)) + payload)
    while rest:
        if patience:
            connection.settimeout(patience())
        try:
            sent = connection.send(rest)
        except TimeoutError:
            continue
        rest = rest[sent:]


def receive(connection: socket.socket, max_bytes: int | None, patience: Patience | None = None) -> dict[str, Any]:
    """Read a whole message.

    Raises EOFError where the other side is gone, FrameError for a message above `max_bytes` or that is no JSON object,
    and what `patience` raises.
    """
    (size,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size, patience))
    if max_bytes is not None and size > max_bytes:
        raise FrameError(f"a message of {size} bytes; at most {max_bytes} are allowed")
    payload = _receive_exactly(connection, size, patience)
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError):
        raise FrameError(f"a message that is not JSON: {bytes(payload[:60])!r}") from None
    if not isinstance(message, dict):
        raise FrameError(f"a message that is no JSON object: {bytes(payload[:60])!r}")
    return message


def _receive_exactly(connection: socket.socket, size: int, patience: Patience | None) -> bytearray:
    received = bytearray()
    while len(received) < size:
        if patience:
            connection.settimeout(patience())
        try:
            part = connection.recv(min(size - len(received), _PART_BYTES))
        except TimeoutError:
            continue
        except ConnectionError:
            raise EOFError from None
        if not part:
            raise EOFError
        received += part
    return received
