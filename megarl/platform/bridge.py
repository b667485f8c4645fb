"""Bridges: process groups over ranks of several worlds of `torch.distributed`, made anew when a world comes or goes.

A bridge is no subgroup of a world: its ranks are numbered by themselves (`rank_in`, `ProcessGroup.size`), and functions
of torch that look a group up in the world's tables do not take it.

Nobody waits on a bridge for longer than the driver lets it (`broken_bridges`). Over gloo a rank that ends mostly fails
what the others wait for, but not where it ends in the middle of a message: then neither the end of the connection nor
`abort` wakes them, and the group's destructor waits as long as they do. So exchanges are waited for in short turns, and
a group with an exchange that cannot end is kept until torch gives it up.

Over NCCL the host waits in `cuda.synchronize` for kernels that nobody ends, until `abort` ends them; torch's watchdog
(TORCH_NCCL_ASYNC_ERROR_HANDLING, by default 3) ends the process that sees a failed connection or the group's timeout
before. An aborted exchange looks like one that is done, so who has synchronised must `check` the bridge; and that all
ranks agree afterwards is the driver's affair, which tells all of them and makes another bridge. This was written by
torch's sources and has not run on GPUs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, Store  # pyright: ignore[reportPrivateImportUsage]

from megarl.platform import broken_bridges, device, rendezvous
from megarl.platform.left_collective import PeerGoneError
from megarl.platform.rendezvous import Meeting

Met = TypeVar("Met")

_LOOK_SECONDS = 0.01
_NAP_SECONDS = 1e-4
_TURN = timedelta(seconds=0.2)
"""An exchange is waited for so long before the next look whether the bridge holds."""


@dataclass(slots=True)
class _Bridge:
    """A bridge that this rank is on."""

    name: str
    exchanges: list[dist.Work] = field(default_factory=list)
    """Those that are under way."""


_bridges: WeakKeyDictionary[ProcessGroup, _Bridge] = WeakKeyDictionary()
_given_up: list[tuple[ProcessGroup, list[dist.Work]]] = []
"""Groups that were left, with exchanges that have not ended: their destructor would wait for these."""


def open_bridge(meeting: Meeting, own_rank: int, timeout_seconds: float) -> ProcessGroup:
    """The process group over the ranks that meet: gloo, and NCCL for tensors of a GPU. A collective of theirs.

    `own_rank` is this one's in its world. Raises PeerGoneError, with the ranks that are missing, where not all come in
    time, and where the driver breaks the bridge off.
    """
    _forget_what_has_ended()
    timeout = timedelta(seconds=timeout_seconds)
    rank, num_ranks = meeting.first + own_rank, meeting.num_ranks

    def meet() -> tuple[Store, dist.ProcessGroupGloo]:
        store = rendezvous.store_of(meeting, timeout_seconds)
        _await_all(store, rank, num_ranks, meeting)
        return store, dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, num_ranks, timeout)

    store, gloo = _unless_broken(meeting.name, meet)
    group = ProcessGroup(store, rank, num_ranks)
    kinds = ProcessGroup.BackendType
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    _bridges[group] = _Bridge(meeting.name)
    if device.current().type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, num_ranks, options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        # In a thread of its own: the driver's further messages shall not wait for NCCL.
        broken_bridges.on_broken(
            meeting.name, lambda: threading.Thread(target=_abort, args=(nccl,), daemon=True).start()
        )
    return group


def _unless_broken(name: str, meet: Callable[[], Met]) -> Met:
    """Call `meet` in a thread, which is left to itself where the bridge is broken off meanwhile; its result or error.

    Connecting waits within torch for whoever has ended since it came.
    """
    met: list[Met] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            met.append(meet())
        except Exception as error:
            failed.append(error)

    meeting = threading.Thread(target=run, name=f"meeting at {name}", daemon=True)
    meeting.start()
    while meeting.is_alive():
        _check(name)
        time.sleep(_LOOK_SECONDS)
    if failed:
        raise failed[0]
    return met[0]


def _await_all(store: Store, rank: int, num_ranks: int, meeting: Meeting) -> None:
    """Wait until all ranks are at the store; one that ended meanwhile would be waited for as long as a collective."""
    store.set(f"here {rank}", "")
    everyone = [f"here {other}" for other in range(num_ranks)]
    last_look = time.monotonic() + meeting.seconds
    while not store.check(everyone):
        _check(meeting.name)
        if time.monotonic() > last_look:
            missing = [other for other, name in enumerate(everyone) if not store.check([name])]
            raise PeerGoneError(f"ranks {missing} of a bridge did not come to it within {meeting.seconds:g} s", missing)
        time.sleep(_LOOK_SECONDS)


def begun(work: dist.Work | None, group: ProcessGroup | None) -> dist.Work:
    """An exchange (`async_op=True`) over a group, to be waited for by `wait`."""
    assert work is not None
    if group is not None and (bridge := _bridges.get(group)) is not None:
        bridge.exchanges.append(work)
    return work


def wait(work: dist.Work, group: ProcessGroup | None, *, is_on_host: bool = True) -> None:
    """Wait for an exchange over a group, from any thread. Raises PeerGoneError where a bridge is broken off meanwhile.

    An exchange of GPU memory is, as ever, waited for by the stream: `check` the bridge when that is synchronised. But
    in any other thread than the main one the host waits too: with CUDA_DEVICE_MAX_CONNECTIONS 1 all streams share one
    queue, and a wait in it would hold up the main thread's kernels, which other ranks may be waiting for.
    """
    bridge = None if group is None else _bridges.get(group)
    if bridge is None:
        work.wait()
        return
    if is_on_host:
        while not _has_ended(work):
            _check(bridge.name)
    elif threading.current_thread() is not threading.main_thread():
        # NCCL aborts an exchange that is given a time to end in.
        while not work.is_completed():
            _check(bridge.name)
            time.sleep(_NAP_SECONDS)
    # What is left behind by a failure has ended, too.
    bridge.exchanges.remove(work)
    work.wait()
    _check(bridge.name)


def _has_ended(work: dist.Work) -> bool:
    """Whether an exchange ends within a turn, well or not."""
    with suppress(RuntimeError):
        work.wait(_TURN)
    return work.is_completed()


def finish(work: dist.Work | None, group: ProcessGroup | None, *, is_on_host: bool = True) -> None:
    """Wait, as `wait` does, for an exchange that has just begun; None is one that has ended."""
    if work is not None:
        wait(begun(work, group), group, is_on_host=is_on_host)


def check(group: ProcessGroup | None) -> None:
    """Raise PeerGoneError where the group is a bridge that was broken off."""
    if group is not None and (bridge := _bridges.get(group)) is not None:
        _check(bridge.name)


def _check(name: str) -> None:
    if (reason := broken_bridges.reason_of(name)) is not None:
        raise PeerGoneError(f"the driver has broken the bridge off: {reason}")


def close_bridge(group: ProcessGroup | None) -> None:
    """Leave a bridge, if any, whether or not the other ranks can be reached: those that wait for this one fail."""
    if group is None:
        return
    if (bridge := _bridges.pop(group, None)) is not None:
        broken_bridges.forget(bridge.name)
        if bridge.exchanges:
            _given_up.append((group, bridge.exchanges))
    _abort(group)
    _forget_what_has_ended()


def _abort(group: ProcessGroup | dist.ProcessGroupNCCL) -> None:
    # What is under way with ranks that are gone shall not be waited for.
    with suppress(RuntimeError):
        group.abort()


def _forget_what_has_ended() -> None:
    _given_up[:] = [left for left in _given_up if not all(work.is_completed() for work in left[1])]


def name_of(group: ProcessGroup | None) -> str:
    """The name of a bridge; empty for a group of this rank's own world."""
    bridge = None if group is None else _bridges.get(group)
    return "" if bridge is None else bridge.name


def rank_in(group: ProcessGroup | None) -> int:
    """This process's rank in a group; None: in its world."""
    return dist.get_rank() if group is None else group.rank()
