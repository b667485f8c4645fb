"""The unfinished requests of an engine pool. Each sampled token is counted once, and reported to its request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megarl.rollout.pool_meter import PoolMeter
from megarl.rollout.requests.engine_requests import PendingRequest, Replica
from megarl.rollout.requests.queues import RequestQueues
from megarl.types import Completion, Request


class RequestTable:
    """The requests that wait, run, or were cancelled and still run in an engine, by id.

    A request's tokens are in its completion, or are reported to `on_abort` or `on_loss` (see `Generates`). `failure` is
    the error of the engines, if they failed.
    """

    def __init__(self, replicas: Sequence[Replica], queues: RequestQueues, meter: PoolMeter) -> None:
        self._replicas, self._queues, self._meter = replicas, queues, meter
        self.pending: dict[str, PendingRequest] = {}
        self.failure: Exception | None = None
        self._withdrawn: dict[str, PendingRequest] = {}
        """Cancelled requests by id, until their engine has ended them. Then their tokens are reported."""
        self._tokens_in_engines: dict[str, int] = {}
        """Tokens of requests that stay in paused engines, by request id. Empty while the engines sample."""

    def find_refusal(self, request_id: str) -> Exception | None:
        """Return why a request of this id cannot start; None: it can."""
        if self.failure is None and request_id in self.pending:
            return ValueError(f"request id {request_id} is in use by a request still running; choose a unique id")
        return self.failure

    def count_parts(self, parts: Iterable[Completion]) -> int:
        return sum(self._count_tokens(part.request_id, len(part.token_ids)) for part in parts)

    def _count_tokens(self, request_id: str, num_tokens: int) -> int:
        """Count the tokens of a request, and return how many are new. Tokens of cancelled requests count as
        training.
        """
        pending = self.pending.get(request_id)
        return self._meter.count_tokens(request_id, num_tokens, "training" if pending is None else pending.purpose)

    def finish_requests(self, replica: Replica, completions: Sequence[Completion]) -> None:
        """Hand the completions that a replica's engine returned to their requests."""
        for completion in completions:
            replica.running.pop(completion.request_id, None)
            self._meter.num_cached += completion.num_cached
            self._report_withdrawn(completion.request_id, len(completion.token_ids))
            pending = self.pending.get(completion.request_id)
            if pending is not None and not pending.future.done():
                pending.finish(completion, replica)
            elif pending is not None:
                # Cancelled or failed in this cycle of the event loop: `generate` reports the tokens as soon as it runs.
                pending.parts.append(completion)

    def requeue_aborted(self, request_ids: Sequence[str], part_by_request: Mapping[str, Completion]) -> None:
        """Queue the remaining tokens of aborted requests at the front. `request_ids` has the oldest first."""
        for request_id in reversed(request_ids):
            self._tokens_in_engines.pop(request_id, None)
            self._report_withdrawn(
                request_id, len(part_by_request[request_id].token_ids) if request_id in part_by_request else 0
            )
            pending = self.pending.get(request_id)
            if pending is None:
                continue
            # A request aborted in the engine's queue has no tokens: it adds no part. One that was cancelled in this
            # cycle of the event loop reports its parts as soon as `generate` runs.
            if request_id in part_by_request and len(part_by_request[request_id].token_ids):
                pending.parts.append(part_by_request[request_id])
            if not pending.future.done():
                self._queues.put_request(pending, self._queues.common, at_front=True)

    def count_unfinished(self, replica: Replica, counts: Mapping[str, int]) -> None:
        """Count the tokens of requests that stay in a paused engine: {request id: number}."""
        replica.pace.num_tokens += sum(
            self._count_tokens(request_id, num_tokens) for request_id, num_tokens in counts.items()
        )
        self._meter.expect_again(counts)
        # The engine ends cancelled requests only after the pause. Until then it samples nothing for them.
        for request_id, num_tokens in counts.items():
            self._report_withdrawn(request_id, num_tokens)
        self._tokens_in_engines |= counts

    def resume(self) -> None:
        self._tokens_in_engines.clear()

    def withdraw_request(self, request: Request) -> None:
        """Remove a cancelled request from its queue. If it already runs, schedule its abort in the engine."""
        self._queues.remove_request(request.request_id)
        for replica in self._replicas:
            if request.request_id in replica.running:
                replica.aborts.append(request.request_id)

    def report_abort(self, pending: PendingRequest) -> None:
        """Report the number of tokens sampled for a cancelled or failed request, as soon as it is known.

        While an engine runs the request, this is when the engine ends it or is paused, otherwise now.
        """
        request_id = pending.request.request_id
        num_in_engine = self._tokens_in_engines.get(request_id)
        if num_in_engine is None and any(request_id in replica.running for replica in self._replicas):
            if self.failure is None:
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

    def requeue_requests(self, replica: Replica) -> int:
        """Move a lost replica's requests to the front of the queue, with the tokens sampled so far. Returns their
        number.
        """
        num_moved = 0
        running = set(replica.running)
        request_ids = [*replica.running, *replica.waiting]
        replica.running.clear()
        replica.waiting.clear()
        replica.aborts.clear()
        # Each request goes to the front, so go through them in reverse to keep the oldest first.
        for request_id in reversed(request_ids):
            pending = self.pending.get(request_id)
            if request_id in running and (running_request := pending or self._withdrawn.get(request_id)) is not None:
                self._report_loss(running_request)
            self._meter.forget(request_id)
            self._tokens_in_engines.pop(request_id, None)
            # A cancelled request has no further tokens. Report this, because the end of its session waits for it.
            self._report_withdrawn(request_id, 0)
            if pending is not None and not pending.future.done():
                num_moved += 1
                self._queues.put_request(pending, self._queues.common, at_front=True)
        return num_moved

    def fail_requests(self, error: Exception) -> None:
        """Fail all current and later requests with this error. A second error is ignored."""
        self.failure = self.failure or error
        for pending in self.pending.values():
            if not pending.future.done():
                pending.future.set_exception(self.failure)
        for request_id, pending in list(self._withdrawn.items()):
            self._report_loss(pending)
            self._report_withdrawn(request_id, 0)
