"""Rendezvous: how the ranks of a run connect to each other, and the secret key they share.

On one machine the ranks meet through a file in a folder private to their user. On several machines rank 0 serves a
TCPStore on one address. Its keys have a secret prefix, derived from the run's key: it separates runs that meet by
mistake, and strangers cannot guess it. It does not stop an attacker who can read the network or list the keys.

megarl unpickles data from the store or a collective only if signed with the run's key (`signed`). Other libraries
pickle their own objects in collectives, so the job's network must be trusted.
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
    """The run's secret key, and the ranks' meeting place: a shared file (one machine) or rank 0's address (several).

    `world`: name of the `torch.distributed` world that this rank joins. Each world of a run has a new name.
    """

    key: bytes
    file: str | None = None
    host: str = ""
    port: int = 0
    world: str = ""


@dataclass(frozen=True)
class Meeting:
    """Instructions for the ranks of one torch world to join a new cross-world process group."""

    rendezvous: Rendezvous
    name: str
    """Name of the group, unique in the run."""
    first_rank: int
    """Rank r of this torch world has number `first_rank` + r in the group."""
    num_ranks: int
    """Ranks of the group, over all torch worlds."""
    seconds: float
    """Seconds within which all ranks must arrive."""


class _ProcessState:
    """This process's rendezvous, rank 0's listening socket, and the torch store."""

    rendezvous: Rendezvous | None = None
    listener: socket.socket | None = None
    store: Store | None = None


def listen(address: str) -> int:
    """Listen on the interface with this address, and return the port. Called by rank 0 of a run on several machines."""
    # Port 0 lets the kernel choose. The backlog is for thousands of ranks that connect at once.
    _ProcessState.listener = socket.create_server((address, 0), backlog=4096)
    return _ProcessState.listener.getsockname()[1]


def set_rendezvous(rendezvous: Rendezvous) -> None:
    """Set this process's rendezvous. A store of an earlier world is dropped."""
    _ProcessState.rendezvous, _ProcessState.store = rendezvous, None


def derived_key(purpose: str) -> bytes:
    """Return a secret key of 32 bytes for one purpose, equal on all ranks of the run."""
    return hmac.digest(_require_rendezvous().key, purpose.encode(), hashlib.sha256)


def world_name() -> str:
    return _require_rendezvous().world


def _require_rendezvous() -> Rendezvous:
    if _ProcessState.rendezvous is None:
        raise RuntimeError("this process is not a rank of a run: `set_rendezvous` was not called with a rendezvous")
    return _ProcessState.rendezvous


def store_of(meeting: Meeting, timeout_seconds: float) -> Store:
    """Return a torch store for the ranks of a cross-world group. On several machines, rank 0 of the run serves it."""
    from torch.distributed import FileStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    timeout = timedelta(seconds=timeout_seconds)
    rendezvous = meeting.rendezvous
    if rendezvous.file is not None:
        shared: Store = FileStore(f"{rendezvous.file}_{meeting.name}", meeting.num_ranks)
    else:
        shared = TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
    shared.set_timeout(timeout)
    # Only ranks of this run know the secret, so a run that connects by mistake uses other keys.
    return PrefixStore(f"{derived_key('names in the store').hex()} {meeting.name}", shared)


def store(world_size: int, timeout_seconds: float) -> Store:
    """Return this process's store for `torch.distributed`. On several machines, rank 0 serves it."""
    from torch.distributed import FileStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    if _ProcessState.store is None:
        secret = derived_key("names in the store").hex()
        rendezvous, listener = _ProcessState.rendezvous, _ProcessState.listener
        assert rendezvous is not None
        if rendezvous.file is not None:
            shared: Store = FileStore(rendezvous.file, world_size)
        else:
            shared = TCPStore(
                rendezvous.host,
                rendezvous.port,
                world_size,
                is_master=listener is not None,
                timeout=timedelta(seconds=timeout_seconds),
                # Without this socket torch 2.13 would listen on all interfaces.
                master_listen_fd=None if listener is None else listener.detach(),
            )
        _ProcessState.store = PrefixStore(secret, shared)
    _ProcessState.store.set_timeout(timedelta(seconds=timeout_seconds))
    return _ProcessState.store
