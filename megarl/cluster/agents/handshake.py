"""Authentication of connections between a run's processes, by a secret key.

Each end sends a random number and an HMAC of both numbers, then one JSON message. Nothing is unpickled before. Later
messages are neither encrypted nor signed: they are as safe as the network between the nodes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

_NUMBER_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_LENGTH = struct.Struct("<I")
"""Header of a JSON message: its bytes."""
_MOST_BYTES = 1 << 20
"""Maximum bytes of a JSON message, so a wrong length cannot exhaust memory."""


STRANGERS = 64
"""Maximum connections without proof of the key, beyond the expected number. A further connection replaces the
oldest.
"""
_INTRODUCTION_SECONDS = 10
"""Maximum seconds of a handshake."""

_SILENT_SECONDS = 30
"""Seconds without an answer to keepalive probes, for example after a power loss. Then the connection ends."""
_UNREAD_SECONDS = 120
"""Seconds for a peer to receive the data sent. Then the connection ends."""

Peer = TypeVar("Peer")


class StrangerError(Exception):
    """Raised for a peer that does not know the key, or disconnects during the handshake."""


async def accept_peers_with_key(
    peers: dict[Peer, socket.socket],
    server: socket.socket,
    key: bytes,
    num_peers: int,
    parse_introduction: Callable[[dict[str, Any]], Peer],
) -> None:
    """Accept connections until `num_peers` processes have proved the key, and store them in `peers`.

    `parse_introduction` returns the key in `peers` for a process's first message. It raises TypeError or ValueError for
    an invalid one. Handshakes run concurrently, so a peer without the key causes no delay. `server` and the accepted
    sockets are non-blocking. Raises OSError if connections cannot be accepted.
    """
    loop = asyncio.get_running_loop()
    all_accepted: asyncio.Future[None] = loop.create_future()
    greeting_tasks: dict[asyncio.Task[None], None] = {}
    """Handshakes in progress, oldest first."""

    async def admit_peer(connected: socket.socket) -> None:
        connected.setblocking(False)
        # Commands and answers are often short: Nagle's algorithm would delay them.
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            introduction = await asyncio.wait_for(authenticate_peer(connected, key), _INTRODUCTION_SECONDS)
            peers[parse_introduction(introduction)] = connected
        except (StrangerError, OSError, ValueError, TypeError, TimeoutError):
            connected.close()
        except asyncio.CancelledError:
            connected.close()
            raise
        if len(peers) == num_peers and not all_accepted.done():
            all_accepted.set_result(None)

    async def accept_peers() -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                connected, _ = await loop.sock_accept(server)
                # Silent strangers must not exhaust this process's file descriptors, nor displace the expected
                # processes.
                if len(greeting_tasks) >= num_peers + STRANGERS:
                    oldest = next(iter(greeting_tasks))
                    del greeting_tasks[oldest]
                    oldest.cancel()
                greeting_task = group.create_task(admit_peer(connected))
                greeting_tasks[greeting_task] = None
                greeting_task.add_done_callback(lambda task: greeting_tasks.pop(task, None))

    accept_task = asyncio.create_task(accept_peers())
    try:
        await asyncio.wait([accept_task, all_accepted], return_when=asyncio.FIRST_COMPLETED)
    finally:
        accept_task.cancel()
        await asyncio.wait([accept_task])
    if not all_accepted.done():
        # Too few have connected, so accepting failed: raise its error.
        accept_task.result()


async def authenticate_peer(connected: socket.socket, key: bytes) -> dict[str, Any]:
    """Authenticate a connecting process on the driver's side, and return its first message.

    The socket must be non-blocking. Raises StrangerError, OSError or ValueError for a process without the key.
    """
    loop = asyncio.get_running_loop()

    async def receive(num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            data_part = await loop.sock_recv(connected, num_bytes - len(data))
            if not data_part:
                raise StrangerError("the connection was closed during the handshake")
            data += data_part
        return data

    challenge = secrets.token_bytes(_NUMBER_BYTES)
    await loop.sock_sendall(connected, challenge)
    answer = await receive(_NUMBER_BYTES + _PROOF_BYTES)
    peer_number, proof = answer[:_NUMBER_BYTES], answer[_NUMBER_BYTES:]
    # compare_digest takes constant time: its duration does not reveal how much of a forged proof is right.
    if not hmac.compare_digest(proof, _make_proof(key, b"process", challenge, peer_number)):
        raise StrangerError(
            "the connecting process does not know this run's secret key, so it is not one of the run's processes"
        )
    await loop.sock_sendall(connected, _make_proof(key, b"driver", challenge, peer_number))
    return json.loads(await receive(_read_length(await receive(_LENGTH.size))))


def introduce(connected: socket.socket, key: bytes, message: dict[str, Any]) -> None:
    """Authenticate to the driver: prove the key, check the driver's proof, then send `message`.

    Raises StrangerError or OSError if the other end is not the driver.
    """
    challenge, peer_number = receive_exactly(connected, _NUMBER_BYTES), secrets.token_bytes(_NUMBER_BYTES)
    connected.sendall(peer_number + _make_proof(key, b"process", challenge, peer_number))
    if not hmac.compare_digest(
        receive_exactly(connected, _PROOF_BYTES), _make_proof(key, b"driver", challenge, peer_number)
    ):
        raise StrangerError(
            "the server at the driver's address does not know this run's secret key, so it is not this run's driver"
        )
    connected.sendall(pack_json(message))


def enable_keepalive(connected: socket.socket) -> None:
    """Turn on TCP keepalive, so the kernel closes the connection after 30 s of silence.

    The peer's kernel answers the probes, so a busy process does not count as silent.
    """
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _SILENT_SECONDS // 2),
        (socket.TCP_KEEPINTVL, _SILENT_SECONDS // 6),
        (socket.TCP_KEEPCNT, 3),
        # Limit for data that the node does not acknowledge, or that a stopped agent does not read. Linux's is 15
        # minutes.
        (socket.TCP_USER_TIMEOUT, 1000 * _UNREAD_SECONDS),
    ):
        with suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


def pack_json(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def receive_json(connected: socket.socket) -> dict[str, Any]:
    return json.loads(receive_exactly(connected, _read_length(receive_exactly(connected, _LENGTH.size))))


def receive_exactly(connected: socket.socket, count: int) -> bytes:
    """Receive `count` bytes from a blocking socket. Raises StrangerError if the connection ends earlier."""
    data = b""
    while len(data) < count:
        data_part = connected.recv(count - len(data))
        if not data_part:
            raise StrangerError("the connection was closed during the handshake")
        data += data_part
    return data


def _read_length(head: bytes) -> int:
    (count,) = _LENGTH.unpack(head)
    if count > _MOST_BYTES:
        raise ValueError(f"a handshake message of {count} bytes exceeds the limit of {_MOST_BYTES} bytes")
    return count


def _make_proof(key: bytes, role: bytes, challenge: bytes, peer_number: bytes) -> bytes:
    # With one role for both directions, a stranger could send an end its own proof back.
    return hmac.digest(key, role + challenge + peer_number, hashlib.sha256)
