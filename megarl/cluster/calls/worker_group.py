"""Remote calls from the driver to a fixed set of rank processes. Any failure ends the whole group.

The agents of the ranks' nodes fork the processes, relay the calls, and watch the ranks (`agent`).
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from megarl import faults, types
from megarl.cluster.agents.agent_link import AgentLink, RankPlace
from megarl.cluster.agents.topology import reached_at, visible_gpus
from megarl.cluster.calls.call import Call, packed, watch
from megarl.cluster.calls.deadlines import Deadlines
from megarl.cluster.calls.hang_report import HangReport
from megarl.cluster.calls.rank_errors import RankLostError, error_of
from megarl.cluster.calls.rank_queues import RankQueues
from megarl.cluster.ranks.messages import pack, pack_cancel
from megarl.cluster.ranks.rank_handle import Answers, RankError, RankHandle, names_of
from megarl.cluster.ranks.stacks import STACKS_SECONDS, summary, waits_in_collective
from megarl.files.private_folder import PrivateFolder
from megarl.groups.rendezvous import Rendezvous

_REPORT_GRACE_SECONDS = 1.5
"""Seconds to wait, after a failure, for another rank to report an earlier failure that caused it. Other ranks may
notice that a rank died before the driver does.
"""
_LEAVE_SECONDS = 10.0
"""Seconds for ranks to exit by themselves when the group closes."""
_KILL_SECONDS = 10.0
"""Maximum seconds to wait for the end of killed processes."""
_MOST_PATIENCE_SECONDS = 60.0
"""Maximum seconds to wait for an agent's answer about stopped ranks."""
_LOOK_SECONDS = 0.1
"""Interval of looks whether a debugger still pauses ranks."""


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


class WorkerGroup:
    """Group of ranks executing the driver's calls. Create an object, then call `start`.

    A rank executes one call at a time, in the order in which the calls were made. Calls to disjoint ranks run at the
    same time. The event loop stays free meanwhile.

    The first failure kills the group. All calls in progress and all later calls raise its error:

    | event | error |
    |---|---|
    | a `MegarlError` of a rank | that class; a full disk is a DiskFullError |
    | a rank ended, lost its device or peers, or its node | `RankLostError` |
    | a rank missed a deadline, or is stopped | `RankLostError`; a note has the stacks of all ranks |
    | any other error of a rank | `RankFailedError` |
    | a call was cancelled half-way | PeerLostError for later calls |
    | `close` | PeerLostError for later calls |

    A call cancelled while it waits for its ranks does no harm. After the end all processes of the group have ended;
    `lost` has the ranks that caused it. The agents of the nodes go on.

    `deadlines` limit how long a call waits for its slowest rank, by method. `on_asked` is the callback for a stop
    signal received by a rank. `hosts` holds, for each rank, the address at which other nodes reach it. `topology` holds
    its node and the network switches above, nearest first.
    """

    def __init__(self, world_size: int, part: PartOfRun | None = None, *, places: Sequence[RankPlace] = ()) -> None:
        """Create a group without processes. `part` is its position in the run; None: the group is the whole run.

        `places` are those of its ranks. They must be known when `start` is called.
        """
        self.world_size, self.places = world_size, list(places)
        self.part = part or PartOfRun(0, world_size, secrets.token_bytes(32))
        self.meeting: Rendezvous | None = None
        """Address at which the ranks meet to create their torch process group, once they have started."""
        self.start_timeout_seconds = 300.0
        self.deadlines = Deadlines.same(self.start_timeout_seconds)
        self.handles: list[RankHandle] = []
        """The group's ranks; empty after its end."""
        self.lost: list[RankHandle] = []
        """Ranks whose loss ended the group."""
        self._queues = RankQueues(self.world_size)
        self._calls: set[Call] = set()
        self._seconds_in_calls = self._in_calls_since = 0.0
        self._ending: asyncio.Task[Exception] | None = None
        self._folder: PrivateFolder | None = None
        """Folder in which ranks of one machine meet."""
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
        imports: Sequence[str] = (),
    ) -> Self:
        """Start the ranks, construct `Class(rank=..., world_size=..., **kwargs)` in each, and return the group.

        `worker` is "package.module:Class". The ranks have their agent's environment, `environment`, `RANK`,
        `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` and a private `TMPDIR`, removed when they end. Output goes to
        `log_folder/rank_NNNN.log`. The modules `imports` are imported once a node. `start_timeout_seconds` limits the
        interpreters' start, then the worker's construction, and then every call until the group has other `deadlines`.
        """
        self.start_timeout_seconds = start_timeout_seconds
        self.deadlines = Deadlines.same(start_timeout_seconds, "cluster.start_timeout_seconds")
        try:
            await self._fork(log_folder, environment or {}, imports)
            await self._introduce()
            if faults.text():
                await self.call("__arm__", faults.text(), self.part.first_rank)
            await self.construct(worker, kwargs)
        except BaseException as error:
            await self._end_once(partial(self._abandon, "start", error))
            raise
        return self

    async def _fork(self, log_folder: Path, environment: Mapping[str, str], imports: Sequence[str]) -> None:
        """Let the agents fork the rank processes."""
        log_folder.mkdir(parents=True, exist_ok=True)
        for rank, place in enumerate(self.places):
            number = self.part.first_rank + rank
            self.handles.append(RankHandle(number, place.agent, log_folder / f"rank_{number:04d}.log"))
        forks: list[Coroutine[Any, Any, None]] = []
        for agent, handles in self._by_agent(self.handles).items():
            variables = [
                {
                    "RANK": str(handle.rank - self.part.first_rank),
                    "WORLD_SIZE": str(self.world_size),
                    "LOCAL_RANK": str(self._place_of(handle).local_rank),
                    "LOCAL_WORLD_SIZE": str(len(handles)),
                }
                for handle in handles
            ]
            # The recipe's variables come last: ranks on the CPU see no GPU.
            common = {**visible_gpus(agent.introduction), **environment}
            forks.append(agent.fork(handles, variables, common, imports, self.start_timeout_seconds))
        await asyncio.gather(*forks)

    async def _introduce(self) -> None:
        """Wait until the ranks serve, and let them know where they meet."""
        key, world = self.part.key, secrets.token_hex(16)
        address = "" if self._is_on_this_machine else self.hosts[0]
        addresses = [address if rank == 0 else "" for rank in range(self.world_size)]
        messages = packed("__listen__", addresses, ())
        port, *_ = await self._exchange("start", range(self.world_size), messages)
        if address:
            self.meeting = Rendezvous(key, host=address, port=port, world=world)
        else:
            self._folder = PrivateFolder()
            self.meeting = Rendezvous(key, file=str(self._folder.path / "store"), world=world)
        await self.call("__settle__", self.meeting)

    @property
    def _is_on_this_machine(self) -> bool:
        """Whether the ranks are on this machine alone, so they can meet in a file."""
        return all(place.agent.addresses is None for place in self.places)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the run. This group may have fewer."""
        return self.part.num_ranks

    @property
    def hosts(self) -> list[str]:
        """For each rank, the address at which other nodes reach it."""
        return reached_at([place.agent.addresses or ("127.0.0.1", "127.0.0.1") for place in self.places])

    @property
    def topology(self) -> list[tuple[str, ...]]:
        """For each rank, its node and the network switches above the node, nearest first.

        Without any switches if their number differs between ranks.
        """
        introductions = [place.agent.introduction for place in self.places]
        has_switches = len({len(node.switches) for node in introductions}) == 1
        return [(node.node, *(reversed(node.switches) if has_switches else ())) for node in introductions]

    @property
    def local_ranks(self) -> list[int]:
        """LOCAL_RANK of each rank: its number on its node, the index of its GPU."""
        return [place.local_rank for place in self.places]

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

    def show_stacks(self) -> None:
        """Make the ranks write the stacks of all threads to their logs and continue."""
        reading = asyncio.ensure_future(self.read_stacks())
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def read_stacks(self, seconds: float = STACKS_SECONDS) -> dict[int, str]:
        """Return the present stacks of each rank, as text by rank. It is empty for a stopped or unreachable rank.

        The ranks have `seconds` to write it.
        """
        handles = list(self.handles)
        stacks = dict.fromkeys((handle.rank for handle in handles), "")
        while True:
            await self._await_debugger()
            debugged = self._seconds_debugging
            answers = await self._request("stacks", handles, seconds + STACKS_SECONDS, seconds=seconds)
            stacks |= {handle.rank: text for handle, text in answers.items() if text is not None}
            if self._seconds_debugging == debugged:
                return stacks

    async def read_thread_states(self) -> dict[int, str]:
        """Return where the threads of each rank are in the kernel, as text by rank; empty if its agent is silent."""
        answers = await self._request("thread_states", self.handles, STACKS_SECONDS)
        return {handle.rank: text or "" for handle, text in answers.items()}

    async def _request(
        self, do: str, handles: Sequence[RankHandle], patience_seconds: float, **fields: Any
    ) -> dict[RankHandle, Any]:
        """Let each agent do something for the ranks of its node. Returns its answers by rank.

        The answer of an agent that is lost, or silent for `patience_seconds`, is None for each of its ranks.
        """
        of_agent = self._by_agent(handles)
        answers = await asyncio.gather(
            *(
                agent.request(
                    do, patience_seconds=patience_seconds, processes=[handle.process for handle in ranks], **fields
                )
                for agent, ranks in of_agent.items()
            ),
            return_exceptions=True,
        )
        results: dict[RankHandle, Any] = {}
        for ranks, answer in zip(of_agent.values(), answers, strict=True):
            if isinstance(answer, dict):
                by_process = {handle: answer[str(handle.process)] for handle in ranks if str(handle.process) in answer}
                results |= by_process
            else:
                results |= dict.fromkeys(ranks)
        return results

    async def _find_obstacles(self, handles: Sequence[RankHandle], patience_seconds: float) -> dict[RankHandle, str]:
        """Return the stopped ranks of these, each with what stops it; empty: the rank itself is stopped.

        An agent that does not answer within `patience_seconds` stops all its ranks.
        """
        while True:
            await self._await_debugger()
            debugged = self._seconds_debugging
            patience = max(STACKS_SECONDS, min(_MOST_PATIENCE_SECONDS, patience_seconds))
            answers = await self._request("stopped", handles, patience)
            # A debugger stops ranks too.
            if self._seconds_debugging == debugged:
                break
        silent_agent = "the agent of its node does not answer"
        obstacles = {handle: silent_agent if text is None else text for handle, text in answers.items()}
        return {handle: text for handle, text in obstacles.items() if not handle.died.done()}

    async def _await_debugger(self) -> None:
        """Wait until no hang report pauses ranks with a debugger."""
        while self.hang_report is not None and self.hang_report.is_debugging:
            await asyncio.sleep(_LOOK_SECONDS)

    @property
    def _seconds_debugging(self) -> float:
        """Total seconds so far in which debuggers paused ranks for hang reports."""
        return 0.0 if self.hang_report is None else self.hang_report.seconds_debugging

    def cancel_group(self, group: str, reason: str) -> None:
        """Cancel a cross-world process group on all ranks, even on ranks executing a call."""
        notice = pack_cancel(group, reason)
        for agent, handles in self._by_agent(self.handles).items():
            agent.send_notice(handles, notice)

    async def end_if_stopped(self, what: str, patience_seconds: float) -> None:
        """End the group if a living rank is stopped. `what` describes the fault in the error.

        Agents have `patience_seconds` to answer, from a few seconds to a minute.
        """
        if self._ending is not None:
            return
        if stopped := list(await self._find_obstacles(self.handles, patience_seconds)):
            await self.end_silent(what, stopped, await self.read_stacks())

    async def end_because_of(self, ranks: Sequence[int], what: str) -> Exception:
        """End the group because of a fault of the given ranks, described by `what`. Returns the error of all later
        calls.
        """

        async def end() -> Exception:
            silent = [self.handles[rank] for rank in ranks]
            return await self._fall_silent(what, silent, await self.read_stacks())

        return await self._end_once(end)

    async def close(self) -> None:
        """Close the group: the ranks exit after the driver closes their streams of commands.

        A rank that is busy, or that has not exited after a few seconds, is killed.
        """
        await self._end_once(self._leave)

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
            handles = [self.handles[rank] for rank in ranks]
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
        return time.monotonic() - self._seconds_debugging

    async def end_silent(self, what: str, silent: Sequence[RankHandle], stacks: Mapping[int, str]) -> None:
        """End the group because of silent ranks, unless it is already ending. For the arguments see `_fall_silent`."""
        await self._end_once(partial(self._fall_silent, what, silent, stacks))

    async def find_stopped(self, call: Call, patience_seconds: float) -> tuple[list[RankHandle], Mapping[int, str]]:
        """Return the stopped ranks of a call, and the stacks of all ranks. Agents have `patience_seconds` to answer."""
        stopped = await self._find_obstacles(call.silent(), patience_seconds)
        if not stopped:
            return [], {}
        stacks = await self.read_stacks()
        # One may have continued or ended meanwhile.
        still_stopped = await self._find_obstacles([h for h in call.silent() if h in stopped], patience_seconds)
        return list(still_stopped), stacks

    def _ask(self, messages: Mapping[RankHandle, bytes]) -> tuple[Answers, list[asyncio.Future[None]]]:
        """Send a command to each rank. Returns a future for each rank's answer, keyed by rank, and a list of futures to
        wait for. All futures of the list are done when all ranks have answered. One of them fails as soon as any rank
        fails.
        """
        loop = asyncio.get_running_loop()
        answers: Answers = {handle: loop.create_future() for handle in messages}
        return answers, [
            agent.ask({handle: messages[handle] for handle in handles}, answers)
            for agent, handles in self._by_agent(messages).items()
        ]

    def _by_agent(self, handles: Iterable[RankHandle]) -> dict[AgentLink, list[RankHandle]]:
        """Return ranks of this group by the agent of their node."""
        of_agent: defaultdict[AgentLink, list[RankHandle]] = defaultdict(list)
        for handle in handles:
            of_agent[self._place_of(handle).agent].append(handle)
        return of_agent

    def _place_of(self, handle: RankHandle) -> RankPlace:
        return self.places[handle.rank - self.part.first_rank]

    async def _end_once(self, end: Callable[[], Coroutine[Any, Any, Exception]]) -> Exception:
        """Run `end` (a coroutine ending the group), unless the group is already ending. Returns the error of all later
        calls."""
        if self._ending is None:
            self._ending = asyncio.create_task(end())
        # Several calls may wait for the end. The shield lets it complete even if some of them are cancelled.
        return await asyncio.shield(self._ending)

    async def _leave(self) -> Exception:
        """End the group. If no call is in progress, the ranks may exit by themselves."""
        if not self._calls and self.handles:
            for agent, handles in self._by_agent(self.handles).items():
                agent.dismiss(handles)
            await asyncio.wait([handle.died for handle in self.handles], timeout=_LEAVE_SECONDS)
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
            return await self._fall_silent(what, call.silent(), await self.read_stacks(), remedy)
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
        # Consequences come last. So do ranks cut off with their agent: the loss of a node may end an agent of another
        # one before a rank's own end is reported.
        first, failed = min(failures, key=lambda found: (found[0].echo, found[0].handle.is_cut_off, found[0].at))
        # The failure is only a consequence. The cause is a rank that did not enter the collective, if there is one.
        if first.echo and (silent := failed.silent()):
            stacks = await self.read_stacks()
            if stopped := [handle for handle in silent if not waits_in_collective(stacks[handle.rank])]:
                return await self._fall_silent(f"did not enter a collective of `{failed.method}`", stopped, stacks)
        return await self._fail(failed.method, first, [error for error, _ in failures])

    async def _fail(self, method: str, first: RankError, failures: Sequence[RankError]) -> Exception:
        """End the group because of a rank's error, the `first` of several. Returns the error naming the first cause."""
        report = first.report
        if report is None or (report["lost"] and not report["megarl_class"]):
            # A rank that reported a fault of its own, such as a broken GPU, cannot continue either.
            lost = [first.handle, *(error.handle for error in failures if not error.echo)]
            self.lost = list(dict.fromkeys(lost))
        await self._end()
        return error_of(first, method, self.part.num_ranks)

    async def _fall_silent(
        self, what: str, silent: Sequence[RankHandle], stacks: Mapping[int, str], remedy: str = ""
    ) -> Exception:
        """End the group because of stopped ranks. Returns an error naming them and shows the stacks of all ranks.

        `silent` ranks that only wait for a stopped one in a collective are listed as waiting.
        """
        stopped = [handle for handle in silent if not waits_in_collective(stacks[handle.rank])] or list(silent)
        # Before the end, which kills the processes.
        obstacles = dict.fromkeys(filter(None, (await self._find_obstacles(stopped, 0.0)).values()))
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
        self.lost = stopped
        await self._end()
        cause = f"{names_of(stopped)} of {self.part.num_ranks} {what}"
        if waiting := [handle for handle in silent if handle not in stopped]:
            cause += f"; {names_of(waiting)} waited in a collective"
        cause += "".join(f"; {obstacle}" for obstacle in obstacles)
        error = RankLostError(stopped[0].rank, cause + remedy, summary(stacks))
        error.add_note("\n".join(handle.log_tail() for handle in stopped))
        if path is not None:
            error.add_note(f"{path} has the stacks of all threads of all ranks.")
        return error

    async def _end(self) -> None:
        """Kill all remaining rank processes, and free all resources of the group."""
        handles, self.handles = self.handles, []
        for call in self._calls:
            for future in (*call.answers.values(), *call.awaited):
                future.cancel()
        for agent, handles_of_node in self._by_agent(handles).items():
            agent.kill(handles_of_node)
        if handles:
            await asyncio.wait([handle.died for handle in handles], timeout=_KILL_SECONDS)
        for agent in self._by_agent(handle for handle in handles if not handle.died.done()):
            # It is stopped, or its node is. It ends its ranks when it goes on.
            agent.cut()
        if self._folder is not None:
            self._folder.remove()
