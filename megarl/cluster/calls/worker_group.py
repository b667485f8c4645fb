"""Remote calls from the driver to a fixed set of rank processes. Any failure ends the whole group."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from megarl import faults
from megarl.cluster.agents.agent_link import RankPlace
from megarl.cluster.agents.topology import find_addresses
from megarl.cluster.calls.call import Call, pack_commands
from megarl.cluster.calls.deadlines import Deadlines
from megarl.cluster.calls.diagnosis import Diagnosis, HangReport
from megarl.cluster.calls.group_end import GroupEnd
from megarl.cluster.calls.group_ranks import GroupRanks, PartOfRun
from megarl.cluster.calls.rank_queues import RankQueues
from megarl.cluster.ranks.messages import pack
from megarl.files.private_folder import PrivateFolder
from megarl.groups.rendezvous import Rendezvous


class WorkerGroup:
    """Ranks that execute the driver's calls. Create an object, then call `start`.

    A rank executes calls one by one, in the order in which they were made. Calls to disjoint ranks run concurrently.
    The first failure kills the group (`diagnosis.Diagnosis` lists failures and errors). A call cancelled before it runs
    does no harm.

    `deadlines` limit calls by method. `on_stop_signal` is called when a rank receives a stop signal.
    """

    def __init__(self, world_size: int, part: PartOfRun | None = None, *, places: Sequence[RankPlace] = ()) -> None:
        """`part` None: this group is the whole run. `start` needs the ranks' `places`."""
        self.world_size = world_size
        self.part = part or PartOfRun(0, world_size, secrets.token_bytes(32))
        self.meeting: Rendezvous | None = None
        """Address at which the started ranks create their torch process group."""
        self.start_timeout_seconds = 300.0
        self.deadlines = Deadlines.for_all_methods(self.start_timeout_seconds)
        self.on_stop_signal: Callable[[str], object] = lambda signal_name: None
        self._queues = RankQueues(self.world_size)
        self._calls: set[Call] = set()
        self._seconds_in_calls = self._in_calls_since = 0.0
        self.ranks = GroupRanks(self.part, places)
        self.end = GroupEnd(self.ranks, self._calls)
        self.diagnosis = Diagnosis(self.ranks, self.end, self._calls)

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

        `worker` is "package.module:Class". Ranks have the environment variables of their node's agent, `environment`,
        `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE` and a private `TMPDIR`. They write to
        `log_folder/rank_NNNN.log`. Each node imports the modules `imports` once. These may take `start_timeout_seconds`
        each: the interpreters' start, the construction, and a call before `deadlines` are set.
        """
        self.start_timeout_seconds = start_timeout_seconds
        self.deadlines = Deadlines.for_all_methods(start_timeout_seconds, "cluster.start_timeout_seconds")
        try:
            await self.ranks.fork(log_folder, environment or {}, imports, start_timeout_seconds)
            await self._exchange_addresses()
            if faults.text():
                await self.call("__arm__", faults.text(), self.part.first_rank)
            await self.construct(worker, kwargs)
        except BaseException as error:
            await self.end.interrupt("start", error)
            raise
        return self

    async def _exchange_addresses(self) -> None:
        """Wait until the ranks answer, and send them the address where they create their torch process group."""
        key, world_name = self.part.key, secrets.token_hex(16)
        is_on_this_machine = all(place.agent.addresses is None for place in self.places)
        store_address = "" if is_on_this_machine else self.hosts[0]
        address_per_rank = [store_address if rank == 0 else "" for rank in range(self.world_size)]
        messages = pack_commands("__listen__", address_per_rank, ())
        store_port, *_ = await self._exchange("start", range(self.world_size), messages)
        if store_address:
            self.meeting = Rendezvous(key, host=store_address, port=store_port, world=world_name)
        else:
            # Ranks of one machine exchange addresses through a file.
            folder = PrivateFolder()
            self.end.resources.callback(folder.remove)
            self.meeting = Rendezvous(key, file=str(folder.path / "store"), world=world_name)
        await self.call("__settle__", self.meeting)

    @property
    def places(self) -> list[RankPlace]:
        return self.ranks.places

    @property
    def hosts(self) -> list[str]:
        """For each rank, the address at which other nodes reach it."""
        return find_addresses([place.agent.addresses or ("127.0.0.1", "127.0.0.1") for place in self.places])

    @property
    def topology(self) -> list[tuple[str, ...]]:
        """For each rank, its node and the network switches above it, nearest first.

        Switches are left out if their number differs between nodes.
        """
        introductions = [place.agent.introduction for place in self.places]
        has_switches = len({len(node.switches) for node in introductions}) == 1
        return [(node.node, *(reversed(node.switches) if has_switches else ())) for node in introductions]

    @property
    def local_ranks(self) -> list[int]:
        """Each rank's number on its node (LOCAL_RANK), the index of its GPU."""
        return [place.local_rank for place in self.places]

    async def construct(self, worker: str, kwargs: Mapping[str, Any]) -> None:
        """Construct a worker ("package.module:Class") on every rank, in place of an earlier one."""
        await self.call("__init__", list(sys.path), worker, dict(kwargs))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method with the same arguments on every rank, and return the answers by rank.

        `part.method` is a method of one of the worker's parts.
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
        """Call a method on every rank, with `per_rank[rank]` as first argument. Return the answers by rank.

        `budget_seconds` is planned working time and `slack_seconds` other time; both extend the deadline. `on_answer`
        gets each answer as it arrives. Raises ValueError if `per_rank` has a wrong length.
        """
        if len(per_rank) != self.world_size:
            raise ValueError(
                f"the remote call of {method} needs {self.world_size} arguments, one per rank: got {len(per_rank)}"
            )
        messages = pack_commands(method, per_rank, args)
        return await self._exchange(method, range(self.world_size), messages, budget_seconds, slack_seconds, on_answer)

    async def ask(
        self, ranks: Sequence[int], method: str, per_rank: Sequence[Any], *args: Any, budget_seconds: float = 0.0
    ) -> list[Any]:
        """Call a method on some ranks, with `per_rank[i]` as first argument on rank `ranks[i]`.

        Returns the answers in the order of `ranks`. `budget_seconds` is planned working time, such as sampling, and
        extends the deadline. Raises ValueError for wrong ranks or a wrong number of arguments.
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
        return await self._exchange(method, ranks, pack_commands(method, per_rank, args), budget_seconds)

    @property
    def seconds_in_calls(self) -> float:
        """Total seconds in which at least one rank executed a call."""
        return self._seconds_in_calls + (time.monotonic() - self._in_calls_since if self._calls else 0.0)

    def report_hangs(self, report: HangReport, on_slow: Callable[[str], object] = lambda report: None) -> None:
        """Write stacks and states of all ranks to a file when a rank falls silent. The groups of a run share `report`.

        `on_slow` gets a text about ranks that are silent or far slower than in earlier calls.
        """
        self.diagnosis.report, self.diagnosis.on_slow = report, on_slow

    async def close(self) -> None:
        await self.end.close()

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
        async with self._queues.hold(ranks):
            await self.end.raise_if_begun()
            handles = [self.ranks.handles[rank] for rank in ranks]
            answers, answer_futures = self.ranks.ask(dict(zip(handles, messages, strict=True)))
            limit, extra_seconds = self.deadlines.limit_for(method), budget_seconds + slack_seconds
            limit = limit._replace(seconds=limit.seconds + extra_seconds)
            call = Call(method, limit, answers, answer_futures, time.monotonic())
            if on_answer is not None:
                call.add_answer_callback(on_answer)
            if not self._calls:
                self._in_calls_since = time.monotonic()
            self._calls.add(call)
            watch_task = asyncio.create_task(
                self.diagnosis.watch(call, self.deadlines, budget_seconds=budget_seconds, extra_seconds=extra_seconds)
            )
            try:
                await asyncio.wait(answer_futures, timeout=limit.seconds, return_when=asyncio.FIRST_EXCEPTION)
                watch_task.cancel()
                if not call.is_answered():
                    raise await self.diagnosis.explain(call)
            except BaseException as error:
                # A call abandoned half-way leaves its ranks in an unknown state.
                await self.end.interrupt(method, error)
                raise
            finally:
                watch_task.cancel()
                self._calls.remove(call)
                if not self._calls:
                    self._seconds_in_calls += time.monotonic() - self._in_calls_since
            # Subtract planned working time, because it does not show how slow the method is.
            self.deadlines.record_duration(method, max(0.0, time.monotonic() - call.began - budget_seconds))
            if stop_signal := next((handle.stop_signal for handle in handles if handle.stop_signal), None):
                self.on_stop_signal(stop_signal)
            return [answer.result() for answer in answers.values()]
