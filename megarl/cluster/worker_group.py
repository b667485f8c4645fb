"""Remote calls from the driver to a fixed set of rank processes. Any failure ends the whole group.

Subclasses start the processes and reach the ranks: `local.LocalGroup`, `srun.SrunGroup`, `ray.RayGroup`.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from megarl import faults, types
from megarl.cluster.deadlines import Deadlines, Limit
from megarl.cluster.hang_report import HangReport
from megarl.cluster.messages import pack, pack_cancel
from megarl.cluster.places import choose_places
from megarl.cluster.rank_handle import (
    LOSS_GRACE_SECONDS,
    Answers,
    RankConnection,
    RankError,
    RankHandle,
    log_since,
    log_size,
)
from megarl.cluster.rank_queues import RankQueues
from megarl.cluster.stacks import has_begun, is_complete, ranks_named, summary, waits_in_collective
from megarl.cluster.topology import NodeKind
from megarl.groups.rendezvous import Rendezvous

_REPORT_GRACE_SECONDS = LOSS_GRACE_SECONDS + 0.5
"""Seconds to wait, after a failure, for another rank to report an earlier failure that caused it. Other ranks may
notice that a rank died before the driver does.
"""
_LEAVE_SECONDS = 10.0
"""Seconds for ranks to exit by themselves when the group closes."""
_KILL_SECONDS = 10.0
"""Maximum seconds to wait for the end of killed processes."""
_ABANDON_SECONDS = 30.0
"""Seconds for surviving ranks to end the call in progress and leave their torch world, after a rank was lost."""
_STACKS_SECONDS = 5.0
"""Seconds for ranks to write their stacks."""
_LOOK_SECONDS = 0.1
"""Seconds between two looks for stacks in the logs, and least pause between two checks of a call."""


class RankFailedError(types.MegarlError):
    """Raised for an unexpected error of a rank. The message has the rank and the cause, a note has the traceback.

    Its exit code is that of an internal error: a restarted run would most likely fail in the same way.
    """

    def __init__(self, rank: int, cause: str, details: str = "") -> None:
        super().__init__(cause)
        self.rank = rank
        self.cause = cause
        self.is_echo = False
        """Whether the rank failed only because another rank had left a collective."""
        if details:
            self.add_note(details.rstrip())


class RankLostError(RankFailedError, types.PeerLostError):
    """Raised for a lost rank: it died, missed a deadline, or lost its device or its peers.

    A note has the end of its log, or its traceback.
    """


@dataclass(frozen=True, slots=True)
class PartOfRun:
    """Position of a group in a run of several groups: its ranks are `first_rank` and the following, of `num_ranks` in
    total.

    Logs and messages use the run's rank numbers. Calls, and the ranks themselves, number a group's ranks from 0. Ranks
    of all groups sign messages to each other with `key`. To connect to the driver they use another key, drawn for each
    start of the group.
    """

    first_rank: int
    num_ranks: int
    key: bytes

    def ranks(self, world_size: int) -> range:
        """Return the rank numbers, within the run, of this group of `world_size` ranks."""
        return range(self.first_rank, self.first_rank + world_size)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A remote call in progress: its method, its deadline, and its ranks' answers."""

    method: str
    limit: Limit
    answers: Answers
    awaited: Sequence[asyncio.Future[None]]
    """Futures that are done when all ranks have answered."""
    started: float
    """The group's clock at the start (`_clock`), in seconds."""

    def is_answered(self) -> bool:
        """Return whether all ranks have answered without an error."""
        return all(part.done() and not part.cancelled() and part.exception() is None for part in self.awaited)

    def is_over(self) -> bool:
        """Return whether all ranks have answered, or one of them has failed."""
        failed = [part for part in self.awaited if part.done() and not part.cancelled() and part.exception()]
        return bool(failed) or all(part.done() for part in self.awaited)

    def silent(self) -> list[RankHandle]:
        """Return the ranks that have not answered."""
        return [handle for handle, answer in self.answers.items() if not answer.done()]

    def errors(self) -> list[Exception]:
        """Return the errors of failed answers. Cancelled answers are not included."""
        ended = [answer for answer in self.answers.values() if answer.done() and not answer.cancelled()]
        return [error for answer in ended if isinstance(error := answer.exception(), Exception)]


def _call_back(on_answer: Callable[[Any], object], answer: asyncio.Future[Any]) -> None:
    """Pass a rank's answer to the callback, unless the call failed."""
    if not answer.cancelled() and answer.exception() is None:
        on_answer(answer.result())


def _ranks(handles: Sequence[RankHandle]) -> str:
    """Return the ranks of these handles as text, for example `ranks 0-2, 5`."""
    return ranks_named([handle.rank for handle in handles])


def _packed(method: str, per_rank: Sequence[Any], args: Sequence[Any]) -> list[bytes]:
    """Return the encoded command for each rank. Ranks with the same first argument, like None, share one."""
    # Keyed by identity: arguments such as lists of batches are not hashable.
    messages: dict[int, bytes] = {}
    for first in per_rank:
        if id(first) not in messages:
            messages[id(first)] = pack((method, (first, *args), {}))
    return [messages[id(first)] for first in per_rank]


class WorkerGroup(ABC):
    """Group of `world_size` ranks executing the driver's calls. Create an object of a subclass, then call `start`.

    A rank executes one call at a time, in the order in which the calls were made. Calls to disjoint ranks run at the
    same time. The event loop stays free meanwhile.

    The first failure kills the group. All calls in progress and all later calls raise its error. A `MegarlError` of a
    rank keeps its class, and a full disk is a DiskFullError. A lost rank raises `RankLostError`, anything else
    `RankFailedError`. A call cancelled half-way also kills the group. A call cancelled while it waits for its ranks
    does no harm.

    `deadlines` limit how long a call waits for its slowest rank, by method. A rank missing its deadline is lost: the
    error names it and shows the stacks of all ranks. `on_asked` is the callback for a stop signal received by a rank.
    `hosts` holds, for each rank, the address at which other nodes reach it. `topology` holds its node and the network
    switches above, nearest first.
    """

    _most_stacks_seconds = _STACKS_SECONDS
    """Maximum seconds to wait for stacks. Ranks on other nodes write them through a shared file system."""

    def __init__(self, world_size: int, part: PartOfRun | None = None) -> None:
        """Create a group without processes. `part` is its position in the run; None: the group is the whole run."""
        self.world_size = world_size
        self.part = part or PartOfRun(0, world_size, secrets.token_bytes(32))
        self.hosts: list[str] = []
        self.topology: list[tuple[str, ...]] = []
        self.meeting: Rendezvous | None = None
        """Address at which the ranks meet to create their torch process group, once they have started."""
        self.start_timeout_seconds = 300.0
        self.deadlines = Deadlines.same(self.start_timeout_seconds)
        self._handles: list[RankHandle] = []
        self._queues = RankQueues(world_size)
        self._calls: set[Call] = set()
        self._seconds_in_calls = self._in_calls_since = 0.0
        self._ending: asyncio.Task[Exception] | None = None
        self.keeps_survivors = False
        """Whether the other ranks keep their processes when a lost rank ends the group (see `successor`)."""
        self.survivors: list[RankHandle] = []
        """Ranks whose processes were kept when the group ended."""
        self._inherited: dict[int, RankHandle] = {}
        """Processes taken over from the group before this one, by their new rank."""
        self.kind = NodeKind(0, 1, world_size)
        """The group's nodes. Here: one node for the group alone."""
        self.places: list[int] = []
        """Place of each rank's process on the run's nodes (see `places`)."""
        self.former_places: Sequence[int] = ()
        """Places of the group replaced by this one, by rank; empty: it replaces none."""
        self.others: Callable[[], Sequence[WorkerGroup]] = lambda: ()
        """Function returning the run's other groups. A new process gets no place and no log of their processes."""
        self._log_folder, self._environment = Path(), {}
        self._unread: dict[RankHandle, tuple[int, float]] = {}
        """Ranks asked for their stacks, without an answer yet. Each has the size of its log before the
        request, in bytes, and the seconds in which debuggers had paused ranks until then.
        """
        self.on_asked: Callable[[str], object] = lambda signal_name: None
        self.on_slow: Callable[[str], object] = lambda report: None
        """Callback (report), called when ranks hold up a call much longer than earlier calls took, or fall silent."""
        self.hang_report: HangReport | None = None
        """Writer of a file with the places of all ranks when one falls silent; None: the error alone shows them."""

    async def start(
        self,
        worker: str,
        kwargs: Mapping[str, Any],
        *,
        log_folder: Path,
        start_timeout_seconds: float = 300.0,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Start the ranks, construct `Class(rank=..., world_size=..., **kwargs)` in each, and return the group.

        `worker` is "package.module:Class". The ranks have the driver's environment, `environment`, `RANK`,
        `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` and a private `TMPDIR`, removed when the group ends. Output goes
        to `log_folder/rank_NNNN.log`. The ranks die with the calling thread. `start_timeout_seconds` limits the
        interpreters' start, then the worker's construction, and then every call until the group has other `deadlines`.
        """
        self._log_folder, self._environment = log_folder, dict(environment or {})
        self.start_timeout_seconds = start_timeout_seconds
        try:
            await self._start_ranks()
            # Processes that replace lost ones get no faults: each fault shall happen once.
            if faults.text():
                await self.call("__arm__", faults.text(), self.part.first_rank)
            await self.construct(worker, kwargs)
        except BaseException as error:
            await self._end_once(partial(self._abandon, "start", error))
            # A loss during the start keeps the survivors, and no successor will follow.
            await self.close()
            raise
        return self

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks, counted within the group, that inherited no process from the group before this one."""
        return [rank for rank in range(self.world_size) if rank not in self._inherited]

    @property
    def all_handles(self) -> list[RankHandle]:
        """Return the group's ranks, after its end the kept ones."""
        return [*self._handles, *self.survivors]

    def taken_places(self, leaving: Collection[WorkerGroup] = ()) -> set[int]:
        """Return the places on the nodes of this group not available to it: those of other groups' processes.

        Groups `leaving` the run need none.
        """
        others = [group for group in self.others() if group not in leaving and self.shares_nodes(group)]
        return {handle.place for group in others for handle in group.all_handles}

    def _choose_places(
        self, first: int, per_node: int, num_nodes: int, silent_nodes: Collection[int] = ()
    ) -> list[int]:
        """Return a place for each missing rank, in the order of ranks. For the arguments see `choose_places`."""
        return choose_places(
            self.world_size,
            {rank: handle.place for rank, handle in self._inherited.items()},
            before=self.former_places,
            # A group starting after the others gets the first free places.
            first=0 if self.others() else first,
            per_node=per_node,
            num_nodes=num_nodes,
            taken=self.taken_places(),
            silent_nodes=silent_nodes,
        )

    def shares_nodes(self, group: WorkerGroup) -> bool:
        """Return whether places of the other group have the same numbers as places of this one."""
        return True

    def _log_of(self, rank: int, log_folder: Path) -> Path:
        """Return the log of a new process. No older process writes to it. `rank` counts within the run."""
        log = log_folder / f"rank_{rank:04d}.log"
        others = (handle for group in self.others() for handle in group.all_handles)
        if any(handle.log == log for handle in (*self._inherited.values(), *others)):
            # That process has another rank now, and still writes to its first log.
            log = log.with_stem(f"{log.stem}_{secrets.token_hex(2)}")
        return log

    async def _start_ranks(self) -> None:
        """Start the missing processes, number the inherited ones, and let all ranks know where they meet."""
        self._log_folder.mkdir(parents=True, exist_ok=True)
        self.deadlines = Deadlines.same(self.start_timeout_seconds, "cluster.start_timeout_seconds")
        await self._start_processes(self._log_folder, self._environment)
        ports: dict[int, Any] = {}
        if started := self.missing_ranks:
            # Each new rank answers once without a command, so the messages are empty.
            ports |= dict(zip(started, await self._exchange("start", started, [b""] * len(started)), strict=True))
        if inherited := sorted(self._inherited):
            address = self._store_address()
            numbers = [
                pack(("__renumber__", (rank, self.world_size, address, self.part.first_rank + rank), {}))
                for rank in inherited
            ]
            ports |= dict(zip(inherited, await self._exchange("renumber", inherited, numbers), strict=True))
        # A fresh world name: messages signed in a lost group are not valid in its replacement.
        self.meeting = replace(self._rendezvous(ports[0]), world=secrets.token_hex(16))
        settle = pack(("__settle__", (self.meeting,), {}))
        await self._exchange("settle", range(self.world_size), [settle] * self.world_size)

    async def successor(self, sources: Sequence[int | None], log_folder: Path, part: PartOfRun | None = None) -> Self:
        """Return a new group that reuses processes of this one, which must have ended.

        Rank i of the new group takes over the process of this group's rank `sources[i]`. A new process starts where
        `sources[i]` is None, where the old process is dead, or where it does not leave its old torch world within 30 s
        (then it is killed). Processes that `sources` does not name are killed. Ranks have no worker objects until
        `construct` is called. New processes write their logs to `log_folder`. `part` is the new group's position in the
        run; None: its first rank has the same number as this group's.
        """
        first = self.part.first_rank
        if part is None:
            part = replace(self.part, num_ranks=self.part.num_ranks + len(sources) - self.world_size)
        # Until the next group exists, `close` of this one still ends the survivors.
        await self._part_survivors()
        ready = {handle.rank - first: handle for handle in self.survivors}
        await self._kill([handle for source, handle in ready.items() if source not in sources])
        group, self.survivors = self._heir(len(sources), part), []
        group._log_folder, group._environment = log_folder, self._environment
        group.start_timeout_seconds, group.keeps_survivors = self.start_timeout_seconds, self.keeps_survivors
        group.on_asked, group.others, group.former_places = self.on_asked, self.others, self.places
        group.kind = self.kind
        for rank, source in enumerate(sources):
            if source is not None and (handle := ready.pop(source, None)) is not None:
                group._inherited[rank] = handle
                handle.rank = part.first_rank + rank
        try:
            await group._start_ranks()
        except BaseException as error:
            await group._end_once(partial(group._abandon, "start", error))
            await group.close()
            raise
        return group

    @property
    @abstractmethod
    def local_ranks(self) -> list[int]:
        """Return the LOCAL_RANK of each rank: its number on its node, the index of its GPU."""

    def arranged(self, count: int) -> list[int | None]:
        """Return the `sources` with which `successor` makes a group of `count` ranks.

        For each of its ranks: the present rank whose process it takes over, or None for a new process.
        """
        return [rank if rank < self.world_size else None for rank in range(count)]

    @abstractmethod
    async def reserve(self, count: int, leaving: Collection[WorkerGroup] = (), num_further: int = 0) -> None:
        """Check that there is room for a successor of this group with `count` ranks. Ray's resources are reserved.

        The groups `leaving` end before the successor starts, so their places count as free. `num_further` ranks of
        other groups start after the successor, and need room too. Raises ConfigError if there is too little room.
        """

    async def inherited_steps(self) -> list[Any]:
        """Return the copies of training states held by each rank's process: see `StateCopies.steps`. New processes have
        none.
        """
        steps: list[Any] = [{} for _ in range(self.world_size)]
        if ranks := sorted(self._inherited):
            found = await self._exchange("legacy", ranks, [pack(("__legacy__", (), {}))] * len(ranks))
            for rank, answer in zip(ranks, found, strict=True):
                steps[rank] = answer
        return steps

    async def set_apart(self) -> None:
        """End the group without a loss, and keep all processes for a successor with another number of ranks."""

        async def end() -> Exception:
            keeps_survivors, self.keeps_survivors = self.keeps_survivors, True
            await self._end(())
            # A successor keeps the survivors of a loss only if this group would have.
            self.keeps_survivors = keeps_survivors
            return types.PeerLostError("the rank processes were called after their group was replaced by another one")

        await self._end_once(end)

    @abstractmethod
    def _heir(self, world_size: int, part: PartOfRun) -> Self:
        """Return a group object of `world_size` ranks at this position in the run, without processes. It takes over
        this group's resources.
        """

    async def _part_survivors(self) -> None:
        """Make the survivors leave their torch world. Those that do not are killed, and are no survivors any more."""
        if not self.survivors:
            return
        answers, _ = self._ask(dict.fromkeys(self.survivors, pack(("__abandon__", (), {}))))
        await asyncio.wait(answers.values(), timeout=_ABANDON_SECONDS)
        ready = [h for h, answer in answers.items() if answer.done() and answer.exception() is None]
        await self._kill([handle for handle in self.survivors if handle not in ready])
        # Some launchers end all processes for one.
        self.survivors = [handle for handle in ready if not handle.died.done()]

    async def construct(self, worker: str, kwargs: Mapping[str, Any]) -> None:
        """Construct another worker on every rank, from "package.module:Class" (`worker`) with the arguments `kwargs`.

        The garbage collector frees the previous worker.
        """
        await self.call("__init__", list(sys.path), worker, dict(kwargs))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the worker's method with the same arguments on every rank, and return the answers by rank.

        The method name `part.method` calls a method of one of the worker's parts.
        """
        message = pack((method, args, kwargs))
        return await self._exchange(method, range(self.world_size), [message] * self.world_size)

    async def scatter(
        self,
        method: str,
        per_rank: Sequence[Any],
        *args: Any,
        budget_seconds: float = 0.0,
        slack_seconds: float = 0.0,
        on_answer: Callable[[Any], object] | None = None,
    ) -> list[Any]:
        """Call the worker's method on every rank, with `per_rank[rank]` as first argument. Returns the answers by rank.

        `budget_seconds` is planned working time and `slack_seconds` other time; both extend the deadline. `on_answer`
        is called with each answer as it arrives. Raises ValueError if `per_rank` has a wrong length.
        """
        if len(per_rank) != self.world_size:
            raise ValueError(
                f"the remote call of {method} needs {self.world_size} arguments, one per rank: got {len(per_rank)}"
            )
        messages = _packed(method, per_rank, args)
        return await self._exchange(method, range(self.world_size), messages, budget_seconds, slack_seconds, on_answer)

    async def ask(
        self, ranks: Sequence[int], method: str, per_rank: Sequence[Any], *args: Any, budget_seconds: float = 0.0
    ) -> list[Any]:
        """Call the worker's method on some ranks, with `per_rank[i]` as first argument on rank `ranks[i]`.

        Returns the answers in the order of `ranks`. The other ranks are free for other calls meanwhile.
        `budget_seconds` is planned working time, like sampling for a while; it extends the deadline. Raises
        ValueError for wrong ranks or a wrong number of arguments.
        """
        if len(per_rank) != len(ranks):
            raise ValueError(
                f"the remote call of {method} needs {len(ranks)} arguments, one per rank: got {len(per_rank)}"
            )
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.world_size)):
            raise ValueError(
                f"the remote call of {method} needs ranks from 0 to {self.world_size - 1}, at least one and each once: "
                f"got {list(ranks)}"
            )
        return await self._exchange(method, ranks, _packed(method, per_rank, args), budget_seconds)

    @property
    def seconds_in_calls(self) -> float:
        """Total seconds so far in which at least one rank executed a call."""
        return self._seconds_in_calls + (time.monotonic() - self._in_calls_since if self._calls else 0.0)

    @abstractmethod
    def show_stacks(self) -> None:
        """Make the ranks write the stacks of all threads to their logs and continue, if they can be reached."""

    @property
    def handles(self) -> Sequence[RankHandle]:
        """The group's ranks; empty after its end."""
        return self._handles

    async def current_stacks(self) -> dict[int, str]:
        """Return the present stacks of each rank; empty for a rank that is stopped or cannot be reached."""
        return await self._stacks()

    def cancel_group(self, group: str, reason: str) -> None:
        """Cancel a cross-world process group on all ranks, even on ranks executing a call."""
        notice = pack_cancel(group, reason)
        for handle in self._handles:
            handle.direct.send(notice)

    async def end_if_stopped(self, what: str, patience_seconds: float) -> None:
        """End the group if a living rank writes no stack within `patience_seconds`. `what` describes the fault in the
        error.

        `patience_seconds` is raised to a few seconds, and limited to a minute for ranks on other nodes.
        """
        if self._ending is not None:
            return
        stopped, stacks = await self._without_stacks(patience_seconds)
        if stopped:
            await self._end_once(partial(self._fall_silent, what, stopped, stacks))

    async def end_because_of(self, ranks: Sequence[int], what: str) -> Exception:
        """End the group because of a fault of the given ranks, described by `what`. Returns the error of all later
        calls.
        """

        async def end() -> Exception:
            silent = [self._handles[rank] for rank in ranks]
            return await self._fall_silent(what, silent, await self._stacks())

        return await self._end_once(end)

    async def close(self) -> None:
        """Close the group: the ranks exit after the driver closes their connections.

        A rank that is busy, or that has not exited after a few seconds, is killed. Kept survivors are killed too.
        """
        await self._end_once(self._leave)
        if self.survivors:
            self._handles, self.survivors = self.survivors, []
            await self._end()

    @abstractmethod
    async def _start_processes(self, log_folder: Path, environment: Mapping[str, str]) -> None:
        """Start the rank processes. Sets `_handles`, `hosts` and `topology`."""

    @abstractmethod
    def _rendezvous(self, port: int) -> Rendezvous:
        """Return the address at which the ranks meet to create their process group.

        `port` is the port of the torch store on rank 0, if that rank has one.
        """

    def _store_address(self) -> str:
        """Return the address at which rank 0 serves the torch store; empty: the ranks meet in a file."""
        return ""

    async def _exchange(
        self,
        method: str,
        ranks: Sequence[int],
        messages: Sequence[bytes],
        budget_seconds: float = 0.0,
        slack_seconds: float = 0.0,
        on_answer: Callable[[Any], object] | None = None,
    ) -> list[Any]:
        """Wait until the ranks are free, send each its message, and return the answers in the order of `ranks`."""
        async with self._queues.turn(ranks):
            if self._ending is not None:
                raise await asyncio.shield(self._ending)
            handles = [self._handles[rank] for rank in ranks]
            answers, awaited = self._ask(dict(zip(handles, messages, strict=True)))
            if on_answer is not None:
                for answer in answers.values():
                    answer.add_done_callback(partial(_call_back, on_answer))
            limit, extra_seconds = self.deadlines.limit_for(method), budget_seconds + slack_seconds
            limit = limit._replace(seconds=limit.seconds + extra_seconds)
            call = Call(method, limit, answers, awaited, self._clock())
            if not self._calls:
                self._in_calls_since = time.monotonic()
            self._calls.add(call)
            watching = asyncio.create_task(self._watch_call(call, budget_seconds, extra_seconds))
            try:
                while not call.is_over() and (left := call.started + limit.seconds - self._clock()) > 0:
                    # The clock may have stood still, so there may be time left afterwards.
                    await asyncio.wait(awaited, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
                watching.cancel()
                if not call.is_answered():
                    raise await self._end_once(partial(self._diagnose, call))
            except BaseException as error:
                # A call abandoned half-way leaves its ranks in an unknown state.
                await self._end_once(partial(self._abandon, method, error))
                raise
            finally:
                watching.cancel()
                self._calls.remove(call)
                if not self._calls:
                    self._seconds_in_calls += time.monotonic() - self._in_calls_since
            # Planned working time says nothing about how slow the method is.
            self.deadlines.note(method, max(0.0, self._clock() - call.started - budget_seconds))
            if stop_signal := next((handle.stop_signal for handle in handles if handle.stop_signal), None):
                self.on_asked(stop_signal)
            return [answer.result() for answer in answers.values()]

    def _clock(self) -> float:
        """Return monotonic seconds, on a clock that stands still while a debugger pauses ranks for a hang report."""
        return time.monotonic() - self._seconds_debugging

    async def _watch_call(self, call: Call, budget_seconds: float, extra_seconds: float) -> None:
        """Report the ranks holding up a call, once per call. End this group of ranks if one of them is stopped.

        The first calls of a method have a long deadline, and a stopped process would hold up the run that long. So the
        search for stopped processes repeats at intervals of the shortest deadline. `budget_seconds` is the working time
        planned for this call. `extra_seconds` is everything that extends its deadline, `budget_seconds` included.
        """
        pause, deadline = self.deadlines.shortest.seconds, call.started + call.limit.seconds
        late_at = call.started + self.deadlines.late_after(call.method) + extra_seconds
        search_at = call.started + budget_seconds + pause
        # At the deadline, the call itself names the silent ranks.
        while (next_at := min(late_at, search_at)) < deadline:
            if (left := next_at - self._clock()) > 0:
                await asyncio.sleep(max(_LOOK_SECONDS, left))
                continue
            seconds = self._clock() - call.started
            try:
                if next_at == late_at:
                    late_at = math.inf
                    await self._report_slow(call, seconds)
                else:
                    # Stacks of ranks on other nodes may arrive late, through a shared file system.
                    await self._end_stopped(call, seconds, (call.limit.seconds - extra_seconds) / 2)
                    search_at = self._clock() + pause
            except Exception as error:
                # A log that cannot be read must neither end the run nor later searches. asyncio logs the error.
                search_at = self._clock() + pause
                message = f"the search for stopped ranks in `{call.method}` failed"
                asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})

    async def _end_stopped(self, call: Call, seconds: float, patience_seconds: float) -> None:
        """End this group of ranks if a rank of a call is stopped. The call has lasted for `seconds`."""
        stopped, stacks = await self._stopped(call, patience_seconds)
        if stopped:
            what = f"did not answer `{call.method}` within {seconds:.0f} s"
            await self._end_once(partial(self._fall_silent, what, stopped, stacks))

    async def _stopped(self, call: Call, patience_seconds: float) -> tuple[list[RankHandle], Mapping[int, str]]:
        """Return the stopped ranks of a call, and the stacks of all ranks.

        A rank counts as stopped if it writes no stack within `patience_seconds` (see `_without_stacks`). Calls that
        read or write large files have deadlines with a recipe field of their own. During them no rank is asked, and
        none counts as stopped: a slow file system may delay the stacks too.
        """
        if self.deadlines.has_own_limit(call.method):
            return [], {}
        silent, stacks = await self._without_stacks(patience_seconds)
        return [handle for handle in silent if handle in call.silent()], stacks

    async def _without_stacks(self, patience_seconds: float) -> tuple[list[RankHandle], Mapping[int, str]]:
        """Return the living ranks that write no stack in time, and the stacks of all ranks.

        The time is `patience_seconds`, but at least 5 s, and at most 60 s for ranks on other nodes (else 5 s).
        """
        stacks = await self._stacks(max(_STACKS_SECONDS, min(self._most_stacks_seconds, patience_seconds)))
        # A rank that could not be asked may work.
        return [handle for handle in self._handles if handle in self._unread and not handle.died.done()], stacks

    async def _report_slow(self, call: Call, seconds: float) -> None:
        """Report the ranks holding up a call, `seconds` after its start."""
        stacks = await self._stacks()
        silent = call.silent()
        slow = [h for h in silent if is_complete(stacks[h.rank]) and not waits_in_collective(stacks[h.rank])]
        # Where all ranks work, none is slower than its peers: the call has more to do than earlier ones.
        if slow and len(slow) < len(call.answers) and not call.errors():
            self.on_slow(
                f"{_ranks(slow)} of {self.part.num_ranks} {'is' if len(slow) == 1 else 'are'} slow in `{call.method}`: "
                f"other ranks wait after {seconds:.0f} s, the deadline is {call.limit.seconds:.0f} s\n"
                + summary({handle.rank: stacks[handle.rank] for handle in slow})
            )

    def _ask(self, messages: Mapping[RankHandle, bytes]) -> tuple[Answers, list[asyncio.Future[None]]]:
        """Send a command to each rank. Returns a future for each rank's answer, keyed by rank, and a list of futures to
        wait for. All futures of the list are done when all ranks have answered. One of them fails as soon as any rank
        fails.
        """
        loop = asyncio.get_running_loop()
        answers: Answers = {handle: loop.create_future() for handle in messages}
        per_connection: defaultdict[RankConnection, dict[RankHandle, bytes]] = defaultdict(dict)
        for handle, message in messages.items():
            per_connection[handle.connection][handle] = message
        return answers, [connection.ask(own, answers) for connection, own in per_connection.items()]

    async def _end_once(self, end: Callable[[], Coroutine[Any, Any, Exception]]) -> Exception:
        """Run `end` (a coroutine ending the group), unless the group is already ending. Returns the error of all later
        calls."""
        if self._ending is None:
            self._ending = asyncio.create_task(end())
        # Several calls may wait for the end. The shield lets it complete even if some of them are cancelled.
        return await asyncio.shield(self._ending)

    async def _leave(self) -> Exception:
        """End the group. If no call is in progress, the ranks may exit by themselves."""
        if not self._calls:
            for handle in self._handles:
                handle.connection.dismiss()
            if self._handles:
                await asyncio.wait([handle.died for handle in self._handles], timeout=_LEAVE_SECONDS)
        await self._end()
        return types.PeerLostError("the rank processes were already closed when the driver called them")

    async def _abandon(self, method: str, error: BaseException) -> Exception:
        """End the group because a call was interrupted half-way by this error."""
        await self._end()
        return types.PeerLostError(f"the call of `{method}` on the ranks was interrupted: {error!r}")

    async def _diagnose(self, call: Call) -> Exception:
        """End the group because a rank failed or missed its deadline. Returns the error naming the first cause.

        After a failure, other ranks (of other calls too) have a moment to report an earlier failure.
        """
        calls = list(self._calls)
        if not call.errors():
            what = f"did not answer `{call.method}` within {call.limit.seconds:g} s"
            remedy = f"; if it needs longer, raise {call.limit.field}" if call.limit.field else ""
            return await self._fall_silent(what, call.silent(), await self._stacks(), remedy)
        answers = [answer for other in calls for answer in other.answers.values()]
        await asyncio.wait(answers, timeout=_REPORT_GRACE_SECONDS)
        failures: list[tuple[RankError, Call]] = []
        for other in calls:
            for error in other.errors():
                # The driver cannot decode an answer: the driver's own error is the cause.
                if not isinstance(error, RankError):
                    await self._end()
                    return error
                failures.append((error, other))
        # Consequences come last. So do ranks cut off by their relay: a launcher ending all processes for one rank may
        # end another node's relay before that rank's end is reported.
        first, failed = min(failures, key=lambda found: (found[0].echo, found[0].handle.is_cut_off, found[0].at))
        # The failure is only a consequence. The cause is a rank that did not enter the collective, if there is one.
        if first.echo and (silent := failed.silent()):
            stacks = await self._stacks()
            if stopped := [handle for handle in silent if not waits_in_collective(stacks[handle.rank])]:
                return await self._fall_silent(f"did not enter a collective of `{failed.method}`", stopped, stacks)
        return await self._fail(failed.method, first, [error for error, _ in failures])

    async def _fail(self, method: str, first: RankError, failures: Sequence[RankError]) -> Exception:
        """End the group because of a rank's error, the `first` of several. Returns the error naming the first cause."""
        handle, report, is_dead = first.handle, first.report, first.handle.died.done()
        is_lost = report is None or (report["lost"] and not report["megarl_class"])
        # A rank that reported a fault of its own, such as a broken GPU, cannot continue either.
        lost = [handle, *(error.handle for error in failures if not error.echo)]
        await self._end(lost if is_lost else None)
        where = f"rank {handle.rank} of {self.part.num_ranks}"
        if report is None:
            return RankLostError(
                handle.rank, f"{where} {handle.exit_reason(is_dead)} during `{method}`", handle.log_tail()
            )
        if report["megarl_class"]:
            error = getattr(types, report["megarl_class"])(report["message"])
            error.add_note(f"raised by {where} during `{method}`\n{report['traceback']}")
            return error
        cause = f"{where} raised {report['class']} during `{method}`: {report['message']}"
        kind = RankLostError if report["lost"] else RankFailedError
        error = kind(handle.rank, cause, report["traceback"])
        error.is_echo = first.echo
        return error

    async def _fall_silent(
        self, what: str, silent: Sequence[RankHandle], stacks: Mapping[int, str], remedy: str = ""
    ) -> Exception:
        """End the group because of stopped ranks. Returns an error naming them and shows the stacks of all ranks.

        `silent` ranks that only wait for a stopped one in a collective are listed as waiting.
        """
        stopped = [handle for handle in silent if not waits_in_collective(stacks[handle.rank])] or list(silent)
        # Before the end, which kills the processes.
        obstacles = dict.fromkeys(found for handle in stopped if (found := handle.obstacle()))
        path = None
        if self.hang_report is not None:
            # Before the report: a debugger takes seconds, and an operator may act meanwhile.
            self.on_slow(
                f"{_ranks(stopped)} of {self.part.num_ranks} {what}; the driver reads the stacks of all ranks, then "
                "ends the call"
            )
            # The group must end whatever happens to its report.
            try:
                path = await self.hang_report.write(self, what, stopped, stacks)
            except Exception as error:
                self.on_slow(f"the report of this hang could not be written: {error!r}")
        await self._end(stopped)
        cause = f"{_ranks(stopped)} of {self.part.num_ranks} {what}"
        if waiting := [handle for handle in silent if handle not in stopped]:
            cause += f"; {_ranks(waiting)} waited in a collective"
        cause += "".join(f"; {obstacle}" for obstacle in obstacles)
        error = RankLostError(stopped[0].rank, cause + remedy, summary(stacks))
        error.add_note("\n".join(handle.log_tail() for handle in stopped))
        if path is not None:
            error.add_note(f"{path} has the stacks of all threads of all ranks.")
        return error

    def _ask_for_stacks(self, handles: Sequence[RankHandle]) -> Sequence[RankHandle]:
        """Make ranks write their stacks to their logs: at least these ranks without an unread request.

        Returns the ranks reached.
        """
        self.show_stacks()
        return handles

    async def _stacks(self, seconds: float = _STACKS_SECONDS) -> dict[int, str]:
        """Return the stacks of each rank as text. It is empty for a rank that is stopped or cannot be reached.

        While a debugger pauses ranks for a hang report, this method waits before it asks.
        """
        while self._is_debugged:
            await asyncio.sleep(_LOOK_SECONDS)
        # Only text after the end of a log at the request counts, because logs may hold earlier stacks. A late answer to
        # an earlier request shows as well that the rank works.
        self._forget_requests()
        debugged = self._seconds_debugging
        sizes = {handle: log_size(handle.log) for handle in self._handles}
        asked = self._ask_for_stacks([handle for handle in self._handles if handle not in self._unread])
        self._unread |= {handle: (sizes[handle], debugged) for handle in asked}
        ends = {handle: self._unread.get(handle, (size, 0.0))[0] for handle, size in sizes.items()}
        stacks: dict[int, str] = {}
        began = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            waited = time.monotonic() - began
            awaited = [handle for handle in ends if not is_complete(stacks.get(handle.rank, ""))]
            stacks |= {handle.rank: log_since(handle.log, ends[handle]) for handle in awaited}
            begun = [handle for handle in awaited if has_begun(stacks[handle.rank])]
            # An incomplete text may never become complete.
            done = [handle for handle in begun if is_complete(stacks[handle.rank]) or waited > _STACKS_SECONDS]
            is_over = all(handle in done or handle.died.done() for handle in awaited)
            if self._is_debugged and not is_over:
                return await self._stacks(seconds)
            if is_over or waited > seconds:
                self._forget_requests()
                return stacks

    def _forget_requests(self) -> None:
        """Forget requests for stacks that are answered or may be lost, so that these ranks are asked again."""
        for handle, (end, debugged) in list(self._unread.items()):
            # gdb loses the signal of a request if it is killed at its time limit. Somebody may have emptied the log.
            is_lost = self._seconds_debugging > debugged or log_size(handle.log) < end
            if is_lost or has_begun(log_since(handle.log, end)):
                del self._unread[handle]

    @property
    def _seconds_debugging(self) -> float:
        """Total seconds so far in which debuggers paused ranks for hang reports."""
        return 0.0 if self.hang_report is None else self.hang_report.seconds_debugging

    @property
    def _is_debugged(self) -> bool:
        """Whether a debugger pauses ranks for a hang report now."""
        return self.hang_report is not None and self.hang_report.is_debugging

    async def _end(self, lost: Sequence[RankHandle] | None = None) -> None:
        """Kill all remaining rank processes, and free all resources of the group.

        If the cause is only the loss of the ranks `lost`, and the group keeps survivors, all other processes stay.
        """
        # A start that failed early has not added all inherited processes.
        handles = list(dict.fromkeys((*self._handles, *self._inherited.values())))
        self._handles, self._inherited = [], {}
        if lost is not None and self.keeps_survivors:
            self.survivors = [handle for handle in handles if handle not in lost and not handle.died.done()]
        for call in self._calls:
            for future in (*call.answers.values(), *call.awaited):
                future.cancel()
        for handle in self.survivors:
            handle.connection.abandon(handle)
        await self._kill([handle for handle in handles if handle not in self.survivors])

    async def _kill(self, handles: Sequence[RankHandle]) -> None:
        """Kill rank processes and release their connections."""
        for handle in handles:
            handle.kill()
        if handles:
            await asyncio.wait([handle.died for handle in handles], timeout=_KILL_SECONDS)
        for handle in handles:
            handle.release()
