"""Handshake for a new connection: both ends prove that they know the key of this group's start.

Each end sends a random number and an HMAC of both numbers. Only then do they exchange one JSON message each. Nothing is
unpickled before. Later messages on the connection are neither encrypted nor signed: they are as safe as the network
between the nodes.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any

_NUMBER_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_LENGTH = struct.Struct("<I")
"""Head of a JSON message: its length in bytes."""
_MOST_BYTES = 1 << 20
"""Limit on a JSON message, so that a wrong length cannot exhaust memory."""


class StrangerError(Exception):
    """Error for a peer without the key, or one that disconnected during the handshake."""


async def admit(connected: socket.socket, key: bytes) -> dict[str, Any]:
    """Authenticate a process, on the driver's side, and return its first message.

    The socket must be non-blocking. Raises StrangerError, OSError or ValueError if the peer is not a process of the
    run.
    """
    loop = asyncio.get_running_loop()

    async def receive(count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = await loop.sock_recv(connected, count - len(data))
            if not more:
                raise StrangerError("the connection was closed during the handshake")
            data += more
        return data

    challenge = secrets.token_bytes(_NUMBER_BYTES)
    await loop.sock_sendall(connected, challenge)
    answer = await receive(_NUMBER_BYTES + _PROOF_BYTES)
    theirs, proof = answer[:_NUMBER_BYTES], answer[_NUMBER_BYTES:]
    # compare_digest takes constant time: its duration does not reveal how much of a forged proof is right.
    if not hmac.compare_digest(proof, _proof(key, b"process", challenge, theirs)):
        raise StrangerError("the peer does not know the secret key of this start")
    await loop.sock_sendall(connected, _proof(key, b"driver", challenge, theirs))
    return json.loads(await receive(_length(await receive(_LENGTH.size))))


def introduce(connected: socket.socket, key: bytes, message: dict[str, Any]) -> None:
    """Prove the key, on a process's side, check the driver's proof, and send the first message.

    Raises StrangerError or OSError if the other end is not the driver.
    """
    challenge, number = receive_exactly(connected, _NUMBER_BYTES), secrets.token_bytes(_NUMBER_BYTES)
    connected.sendall(number + _proof(key, b"process", challenge, number))
    if not hmac.compare_digest(receive_exactly(connected, _PROOF_BYTES), _proof(key, b"driver", challenge, number)):
        raise StrangerError("the server at the driver's address does not know the key of this start")
    send_json(connected, message)


def send_json(connected: socket.socket, message: dict[str, Any]) -> None:
    """Send a JSON message through a blocking socket."""
    data = json.dumps(message).encode()
    connected.sendall(_LENGTH.pack(len(data)) + data)


def receive_json(connected: socket.socket) -> dict[str, Any]:
    """Receive a JSON message through a blocking socket."""
    return json.loads(receive_exactly(connected, _length(receive_exactly(connected, _LENGTH.size))))


def receive_exactly(connected: socket.socket, count: int) -> bytes:
    """Receive `count` bytes from a blocking socket. Raise StrangerError if the connection ends before."""
    data = b""
    while len(data) < count:
        more = connected.recv(count - len(data))
        if not more:
            raise StrangerError("the connection was closed during the handshake")
        data += more
    return data


def _length(head: bytes) -> int:
    """Parse the head of a JSON message. Raise ValueError if the message is too long."""
    (count,) = _LENGTH.unpack(head)
    if count > _MOST_BYTES:
        raise ValueError(f"a message of {count} bytes exceeds the limit of {_MOST_BYTES}")
    return count


def _proof(key: bytes, who: bytes, challenge: bytes, number: bytes) -> bytes:
    """Return the HMAC-SHA256 of both random numbers under the key."""
    # The role `who` differs by direction, so that a stranger cannot return an end's own proof to it.
    return hmac.digest(key, who + challenge + number, hashlib.sha256)
