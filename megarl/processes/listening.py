"""Addresses of this machine's HTTP servers."""

from __future__ import annotations

import socket


def listen_fault(host: str, port: int) -> str | None:
    """Return why a server could not listen at an address of this machine; None if it could.

    The check leaves the address free. Another process may still take it before the server starts.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, socket_type, protocol, _, address in addresses:
            with socket.socket(family, socket_type, protocol) as probe:
                # As asyncio's servers do: a port with recently closed connections must not count as taken.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                # Only `listen` fails if another socket with the same option is bound but does not listen yet.
                probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


def taken_text(host: str, port: int, reason: str) -> str:
    """Return the end of an error message: what is wrong with an address, and what to do."""
    return f"cannot listen on {host}, port {port} ({reason}); give another port, 0 takes any that is free"


def host_in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
