"""The driver's pool of vLLM engine replicas, shared by all sampling coroutines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from megarl.config.parallel import ParallelConfig
from megarl.rollout.pool_meter import PoolMeter
from megarl.rollout.requests.engine_requests import OnLoss, PendingRequest, Replica, num_sampled, select_live
from megarl.rollout.requests.queues import RequestQueues
from megarl.rollout.requests.request_table import RequestTable
from megarl.rollout.stragglers import Pace, StragglerDetector
from megarl.types import Completion, PeerLostError, Request

BUDGET_SECONDS = 1.0
"""Seconds for an engine to sample before it returns to the driver."""
Result = TypeVar("Result")


class PoolLoad(NamedTuple):
    """Load of the engines at one moment."""

    num_running: int
    """Requests sent to engines and not yet finished."""
    num_waiting: int
    """Requests waiting in the driver's queues."""
    num_live: int
    num_lost: int
    num_sampled_tokens: int
    """Tokens sampled since the start of the run."""
    is_paused: bool
    failure: str | None
    """Error of the engines, if they failed."""


class AbandonedError(Exception):
    """Raised when the run must stop while it samples. By then the engines have no request left."""


class Asks(Protocol):
    """Calls to ranks with engines, addressed by rank number."""

    async def ask(
        self, ranks: Sequence[int], method: str, per_rank: Sequence[Any], *args: Any, budget_seconds: float = 0.0
    ) -> list[Any]:
        """Call `method` on these ranks with `per_rank` arguments; return one result per rank. `budget_seconds` extends
        the call's deadline.
        """
        ...


class EnginePool:
    """Engine replicas shared by many coroutines. One task per replica, its pump, steps the replica's engine.

    Requests are admitted in the order of arrival, at most `max_running` per replica. So samples of one prompt share a
    replica's prefix cache, and a faster replica gets more requests.

    One call of the pump lets the engine run until an eighth of its requests have finished, for at most
    `budget_seconds`. If no further request can come (`is_last`), the engine runs until all have finished. Other tasks
    of the driver, for example scoring, run meanwhile.

    If a pump fails, all current and later requests raise its error. Losing a replica while others live is no failure:
    its requests move to the others, with the tokens sampled so far.

    `pause` aborts running requests and retains their tokens, and `resume` continues them as new requests. After
    `pause(aborts=False)` they are still in their engines.
    """

    def __init__(
        self,
        ranks: Asks,
        parallel: ParallelConfig,
        *,
        max_running: int,
        budget_seconds: float = BUDGET_SECONDS,
        stragglers: StragglerDetector | None = None,
    ) -> None:
        self._ranks, self._stragglers = ranks, stragglers
        self._budget_seconds = budget_seconds
        tp = parallel.rollout_tp
        self._replicas = [Replica(range(leader, leader + tp)) for leader in parallel.leaders()]
        self._num_lost = 0
        self._advanced = asyncio.Event()
        self._meter = PoolMeter()
        self._queues = RequestQueues(self._replicas, max_running)
        self._requests = RequestTable(self._replicas, self._queues, self._meter)

    async def generate(
        self,
        request: Request,
        *,
        affinity: str | None = None,
        is_last: bool = False,
        parts: list[Completion] | None = None,
        on_begun: Callable[[int], None] | None = None,
        on_abort: Callable[[int], None] | None = None,
        on_loss: OnLoss | None = None,
    ) -> Completion:
        """Sample one completion (see `Generates`), across any number of pauses. A cancelled call aborts the request.

        `parts` are the tokens sampled before this call; each pause of the engines appends one part. `on_begun` is
        called with the number of tokens in `parts`. With `is_last` the completion may arrive up to `budget_seconds`
        late.

        Raises ValueError if the request id is in use, and the error of a failed pump (the task that steps an engine).
        """
        if on_begun is not None and parts:
            on_begun(num_sampled(parts))
        if (error := self._requests.find_refusal(request.request_id)) is not None:
            # Report even then: the end of a session waits for it.
            if on_abort is not None:
                on_abort(num_sampled(parts or []))
            raise error
        trajectory_name = request.request_id if affinity is None else affinity
        self._queues.record_request(trajectory_name, is_last=is_last)
        future: asyncio.Future[tuple[Completion, Replica | None]] = asyncio.get_running_loop().create_future()
        pending = PendingRequest(request, future, [] if parts is None else parts, on_abort, on_loss)
        self._requests.pending[request.request_id] = pending
        self._queues.put_request(pending, self._queues.choose_queue(affinity))
        self._start_pumps()
        try:
            completion, replica = await future
        except asyncio.CancelledError:
            # The completion may have arrived in the same cycle of the event loop as the cancellation.
            if on_abort is not None and not future.cancelled() and future.exception() is None:
                on_abort(len(future.result()[0].token_ids))
            raise
        finally:
            del self._requests.pending[request.request_id]
            if affinity is None:
                self._queues.close_trajectory(trajectory_name)
            # The future is pending only if this coroutine was cancelled. Its cancellation cancels the future too.
            if future.cancelled() or future.exception():
                self._requests.withdraw_request(request)
                if self._requests.failure is None:
                    self._start_pumps()
                self._requests.report_abort(pending)
        if affinity is not None and replica is not None:
            self._queues.homes[affinity] = replica
        return completion

    def forget(self, affinity: str) -> None:
        self._queues.forget_trajectory(affinity)

    async def pause(self, *, aborts: bool = True) -> None:
        """Stop stepping all engines, and abort all running requests. New requests wait until `resume`.

        Aborted requests retain their tokens. With `aborts` = False, requests are not aborted. Raises the error of a
        failed rank.
        """
        self._meter.begin_pause()
        while pumps := [replica.pump for replica in self._replicas if replica.pump and replica.is_pumped]:
            await asyncio.wait(pumps)
        stop_sampling = self._abort_running if aborts else self._count_unfinished
        await asyncio.gather(*(stop_sampling(replica) for replica in self._replicas if replica.running))
        # The pause may change the weights, and with them the KV cache, or lose replicas. So clear the affinities, and
        # move all replica queues to the common queue.
        self._queues.forget_homes()

    def resume(self) -> None:
        self._meter.end_pause(requests_wait=bool(self._requests.pending))
        self._requests.resume()
        self._start_pumps()

    @property
    def is_paused(self) -> bool:
        return self._meter.is_paused

    def set_live_replicas(self, leaders: Collection[int]) -> None:
        """Use only the replicas with these first ranks. A replica lost earlier may return. Call this while the pool is
        paused.

        Requests in the engine of an excluded replica move to the other replicas.
        """
        for replica in self._replicas:
            is_lost = replica.ranks[0] not in leaders
            if self._stragglers is not None and is_lost != replica.is_lost:
                self._stragglers.forget(replica.name)
            replica.is_lost = is_lost
            if is_lost:
                self._num_lost += self._requests.requeue_requests(replica)

    def take_lost(self) -> int:
        num_lost, self._num_lost = self._num_lost, 0
        return num_lost

    @property
    def seconds_paused(self) -> float:
        return self._meter.seconds_paused

    @property
    def num_begun_tokens(self) -> int:
        # The pool has no journal.
        return 0

    def load(self) -> PoolLoad:
        num_live, failure = len(select_live(self._replicas)), self._requests.failure
        return PoolLoad(
            num_running=sum(len(replica.running) for replica in self._replicas),
            num_waiting=self._queues.num_waiting,
            num_live=num_live,
            num_lost=len(self._replicas) - num_live,
            num_sampled_tokens=self._meter.total_sampled,
            is_paused=self.is_paused,
            failure=failure and f"{type(failure).__name__}: {failure}",
        )

    async def wait_until_drained(self) -> None:
        """Wait until no cancelled or finished request is left in the engines."""
        while any(r.is_pumped and not r.running.keys() <= self._requests.pending.keys() for r in self._replicas):
            await self._advanced.wait()

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call. A pause in progress counts up to now."""
        metrics = self._meter.metrics(
            num_live=len(select_live(self._replicas)),
            busy_seconds=sum(replica.pace.seconds for replica in self._replicas),
            requests_wait=bool(self._requests.pending),
        )
        if self._stragglers is not None and len(self._replicas) > 1:
            metrics |= self._stragglers.metrics({replica.name: replica.pace for replica in select_live(self._replicas)})
        for replica in self._replicas:
            replica.pace = Pace()
        return metrics

    def evaluation_metrics(self) -> dict[str, float]:
        """Return the token counts of an evaluation that has ended, and restart the counts of `metrics`."""
        metrics = self._meter.evaluation_metrics()
        self.metrics()
        return metrics

    async def _abort_running(self, replica: Replica) -> None:
        """Abort a replica's running requests. Queue them again at the front, with the tokens still to sample."""
        request_ids = tuple(replica.running)
        try:
            part_by_request = {part.request_id: part for part in await self._call_engine(replica, (), request_ids, 0.0)}
        except PeerLostError as error:
            self._drop_replica(replica, error)
            if self._requests.failure is not None:
                raise
            return
        # Only now: the tokens of a request that is cancelled during the call are reported below.
        replica.running.clear()
        replica.aborts.clear()
        replica.pace.num_tokens += self._requests.count_parts(part_by_request.values())
        self._requests.requeue_aborted(request_ids, part_by_request)

    async def _count_unfinished(self, replica: Replica) -> None:
        """Count the tokens of requests that stay in an engine during a pause: they may finish in a later step."""
        try:
            counts, *_ = await self._ranks.ask(replica.ranks, "sampled_so_far", [None] * len(replica.ranks))
        except PeerLostError as error:
            self._drop_replica(replica, error)
            if self._requests.failure is not None:
                raise
            return
        self._requests.count_unfinished(replica, counts)

    def _start_pumps(self) -> None:
        if self.is_paused:
            return
        for replica in select_live(self._replicas):
            if not replica.is_pumped:
                replica.pump = asyncio.create_task(self._pump(replica))

    async def _pump(self, replica: Replica) -> None:
        """Let one replica's engine sample until it has no requests, or until the pool is paused."""
        try:
            while not self.is_paused:
                new_requests = self._queues.admit_requests(replica)
                if not replica.running:
                    return
                await self._advance_engine(replica, new_requests)
                # Yield once, so that coroutines resumed by these completions can queue their next request before
                # admission.
                await asyncio.sleep(0)
        except PeerLostError as error:
            self._drop_replica(replica, error)
        except Exception as error:
            self.fail(error)
        finally:
            self._notify_advance()

    async def _advance_engine(self, replica: Replica, new_requests: tuple[Request, ...]) -> None:
        """Send new and cancelled requests to a replica's engine, and handle the completions that it returns."""
        self._meter.num_prompt_tokens += sum(len(request.prompt_token_ids) for request in new_requests)
        # A request may have finished since its cancellation. The engine no longer knows its id.
        aborts = tuple(request_id for request_id in replica.aborts if request_id in replica.running)
        replica.aborts = []
        call_began, num_running = time.monotonic(), len(replica.running)
        completions = await self._call_engine(replica, new_requests, aborts, self._budget_seconds)
        seconds = time.monotonic() - call_began
        # Assume that a request finishing in this call ran for half of the call.
        replica.pace.add(
            Pace(
                num_tokens=self._requests.count_parts(completions),
                seconds=seconds,
                request_seconds=seconds * (num_running - len(completions) / 2),
            )
        )
        self._requests.finish_requests(replica, completions)
        self._notify_advance()

    async def _call_engine(
        self, replica: Replica, new_requests: tuple[Request, ...], aborts: tuple[str, ...], budget_seconds: float
    ) -> list[Completion]:
        """Send new requests and aborts to a replica, let it sample, and return the finished completions."""
        requests_and_aborts: tuple[tuple[Request, ...], tuple[str, ...]] = (new_requests, aborts)
        # Only the replica's first rank has vLLM's scheduler. The other ranks follow it.
        per_rank = [requests_and_aborts, *[((), ())] * (len(replica.ranks) - 1)]
        completions, *_ = await self._ranks.ask(
            replica.ranks,
            "advance",
            per_rank,
            budget_seconds,
            self._queues.choose_completions_per_report(replica),
            budget_seconds=budget_seconds,
        )
        return completions

    def _notify_advance(self) -> None:
        # Set the old event to wake its waiters, then replace it, so that the next wait blocks.
        self._advanced.set()
        self._advanced = asyncio.Event()

    def _drop_replica(self, replica: Replica, error: Exception) -> None:
        """Mark a replica as lost, and move its requests to the front of the queue. Without a live replica, fail them
        all.
        """
        replica.is_lost = True
        if not select_live(self._replicas):
            self.fail(error)
            return
        self._num_lost += self._requests.requeue_requests(replica)
        self._queues.forget_homes_in(replica)
        self._start_pumps()

    def fail(self, error: Exception) -> None:
        self._requests.fail_requests(error)


async def gather_unless_abandoned(
    pool: EnginePool, attempts: Iterable[Coroutine[Any, Any, Result]], is_abandoned: Callable[[], bool]
) -> list[Result]:
    """Run attempts concurrently, and return their results in order.

    Raises AbandonedError once `is_abandoned()` is True, or the first error of an attempt. First cancels all other
    attempts, and waits until the engines have none of their requests left.
    """
    tasks = [asyncio.create_task(attempt) for attempt in attempts]
    running_tasks = set(tasks)
    try:
        while running_tasks:
            # With a timeout, because `is_abandoned` must be polled: no event announces a requested stop.
            ended_tasks, running_tasks = await asyncio.wait(
                running_tasks, timeout=BUDGET_SECONDS, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in ended_tasks:
                task.result()
            if running_tasks and is_abandoned():
                raise AbandonedError
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pool.wait_until_drained()
        raise
    return [task.result() for task in tasks]
