"""Messages between the driver and a supervised process: JSON objects, each preceded by its length in bytes.

Received data is never executed or unpickled. This module imports only the standard library, because interpreters of
other libraries load it by its path.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_LENGTH = struct.Struct("!I")
_PART_BYTES = 1 << 20
"""Maximum bytes of one `recv`, which allocates its buffer before any data arrives."""

Patience = Callable[[], float]
"""Time limit of a message, as a function called before each wait for the connection.

It returns the longest time of this wait in seconds, and raises an error after the deadline. None: no deadline.
"""


MAX_ERROR_CHARACTERS = 4000

Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""Function of a child process carrying out a request (JSON object) and returning its answer."""
Start = Callable[[dict[str, Any]], tuple[dict[str, Any], Answer]]
"""Function of a child process called with the first message.

It returns an introduction, and the function answering requests. It raises RefusedError if the process cannot start.
"""


class RefusedError(Exception):
    """Raised if a child process cannot start as requested."""


class FrameError(Exception):
    """Raised if a received message violates the protocol."""


class UnsendableError(Exception):
    """Raised if a message contains a value that JSON cannot express."""


def send(connection: socket.socket, message: dict[str, Any], patience: Patience | None = None) -> None:
    """Send a message.

    Raises UnsendableError, before any byte is sent, for a value without a JSON form. Raises OSError if the other side
    is gone, and the errors of `patience`.
    """
    try:
        payload = json.dumps(message, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsendableError(str(error)) from None
    # send() in parts, not sendall(): a full buffer must not outlast the timeout policy.
    unsent = memoryview(_LENGTH.pack(len(payload)) + payload)
    while unsent:
        if patience:
            connection.settimeout(patience())
        try:
            sent = connection.send(unsent)
        except TimeoutError:
            continue
        unsent = unsent[sent:]


def receive(connection: socket.socket, max_bytes: int | None, patience: Patience | None = None) -> dict[str, Any]:
    """Receive a message.

    Raises EOFError if the other side is gone. Raises FrameError if the message exceeds `max_bytes` or is not a JSON
    object. Raises the errors of `patience`.
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
        raise FrameError(f"a message that is not a JSON object: {bytes(payload[:60])!r}")
    return message


def receive_answer(
    connection: socket.socket, number: int, max_bytes: int | None, patience: Patience | None = None
) -> dict[str, Any]:
    """Receive the answer with `id` equal to `number`, the newest request. Drop answers to earlier requests.

    Forks of the process may send late answers. Raises the errors of `receive`, and FrameError if an answer belongs to a
    request never made.
    """
    while True:
        answer = receive(connection, max_bytes, patience)
        answered = answer.get("id")
        if answered == number:
            return answer
        if not isinstance(answered, int) or answered > number:
            raise FrameError(f"a reply to request {answered!r:.60}, which was never made")


def within(seconds: float) -> Patience:
    """Return a time limit ending `seconds` from now. After that it raises TimeoutError."""
    deadline = time.monotonic() + seconds

    def remaining() -> float:
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            raise TimeoutError
        return seconds_left

    return remaining


def answer_requests(connection: socket.socket, start: Start) -> None:
    """Answer the driver's requests until it closes the connection: the main loop of a child process.

    The first message has settings. Its answer is `ready` with the introduction of `start`, or `refused` with the
    reason. Each later request has a number, the `id`, repeated in its answer.
    """
    with suppress(EOFError, OSError):
        try:
            introduction, answer = start(receive(connection, None))
        except RefusedError as error:
            send(connection, {"refused": str(error)[:MAX_ERROR_CHARACTERS]})
            return
        send(connection, {"ready": True, **introduction})
        process = os.getpid()
        while True:
            request = receive(connection, None)
            reply = answer(request)
            if os.getpid() != process:
                # The code of a user forked, and this is the child. The connection belongs to the parent.
                os._exit(0)
            try:
                send(connection, {"id": request["id"], **reply})
            except UnsendableError as error:
                send(connection, {"id": request["id"], "error": f"TypeError: its answer is not JSON: {error}"})


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
