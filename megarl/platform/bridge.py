"""Bridges: process groups over ranks of several worlds of `torch.distributed`, made anew when a world comes or goes.

A bridge is no subgroup of a world: its ranks are numbered by themselves (`rank_in`, `ProcessGroup.size`), and functions
of torch that look a group up in the world's tables do not take it.

Over gloo a rank that ends fails what the others wait for, and they can leave. Not so over NCCL: the host waits in
`cuda.synchronize` for kernels that nobody ends, and torch's watchdog (TORCH_NCCL_ASYNC_ERROR_HANDLING, by default 3)
ends the process that sees a failed connection or the group's timeout. Who makes it only abort (2) must see to it that
all ranks agree afterwards that every exchange arrived: an aborted one looks like one that is done.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store  # pyright: ignore[reportPrivateImportUsage]

from megarl.platform import device, rendezvous
from megarl.platform.left_collective import PeerGoneError
from megarl.platform.rendezvous import Meeting

_LOOK_SECONDS = 0.01

_names: WeakKeyDictionary[ProcessGroup, str] = WeakKeyDictionary()


def open_bridge(meeting: Meeting, own_rank: int, timeout_seconds: float) -> ProcessGroup:
    """The process group over the ranks that meet: gloo, and NCCL for tensors of a GPU. A collective of theirs.

    `own_rank` is this one's in its world. Raises PeerGoneError, with the ranks that are missing, where not all come in
    time.
    """
    timeout = timedelta(seconds=timeout_seconds)
    store = rendezvous.store_of(meeting, timeout_seconds)
    rank, num_ranks = meeting.first + own_rank, meeting.num_ranks
    _await_all(store, rank, num_ranks, meeting.seconds)
    group = ProcessGroup(store, rank, num_ranks)
    kinds = ProcessGroup.BackendType
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, num_ranks, timeout)
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if device.current().type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, num_ranks, options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    _names[group] = meeting.name
    return group


def _await_all(store: Store, rank: int, num_ranks: int, seconds: float) -> None:
    """Wait until all ranks are at the store; one that ended meanwhile would be waited for as long as a collective."""
    store.set(f"here {rank}", "")
    everyone = [f"here {other}" for other in range(num_ranks)]
    last_look = time.monotonic() + seconds
    while not store.check(everyone):
        if time.monotonic() > last_look:
            missing = [other for other, name in enumerate(everyone) if not store.check([name])]
            raise PeerGoneError(f"ranks {missing} of a bridge did not come to it within {seconds:g} s", missing)
        time.sleep(_LOOK_SECONDS)


def close_bridge(group: ProcessGroup | None) -> None:
    """Leave a bridge, if any, whether or not the other ranks can be reached: those that wait for this one fail."""
    if group is None:
        return
    _names.pop(group, None)
    # What is under way with ranks that are gone shall not be waited for.
    with suppress(RuntimeError):
        group.abort()


def name_of(group: ProcessGroup | None) -> str:
    """The name of a bridge; empty for a group of this rank's own world."""
    return _names.get(group, "") if group is not None else ""


def rank_in(group: ProcessGroup | None) -> int:
    """This process's rank in a group; None: in its world."""
    return dist.get_rank() if group is None else group.rank()
