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
HEADER_BYTES = _LENGTH.size
"""Bytes of the length that precedes a message."""
_PART_BYTES = 1 << 20
"""Maximum bytes of one `recv`. It allocates its buffer before any data arrives."""

Patience = Callable[[], float]
"""Time limit of a message, as a function called before each wait for the connection.

It returns the longest time of this wait in seconds, and raises an error after the deadline. None: no deadline.
"""


MAX_ERROR_CHARACTERS = 4000

Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""Function of a child process carrying out a request (JSON object) and returning its answer."""
Start = Callable[[dict[str, Any]], tuple[dict[str, Any], Answer]]
"""Function of a child process, called with the first message.

It returns an introduction, and the function answering requests. It raises RefusedError if the process cannot start.
"""


class RefusedError(Exception):
    """Raised if a child process cannot start as requested."""


class FrameError(Exception):
    """Raised if a received message violates the protocol."""


class UnsendableError(Exception):
    """Raised if a message contains a value that JSON cannot express."""


def encode_message(message: dict[str, Any]) -> bytes:
    """Return a message preceded by its length. Raises UnsendableError for a value without a JSON form."""
    try:
        payload = json.dumps(message, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsendableError(str(error)) from None
    return _LENGTH.pack(len(payload)) + payload


def send(connection: socket.socket, message: dict[str, Any], patience: Patience | None = None) -> None:
    """Send a message.

    Raises UnsendableError, before any byte is sent, for a value without a JSON form. Raises OSError if the other side
    has closed the connection, and the errors of `patience`.
    """
    # send() in parts, not sendall(): with a full buffer, sendall() would exceed the time limit of `patience`.
    unsent = memoryview(encode_message(message))
    while unsent:
        if patience:
            connection.settimeout(patience())
        try:
            num_sent = connection.send(unsent)
        except TimeoutError:
            continue
        unsent = unsent[num_sent:]


def receive(connection: socket.socket, max_bytes: int | None, patience: Patience | None = None) -> dict[str, Any]:
    """Receive a message.

    Raises EOFError if the other side has closed the connection. Raises FrameError if the message exceeds `max_bytes` or
    is not a JSON object. Raises the errors of `patience`.
    """
    size = payload_size(_receive_exactly(connection, HEADER_BYTES, patience), max_bytes)
    return decode_message(_receive_exactly(connection, size, patience))


def payload_size(header: bytes | bytearray, max_bytes: int | None) -> int:
    """Return the number of bytes after a message's header. Raises FrameError if it exceeds `max_bytes`."""
    (size,) = _LENGTH.unpack(header)
    if max_bytes is not None and size > max_bytes:
        raise FrameError(f"a message of {size} bytes; at most {max_bytes} are allowed")
    return size


def decode_message(payload: bytes | bytearray) -> dict[str, Any]:
    """Return the message in a payload. Raises FrameError if it is not a JSON object."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError):
        raise FrameError(f"a message that is not JSON: {bytes(payload[:60])!r}") from None
    if not isinstance(message, dict):
        raise FrameError(f"a message that is not a JSON object: {bytes(payload[:60])!r}")
    return message


def receive_answer(
    connection: socket.socket, request_number: int, max_bytes: int | None, patience: Patience | None = None
) -> dict[str, Any]:
    """Receive the answer to request `request_number`, the newest one. Late answers to earlier requests are dropped.

    Raises the errors of `receive`, and FrameError for an answer to a request never made.
    """
    while True:
        answer = receive(connection, max_bytes, patience)
        if answered_request(answer, request_number) == request_number:
            return answer


def answered_request(answer: dict[str, Any], newest: int) -> int:
    """Return the number of the request that an answer belongs to. `newest` is the newest request's number.

    Raises FrameError for an answer to a request never made.
    """
    request_number = answer.get("id")
    if not isinstance(request_number, int) or request_number > newest:
        raise FrameError(f"a reply to request {request_number!r:.60}, which was never made")
    return request_number


def time_limit(seconds: float) -> Patience:
    """Return a function that returns the seconds left until `seconds` from now, and raises TimeoutError afterwards."""
    deadline = time.monotonic() + seconds

    def remaining_seconds() -> float:
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            raise TimeoutError
        return seconds_left

    return remaining_seconds


def answer_requests(connection: socket.socket, start: Start) -> None:
    """Answer the driver's requests until it closes the connection: the main loop of a child process.

    Each request has a number, the `id`. Its answer has the same `id`.
    """
    with suppress(EOFError, OSError):
        answer = introduce(connection, start)
        while answer is not None:
            answer_request(connection, receive(connection, None), answer)


def introduce(connection: socket.socket, start: Start) -> Answer | None:
    """Receive the driver's first message, call `start` with it, and send that this process is ready.

    Returns the function answering requests; None: `start` refused, and the reason was sent.
    """
    try:
        introduction, answer = start(receive(connection, None))
    except RefusedError as error:
        send(connection, {"refused": str(error)[:MAX_ERROR_CHARACTERS]})
        return None
    send(connection, {"ready": True, **introduction})
    return answer


def answer_request(connection: socket.socket, request: dict[str, Any], answer: Answer) -> None:
    """Call `answer` with a request, and send the result with the request's id."""
    server_pid = os.getpid()
    answer_fields = answer(request)
    if os.getpid() != server_pid:
        # This is a child forked by user code. The connection belongs to its parent.
        os._exit(0)
    try:
        send(connection, {"id": request["id"], **answer_fields})
    except UnsendableError as error:
        send(connection, {"id": request["id"], "error": f"TypeError: its answer is not JSON: {error}"})


def _receive_exactly(connection: socket.socket, size: int, patience: Patience | None) -> bytearray:
    """Receive `size` bytes. Raises EOFError at the end, and the errors of `patience`."""
    payload = bytearray()
    while len(payload) < size:
        if patience:
            connection.settimeout(patience())
        try:
            part = connection.recv(min(size - len(payload), _PART_BYTES))
        except TimeoutError:
            continue
        except ConnectionError:
            raise EOFError from None
        if not part:
            raise EOFError
        payload += part
    return payload
