"""The driver's pool of vLLM engine replicas, shared by all sampling coroutines."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from megarl.config.parallel import ParallelConfig
from megarl.rollout.engine_requests import OnLoss, PendingRequest, Queue, Replica, make_remaining_request, num_sampled
from megarl.rollout.pool_meter import PoolMeter
from megarl.rollout.stragglers import Pace, StragglerDetector
from megarl.rounding import divide_up
from megarl.types import Completion, PeerLostError, Request

BUDGET_SECONDS = 1.0
"""Seconds for an engine to sample before it returns to the driver."""
_MARGIN = 2
"""Extra requests tolerated on the replica with a trajectory's prefix cached, compared with the least loaded replica.
With more, the trajectory's next request goes to the common queue.
"""
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
        self._max_running = max_running
        self._budget_seconds = budget_seconds
        tp = parallel.rollout_tp
        self._replicas = [Replica(range(leader, leader + tp)) for leader in parallel.leaders()]
        self._num_lost = 0
        self._waiting: Queue = OrderedDict()
        self._pending: dict[str, PendingRequest] = {}
        self._homes: dict[str, Replica] = {}
        """Replica that has each trajectory's prefix cached, by `affinity`."""
        self._open: set[str] = set()
        """Trajectories that may send another request after the current one, by `affinity` or else by request id."""
        self._withdrawn: dict[str, PendingRequest] = {}
        """Cancelled requests by id, until their engine has ended them. Then their tokens are reported."""
        self._tokens_in_engines: dict[str, int] = {}
        """Tokens of requests that stay in paused engines, by request id. Empty while the engines sample."""
        self._failure: Exception | None = None
        self._advanced = asyncio.Event()
        self._meter = PoolMeter()

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
        error = self._failure
        if error is None and request.request_id in self._pending:
            error = ValueError(
                f"request id {request.request_id} is in use by a request still running; choose a unique id"
            )
        if error is not None:
            # Report even then: the end of a session waits for it.
            if on_abort is not None:
                on_abort(num_sampled(parts or []))
            raise error
        trajectory_name = request.request_id if affinity is None else affinity
        (self._open.discard if is_last else self._open.add)(trajectory_name)
        future: asyncio.Future[tuple[Completion, Replica | None]] = asyncio.get_running_loop().create_future()
        pending = PendingRequest(request, future, [] if parts is None else parts, on_abort, on_loss)
        self._pending[request.request_id] = pending
        self._enqueue(pending, self._choose_queue(affinity))
        self._start_pumps()
        try:
            completion, replica = await future
        except asyncio.CancelledError:
            # The completion may have arrived in the same cycle of the event loop as the cancellation.
            if on_abort is not None and not future.cancelled() and future.exception() is None:
                on_abort(len(future.result()[0].token_ids))
            raise
        finally:
            del self._pending[request.request_id]
            if affinity is None:
                self._open.discard(trajectory_name)
            # The future is pending only if this coroutine was cancelled. Its cancellation cancels the future too.
            if future.cancelled() or future.exception():
                self._withdraw(request)
                self._report_abort(pending)
        if affinity is not None and replica is not None:
            self._homes[affinity] = replica
        return completion

    def forget(self, affinity: str) -> None:
        self._homes.pop(affinity, None)
        self._open.discard(affinity)

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
        self._homes.clear()
        for replica in self._replicas:
            while replica.waiting:
                # Pop the newest first and put each at the front. So the common queue keeps the original order.
                request_id, request = replica.waiting.popitem()
                self._waiting[request_id] = request
                self._waiting.move_to_end(request_id, last=False)

    def resume(self) -> None:
        self._meter.end_pause(requests_wait=bool(self._pending))
        self._tokens_in_engines.clear()
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
                self._requeue(replica)

    def take_lost(self) -> int:
        num_lost, self._num_lost = self._num_lost, 0
        return num_lost

    @property
    def _live(self) -> list[Replica]:
        return [replica for replica in self._replicas if not replica.is_lost]

    @property
    def seconds_paused(self) -> float:
        return self._meter.seconds_paused

    @property
    def num_begun(self) -> int:
        # The pool has no journal.
        return 0

    def load(self) -> PoolLoad:
        return PoolLoad(
            num_running=sum(len(replica.running) for replica in self._replicas),
            num_waiting=len(self._waiting) + sum(len(replica.waiting) for replica in self._replicas),
            num_live=len(self._live),
            num_lost=len(self._replicas) - len(self._live),
            num_sampled_tokens=self._meter.total_sampled,
            is_paused=self.is_paused,
            failure=self._failure and f"{type(self._failure).__name__}: {self._failure}",
        )

    async def wait_until_drained(self) -> None:
        """Wait until no cancelled or finished request is left in the engines."""
        while any(r.is_pumped and not r.running.keys() <= self._pending.keys() for r in self._replicas):
            await self._advanced.wait()

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call. A pause in progress counts up to now."""
        metrics = self._meter.metrics(
            num_live=len(self._live),
            busy_seconds=sum(replica.pace.seconds for replica in self._replicas),
            requests_wait=bool(self._pending),
        )
        if self._stragglers is not None and len(self._replicas) > 1:
            metrics |= self._stragglers.metrics({replica.name: replica.pace for replica in self._live})
        for replica in self._replicas:
            replica.pace = Pace()
        return metrics

    def evaluation_metrics(self) -> dict[str, float]:
        """Return the token counts of an evaluation that has ended, and restart the counts of `metrics`."""
        metrics = self._meter.evaluation_metrics()
        self.metrics()
        return metrics

    async def _abort_running(self, replica: Replica) -> None:
        """Abort a replica's running requests. Queue each one's remaining tokens at the front."""
        running = tuple(replica.running)
        try:
            aborted = {part.request_id: part for part in await self._call_engine(replica, (), running, 0.0)}
        except PeerLostError as error:
            self._drop_replica(replica, error)
            if self._failure is not None:
                raise
            return
        # Only now: the tokens of a request that is cancelled during the call are reported below.
        replica.running.clear()
        replica.aborts.clear()
        replica.pace.num_tokens += self._count_parts(aborted.values())
        for request_id in reversed(running):
            self._tokens_in_engines.pop(request_id, None)
            self._report_withdrawn(request_id, len(aborted[request_id].token_ids) if request_id in aborted else 0)
            pending = self._pending.get(request_id)
            if pending is None:
                continue
            # A request aborted in the engine's queue has no tokens: it adds no part. One that was cancelled in this
            # cycle of the event loop reports its parts as soon as `generate` runs.
            if request_id in aborted and len(aborted[request_id].token_ids):
                pending.parts.append(aborted[request_id])
            if not pending.future.done():
                self._enqueue(pending, self._waiting, last=False)

    async def _count_unfinished(self, replica: Replica) -> None:
        """Count the tokens of requests that stay in an engine during a pause: they may finish in a later step."""
        try:
            counts, *_ = await self._ranks.ask(replica.ranks, "sampled_so_far", [None] * len(replica.ranks))
        except PeerLostError as error:
            self._drop_replica(replica, error)
            if self._failure is not None:
                raise
            return
        replica.pace.num_tokens += sum(
            self._count_tokens(request_id, num_tokens) for request_id, num_tokens in counts.items()
        )
        self._meter.expect_again(counts)
        # The engine ends cancelled requests only after the pause. Until then it samples nothing for them.
        for request_id, num_tokens in counts.items():
            self._report_withdrawn(request_id, num_tokens)
        self._tokens_in_engines |= counts

    def _enqueue(self, pending: PendingRequest, queue: Queue, *, last: bool = True) -> None:
        """Queue the remaining tokens of a completion. If its token limit is reached, finish it instead."""
        request_id = pending.request.request_id
        if num_sampled(pending.parts) >= pending.request.sampling.max_new_tokens:
            pending.finish(replace(pending.parts.pop(), finish_reason="length"), None)
            return
        queue[request_id] = make_remaining_request(pending.request, pending.parts)
        queue.move_to_end(request_id, last=last)

    def _choose_queue(self, affinity: str | None) -> Queue:
        """Return the queue for a trajectory's request: its earlier replica's, or the common one if that is busy."""
        home = self._homes.get(affinity) if affinity is not None else None
        # A lost replica has no pump: a request in its queue would wait for ever.
        if home is None or home.is_lost or home.load > min(replica.load for replica in self._live) + _MARGIN:
            return self._waiting
        return home.waiting

    def _withdraw(self, request: Request) -> None:
        """Remove a cancelled request from its queue. If it already runs, schedule its abort in the engine."""
        self._waiting.pop(request.request_id, None)
        for replica in self._replicas:
            replica.waiting.pop(request.request_id, None)
            if request.request_id in replica.running:
                replica.aborts.append(request.request_id)
        if self._failure is None:
            self._start_pumps()

    def _report_abort(self, pending: PendingRequest) -> None:
        """Report the number of tokens sampled for a cancelled or failed request, as soon as it is known.

        While an engine runs the request, this is when the engine ends it or is paused, otherwise now.
        """
        request_id = pending.request.request_id
        num_in_engine = self._tokens_in_engines.get(request_id)
        if num_in_engine is None and any(request_id in replica.running for replica in self._replicas):
            if self._failure is None:
                self._withdrawn[request_id] = pending
                return
            self._report_loss(pending)
        pending.report_abort(num_in_engine or 0)

    def _report_withdrawn(self, request_id: str, num_tokens: int) -> None:
        if (pending := self._withdrawn.pop(request_id, None)) is not None:
            pending.report_abort(num_tokens)

    def _report_loss(self, pending: PendingRequest) -> None:
        """Report the known tokens that a lost engine has sampled for a request since its last part."""
        request_id = pending.request.request_id
        # A paused engine had sampled no further tokens.
        is_all = request_id in self._tokens_in_engines
        if pending.on_loss is not None:
            pending.on_loss(self._meter.num_counted(request_id), is_all)

    def _start_pumps(self) -> None:
        if self.is_paused:
            return
        for replica in self._live:
            if not replica.is_pumped:
                replica.pump = asyncio.create_task(self._pump(replica))

    async def _pump(self, replica: Replica) -> None:
        """Let one replica's engine sample until it has no requests, or until the pool is paused."""
        try:
            while not self.is_paused:
                new_requests = self._admit(replica)
                if not replica.running:
                    return
                await self._advance(replica, new_requests)
                # Yield once, so that coroutines resumed by these completions can queue their next request before
                # admission.
                await asyncio.sleep(0)
        except PeerLostError as error:
            self._drop_replica(replica, error)
        except Exception as error:
            self.fail(error)
        finally:
            self._notify_advance()

    def _admit(self, replica: Replica) -> tuple[Request, ...]:
        """Dequeue the requests that a replica may start: its own queue first, then its share of the common queue."""
        num_unfinished = len(self._waiting) + sum(r.load for r in self._replicas)
        # Each replica takes at most an even share, rounded up. Otherwise the first pump to run would drain the common
        # queue.
        max_share = divide_up(num_unfinished, by=len(self._live))
        num_admitted = min(len(replica.waiting), self._max_running - len(replica.running))
        new_requests = [replica.waiting.popitem(last=False)[1] for _ in range(num_admitted)]
        num_free = min(self._max_running, max_share) - len(replica.running) - len(new_requests)
        new_requests += [self._waiting.popitem(last=False)[1] for _ in range(min(len(self._waiting), num_free))]
        replica.running |= dict.fromkeys(request.request_id for request in new_requests)
        return tuple(new_requests)

    async def _advance(self, replica: Replica, new_requests: tuple[Request, ...]) -> None:
        """Send new and cancelled requests to a replica's engine, and handle the completions that it returns."""
        self._meter.num_prompt_tokens += sum(len(request.prompt_token_ids) for request in new_requests)
        # A request may have finished since its cancellation. The engine no longer knows its id.
        aborts = tuple(request_id for request_id in replica.aborts if request_id in replica.running)
        replica.aborts = []
        started, num_running = time.monotonic(), len(replica.running)
        completions = await self._call_engine(replica, new_requests, aborts, self._budget_seconds)
        seconds = time.monotonic() - started
        # Assume that a request finishing in this call ran for half of the call.
        replica.pace.add(
            Pace(
                num_tokens=self._count_parts(completions),
                seconds=seconds,
                request_seconds=seconds * (num_running - len(completions) / 2),
            )
        )
        for completion in completions:
            replica.running.pop(completion.request_id, None)
            self._meter.num_cached += completion.num_cached
            self._report_withdrawn(completion.request_id, len(completion.token_ids))
            pending = self._pending.get(completion.request_id)
            if pending is not None and not pending.future.done():
                pending.finish(completion, replica)
            elif pending is not None:
                # Cancelled or failed in this cycle of the event loop: `generate` reports the tokens as soon as it runs.
                pending.parts.append(completion)
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
            self._choose_completions_per_report(replica),
            budget_seconds=budget_seconds,
        )
        return completions

    def _choose_completions_per_report(self, replica: Replica) -> int | None:
        """Return the number of finished completions after which the engine returns; None: only at the time limit.

        Each return costs driver and engine as much time as some sampled tokens.
        """
        may_follow = self._waiting or replica.waiting or self._open
        # An eighth of the requests: later turns can start early, but more returns would slow down sampling.
        return max(1, len(replica.running) // 8) if may_follow else None

    def _count_parts(self, parts: Iterable[Completion]) -> int:
        return sum(self._count_tokens(part.request_id, len(part.token_ids)) for part in parts)

    def _count_tokens(self, request_id: str, num_tokens: int) -> int:
        """Count the tokens of a request, and return how many are new. Tokens of cancelled requests count as
        training.
        """
        pending = self._pending.get(request_id)
        return self._meter.count_tokens(request_id, num_tokens, "training" if pending is None else pending.purpose)

    def _notify_advance(self) -> None:
        # Set the old event to wake its waiters, then replace it, so that the next wait blocks.
        self._advanced.set()
        self._advanced = asyncio.Event()

    def _drop_replica(self, replica: Replica, error: Exception) -> None:
        """Mark a replica as lost, and move its requests to the front of the queue. Without a live replica, fail them
        all.
        """
        replica.is_lost = True
        if not self._live:
            self.fail(error)
            return
        self._requeue(replica)
        self._homes = {affinity: home for affinity, home in self._homes.items() if home is not replica}
        self._start_pumps()

    def _requeue(self, replica: Replica) -> None:
        """Move a lost replica's requests to the front of the queue, with the tokens sampled so far."""
        running = set(replica.running)
        request_ids = [*replica.running, *replica.waiting]
        replica.running.clear()
        replica.waiting.clear()
        replica.aborts.clear()
        # Each request goes to the front, so go through them in reverse to keep the oldest first.
        for request_id in reversed(request_ids):
            pending = self._pending.get(request_id)
            if request_id in running and (sampled := pending or self._withdrawn.get(request_id)) is not None:
                self._report_loss(sampled)
            self._meter.forget(request_id)
            self._tokens_in_engines.pop(request_id, None)
            # The end of a session waits for a report.
            self._report_withdrawn(request_id, 0)
            if pending is not None and not pending.future.done():
                self._num_lost += 1
                self._enqueue(pending, self._waiting, last=False)

    def fail(self, error: Exception) -> None:
        """Fail all current and later requests with this error. A second error is ignored."""
        self._failure = self._failure or error
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(self._failure)
        for request_id, pending in list(self._withdrawn.items()):
            self._report_loss(pending)
            self._report_withdrawn(request_id, 0)


async def gather_unless_abandoned(
    pool: EnginePool, attempts: Iterable[Coroutine[Any, Any, Result]], is_abandoned: Callable[[], bool]
) -> list[Result]:
    """Run attempts concurrently, and return their results in order.

    Raises AbandonedError once `is_abandoned()` is True, or the first error of an attempt. First cancels all other
    attempts, and waits until the engines have none of their requests left.
    """
    tasks = [asyncio.create_task(attempt) for attempt in attempts]
    waiting = set(tasks)
    try:
        while waiting:
            # With a timeout, because `is_abandoned` must be polled: no event announces a requested stop.
            done, waiting = await asyncio.wait(waiting, timeout=BUDGET_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if waiting and is_abandoned():
                raise AbandonedError
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pool.wait_until_drained()
        raise
    return [task.result() for task in tasks]
