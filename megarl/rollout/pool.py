"""The driver's side of the engines: a pool that any number of coroutines sample from. No torch."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from megarl.cluster.stacks import engine_named
from megarl.config.parallel import ParallelConfig
from megarl.rewards.served import COUNTED_FOR
from megarl.rollout.parts import joined, num_kept, rest_of
from megarl.rollout.slow import Pace, SlowReplicas
from megarl.types import Completion, PeerLostError, Request

METRICS = {
    "time/engines_idle": (
        "share",
        "the engines' time with nothing to sample, but for that in which they are held: for training, or asleep while "
        "rewards are awaited (time/rollout_late_rewards_seconds)",
    ),
    "rollout/held_seconds": ("seconds", "how long the engines were held while requests waited"),
    "perf/engines_open_seconds": (
        "seconds",
        "how long the engines were open to requests, from one reshard to the next hold",
    ),
    "rollout/sampled_tokens": (
        "tokens",
        "tokens that the engines sampled for the step, those of requests that a reshard interrupts included",
    ),
    "rollout/evaluation_tokens": ("tokens", "tokens that the engines sampled for the step's evaluation"),
    "rollout/beside_evaluation_tokens": (
        "tokens",
        "tokens that they sampled meanwhile for training, where it goes on; rollout/sampled_tokens, rates and idle "
        "shares leave both out, with the time of the evaluation",
    ),
    "rollout/prefix_hits": ("share", "the prompts' tokens that an engine had in its prefix cache"),
}
"""Names, units and meanings, for `tracking.table`."""

BUDGET_SECONDS = 1.0
"""Time limit of one call of `advance`: how long an engine runs between two exchanges with the driver."""
_MARGIN = 2
"""Requests that a replica may have beyond the least loaded one and still receive its trajectories' next requests."""
Result = TypeVar("Result")
Queue = OrderedDict[str, Request]
"""Requests by id, first in first out; any of thousands may be removed before its turn, in constant time."""


class AbandonedError(Exception):
    """Sampling was abandoned; all its requests have left the engines."""


class Asks(Protocol):
    """The ranks that have engines, by number: a `WorkerGroup`, or `RunRanks`."""

    async def ask(
        self, ranks: Sequence[int], method: str, per_rank: Sequence[Any], *args: Any, budget_seconds: float = 0.0
    ) -> list[Any]:
        """As `WorkerGroup.ask`."""
        ...


class Generates(Protocol):
    """Where an attempt has its completions from."""

    async def generate(self, request: Request, *, affinity: str | None = None, is_last: bool = False) -> Completion:
        """As `EnginePool.generate`."""
        ...

    def forget(self, affinity: str) -> None:
        """As `EnginePool.forget`."""
        ...

    @property
    def seconds_held(self) -> float:
        """As `EnginePool.seconds_held`."""
        ...


@dataclass(slots=True, eq=False)
class _Pending:
    """A completion that someone waits for: the request, who is told, and the parts of it that parks kept."""

    request: Request
    future: asyncio.Future[tuple[Completion, _Replica | None]]
    parts: list[Completion]
    purpose: str = field(default_factory=COUNTED_FOR.get)
    """Whom its tokens are counted for."""

    def finish(self, last: Completion, replica: _Replica | None) -> None:
        """Tell the completion that this part ends."""
        self.future.set_result((joined([*self.parts, last]) if self.parts else last, replica))


class _Replica:
    """The state of an engine replica: requests it runs, requests that wait for it, its pump."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.running: dict[str, None] = {}
        """Ids in the order in which they were admitted."""
        self.waiting: Queue = OrderedDict()
        self.aborts: list[str] = []
        self.is_lost = False
        self.pump: asyncio.Task[None] | None = None
        self.pace = Pace()

    @property
    def name(self) -> str:
        return engine_named(self.ranks)

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def is_pumped(self) -> bool:
        return self.pump is not None and not self.pump.done()


class EnginePool:
    """Engine replicas for any number of coroutines, with one pump per replica, independent of the others.

    `max_running` bounds the requests that a replica runs. Requests are admitted in the order in which they were filed,
    so that those of one prompt share a replica's prefix cache; a replica that finishes early is given more.

    An engine runs until an eighth of its requests have finished, or all of them where no request can follow on any, at
    most `budget_seconds`; the driver's other tasks, such as scoring, go on meanwhile. The error of a pump is raised by
    all requests, later ones too; but a replica that is lost while others are not is cut off, and its requests go to
    those, with the tokens that parks kept.

    While the pool is held the engines have no request: those that ran are parked, with their tokens kept here, and go
    on as new requests once it is released. Or they rest in the engines. Nobody who waits for a completion sees it.
    """

    def __init__(
        self,
        ranks: Asks,
        layout: ParallelConfig,
        *,
        max_running: int,
        budget_seconds: float = BUDGET_SECONDS,
        slow: SlowReplicas | None = None,
    ) -> None:
        """`slow` judges the replicas' paces, where that is wanted."""
        self._ranks, self._slow = ranks, slow
        self._max_running = max_running
        self._budget_seconds = budget_seconds
        tp = layout.rollout_tp
        self._replicas = [_Replica(range(leader, leader + tp)) for leader in layout.leaders()]
        self._num_lost = 0
        self._waiting: Queue = OrderedDict()
        self._pending: dict[str, _Pending] = {}
        self._homes: dict[str, _Replica] = {}
        self._open: set[str] = set()
        """Affinities whose next request may come at any time, and requests without one that others may follow."""
        self._failure: Exception | None = None
        self._is_held = False
        self._advanced = asyncio.Event()
        self._held_at = self._measured_at = time.monotonic()
        self._seconds_held = self._held_before = self._seconds_waited = 0.0
        self._num_prompt_tokens = self._num_cached = 0
        self._num_sampled: Counter[str] = Counter()
        """By the purpose of the requests."""
        self._num_counted: dict[str, int] = {}
        """By request id: the tokens of a request that stayed in its engine over a hold, which were counted then."""

    async def generate(
        self,
        request: Request,
        *,
        affinity: str | None = None,
        is_last: bool = False,
        parts: list[Completion] | None = None,
    ) -> Completion:
        """Sample one completion, however often the pool is held meanwhile; cancelling this aborts it.

        Requests of one `affinity`, a trajectory's name, go to the replica that has its tokens in its prefix cache,
        unless that has a much higher load than another. `is_last`: no request will follow on this completion, which may
        be told `budget_seconds` late. `parts` are what was sampled of the completion before, if anything; while it is
        awaited, each park adds one to the list.

        Raises ValueError for a request id that is in use, and the error of a pump that failed.
        """
        if self._failure is not None:
            raise self._failure
        if request.request_id in self._pending:
            raise ValueError(f"request {request.request_id} is running already")
        opened = request.request_id if affinity is None else affinity
        (self._open.discard if is_last else self._open.add)(opened)
        future: asyncio.Future[tuple[Completion, _Replica | None]] = asyncio.get_running_loop().create_future()
        self._pending[request.request_id] = pending = _Pending(request, future, [] if parts is None else parts)
        self._file(pending, self._queue_for(affinity))
        self._start_pumps()
        try:
            completion, replica = await future
        finally:
            del self._pending[request.request_id]
            if affinity is None:
                self._open.discard(opened)
            if future.cancelled() or future.exception():
                self._withdraw(request)
        if affinity is not None and replica is not None:
            self._homes[affinity] = replica
        return completion

    def forget(self, affinity: str) -> None:
        """Drop the affinity of a trajectory that has ended."""
        self._homes.pop(affinity, None)
        self._open.discard(affinity)

    async def hold(self, *, parks: bool = True) -> None:
        """Bring the pumps to rest between two steps of their engines and park all requests that run.

        Afterwards the engines have none; but without `parks` what ran stays as it is in its engine. Requests wait, new
        ones too, until `release`. Raises a rank's error.
        """
        if not self._is_held:
            self._is_held, self._held_at = True, time.monotonic()
        while pumps := [replica.pump for replica in self._replicas if replica.pump and replica.is_pumped]:
            await asyncio.wait(pumps)
        come_to_rest = self._park if parks else self._count_resting
        await asyncio.gather(*(come_to_rest(replica) for replica in self._replicas if replica.running))
        # The keys and values of a trajectory's tokens do not outlive the weights, nor does every replica.
        self._homes.clear()
        for replica in self._replicas:
            while replica.waiting:
                name, request = replica.waiting.popitem()
                self._waiting[name] = request
                self._waiting.move_to_end(name, last=False)

    def release(self) -> None:
        """Let the requests go on that wait since `hold`."""
        self._count_hold()
        self._is_held = False
        self._start_pumps()

    def _count_hold(self) -> None:
        """Count how long the pool has been held, if it is, up to now."""
        if self._is_held:
            now = time.monotonic()
            seconds, self._held_at = now - self._held_at, now
            self._seconds_held += seconds
            self._seconds_waited += seconds if self._pending else 0.0

    @property
    def is_held(self) -> bool:
        """Whether requests wait, from a `hold` to the next `release`."""
        return self._is_held

    def settle(self, leaders: Collection[int]) -> None:
        """Sample with the replicas of these first ranks, while the pool is held; a lost one may be among them again.

        Requests that rest in the engine of another one go to these.
        """
        for replica in self._replicas:
            is_lost = replica.ranks[0] not in leaders
            if self._slow is not None and is_lost != replica.is_lost:
                self._slow.forget(replica.name)
            replica.is_lost = is_lost
            if is_lost:
                self._file_again(replica)

    def take_lost(self) -> int:
        """How many requests' replica was lost since the call before."""
        taken, self._num_lost = self._num_lost, 0
        return taken

    @property
    def _live(self) -> list[_Replica]:
        return [replica for replica in self._replicas if not replica.is_lost]

    @property
    def seconds_held(self) -> float:
        """For how long the pool has been held so far, in all: what waits for a completion is not slow then."""
        return self._seconds_held + (time.monotonic() - self._held_at if self._is_held else 0.0)

    async def drained(self) -> None:
        """Wait until all cancelled and finished requests have left the engines."""
        while any(r.is_pumped and not r.running.keys() <= self._pending.keys() for r in self._replicas):
            await self._advanced.wait()

    def metrics(self) -> dict[str, float]:
        """Since the call before; of a time in which the pool is held up to now.

        What an engine has in its prefix cache are the prompts of a group's samples but the first, and of an attempt's
        earlier turns.
        """
        self._count_hold()
        now = time.monotonic()
        open_seconds = now - self._measured_at - (self._seconds_held - self._held_before)
        seconds = open_seconds * len(self._live)
        busy_seconds = sum(replica.pace.seconds for replica in self._replicas)
        found = {
            "time/engines_idle": min(1.0, max(0.0, 1 - busy_seconds / max(seconds, 1e-9))),
            "rollout/held_seconds": self._seconds_waited,
            "perf/engines_open_seconds": open_seconds,
            "rollout/prefix_hits": self._num_cached / max(self._num_prompt_tokens, 1),
            "rollout/sampled_tokens": float(self._num_sampled["training"]),
        }
        self._num_prompt_tokens = self._num_cached = 0
        self._num_sampled.clear()
        self._measured_at, self._held_before, self._seconds_waited = now, self._seconds_held, 0.0
        if self._slow is not None and len(self._replicas) > 1:
            found |= self._slow.of_step({replica.name: replica.pace for replica in self._live})
        for replica in self._replicas:
            replica.pace = Pace()
        return found

    def evaluation_metrics(self) -> dict[str, float]:
        """Of an evaluation that has just ended; `metrics` begin anew."""
        found = {"rollout/evaluation_tokens": float(self._num_sampled["evaluation"])}
        if beside := self.metrics()["rollout/sampled_tokens"]:
            found["rollout/beside_evaluation_tokens"] = beside
        return found

    async def _park(self, replica: _Replica) -> None:
        """Abort what a replica runs and put the rest of it first in the queue."""
        running = tuple(replica.running)
        replica.running.clear()
        replica.aborts.clear()
        try:
            parked = {part.request_id: part for part in await self._ask(replica, (), running, 0.0)}
        except PeerLostError as error:
            replica.running = dict.fromkeys(running)
            self._cut_off(replica, error)
            if self._failure is not None:
                raise
            return
        replica.pace.num_tokens += self._count(parked.values())
        for name in reversed(running):
            pending = self._pending.get(name)
            if pending is not None and not pending.future.done():
                if len(parked[name].token_ids):
                    pending.parts.append(parked[name])
                self._file(pending, self._waiting, last=False)

    async def _count_resting(self, replica: _Replica) -> None:
        """Count what the requests that stay in an engine have sampled: their completions may be of a later step."""
        try:
            found, *_ = await self._ranks.ask(replica.ranks, "sampled_so_far", [None] * len(replica.ranks))
        except PeerLostError as error:
            self._cut_off(replica, error)
            if self._failure is not None:
                raise
            return
        replica.pace.num_tokens += sum(self._count_new(name, num_tokens) for name, num_tokens in found.items())
        self._num_counted |= found

    def _file(self, pending: _Pending, queue: Queue, *, last: bool = True) -> None:
        """Queue the request for what is left of a completion; one of which nothing is left is told its parts."""
        name = pending.request.request_id
        if num_kept(pending.parts) >= pending.request.sampling.max_new_tokens:
            pending.finish(replace(pending.parts.pop(), finish_reason="length"), None)
            return
        queue[name] = rest_of(pending.request, pending.parts)
        queue.move_to_end(name, last=last)

    def _queue_for(self, affinity: str | None) -> Queue:
        home = self._homes.get(affinity) if affinity is not None else None
        # One that was lost since has no pump: whoever waited for it would wait for ever.
        if home is None or home.is_lost or home.load > min(replica.load for replica in self._live) + _MARGIN:
            return self._waiting
        return home.waiting

    def _withdraw(self, request: Request) -> None:
        """Remove a cancelled request from its queue, or have its engine abort it."""
        self._waiting.pop(request.request_id, None)
        for replica in self._replicas:
            replica.waiting.pop(request.request_id, None)
            if request.request_id in replica.running:
                replica.aborts.append(request.request_id)
        if self._failure is None:
            self._start_pumps()

    def _start_pumps(self) -> None:
        if self._is_held:
            return
        for replica in self._live:
            if not replica.is_pumped:
                replica.pump = asyncio.create_task(self._pump(replica))

    async def _pump(self, replica: _Replica) -> None:
        """Run an engine while it has requests and the pool is not held."""
        try:
            while not self._is_held:
                new = self._admitted(replica)
                if not replica.running:
                    return
                await self._advance(replica, new)
                # Who waited for a completion files its next request now.
                await asyncio.sleep(0)
        except PeerLostError as error:
            self._cut_off(replica, error)
        except Exception as error:
            self.fail(error)
        finally:
            self._tell_advance()

    def _admitted(self, replica: _Replica) -> tuple[Request, ...]:
        """Dequeue the requests that a replica has room for: its own, then its share of those for all."""
        unfinished = len(self._waiting) + sum(r.load for r in self._replicas)
        share = -(-unfinished // len(self._live))
        own = min(len(replica.waiting), self._max_running - len(replica.running))
        new = [replica.waiting.popitem(last=False)[1] for _ in range(own)]
        room = min(self._max_running, share) - len(replica.running) - len(new)
        new += [self._waiting.popitem(last=False)[1] for _ in range(min(len(self._waiting), room))]
        replica.running |= dict.fromkeys(request.request_id for request in new)
        return tuple(new)

    async def _advance(self, replica: _Replica, new: tuple[Request, ...]) -> None:
        self._num_prompt_tokens += sum(len(request.prompt_token_ids) for request in new)
        aborts = tuple(name for name in replica.aborts if name in replica.running)
        replica.aborts = []
        began, load = time.monotonic(), len(replica.running)
        completions = await self._ask(replica, new, aborts, self._budget_seconds)
        seconds = time.monotonic() - began
        replica.pace.add(Pace(self._count(completions), seconds, seconds * (load - len(completions) / 2)))
        for completion in completions:
            replica.running.pop(completion.request_id, None)
            self._num_cached += completion.num_cached
            pending = self._pending.get(completion.request_id)
            if pending is not None and not pending.future.done():
                pending.finish(completion, replica)
        self._tell_advance()

    async def _ask(
        self, replica: _Replica, new: tuple[Request, ...], aborts: tuple[str, ...], budget_seconds: float
    ) -> list[Completion]:
        """Give a replica's leader requests and aborts, and let it sample; the completions that it ended with."""
        work: tuple[tuple[Request, ...], tuple[str, ...]] = (new, aborts)
        per_rank = [work, *[((), ())] * (len(replica.ranks) - 1)]
        completions, *_ = await self._ranks.ask(
            replica.ranks,
            "advance",
            per_rank,
            budget_seconds,
            self._leave_after(replica),
            budget_seconds=budget_seconds,
        )
        return completions

    def _leave_after(self, replica: _Replica) -> int | None:
        """How many completions the driver is to be told of at once; None: there is no hurry to tell it of any.

        Each exchange costs both sides what some sampled tokens cost.
        """
        may_follow = self._waiting or replica.waiting or self._open
        return max(1, len(replica.running) // 8) if may_follow else None

    def _count(self, completions: Iterable[Completion]) -> int:
        """Count what was sampled and is not counted yet; the number of tokens."""
        return sum(self._count_new(part.request_id, len(part.token_ids)) for part in completions)

    def _count_new(self, name: str, num_tokens: int) -> int:
        """Count a request's tokens that are not, by purpose. Nobody waits for a cancelled one: training's."""
        pending = self._pending.get(name)
        num_new = num_tokens - self._num_counted.pop(name, 0)
        self._num_sampled["training" if pending is None else pending.purpose] += num_new
        return num_new

    def _tell_advance(self) -> None:
        """Wake those who wait for a change of what the engines run."""
        self._advanced.set()
        self._advanced = asyncio.Event()

    def _cut_off(self, replica: _Replica, error: Exception) -> None:
        """Give a lost replica's requests to the others, first in the queue; where there is no other, all fail."""
        replica.is_lost = True
        if not self._live:
            self.fail(error)
            return
        self._file_again(replica)
        self._homes = {affinity: home for affinity, home in self._homes.items() if home is not replica}
        self._start_pumps()

    def _file_again(self, replica: _Replica) -> None:
        """Put a lost replica's requests first in the queue, with the tokens that parks kept."""
        names = [*replica.running, *replica.waiting]
        replica.running.clear()
        replica.waiting.clear()
        replica.aborts.clear()
        for name in reversed(names):
            self._num_counted.pop(name, None)
            pending = self._pending.get(name)
            if pending is not None and not pending.future.done():
                self._num_lost += 1
                self._file(pending, self._waiting, last=False)

    def fail(self, error: Exception) -> None:
        """Raise this error in all requests, later ones too, unless they failed before."""
        self._failure = self._failure or error
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(self._failure)


async def gather_unless_abandoned(
    pool: EnginePool, attempts: Iterable[Coroutine[Any, Any, Result]], is_abandoned: Callable[[], bool]
) -> list[Result]:
    """Run attempts concurrently; returns their results in order.

    Raises AbandonedError once `is_abandoned` is true, and the first error of an attempt; then all others are cancelled
    and their requests have left the engines.
    """
    tasks = [asyncio.create_task(attempt) for attempt in attempts]
    waiting = set(tasks)
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=BUDGET_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if waiting and is_abandoned():
                raise AbandonedError
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pool.drained()
        raise
    return [task.result() for task in tasks]
