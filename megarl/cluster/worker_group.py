"""Remote calls from the driver to a fixed set of rank processes. Any failure ends the whole group.

Subclasses start the processes and reach the ranks: `local.LocalGroup`, `srun.SrunGroup`, `ray.RayGroup`.
"""

from __future__ import annotations

import asyncio
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
from megarl.cluster.call import Call, packed
from megarl.cluster.call_watch import watch
from megarl.cluster.deadlines import Deadlines
from megarl.cluster.hang_report import HangReport
from megarl.cluster.messages import pack, pack_cancel
from megarl.cluster.places import choose_places
from megarl.cluster.rank_errors import RankLostError, error_of
from megarl.cluster.rank_handle import LOSS_GRACE_SECONDS, Answers, RankConnection, RankError, RankHandle, names_of
from megarl.cluster.rank_queues import RankQueues
from megarl.cluster.stack_requests import StackRequests
from megarl.cluster.stacks import summary, waits_in_collective
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
        self.stacks = StackRequests(self)
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
    def num_ranks(self) -> int:
        """Number of ranks of the run. This group may have fewer."""
        return self.part.num_ranks

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
        sharing_groups = [group for group in self.others() if group not in leaving and self.shares_nodes(group)]
        return {handle.place for group in sharing_groups for handle in group.all_handles}

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
        handles = (handle for group in self.others() for handle in group.all_handles)
        if any(handle.log == log for handle in (*self._inherited.values(), *handles)):
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

    async def inherited_steps(self, *, checks: bool = True) -> tuple[list[Any], list[str]]:
        """Return the copies of training states of each rank's process, as in `StateCopies.steps`, and damages.

        New processes have none. With `checks`, damaged copies are dropped; a sentence about each names its holder.
        """
        steps: list[Any] = [{} for _ in range(self.world_size)]
        damages: list[str] = []
        if ranks := sorted(self._inherited):
            answers = await self._exchange("legacy", ranks, [pack(("__legacy__", (checks,), {}))] * len(ranks))
            for rank, (copied_steps, sentences) in zip(ranks, answers, strict=True):
                steps[rank] = copied_steps
                holder = f"rank {self.part.first_rank + rank} on {self.topology[rank][0]}"
                damages += [f"{holder}: {sentence}; this copy is dropped" for sentence in sentences]
        return steps, damages

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
        messages = packed(method, per_rank, args)
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
        return await self._exchange(method, ranks, packed(method, per_rank, args), budget_seconds)

    @property
    def seconds_in_calls(self) -> float:
        """Total seconds so far in which at least one rank executed a call."""
        return self._seconds_in_calls + (time.monotonic() - self._in_calls_since if self._calls else 0.0)

    @abstractmethod
    def show_stacks(self) -> None:
        """Make the ranks write the stacks of all threads to their logs and continue, if they can be reached."""

    def ask_for_stacks(self, handles: Sequence[RankHandle]) -> Sequence[RankHandle]:
        """Make at least these ranks write their stacks to their logs. Returns those that could be reached."""
        self.show_stacks()
        return handles

    @property
    def handles(self) -> Sequence[RankHandle]:
        """The group's ranks; empty after its end."""
        return self._handles

    async def current_stacks(self) -> dict[int, str]:
        """Return the present stacks of each rank; empty for a rank that is stopped or cannot be reached."""
        return await self.stacks.read()

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
        stopped, stacks = await self.stacks.missing(patience_seconds)
        if stopped:
            await self.end_silent(what, stopped, stacks)

    async def end_because_of(self, ranks: Sequence[int], what: str) -> Exception:
        """End the group because of a fault of the given ranks, described by `what`. Returns the error of all later
        calls.
        """

        async def end() -> Exception:
            silent = [self._handles[rank] for rank in ranks]
            return await self._fall_silent(what, silent, await self.stacks.read())

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
            limit, extra_seconds = self.deadlines.limit_for(method), budget_seconds + slack_seconds
            limit = limit._replace(seconds=limit.seconds + extra_seconds)
            call = Call(method, limit, answers, awaited, self.clock())
            if on_answer is not None:
                call.on_answers(on_answer)
            if not self._calls:
                self._in_calls_since = time.monotonic()
            self._calls.add(call)
            watching = asyncio.create_task(watch(self, call, budget_seconds, extra_seconds))
            try:
                while not call.is_over() and (seconds_left := call.started + limit.seconds - self.clock()) > 0:
                    # The clock may have stood still, so there may be time left afterwards.
                    await asyncio.wait(awaited, timeout=seconds_left, return_when=asyncio.FIRST_EXCEPTION)
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
            self.deadlines.note(method, max(0.0, self.clock() - call.started - budget_seconds))
            if stop_signal := next((handle.stop_signal for handle in handles if handle.stop_signal), None):
                self.on_asked(stop_signal)
            return [answer.result() for answer in answers.values()]

    def clock(self) -> float:
        """Return monotonic seconds, on a clock that stands still while a debugger pauses ranks for a hang report."""
        return time.monotonic() - (0.0 if self.hang_report is None else self.hang_report.seconds_debugging)

    async def end_silent(self, what: str, silent: Sequence[RankHandle], stacks: Mapping[int, str]) -> None:
        """End the group because of silent ranks, unless it is already ending. For the arguments see `_fall_silent`."""
        await self._end_once(partial(self._fall_silent, what, silent, stacks))

    async def find_stopped(self, call: Call, patience_seconds: float) -> tuple[list[RankHandle], Mapping[int, str]]:
        """Return the stopped ranks of a call, and the stacks of all ranks.

        A rank counts as stopped if it writes no stack within `patience_seconds` (see `StackRequests.missing`). Calls
        that read or write large files have deadlines with a recipe field of their own. During them no rank is asked,
        and none counts as stopped: a slow file system may delay the stacks too.
        """
        if self.deadlines.has_own_limit(call.method):
            return [], {}
        silent, stacks = await self.stacks.missing(patience_seconds)
        return [handle for handle in silent if handle in call.silent()], stacks

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
        return answers, [connection.ask(local_ranks, answers) for connection, local_ranks in per_connection.items()]

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
            return await self._fall_silent(what, call.silent(), await self.stacks.read(), remedy)
        answers = [answer for pending in calls for answer in pending.answers.values()]
        await asyncio.wait(answers, timeout=_REPORT_GRACE_SECONDS)
        failures: list[tuple[RankError, Call]] = []
        for pending in calls:
            for error in pending.errors():
                # The driver cannot decode an answer: the driver's own error is the cause.
                if not isinstance(error, RankError):
                    await self._end()
                    return error
                failures.append((error, pending))
        # Consequences come last. So do ranks cut off by their relay: a launcher ending all processes for one rank may
        # end another node's relay before that rank's end is reported.
        first, failed = min(failures, key=lambda found: (found[0].echo, found[0].handle.is_cut_off, found[0].at))
        # The failure is only a consequence. The cause is a rank that did not enter the collective, if there is one.
        if first.echo and (silent := failed.silent()):
            stacks = await self.stacks.read()
            if stopped := [handle for handle in silent if not waits_in_collective(stacks[handle.rank])]:
                return await self._fall_silent(f"did not enter a collective of `{failed.method}`", stopped, stacks)
        return await self._fail(failed.method, first, [error for error, _ in failures])

    async def _fail(self, method: str, first: RankError, failures: Sequence[RankError]) -> Exception:
        """End the group because of a rank's error, the `first` of several. Returns the error naming the first cause."""
        report = first.report
        # Killing the processes would make it look as if this one had ended by itself.
        is_dead = first.handle.died.done()
        is_lost = report is None or (report["lost"] and not report["megarl_class"])
        # A rank that reported a fault of its own, such as a broken GPU, cannot continue either.
        lost = [first.handle, *(error.handle for error in failures if not error.echo)]
        await self._end(lost if is_lost else None)
        return error_of(first, method, self.part.num_ranks, is_dead=is_dead)

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
                f"{names_of(stopped)} of {self.part.num_ranks} {what}; the driver reads the stacks of all ranks, then "
                "ends the call"
            )
            # The group must end whatever happens to its report.
            try:
                path = await self.hang_report.write(self, what, stopped, stacks)
            except Exception as error:
                self.on_slow(f"the report of this hang could not be written: {error!r}")
        await self._end(stopped)
        cause = f"{names_of(stopped)} of {self.part.num_ranks} {what}"
        if waiting := [handle for handle in silent if handle not in stopped]:
            cause += f"; {names_of(waiting)} waited in a collective"
        cause += "".join(f"; {obstacle}" for obstacle in obstacles)
        error = RankLostError(stopped[0].rank, cause + remedy, summary(stacks))
        error.add_note("\n".join(handle.log_tail() for handle in stopped))
        if path is not None:
            error.add_note(f"{path} has the stacks of all threads of all ranks.")
        return error

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
