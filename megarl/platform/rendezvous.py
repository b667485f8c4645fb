"""The rendezvous of a run's ranks, and the secret key that they share.

On one machine they meet through a file in a folder that only their user can open. On several, rank 0 keeps a TCPStore
that listens on one address, and its keys begin with a text that only the run's ranks can work out. That keeps apart
runs that meet by mistake and whoever guesses at keys; it does not keep out those who can read the network or list the
keys of the store. Nothing that megarl reads from the store or from a collective is unpickled unless the run's key has
signed it (`signed`); libraries pickle some objects of their own in collectives, so the job's network must be trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class Rendezvous:
    """The run's key, and either a shared file or rank 0's address.

    `world` is a name that no other group of ranks of the run has or had: a replica that is started again has another.
    """

    key: bytes
    file: str | None = None
    host: str = ""
    port: int = 0
    world: str = ""


@dataclass(frozen=True)
class Meeting:
    """A bridge to come between ranks of several worlds, as those of one world are told of it."""

    rendezvous: Rendezvous
    name: str
    """Never used in the run before."""
    first: int
    """The world's first rank on the bridge; its others follow."""
    num_ranks: int
    """Of the bridge, all worlds together."""
    seconds: float
    """Within which all come."""


class _Settled:
    """This process's rendezvous, set once by `settle`."""

    rendezvous: Rendezvous | None = None
    listener: socket.socket | None = None
    store: Store | None = None


def listen(address: str) -> int:
    """On rank 0 of several machines: listen on the interface with this address; returns the port."""
    _Settled.listener = socket.create_server((address, 0), backlog=4096)
    return _Settled.listener.getsockname()[1]


def settle(rendezvous: Rendezvous) -> None:
    """Set this process's rendezvous."""
    _Settled.rendezvous = rendezvous


def derived_key(purpose: str) -> bytes:
    """A key of 32 bytes for one purpose, the same on all ranks of the run."""
    return hmac.digest(_settled().key, purpose.encode(), hashlib.sha256)


def world_name() -> str:
    """The name of this rank's world, which no other world of the run has or had."""
    return _settled().world


def _settled() -> Rendezvous:
    if _Settled.rendezvous is None:
        raise RuntimeError("this process is no rank of a run: nobody told it where ranks meet")
    return _Settled.rendezvous


def store_of(meeting: Meeting, timeout_seconds: float) -> Store:
    """A store for the ranks that meet; on several machines that which rank 0 of the meeting's rendezvous serves."""
    from torch.distributed import FileStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    timeout = timedelta(seconds=timeout_seconds)
    place = meeting.rendezvous
    if place.file is not None:
        shared: Store = FileStore(f"{place.file}_{meeting.name}", meeting.num_ranks)
    else:
        shared = TCPStore(place.host, place.port, is_master=False, timeout=timeout)
    shared.set_timeout(timeout)
    return PrefixStore(f"{derived_key('names in the store').hex()} {meeting.name}", shared)


def store(world_size: int, timeout_seconds: float) -> Store:
    """The store of `torch.distributed`, one per process; rank 0 of several machines serves it."""
    from torch.distributed import FileStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    if _Settled.store is None:
        secret = derived_key("names in the store").hex()
        meeting, listener = _Settled.rendezvous, _Settled.listener
        assert meeting is not None
        if meeting.file is not None:
            shared: Store = FileStore(meeting.file, world_size)
        else:
            shared = TCPStore(
                meeting.host,
                meeting.port,
                world_size,
                is_master=listener is not None,
                timeout=timedelta(seconds=timeout_seconds),
                # Without a socket of ours, torch would listen on all interfaces.
                master_listen_fd=None if listener is None else listener.detach(),
            )
        _Settled.store = PrefixStore(secret, shared)
    _Settled.store.set_timeout(timedelta(seconds=timeout_seconds))
    return _Settled.store
