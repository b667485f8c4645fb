"""Relay of connections from a container to the policy's endpoint. The container can reach nothing else."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

_PART_BYTES = 64 << 10
# A connection takes two threads of the keeper, and a program may open any number of connections.
_MAX_CONNECTIONS = 64
"""Maximum connections of one container at once. Further connections wait."""
_RETRY_SECONDS = 0.25
"""Seconds between two tries to connect to an absent endpoint."""


class Relay:
    """Accepts connections on `listener`, in the network of a container, and passes their bytes to `address`.

    A connection waits up to `patience` seconds for an absent endpoint.
    """

    def __init__(self, listener: socket.socket, address: tuple[str, int], patience: float = 0.0) -> None:
        self._listener, self._address, self._patience = listener, address, patience
        self._free_connections = threading.Semaphore(_MAX_CONNECTIONS)
        threading.Thread(target=self._accept_clients, daemon=True).start()

    def _accept_clients(self) -> None:
        while True:
            # The kernel's queue holds further clients.
            self._free_connections.acquire()
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._relay_client, args=(client,), daemon=True).start()

    def _relay_client(self, client: socket.socket) -> None:
        """Copy bytes between a client and the endpoint until the endpoint closes."""
        try:
            with client, suppress(OSError), self._reach_endpoint() as server:
                sending = threading.Thread(target=_copy_stream, args=(client, server), daemon=True)
                sending.start()
                _copy_stream(server, client)
                # The endpoint has answered and closed, but the client may keep its own side open.
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RD)
                sending.join()
        finally:
            self._free_connections.release()

    def _reach_endpoint(self) -> socket.socket:
        """Connect to the endpoint. Raises OSError if it is still absent after `patience` seconds."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return socket.create_connection(self._address)
            except ConnectionRefusedError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_SECONDS)


def _copy_stream(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while part := source.recv(_PART_BYTES):
            target.sendall(part)
    # End only this direction: the other may still carry an answer.
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
