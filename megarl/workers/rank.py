"""A worker group's other end: the process of one rank, and the messages between the two.

A message is one pickle whose large buffers (numpy arrays) follow it unpickled, so that none is copied on its way.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from multiprocessing.connection import Client
from typing import Any

from megarl.types import MegarlError

Buffer = bytes | bytearray | memoryview

_HEAD = struct.Struct("<QQ")  # bytes of the pickle, number of buffers behind it
_IN_PLACE_BYTES = 65536
_PR_SET_PDEATHSIG = 1
_ECHOES = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL")


def pack(content: Any) -> list[Buffer]:
    """The pieces of a message, to be sent one after the other."""
    buffers: list[memoryview] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < _IN_PLACE_BYTES:
            return True
        buffers.append(raw)
        return False

    body = pickle.dumps(content, protocol=5, buffer_callback=take)
    sizes = struct.pack(f"<{len(buffers)}Q", *(buffer.nbytes for buffer in buffers))
    return [_HEAD.pack(len(body), len(buffers)) + sizes + body, *buffers]


def read_message() -> Generator[bytearray, None, tuple[bytearray, list[bytearray]]]:
    """Yield buffers to be filled from the socket one after the other; return the pickle and its buffers."""
    head = bytearray(_HEAD.size)
    yield head
    num_bytes, num_buffers = _HEAD.unpack(head)
    body = bytearray(8 * num_buffers + num_bytes)
    yield body
    buffers = [bytearray(size) for size in struct.unpack_from(f"<{num_buffers}Q", body)]
    yield from buffers
    return body[8 * num_buffers :] if num_buffers else body, buffers


def unpack(body: bytearray, buffers: Sequence[bytearray]) -> Any:
    return pickle.loads(body, buffers=buffers)


def _send(sock: socket.socket, pieces: Sequence[Buffer]) -> None:
    for piece in pieces:
        sock.sendall(piece)


def _received_messages(sock: socket.socket) -> Iterator[tuple[bytearray, list[bytearray]]]:
    """Messages until the driver closes its end."""
    while True:
        reader = read_message()
        wanted = next(reader)
        while True:
            view = memoryview(wanted)
            while view:
                received = sock.recv_into(view)
                if not received:
                    return
                view = view[received:]
            try:
                wanted = next(reader)
            except StopIteration as message:
                yield message.value
                break


def _is_echo(error: BaseException | None) -> bool:
    """Whether the error, or one that led to it, is a collective that another rank broke."""
    while error is not None:
        names = {f"{c.__module__}.{c.__name__}" for c in type(error).__mro__}
        told = isinstance(error, RuntimeError) and any(word in str(error) for word in _ECHOES)
        if told or isinstance(error, ConnectionError) or "torch.distributed.DistError" in names:
            return True
        error = error.__cause__ or error.__context__
    return False


def _report(error: Exception) -> dict[str, Any]:
    """What the driver needs to know of an exception; plain data, for its class may not unpickle there."""
    named = next((c.__name__ for c in type(error).__mro__ if c.__module__ == MegarlError.__module__), None)
    return {
        "class": type(error).__qualname__,
        "megarl_class": named,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "echo": _is_echo(error),
        "time": time.time(),
    }


def _construct(path: Sequence[str], worker: str, kwargs: Mapping[str, Any]) -> Any:
    sys.path[:] = path
    module, _, name = worker.partition(":")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return getattr(importlib.import_module(module), name)(rank=rank, world_size=world_size, **kwargs)


def _answer(sock: socket.socket, worker: Any, body: bytearray, buffers: list[bytearray]) -> Any:
    """Execute one command and send what it returns or raises; returns the worker."""
    try:
        method, args, kwargs = unpack(body, buffers)
        if method == "__init__":
            worker, result = _construct(*args, **kwargs), None
        else:
            result = getattr(worker, method)(*args, **kwargs)
        answer = pack((True, result))
    except Exception as error:
        answer = pack((False, _report(error)))
    _send(sock, answer)
    return worker


def _serve(sock: socket.socket) -> None:
    """Answer commands until the driver closes its end; then call the worker's `close`, if it has one."""
    worker: Any = None
    for message in _received_messages(sock):
        worker = _answer(sock, worker, *message)
    if hasattr(worker, "close"):
        worker.close()


def _die_with(driver: int) -> None:
    """Have the kernel kill this process when the driver dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:
        raise SystemExit("the driver is gone")


def main() -> None:
    """Serve the rank named by `RANK`: arguments are the socket's name and the driver's process id, the key is stdin."""
    name, driver = sys.argv[1], int(sys.argv[2])
    _die_with(driver)
    faulthandler.enable()
    key = sys.stdin.buffer.read()
    with Client("\0" + name, family="AF_UNIX", authkey=key) as connection:
        sock = socket.socket(fileno=os.dup(connection.fileno()))
    with sock:
        _send(sock, pack((int(os.environ["RANK"]),)))
        _serve(sock)


if __name__ == "__main__":
    main()
