"""How a process and the driver find out that both know the run's key, before either reads anything else of the other.

Each sends a random number and proves with an HMAC of both numbers that it knows the key. Only then do they exchange
one message each, in JSON: nothing is unpickled of somebody who has not proved the key. What follows on the connection
is not encrypted and not signed message by message: it is as safe as the network between the nodes.
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
_MOST_BYTES = 1 << 20


class StrangerError(Exception):
    """The other end of a connection does not know the run's key."""


async def admit(connected: socket.socket, key: bytes) -> dict[str, Any]:
    """At the driver: the first message of a process, once it has proved the key.

    The socket must not block. Raises StrangerError, OSError or ValueError for anything else than a process of the run.
    """
    loop = asyncio.get_running_loop()

    async def receive(count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = await loop.sock_recv(connected, count - len(data))
            if not more:
                raise StrangerError("the connection ended")
            data += more
        return data

    challenge = secrets.token_bytes(_NUMBER_BYTES)
    await loop.sock_sendall(connected, challenge)
    answer = await receive(_NUMBER_BYTES + _PROOF_BYTES)
    theirs, proof = answer[:_NUMBER_BYTES], answer[_NUMBER_BYTES:]
    if not hmac.compare_digest(proof, _proof(key, b"process", challenge, theirs)):
        raise StrangerError("it does not know the key")
    await loop.sock_sendall(connected, _proof(key, b"driver", challenge, theirs))
    return json.loads(await receive(_length(await receive(_LENGTH.size))))


def introduce(connected: socket.socket, key: bytes, message: dict[str, Any]) -> None:
    """In a process: prove the key to the driver, see it prove the key, and send the first message.

    Raises StrangerError or OSError if the other end is not the driver.
    """
    challenge, number = receive_exactly(connected, _NUMBER_BYTES), secrets.token_bytes(_NUMBER_BYTES)
    connected.sendall(number + _proof(key, b"process", challenge, number))
    if not hmac.compare_digest(receive_exactly(connected, _PROOF_BYTES), _proof(key, b"driver", challenge, number)):
        raise StrangerError("what answered at the driver's address does not know the run's key")
    send_json(connected, message)


def send_json(connected: socket.socket, message: dict[str, Any]) -> None:
    """Send a message of plain data through a socket that blocks."""
    data = json.dumps(message).encode()
    connected.sendall(_LENGTH.pack(len(data)) + data)


def receive_json(connected: socket.socket) -> dict[str, Any]:
    """Receive such a message through a socket that blocks."""
    return json.loads(receive_exactly(connected, _length(receive_exactly(connected, _LENGTH.size))))


def receive_exactly(connected: socket.socket, count: int) -> bytes:
    """So many bytes from a socket that blocks. Raises StrangerError if the connection ends before."""
    data = b""
    while len(data) < count:
        more = connected.recv(count - len(data))
        if not more:
            raise StrangerError("the connection ended")
        data += more
    return data


def _length(head: bytes) -> int:
    (count,) = _LENGTH.unpack(head)
    if count > _MOST_BYTES:
        raise ValueError(f"a message of {count} bytes, more than {_MOST_BYTES}")
    return count


def _proof(key: bytes, who: bytes, challenge: bytes, number: bytes) -> bytes:
    return hmac.digest(key, who + challenge + number, hashlib.sha256)
