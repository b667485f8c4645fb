"""Turns of the ranks: which training call runs next, and which sampling requests run together.

Accounts get equal shares of the tokens (`fair_queue`). Engines on the trainer's ranks take turns with it, in one queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from megarl.service.queueing.engine_slots import EngineSlot, EngineSlots
from megarl.service.queueing.fair_queue import FairQueue

TENANT: ContextVar[str] = ContextVar("TENANT", default="")
"""Account of the current request. The ledger sets it."""
QUANTUM = 4096
"""Tokens of an account's turn. Smaller turns share more evenly, but change the trainer's model more often."""


class Engines(Protocol):
    """Calls of trainer and engines, made by turns one at a time."""

    async def free_device(self) -> None:
        """Put engines on the trainer's ranks to sleep, so that the trainer has the device."""
        ...

    async def wake(self) -> None:
        """Wake the engines on the trainer's ranks. Their slots still have their adapters."""
        ...

    async def load(self, version: str | None, index: int) -> None:
        """Load a version's adapter into slot `index` of all engines, between two of their steps, and wake them."""
        ...


@dataclass(eq=False, slots=True)
class _Work:
    """Work that waits for its turn. `begin` takes the resources; `outcome` has its result.

    `release` is called with this result if the work was cancelled meanwhile.
    """

    begin: Callable[[], Awaitable[Any]]
    release: Callable[[Any], None]
    outcome: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class _Lane:
    """A queue of work in fair order. Work begins one at a time, and may end later."""

    def __init__(self) -> None:
        self._queue: FairQueue[_Work] = FairQueue(QUANTUM)
        self._task: asyncio.Task[None] | None = None

    async def enter(self, tokens: int, begin: Callable[[], Awaitable[Any]], release: Callable[[Any], None]) -> Any:
        """Wait for a turn of the current account, and return what `begin` returns. Raises its error.

        If the caller is cancelled, either `begin` is not called, or `release` gets its result.
        """
        work = _Work(begin, release)
        self._queue.put(TENANT.get(), tokens, work)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._begin_work())
        try:
            return await work.outcome
        except asyncio.CancelledError:
            # The cancellation may arrive between the turn's start and this task's next step.
            if work.outcome.done() and not work.outcome.cancelled() and work.outcome.exception() is None:
                release(work.outcome.result())
            raise

    def refund(self, tokens: int) -> None:
        """Return unused tokens, charged by `enter`, to the current request's account."""
        self._queue.refund(TENANT.get(), tokens)

    async def _begin_work(self) -> None:
        """Begin the queue's work one by one: each waits until the work before has its resources."""
        while self._queue:
            work = self._queue.pop()
            if work.outcome.cancelled():
                continue
            try:
                result = await work.begin()
            except Exception as error:
                if not work.outcome.cancelled():
                    work.outcome.set_exception(error)
            else:
                # The session ended while its work waited: return the resources, or they would never be free again.
                if work.outcome.cancelled():
                    work.release(result)
                else:
                    work.outcome.set_result(result)


class Turns:
    """Turns of training calls, one at a time, and of sampling requests, several versions at a time.

    `is_shared`: engines and trainer share ranks. The engines have `num_slots` slots for versions, and sample at most
    `num_sequences` at once. Further requests wait here, where accounts have equal shares.
    """

    def __init__(self, engines: Engines, *, is_shared: bool, num_slots: int, num_sequences: int) -> None:
        self._engines, self._is_shared, self._max_sequences = engines, is_shared, num_sequences
        self._training_lane = _Lane()
        self._sampling_lane = self._training_lane if is_shared else _Lane()
        # Held to the end of a call: its collectives must not mix with other calls'.
        self._trainer_lock = asyncio.Lock()
        self._slots = EngineSlots(num_slots)
        self._is_sampling = False
        """Whether engines on the trainer's ranks are awake."""
        self._num_running = 0
        self._request_ended = asyncio.Event()
        """Set when a request has ended."""

    @asynccontextmanager
    async def training_turn(self, tokens: int, check: Callable[[], object] = lambda: None) -> AsyncIterator[None]:
        """Hold the trainer for one call of `tokens`. `check` is called when the turn comes, and may raise."""
        await self._training_lane.enter(tokens, partial(self._begin_training, check), self._end_training)
        try:
            yield
        finally:
            self._end_training()

    @asynccontextmanager
    async def sampling_turn(
        self, version: str | None, *, tokens: int, num_sequences: int, check: Callable[[], object] = lambda: None
    ) -> AsyncIterator[Callable[[int], None]]:
        """Hold a version in the engines for one sampling request. `check` is called when the turn comes, and may raise.

        `tokens` counts the prompts and the longest samples. Yields a function that refunds a number of unused tokens.
        """
        begin = partial(self._begin_sampling, version, num_sequences, check)
        end = partial(self._end_request, num_sequences=num_sequences)
        slot: EngineSlot = await self._sampling_lane.enter(tokens, begin, end)
        try:
            assert slot.ready is not None
            # Shielded: other requests wait for the same version.
            await asyncio.shield(slot.ready)
            yield self._sampling_lane.refund
        finally:
            end(slot)

    def _end_training(self, _: object = None) -> None:
        self._trainer_lock.release()

    def _end_request(self, slot: EngineSlot, *, num_sequences: int) -> None:
        slot.num_users -= 1
        self._num_running -= num_sequences
        self._request_ended.set()

    async def _begin_training(self, check: Callable[[], object]) -> None:
        """Take the trainer for the next training call. On shared ranks, first let sampling end."""
        await self._trainer_lock.acquire()
        try:
            check()
            if self._is_shared:
                await self._end_sampling()
        except BaseException:
            self._trainer_lock.release()
            raise

    async def _begin_sampling(self, version: str | None, num_sequences: int, check: Callable[[], object]) -> EngineSlot:
        """Take a slot with the version for a sampling request, and return the slot. It may still be loading."""
        # A request above the limit runs alone. The pool then queues its samples.
        while self._num_running and self._num_running + num_sequences > self._max_sequences:
            await self._wait_for_request_end()
        # Check also for a loaded version: all waiting requests of a lost client would be sampled for nobody.
        check()
        slot = self._slots.find(version)
        if slot is None:
            slot = await self._start_loading(version, check)
        elif self._is_shared and not self._is_sampling:
            async with self._trainer_lock:
                await self._engines.wake()
        self._is_sampling = True
        slot.num_users += 1
        self._num_running += num_sequences
        return slot

    async def _start_loading(self, version: str | None, check: Callable[[], object]) -> EngineSlot:
        """Begin to load a version into a slot, and return the slot. On shared ranks, wait for the load."""
        # Later requests wait behind this one, so the users of the slots must end.
        while (slot := self._slots.find_unused()) is None:
            await self._wait_for_request_end()
        check()
        if self._is_shared:
            async with self._trainer_lock:
                # The trainer sends the version. It has the device only while no engine samples.
                await self._end_sampling()
                self._slots.clear(slot)
                await self._engines.load(version, slot.index)
            ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            ready.set_result(None)
        else:
            # Load in the background: the trainer may first finish a long call, and requests for other versions can
            # start.
            ready = asyncio.ensure_future(self._load_version(slot, version, check))
        self._slots.assign(slot, version, ready)
        return slot

    async def _load_version(self, slot: EngineSlot, version: str | None, check: Callable[[], object]) -> None:
        """Load a version into a slot of separate engines, once the trainer is free. An error clears the slot."""
        async with self._trainer_lock:
            try:
                # Check again: the version's session may have ended while the trainer was busy.
                check()
                await self._engines.load(version, slot.index)
            except BaseException:
                self._slots.clear(slot)
                raise

    async def _end_sampling(self) -> None:
        """Wait for the running requests, then put engines on shared ranks to sleep."""
        # Requests must finish before engines sleep, so that a completion is sampled with one KV cache.
        while self._num_running:
            await self._wait_for_request_end()
        if self._is_sampling:
            await self._engines.free_device()
            self._is_sampling = False

    async def _wait_for_request_end(self) -> None:
        self._request_ended.clear()
        await self._request_ended.wait()
