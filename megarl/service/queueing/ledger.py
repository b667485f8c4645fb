"""Ledger of a service. It runs every request once, a model's requests in the order of their numbers, and keeps results
until they are read.

The SDK numbers a model's requests from 1, and repeats them after a lost reply. Chunks of one call arrive in any order,
the first one last. So a request waits until all lower numbers have arrived. A repeated request gets the promise (the
result to come) of the first one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from megarl.service.queueing.admission import BODY_BYTES, Admission, QueueLimits
from megarl.service.queueing.turns import TENANT
from megarl.service.refusals import BusyError, NotFoundError, UserError
from megarl.types import MegarlError

READ_SECONDS = 600.0
"""Seconds for which a result is kept after the first read: the reply may be lost, and the client asks again."""
# The SDK polls for every result from the request on, so only a lost client reads nothing for this long.
UNREAD_SECONDS = 3600.0
"""Seconds for which an unread result is kept."""
# SDK 0.38 abandons a request after five minutes of retries. Between the two requests of a custom loss, the client
# computes the loss.
GAP_SECONDS = 900.0
"""Seconds for which later requests wait for a missing number. Then the number is skipped, so that the client does not
hang.
"""
# Requests before their turn hold their bodies in memory, so their number is limited.
MAX_AHEAD = 10_000
"""Maximum distance of a request's number from the next missing number."""
# SDK 0.38 repeats a request after status 429 for 300 seconds. Then it raises an error, and its number is lost.
PATIENCE_SECONDS = 200.0
"""Seconds of BusyErrors after which a request uses its number. It is accepted above the limits of waiting work, or
fails.
"""
_JSON = "application/json"
_SKIPPED = b"skipped"
"""Digest of a promise without a request, for a missing or refused number. No hash has this length."""


class Reply(NamedTuple):
    """The body of a finished request's answer, and its content type."""

    body: bytes
    content_type: str = _JSON


Work = Callable[[], Awaitable[Reply]]


def digest_of(values: Any) -> bytes:
    """A repeated request has the same hash."""
    return hashlib.sha256(repr(values).encode(errors="surrogatepass")).digest()


def json_reply(**values: Any) -> Reply:
    return Reply(json.dumps(values).encode())


@dataclass(eq=False, slots=True)
class Promise:
    """An accepted request. `digest` identifies its body, `owner` is its account."""

    request_id: str
    owner: str
    digest: bytes
    model_id: str | None = None
    sequence_ids: tuple[str, ...] = ()
    """Ids of a sampling request's future sequences."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    reply: Reply | None = None
    is_failed: bool = False
    read_at: float | None = None
    """Time when the result was first read."""
    finished_at: float | None = None
    on_done: Callable[[], object] = lambda: None
    """Called once, with the first result."""

    def finish(self, reply: Reply) -> None:
        self.reply = reply
        if not self.done.is_set():
            self.done.set()
            self.on_done()

    def fail(self, message: str, category: str) -> None:
        """Give the client an error. `category` is user (a client's fault) or server; the client retries neither."""
        self.is_failed = True
        self.finish(json_reply(error=message, category=category))


@dataclass(eq=False, slots=True)
class _Sequence:
    """The numbered requests of one model."""

    owner: str
    on_skip: Callable[[str], object]
    """Called with a sentence about a training request that does not run, when its turn comes."""
    next_number: int = 1
    waiting_since: float | None = None
    """Time when the wait for the next missing number began; None: no later request waits for it."""
    promises: dict[int, Promise] = field(default_factory=dict)
    early_work: dict[int, Work] = field(default_factory=dict)
    """Work of requests that have arrived before a lower number, by number."""
    ready: asyncio.Queue[tuple[Promise, Work]] = field(default_factory=asyncio.Queue)
    worker: asyncio.Task[None] | None = None
    busy_since: dict[int, float] = field(default_factory=dict)
    """Time of the first BusyError, by number. Only numbers that clients still repeat."""

    @property
    def is_idle(self) -> bool:
        """Whether no request can run: all waiting requests lack an earlier one."""
        return all(promise.done.is_set() for number, promise in self.promises.items() if number < self.next_number)


def _make_failing_work(sequence: _Sequence, reason: str | None, message: str) -> Work:
    """Return the work of a refused request: fail it with `message`. With a `reason`, the model's next step fails too.

    The work runs when the request's turn comes, so no earlier step fails.
    """

    async def fail_request() -> Reply:
        if reason is not None:
            sequence.on_skip(reason)
        raise UserError(message)

    return fail_request


class Ledger:
    """Promises by id, and the numbered requests of each model. `report` is called with errors of the service.

    `limits` restrict waiting tokens. A request above them raises BusyError, and can be sent again.
    """

    def __init__(
        self,
        report: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
        limits: QueueLimits | None = None,
    ) -> None:
        self._report, self._clock = report, clock
        self.admission = Admission(limits or QueueLimits())
        self._promises: dict[str, Promise] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._unordered: dict[Hashable, Promise] = {}
        """Promises of unordered requests, by their keys."""
        self._tasks: set[asyncio.Task[None]] = set()

    def open_model(self, model_id: str, owner: str, on_skip: Callable[[str], object]) -> None:
        """Begin a model's numbers with 1. Repeated calls have no effect.

        `on_skip` is called in turn for each training request that was refused or too large to wait. It is also called
        for each number still missing `GAP_SECONDS` after later ones.
        """
        if model_id not in self._sequences:
            sequence = self._sequences[model_id] = _Sequence(owner, on_skip)
            # One task per model keeps the order, and models do not wait for each other.
            sequence.worker = asyncio.create_task(self._run_in_order(sequence))

    def close_model(self, model_id: str) -> None:
        """Forget a model's numbers, and fail its unfinished requests."""
        sequence = self._sequences.pop(model_id, None)
        if sequence is None:
            return
        assert sequence.worker is not None
        sequence.worker.cancel()
        for number, promise in sequence.promises.items():
            if not promise.done.is_set():
                promise.fail(f"model {model_id}: its session ended before request {number} ran", "user")
            # Perhaps nobody reads the results of an ended session, so they must expire.
            self._start_expiry(promise)

    def submit(
        self, model_id: str, number: int, digest: bytes, work: Work, *, tokens: int = 0, is_training: bool = False
    ) -> Promise:
        """Accept request `number` of a model, with this many tokens. It runs after all lower numbers.

        `is_training`: if this request is refused, the model's next step fails too, because it would lack gradients. A
        repeated request gets the first promise. A used number with another body, or a number out of range, gets a
        failed promise: after an error status the client would retry, or lose its place. Raises BusyError.
        """
        sequence = self._sequences[model_id]
        if (earlier_promise := sequence.promises.get(number)) is not None and earlier_promise.digest not in (
            digest,
            _SKIPPED,
        ):
            return self._make_failed_promise(
                sequence.owner, model_id, f"seq_id = {number}: was used by another request; count on"
            )
        if (promise := self._find_promise_of_used_number(sequence, model_id, number)) is not None:
            return promise
        # Accept a later number: SDK 0.38 sends a call's first chunk after it has the promises of the others.
        is_next, num_bytes = number == sequence.next_number, BODY_BYTES.get()
        # Later numbers wait for this one.
        is_awaited = is_next and sequence.is_idle
        if is_next and not is_awaited:
            self._refuse_if_busy(sequence, number, tokens)
        # Always accept the number that later requests wait for: otherwise these never finish, and their bytes stay
        # counted. Do not refuse a later number with a status: the client may send the missing one only after it.
        if not is_awaited and not self.admission.has_room(sequence.owner, num_bytes):
            message = self.admission.full_queue_message(sequence.owner, num_bytes)
            reason = f"request {number} was too large to wait" if is_training else None
            work, num_bytes = _make_failing_work(sequence, reason, message), 0
        promise = self._make_promise(sequence.owner, digest, model_id, tokens=tokens, num_bytes=num_bytes)
        sequence.promises[number], sequence.early_work[number] = promise, work
        self._queue_ready_requests(sequence)
        return promise

    def fail_in_turn(self, model_id: str, number: int, error: Exception, *, is_training: bool) -> Promise:
        """Use a model's number for a request that cannot run: it fails in turn. `is_training`: the next step fails too.

        A repetition gets the same promise, and an earlier promise of the number stays. A BusyError is raised again
        while the client repeats the request.
        """
        sequence, message = self._sequences[model_id], str(error)
        if (promise := self._find_promise_of_used_number(sequence, model_id, number)) is None:
            should_repeat = isinstance(error, BusyError) and self._record_busy(sequence, number)
            if should_repeat:
                raise error
            reason = f"request {number} was refused: {message}" if is_training else None
            promise = self._use_up_number(sequence, model_id, number, reason, message)
            self._queue_ready_requests(sequence)
        return promise

    def submit_unordered(
        self,
        request_key: Hashable,
        owner: str,
        digest: bytes,
        work: Work,
        *,
        model_id: str | None = None,
        num_sequences: int = 0,
        tokens: int = 0,
    ) -> Promise:
        """Run a request that waits for no earlier one. A repetition, with equal key and body, gets the same promise.

        Raises BusyError if `tokens` exceed the owner's limit.
        """
        if (earlier_promise := self._unordered.get(request_key)) is not None:
            if earlier_promise.digest == digest:
                return earlier_promise
            return self._make_failed_promise(
                owner, model_id, f"{request_key}: was used by another request; use a new number", num_sequences
            )
        if tokens:
            self.admission.check_tokens(owner, tokens)
        if not self.admission.has_room(owner, BODY_BYTES.get()):
            raise BusyError(self.admission.full_queue_message(owner, BODY_BYTES.get()))
        promise = self._unordered[request_key] = self._make_promise(
            owner, digest, model_id, num_sequences, tokens=tokens, num_bytes=BODY_BYTES.get()
        )
        task = asyncio.create_task(self._run_request(promise, work))
        # asyncio keeps only weak references to tasks, and could collect this one.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return promise

    def find(self, request_id: str, owner: str) -> Promise:
        """Return a promise of this owner. Raises NotFoundError."""
        promise = self._promises.get(request_id)
        if promise is None or promise.owner != owner:
            raise NotFoundError(f"request_id = {request_id}: does not exist")
        return promise

    async def wait_for(self, promise: Promise, seconds: float) -> Reply | None:
        """Return a promise's result, or None if it is not finished after `seconds`. The result can be read again."""
        try:
            async with asyncio.timeout(seconds):
                await promise.done.wait()
        except TimeoutError:
            return None
        self._start_expiry(promise)
        return promise.reply

    def expire_results(self) -> None:
        """Drop results `READ_SECONDS` after their first read, and unread ones `UNREAD_SECONDS` after their end.

        Requests that wait `GAP_SECONDS` for a missing number go on. Dropped and missing numbers stay used.
        """
        # Results first read, or finished, before these times are dropped.
        read_before = self._clock() - READ_SECONDS
        finished_before = self._clock() - UNREAD_SECONDS
        old_promises = {
            promise
            for promise in self._promises.values()
            if (promise.read_at is not None and promise.read_at < read_before)
            or (promise.finished_at is not None and promise.finished_at < finished_before)
        }
        self._promises = {
            request_id: promise for request_id, promise in self._promises.items() if promise not in old_promises
        }
        self._unordered = {key: promise for key, promise in self._unordered.items() if promise not in old_promises}
        for sequence in self._sequences.values():
            sequence.promises = {
                number: promise for number, promise in sequence.promises.items() if promise not in old_promises
            }
        waiting_before = self._clock() - GAP_SECONDS
        for model_id, sequence in self._sequences.items():
            if sequence.waiting_since is not None and sequence.waiting_since < waiting_before:
                self._use_up_missing_numbers(model_id, sequence)

    def forget_session(self, session_id: str) -> None:
        """Forget the unordered requests of a session. Their keys begin with its id."""
        for key in [key for key in self._unordered if isinstance(key, tuple) and key[0] == session_id]:
            self._promises.pop(self._unordered.pop(key).request_id, None)

    async def close(self) -> None:
        tasks = [*self._tasks, *(sequence.worker for sequence in self._sequences.values() if sequence.worker)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _make_promise(
        self,
        owner: str,
        digest: bytes,
        model_id: str | None,
        num_sequences: int = 0,
        *,
        tokens: int = 0,
        num_bytes: int = 0,
    ) -> Promise:
        """Record an accepted request. Its tokens and bytes count against its account until it is done."""
        sequence_ids = tuple(secrets.token_hex(12) for _ in range(num_sequences))
        promise = Promise(secrets.token_hex(16), owner, digest, model_id, sequence_ids)
        if tokens or num_bytes:
            self.admission.add(owner, tokens=tokens, num_bytes=num_bytes)
            promise.on_done = partial(self.admission.remove, owner, tokens=tokens, num_bytes=num_bytes)
        self._promises[promise.request_id] = promise
        return promise

    def _refuse_if_busy(self, sequence: _Sequence, number: int, tokens: int) -> None:
        """Raise BusyError if the model's next request exceeds the limits of waiting work.

        Do not raise it once the client has repeated the request for PATIENCE_SECONDS.
        """
        try:
            self.admission.check_tokens(sequence.owner, tokens)
            if not self.admission.has_room(sequence.owner, BODY_BYTES.get()):
                raise BusyError(self.admission.full_queue_message(sequence.owner, BODY_BYTES.get()))
        except BusyError:
            should_repeat = self._record_busy(sequence, number)
            if should_repeat:
                raise

    def _record_busy(self, sequence: _Sequence, number: int) -> bool:
        """Record a number's BusyError. Returns whether the client should repeat: PATIENCE_SECONDS have not passed."""
        return self._clock() - sequence.busy_since.setdefault(number, self._clock()) <= PATIENCE_SECONDS

    def _find_promise_of_used_number(self, sequence: _Sequence, model_id: str, number: int) -> Promise | None:
        """Return the promise of a number that no request can take any more, or None."""
        # A repeated number may be below the next one: look it up before the check of the range.
        if (earlier_promise := sequence.promises.get(number)) is not None:
            return earlier_promise
        if sequence.next_number <= number < sequence.next_number + MAX_AHEAD:
            return None
        message = f"seq_id = {number}: the next request of this model has number {sequence.next_number}"
        return self._make_failed_promise(sequence.owner, model_id, message)

    def _use_up_number(
        self, sequence: _Sequence, model_id: str, number: int, reason: str | None, message: str
    ) -> Promise:
        """Use a number without a request: `message` fails its promise in turn. A `reason` also fails the model's next
        step.
        """
        promise = sequence.promises[number] = self._make_promise(sequence.owner, _SKIPPED, model_id)
        sequence.early_work[number] = _make_failing_work(sequence, reason, message)
        return promise

    def _make_failed_promise(self, owner: str, model_id: str | None, message: str, num_sequences: int = 0) -> Promise:
        promise = self._make_promise(owner, b"", model_id, num_sequences)
        promise.fail(message, "user")
        # No number leads to this promise: it must expire even if it is never read.
        self._start_expiry(promise)
        return promise

    def _start_expiry(self, promise: Promise) -> None:
        # Only the first read counts. Repeated reads must not keep a result for ever.
        if promise.read_at is None:
            promise.read_at = self._clock()

    def _queue_ready_requests(self, sequence: _Sequence) -> None:
        """Queue all requests up to the next missing number."""
        first_missing = sequence.next_number
        # SDK 0.38 submits a call's first chunk last, so one request may release many.
        while (work := sequence.early_work.pop(sequence.next_number, None)) is not None:
            sequence.ready.put_nowait((sequence.promises[sequence.next_number], work))
            sequence.busy_since.pop(sequence.next_number, None)
            sequence.next_number += 1
        if not sequence.early_work:
            sequence.waiting_since = None
        # Each missing number gets the whole time to arrive.
        elif sequence.waiting_since is None or sequence.next_number != first_missing:
            sequence.waiting_since = self._clock()

    def _use_up_missing_numbers(self, model_id: str, sequence: _Sequence) -> None:
        """Fail in turn the missing numbers before the first waiting request, then queue this request."""
        for number in range(sequence.next_number, min(sequence.early_work)):
            message = f"seq_id = {number}: did not arrive within {GAP_SECONDS:g} seconds, and later requests went on"
            promise = self._use_up_number(sequence, model_id, number, f"request {number} did not arrive", message)
            # Perhaps nobody asks for it, so it must expire.
            self._start_expiry(promise)
        self._queue_ready_requests(sequence)

    async def _run_in_order(self, sequence: _Sequence) -> None:
        while True:
            await self._run_request(*await sequence.ready.get())

    async def _run_request(self, promise: Promise, work: Work) -> None:
        """Run a request and keep its result. An error fails the promise, never the ledger."""
        TENANT.set(promise.owner)
        try:
            promise.finish(await work())
        except (UserError, NotFoundError) as error:
            # The client's text names no folder of the service. The operator gets the cause.
            if isinstance(cause := error.__cause__, OSError | MegarlError):
                self._report(f"request {promise.request_id}: {error}: {type(cause).__name__}: {cause}")
            promise.fail(str(error), "user")
        except asyncio.CancelledError:
            # `close_model` has already failed the promise, with the end of the client's session as reason.
            if not promise.done.is_set():
                promise.fail("the service ended before this request ran", "server")
            raise
        except Exception as error:
            # The client gets only the type of the error: the text may quote other clients' data or local paths.
            self._report(f"request {promise.request_id}: {type(error).__name__}: {error}")
            promise.fail(f"the service failed: {type(error).__name__}; its log has the cause", "server")
        promise.finished_at = self._clock()
