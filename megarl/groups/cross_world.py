"""Cross-world process groups: groups over ranks of several `torch.distributed` worlds.

They are created again whenever a world is added or lost. A cross-world group is not a subgroup of a world. It numbers
its own ranks (`rank_in`, `ProcessGroup.size`). torch functions that look a group up in a world's tables reject it.

No rank waits longer than the driver permits (`cancelled`). Over gloo, the end of a rank usually fails its peers'
exchanges. A rank may end in the middle of a message. Then neither the closed connection nor `abort` wakes the peers,
and the group's destructor blocks. Waits are therefore short and repeated, and a group with a stuck exchange is retained
until torch ends the exchange.

Over NCCL the host waits in `cuda.synchronize` for stuck kernels until `abort` ends them. Before that, torch's watchdog
(TORCH_NCCL_ASYNC_ERROR_HANDLING, default 3) may end a process after a failed connection or the group's timeout. An
aborted exchange looks finished, so callers must `check` the group after synchronising. The driver then notifies all
ranks and creates another group. This follows torch's sources and has not run on GPUs.
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

from megarl.groups import cancelled, rendezvous
from megarl.groups.backends import require_gpu_backend
from megarl.groups.peer_errors import PeerGoneError
from megarl.groups.rendezvous import Meeting
from megarl.platform import device

Result = TypeVar("Result")

_CHECK_SECONDS = 0.01
"""Seconds between two checks while ranks connect."""
_NAP_SECONDS = 1e-4
"""Seconds between two checks of a GPU exchange by a background thread."""
_WAIT_SLICE = timedelta(seconds=0.2)
"""Length of one wait for an exchange. Between two waits the group is checked for a cancellation."""


@dataclass(slots=True)
class _Membership:
    """State of a cross-world process group that this rank has joined."""

    name: str
    exchanges: list[dist.Work] = field(default_factory=list)
    """Asynchronous collectives in progress."""


_memberships: WeakKeyDictionary[ProcessGroup, _Membership] = WeakKeyDictionary()
_unfinished: list[tuple[ProcessGroup, list[dist.Work]]] = []
"""Groups that this rank left with unfinished exchanges. They stay referenced, because destroying them would block."""


def join_group(meeting: Meeting, own_rank: int, timeout_seconds: float) -> ProcessGroup:
    """Join a process group with ranks of several torch worlds, and return it. All its ranks must call this.

    The group uses gloo, and NCCL for GPU tensors.

    `own_rank` is this rank's number in its torch world. Raises PeerGoneError if the driver cancels the group, or if
    ranks do not arrive in time; it lists the missing ranks.
    """
    _drop_finished_groups()
    timeout = timedelta(seconds=timeout_seconds)
    rank, num_ranks = meeting.first_rank + own_rank, meeting.num_ranks

    def connect() -> tuple[Store, dist.ProcessGroupGloo]:
        store = rendezvous.store_of(meeting, timeout_seconds)
        _await_all_ranks(store, rank, num_ranks, meeting)
        return store, dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, num_ranks, timeout)

    store, gloo = _run_unless_cancelled(meeting.name, connect)
    # dist.new_group supports only ranks of one world, so assemble the group from its backends.
    group = ProcessGroup(store, rank, num_ranks)
    backend_types = ProcessGroup.BackendType
    group._set_default_backend(backend_types.GLOO)
    group._register_backend(torch.device("cpu"), backend_types.GLOO, gloo)
    _memberships[group] = _Membership(meeting.name)
    if device.current().type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, num_ranks, options)
        group._register_backend(torch.device("cuda"), backend_types.NCCL, nccl)
        # Abort in a thread of its own: NCCL may take long, and other messages of the driver must not wait.
        cancelled.on_cancelled(meeting.name, lambda: threading.Thread(target=_abort, args=(nccl,), daemon=True).start())
    require_gpu_backend(group, meeting.name, device.current())
    return group


def _run_unless_cancelled(name: str, work: Callable[[], Result]) -> Result:
    """Call `work` in a thread. Returns its result or raises its error.

    If the driver cancels the group `name` first, raises PeerGoneError and abandons the thread: torch cannot otherwise
    interrupt a connection to a rank that has just ended.
    """
    results: list[Result] = []
    errors: list[Exception] = []

    def run_and_record() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run_and_record, name=f"meeting at {name}", daemon=True)
    thread.start()
    while thread.is_alive():
        _check_group_name(name)
        time.sleep(_CHECK_SECONDS)
    if errors:
        raise errors[0]
    return results[0]


def _await_all_ranks(store: Store, rank: int, num_ranks: int, meeting: Meeting) -> None:
    """Wait until all ranks of a group have registered in the store.

    Raises PeerGoneError for missing ranks or a cancelled group.
    """
    # Without this wait, a rank that died early would block the others for the timeout of a whole collective.
    store.set(f"here {rank}", "")
    arrival_keys = [f"here {group_rank}" for group_rank in range(num_ranks)]
    deadline = time.monotonic() + meeting.seconds
    while not store.check(arrival_keys):
        _check_group_name(meeting.name)
        if time.monotonic() > deadline:
            missing = [group_rank for group_rank, key in enumerate(arrival_keys) if not store.check([key])]
            raise PeerGoneError(
                f"ranks {missing} did not join the process group of trainers and engines within {meeting.seconds:g} s",
                missing,
            )
        time.sleep(_CHECK_SECONDS)


def register(work: dist.Work | None, group: ProcessGroup | None) -> dist.Work:
    """Record an exchange (`async_op=True`) over a group as in progress, and return it. Call `wait` for it
    afterwards.
    """
    assert work is not None
    if group is not None and (membership := _memberships.get(group)) is not None:
        membership.exchanges.append(work)
    return work


def wait(work: dist.Work, group: ProcessGroup | None, *, is_on_host: bool = True) -> None:
    """Wait for an exchange over a group, from any thread. Raises PeerGoneError if the driver cancels the group.

    For GPU memory only the CUDA stream waits, as usual in torch; in a background thread the host waits too. Call
    `check` for the group after synchronising the stream.
    """
    membership = None if group is None else _memberships.get(group)
    if membership is None:
        work.wait()
        return
    if is_on_host:
        while not _has_ended(work):
            _check_group_name(membership.name)
    elif threading.current_thread() is not threading.main_thread():
        # With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one queue. A wait queued here would block kernels of the
        # main thread, for which other ranks may wait. So the host waits. It polls, because torch aborts an NCCL
        # exchange that is waited for with a timeout.
        while not work.is_completed():
            _check_group_name(membership.name)
            time.sleep(_NAP_SECONDS)
    # The exchange has ended even if `work.wait()` raises.
    membership.exchanges.remove(work)
    work.wait()
    _check_group_name(membership.name)


def _has_ended(work: dist.Work) -> bool:
    """Return whether an exchange ends within `_WAIT_SLICE` (0.2 s), successfully or not."""
    with suppress(RuntimeError):
        work.wait(_WAIT_SLICE)
    return work.is_completed()


def finish(work: dist.Work | None, group: ProcessGroup | None, *, is_on_host: bool = True) -> None:
    """Record an exchange and wait for it, like `register` and `wait`. None: the exchange is finished already."""
    if work is not None:
        wait(register(work, group), group, is_on_host=is_on_host)


def check(group: ProcessGroup | None) -> None:
    """Raise PeerGoneError if the driver has cancelled this cross-world group."""
    if group is not None and (membership := _memberships.get(group)) is not None:
        _check_group_name(membership.name)


def _check_group_name(name: str) -> None:
    if (reason := cancelled.reason_for(name)) is not None:
        raise PeerGoneError(f"the driver cancelled the process group of trainers and engines: {reason}")


def leave_group(group: ProcessGroup | None) -> None:
    """Leave a process group of several torch worlds, alone. Exchanges of others that wait for this rank then fail."""
    if group is None:
        return
    if (membership := _memberships.pop(group, None)) is not None:
        cancelled.forget(membership.name)
        if membership.exchanges:
            # Keep the group until its exchanges have ended: destroying it earlier blocks.
            _unfinished.append((group, membership.exchanges))
    _abort(group)
    _drop_finished_groups()


def _abort(group: ProcessGroup | dist.ProcessGroupNCCL) -> None:
    # Abort the exchanges. An exchange with a lost rank would never end by itself.
    with suppress(RuntimeError):
        group.abort()


def _drop_finished_groups() -> None:
    """Destroy the left groups with no exchange in progress: destroying them no longer blocks."""
    _unfinished[:] = [
        (group, exchanges)
        for group, exchanges in _unfinished
        if not all(exchange.is_completed() for exchange in exchanges)
    ]


def group_name(group: ProcessGroup | None) -> str:
    """Return the name of a cross-world group; "" for a group of this rank's own torch world."""
    membership = None if group is None else _memberships.get(group)
    return "" if membership is None else membership.name


def rank_in(group: ProcessGroup | None) -> int:
    """Return this process's rank in a group; for None, its rank in its torch world."""
    return dist.get_rank() if group is None else group.rank()
