"""The driver's pool of vLLM engine replicas, shared by all sampling coroutines."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from megarl.config.parallel import ParallelConfig
from megarl.rollout.engine_requests import PendingRequest, Queue, Replica, num_sampled, remainder
from megarl.rollout.pool_meter import PoolMeter
from megarl.rollout.stragglers import Pace, StragglerDetector
from megarl.types import Completion, PeerLostError, Request

BUDGET_SECONDS = 1.0
"""Seconds of sampling before an engine reports to the driver again."""
_MARGIN = 2
"""Tolerated extra load of a replica over the least loaded one, in requests. A trajectory's next request goes to the
replica with its prefix cached. With more extra load it goes to the common queue.
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
    """Engine replicas shared by many coroutines. One task per replica (its pump) steps the engine.

    Requests are admitted in the order of their arrival, at most `max_running` per replica. So samples of one prompt
    share a replica's prefix cache, and a faster replica gets more requests.

    The pump lets the engine run until an eighth of its requests have finished, for at most `budget_seconds`. If no
    further request can come (`is_last`), the engine runs until all have finished. Other tasks of the driver, for
    example scoring, continue meanwhile.

    If a pump fails, all current and later requests raise its error. Losing a replica while others live is not a
    failure: its requests move to the others, with the tokens sampled so far.

    `pause` aborts running requests and retains their tokens; `resume` continues them as new requests. With
    `pause(aborts=False)` they stay in their engines instead. Callers of `generate` only wait longer.
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
        """Create a pool over the replicas of `parallel`. `stragglers` finds slow replicas; None: nothing does."""
        self._ranks, self._stragglers = ranks, stragglers
        self._max_running = max_running
        self._budget_seconds = budget_seconds
        tp = parallel.rollout_tp
        self._replicas = [Replica(range(leader, leader + tp)) for leader in parallel.leaders()]
        self._num_lost = 0
        self._waiting: Queue = OrderedDict()
        self._pending: dict[str, PendingRequest] = {}
        self._homes: dict[str, Replica] = {}
        self._open: set[str] = set()
        """Trajectories (their `affinity`, else the request id) that may send another request after the current one."""
        self._withdrawn: dict[str, Callable[[int], None]] = {}
        """Callbacks for the tokens of cancelled requests that their engines have not ended yet."""
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
        on_abort: Callable[[int], None] | None = None,
    ) -> Completion:
        """Sample one completion, across any number of pauses. Cancelling this call aborts the request.

        Requests of one trajectory (`affinity`) go to the replica with its prefix cached, unless that replica has much
        more load than another. `is_last` promises that no request follows. The completion may then arrive up to
        `budget_seconds` late. `parts` were sampled earlier; each pause appends one. After a cancellation or an error,
        `on_abort` is called once with the number of tokens sampled so far, as soon as it is known.

        Raises ValueError if the request id is in use, and the error of a failed pump.
        """
        error = self._failure
        if error is None and request.request_id in self._pending:
            error = ValueError(
                f"request id {request.request_id} is in use by a request still running; choose a unique id"
            )
        if error is not None:
            # The end of a session waits for this report.
            if on_abort is not None:
                on_abort(num_sampled(parts or []))
            raise error
        opened = request.request_id if affinity is None else affinity
        (self._open.discard if is_last else self._open.add)(opened)
        future: asyncio.Future[tuple[Completion, Replica | None]] = asyncio.get_running_loop().create_future()
        self._pending[request.request_id] = pending = PendingRequest(request, future, [] if parts is None else parts)
        self._enqueue(pending, self._queue_for(affinity))
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
                self._open.discard(opened)
            # The future is pending only if this coroutine was cancelled, and then it is cancelled too.
            if future.cancelled() or future.exception():
                self._withdraw(request)
                if on_abort is not None:
                    self._report_abort(request.request_id, num_sampled(pending.parts), on_abort)
        if affinity is not None and replica is not None:
            self._homes[affinity] = replica
        return completion

    def forget(self, affinity: str) -> None:
        """Forget the replica with the prefix cache of the finished trajectory `affinity`."""
        self._homes.pop(affinity, None)
        self._open.discard(affinity)

    async def pause(self, *, aborts: bool = True) -> None:
        """Stop stepping all engines, and abort all running requests. New requests wait until `resume`.

        Aborted requests retain their tokens. With `aborts` = False, requests stay in their engines. Raises the error of
        a failed rank.
        """
        self._meter.begin_pause()
        while pumps := [replica.pump for replica in self._replicas if replica.pump and replica.is_pumped]:
            await asyncio.wait(pumps)
        stop_sampling = self._abort_running if aborts else self._count_unfinished
        await asyncio.gather(*(stop_sampling(replica) for replica in self._replicas if replica.running))
        # Weights may change during the pause, and cached keys and values with them. Replicas may be lost too.
        # So affinities are void, and replica queues merge into the common queue.
        self._homes.clear()
        for replica in self._replicas:
            while replica.waiting:
                # Newest first, each moved to the front: the common queue ends up in the original order.
                name, request = replica.waiting.popitem()
                self._waiting[name] = request
                self._waiting.move_to_end(name, last=False)

    def resume(self) -> None:
        """Resume sampling: send the requests waiting since `pause` to the engines."""
        self._meter.end_pause(requests_wait=bool(self._pending))
        self._tokens_in_engines.clear()
        self._start_pumps()

    @property
    def is_paused(self) -> bool:
        return self._meter.is_paused

    def set_live_replicas(self, leaders: Collection[int]) -> None:
        """Use only the replicas with these first ranks, even lost replicas. Call it while the pool is paused.

        Requests still in the engine of an excluded replica move to the others.
        """
        for replica in self._replicas:
            is_lost = replica.ranks[0] not in leaders
            if self._stragglers is not None and is_lost != replica.is_lost:
                self._stragglers.forget(replica.name)
            replica.is_lost = is_lost
            if is_lost:
                self._requeue(replica)

    def take_lost(self) -> int:
        """Return how many requests lost their replica since the last call of this method."""
        num_lost, self._num_lost = self._num_lost, 0
        return num_lost

    @property
    def _live(self) -> list[Replica]:
        return [replica for replica in self._replicas if not replica.is_lost]

    @property
    def seconds_paused(self) -> float:
        """Total seconds of the pool's pauses."""
        return self._meter.seconds_paused

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
        """Abort a replica's running requests, and queue the remaining tokens of each completion at the front."""
        running = tuple(replica.running)
        replica.running.clear()
        replica.aborts.clear()
        try:
            aborted = {part.request_id: part for part in await self._ask(replica, (), running, 0.0)}
        except PeerLostError as error:
            # `_drop_replica` requeues the ids in `running`, which this method has already cleared.
            replica.running = dict.fromkeys(running)
            self._drop_replica(replica, error)
            if self._failure is not None:
                raise
            return
        replica.pace.num_tokens += self._count_parts(aborted.values())
        for name in reversed(running):
            self._report_withdrawn(name, len(aborted[name].token_ids) if name in aborted else 0)
            pending = self._pending.get(name)
            if pending is not None and not pending.future.done():
                # A request aborted in the engine's queue has no tokens: it adds no part.
                if len(aborted[name].token_ids):
                    pending.parts.append(aborted[name])
                self._enqueue(pending, self._waiting, last=False)

    async def _count_unfinished(self, replica: Replica) -> None:
        """Count the tokens of requests staying in an engine during a pause: they may finish in a later step."""
        try:
            counts, *_ = await self._ranks.ask(replica.ranks, "sampled_so_far", [None] * len(replica.ranks))
        except PeerLostError as error:
            self._drop_replica(replica, error)
            if self._failure is not None:
                raise
            return
        replica.pace.num_tokens += sum(self._count_tokens(name, num_tokens) for name, num_tokens in counts.items())
        self._meter.expect_again(counts)
        # The engine ends cancelled requests only after the pause, and until then samples nothing for them.
        for name, num_tokens in counts.items():
            self._report_withdrawn(name, num_tokens)
        self._tokens_in_engines |= counts

    def _enqueue(self, pending: PendingRequest, queue: Queue, *, last: bool = True) -> None:
        """Queue the remaining tokens of a completion, or finish the completion if its token limit is reached."""
        name = pending.request.request_id
        if num_sampled(pending.parts) >= pending.request.sampling.max_new_tokens:
            pending.finish(replace(pending.parts.pop(), finish_reason="length"), None)
            return
        queue[name] = remainder(pending.request, pending.parts)
        queue.move_to_end(name, last=last)

    def _queue_for(self, affinity: str | None) -> Queue:
        home = self._homes.get(affinity) if affinity is not None else None
        # A lost replica has no pump, so a request in its queue would wait for ever.
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

    def _report_abort(self, request_id: str, num_before: int, on_abort: Callable[[int], None]) -> None:
        """Call `on_abort` with the number of tokens sampled for an aborted request.

        A request that runs in an engine is reported once the engine has ended it, or has paused. Others are reported at
        once. `num_before` are tokens of earlier parts.
        """
        is_running = any(request_id in replica.running for replica in self._replicas)
        if is_running and self._failure is None and request_id not in self._tokens_in_engines:
            self._withdrawn[request_id] = lambda num_tokens: on_abort(num_before + num_tokens)
        else:
            on_abort(num_before + self._tokens_in_engines.get(request_id, 0))

    def _report_withdrawn(self, request_id: str, num_tokens: int) -> None:
        """Report the tokens of a cancelled request, sampled since its last part. Does nothing for other requests."""
        if (report := self._withdrawn.pop(request_id, None)) is not None:
            report(num_tokens)

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
                new = self._admit(replica)
                if not replica.running:
                    return
                await self._advance(replica, new)
                # Yield once: coroutines resumed by these completions can queue their next request before admission.
                await asyncio.sleep(0)
        except PeerLostError as error:
            self._drop_replica(replica, error)
        except Exception as error:
            self.fail(error)
        finally:
            self._notify_advance()

    def _admit(self, replica: Replica) -> tuple[Request, ...]:
        """Dequeue as many requests as a replica may start: first its own queue, then its share of the common queue."""
        unfinished = len(self._waiting) + sum(r.load for r in self._replicas)
        # Round up. No replica takes more than its even share of the common queue: one with a free engine would
        # otherwise drain the queue before the other pumps start.
        share = -(-unfinished // len(self._live))
        num_admitted = min(len(replica.waiting), self._max_running - len(replica.running))
        new = [replica.waiting.popitem(last=False)[1] for _ in range(num_admitted)]
        num_free = min(self._max_running, share) - len(replica.running) - len(new)
        new += [self._waiting.popitem(last=False)[1] for _ in range(min(len(self._waiting), num_free))]
        replica.running |= dict.fromkeys(request.request_id for request in new)
        return tuple(new)

    async def _advance(self, replica: Replica, new: tuple[Request, ...]) -> None:
        self._meter.num_prompt_tokens += sum(len(request.prompt_token_ids) for request in new)
        # A request may have finished between its cancellation and this call; the engine does not know its id then.
        aborts = tuple(name for name in replica.aborts if name in replica.running)
        replica.aborts = []
        began, load = time.monotonic(), len(replica.running)
        completions = await self._ask(replica, new, aborts, self._budget_seconds)
        seconds = time.monotonic() - began
        # Requests that finish in this call ran for half of it on average.
        replica.pace.add(
            Pace(
                num_tokens=self._count_parts(completions),
                seconds=seconds,
                request_seconds=seconds * (load - len(completions) / 2),
            )
        )
        for completion in completions:
            replica.running.pop(completion.request_id, None)
            self._meter.num_cached += completion.num_cached
            self._report_withdrawn(completion.request_id, len(completion.token_ids))
            pending = self._pending.get(completion.request_id)
            if pending is not None and not pending.future.done():
                pending.finish(completion, replica)
        self._notify_advance()

    async def _ask(
        self, replica: Replica, new: tuple[Request, ...], aborts: tuple[str, ...], budget_seconds: float
    ) -> list[Completion]:
        """Send new requests and aborts to a replica, let it sample, and return the finished completions."""
        work: tuple[tuple[Request, ...], tuple[str, ...]] = (new, aborts)
        # Only the leader has vLLM's scheduler; the other ranks of the replica follow it.
        per_rank = [work, *[((), ())] * (len(replica.ranks) - 1)]
        completions, *_ = await self._ranks.ask(
            replica.ranks,
            "advance",
            per_rank,
            budget_seconds,
            self._completions_per_report(replica),
            budget_seconds=budget_seconds,
        )
        return completions

    def _completions_per_report(self, replica: Replica) -> int | None:
        """Return the finished completions after which the engine reports. None: it reports only at the time limit.

        A report costs driver and engine as much time as some sampled tokens.
        """
        may_follow = self._waiting or replica.waiting or self._open
        # An eighth: early completions let next turns start, but frequent returns would slow sampling.
        return max(1, len(replica.running) // 8) if may_follow else None

    def _count_parts(self, parts: Iterable[Completion]) -> int:
        return sum(self._count_tokens(part.request_id, len(part.token_ids)) for part in parts)

    def _count_tokens(self, name: str, num_tokens: int) -> int:
        """Count the tokens of a request, and return how many are new. Cancelled requests count as training."""
        pending = self._pending.get(name)
        return self._meter.count_tokens(name, num_tokens, "training" if pending is None else pending.purpose)

    def _notify_advance(self) -> None:
        # Waiters keep the old event. A new one makes the next wait block again.
        self._advanced.set()
        self._advanced = asyncio.Event()

    def _drop_replica(self, replica: Replica, error: Exception) -> None:
        """Mark a replica as lost, and move its requests to the front of the queue. Without a live replica, fail all
        requests.
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
        names = [*replica.running, *replica.waiting]
        replica.running.clear()
        replica.waiting.clear()
        replica.aborts.clear()
        # Each request goes to the front, so the reverse order keeps the oldest first.
        for name in reversed(names):
            self._meter.forget(name)
            # The tokens in a lost engine are unknown. Without a report, the end of a session would wait for one.
            self._report_withdrawn(name, 0)
            pending = self._pending.get(name)
            if pending is not None and not pending.future.done():
                self._num_lost += 1
                self._enqueue(pending, self._waiting, last=False)

    def fail(self, error: Exception) -> None:
        """Fail all current and later requests with this error. A second error is ignored."""
        self._failure = self._failure or error
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(self._failure)
        for name in list(self._withdrawn):
            self._report_withdrawn(name, 0)


async def gather_unless_abandoned(
    pool: EnginePool, attempts: Iterable[Coroutine[Any, Any, Result]], is_abandoned: Callable[[], bool]
) -> list[Result]:
    """Run attempts concurrently and return their results in order.

    Raises AbandonedError once `is_abandoned()` is True, or the first error of an attempt. Before that, all other
    attempts are cancelled and their requests have left the engines.
    """
    tasks = [asyncio.create_task(attempt) for attempt in attempts]
    waiting = set(tasks)
    try:
        while waiting:
            # A timeout, because `is_abandoned` is polled: nothing notifies this coroutine of a requested stop.
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
