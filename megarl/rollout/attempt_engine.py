"""The engine as one attempt sees it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from megarl.rewards.scoring.http_rewards import COUNTED_FOR
from megarl.rollout.journal.journal import AttemptLog
from megarl.rollout.pool import EnginePool
from megarl.rollout.recording import RecordedCall
from megarl.rollout.requests.engine_requests import OnLoss, num_sampled
from megarl.types import Completion, Request

if TYPE_CHECKING:
    from numpy.typing import NDArray


class AttemptEngine:
    """Records each completion of an attempt in `calls`, and replays recorded completions after a resume.

    A resumed attempt runs again from its start. While its prompts equal the recorded prompts, it receives the recorded
    completions, each once. So a deterministic environment reaches its earlier state without sampling. At the first
    different prompt the remaining records are discarded, and sampling starts (`is_restarted`).

    `seconds` is the time spent waiting for completions. Concurrent waits count once. Pauses of the engines count only
    in `seconds_by_clock`. `log` is the attempt's journal, if any. It has each completion before the caller does.
    `is_followed`: another attempt or group starts when this attempt ends, so no request is the last one.
    """

    def __init__(
        self,
        pool: EnginePool,
        calls: list[RecordedCall] | None = None,
        *,
        log: AttemptLog | None = None,
        is_followed: bool = False,
    ) -> None:
        """`calls` are the attempt's recorded calls: the list that checkpoints save, changed in place."""
        self.log = log
        self._pool, self._calls, self._purpose = pool, [] if calls is None else calls, COUNTED_FOR.get()
        if log is not None:
            for call in [call for call in self._calls if not call.is_done]:
                if not log.admit_call(call):
                    # Remove it from the shared list, so that later checkpoints do not have the call either.
                    self._calls.remove(call)
        # A program that outlived an earlier driver already has its answers. Only the answer that it still waits for
        # may be continued.
        is_reopened = log is not None and log.reopened is not None
        self._repeatable_calls = [call for call in self._calls if not (is_reopened and call.is_done)]
        self._is_closed = False
        self._num_calls_under_way = 0
        self._wait_began = self._paused_before = 0.0
        self.is_followed, self.is_restarted = is_followed, False
        self.seconds = self.seconds_by_clock = 0.0

    @property
    def seconds_paused(self) -> float:
        return self._pool.seconds_paused

    @property
    def num_begun_tokens(self) -> int:
        begun_calls = [] if self.log is None else [call for call in self._repeatable_calls if not call.is_done]
        return sum(num_sampled(call.parts) for call in begun_calls)

    def close(self) -> None:
        """Make all further requests fail: an attempt may ignore its cancellation."""
        self._is_closed = True

    def check_storage(self) -> None:
        if self.log is not None:
            self.log.check_storage()

    def begin_again(self) -> None:
        """Restart the attempt with its recorded completions, because its program was lost."""
        self.is_restarted = True
        if self.log is not None:
            self.log.begin_again()
        self._repeatable_calls = [call for call in self._calls if call.is_done]
        self._calls[:] = self._repeatable_calls

    async def generate(
        self,
        request: Request,
        *,
        affinity: str | None = None,
        is_last: bool = False,
        on_begun: Callable[[int], None] | None = None,
        on_abort: Callable[[int], None] | None = None,
        on_loss: OnLoss | None = None,
    ) -> Completion:
        """Return a recorded completion of this prompt, or sample one.

        `on_begun(n)` reports that a checkpoint has the first n tokens of this completion. It needs a journal.
        """
        if self._is_closed:
            if on_abort is not None:
                on_abort(0)
            raise asyncio.CancelledError
        # A server task may have its own context variables. Set this attempt's purpose, by which tokens are counted.
        COUNTED_FOR.set(self._purpose)
        # Find the call in the recording, or record a new one.
        call = self._take_recorded_call(request.prompt_token_ids)
        if call is None:
            identity = "" if self.log is None else secrets.token_hex(8)
            call = RecordedCall(request.prompt_token_ids, identity=identity)
            self._calls.append(call)
        is_repeated = call.is_done
        num_begun_tokens = 0 if is_repeated else num_sampled(call.parts)
        if not is_repeated:
            await self._sample_call(request, call, affinity, on_begun, on_abort, on_loss, is_last=is_last)
        # The journal must have the answer before the agent reads it.
        if self.log is not None:
            try:
                await self.log.write_call(
                    call, is_repeated=is_repeated, num_begun_tokens=num_begun_tokens, request_id=request.request_id
                )
            except BaseException:
                # The journal has the answer, but its caller was cancelled and does not get it.
                if on_abort is not None:
                    on_abort(len(call.parts[0].token_ids))
                raise
        return call.parts[0]

    async def _sample_call(
        self,
        request: Request,
        call: RecordedCall,
        affinity: str | None,
        on_begun: Callable[[int], None] | None,
        on_abort: Callable[[int], None] | None,
        on_loss: OnLoss | None,
        *,
        is_last: bool,
    ) -> None:
        """Sample the rest of a call's completion, and store the whole completion in `call`."""
        try_name = None if self.log is None else self.log.name
        report_abort = partial(self._report_abort_and_record, call, num_sampled(call.parts), try_name, on_abort)
        report_loss = partial(self._report_loss_and_record, try_name, on_loss)
        # Without a journal nobody has counted the tokens of a checkpoint.
        report_begun = None if self.log is None else on_begun
        if self.log is not None:
            self.log.record_call_start(call)
        is_last = is_last and not self.is_followed
        completion = await self._sample(
            request, call, affinity, report_begun, report_abort, report_loss, is_last=is_last
        )
        # Change the list in place: `StartedGroup.calls` and the pool hold the same list. `completion` includes all
        # parts.
        call.parts[:] = [completion]
        call.is_done = True

    def _report_abort_and_record(
        self,
        call: RecordedCall,
        num_begun_tokens: int,
        try_name: str | None,
        on_abort: Callable[[int], None] | None,
        num_tokens: int,
    ) -> None:
        """Report the tokens of an aborted call to its caller, and record them in the journal.

        The journal already has the first `num_begun_tokens` tokens, from a checkpoint. `try_name` is the try that made
        the call.
        """
        # Report before recording: the session's end waits for this report, and a journal error must not delay it.
        if on_abort is not None:
            on_abort(num_tokens)
        if self.log is not None and try_name is not None:
            self.log.record_abort(try_name, call, num_tokens - num_begun_tokens)
            # Later checkpoints must not have the call. A closed engine's groups are in no later checkpoint anyway.
            if not self._is_closed and call in self._calls:
                self._calls.remove(call)

    def _report_loss_and_record(
        self, try_name: str | None, on_loss: OnLoss | None, num_tokens: int, is_all: bool
    ) -> None:
        if on_loss is not None:
            on_loss(num_tokens, is_all)
        if self.log is not None and try_name is not None:
            self.log.record_loss(try_name, num_tokens, is_all=is_all)

    def forget(self, affinity: str) -> None:
        self._pool.forget(affinity)

    async def _sample(
        self,
        request: Request,
        call: RecordedCall,
        affinity: str | None,
        on_begun: Callable[[int], None] | None,
        on_abort: Callable[[int], None],
        on_loss: OnLoss,
        *,
        is_last: bool,
    ) -> Completion:
        """Sample a completion from the pool, and measure how long the attempt waits for the engines.

        Time with several parallel calls counts once. `seconds` excludes pauses of the engines, `seconds_by_clock`
        includes them.
        """
        if not self._num_calls_under_way:
            self._wait_began, self._paused_before = time.monotonic(), self.seconds_paused
        self._num_calls_under_way += 1
        try:
            return await self._pool.generate(
                request,
                affinity=affinity,
                is_last=is_last,
                parts=call.parts,
                on_begun=on_begun,
                on_abort=on_abort,
                on_loss=on_loss,
            )
        finally:
            self._num_calls_under_way -= 1
            if not self._num_calls_under_way:
                seconds = time.monotonic() - self._wait_began
                self.seconds_by_clock += seconds
                self.seconds += max(0.0, seconds - (self.seconds_paused - self._paused_before))

    def _take_recorded_call(self, prompt_token_ids: NDArray[np.int32]) -> RecordedCall | None:
        """Remove and return the recorded call with this prompt; None: there is none, so the call must be sampled.

        A new prompt means that the attempt deviates from its recording. Then all other recorded calls are discarded.
        """
        # Search the whole list: after a resume, parallel calls of an attempt may come in another order.
        for index, call in enumerate(self._repeatable_calls):
            if np.array_equal(call.prompt_token_ids, prompt_token_ids):
                return self._repeatable_calls.pop(index)
        for call in self._repeatable_calls:
            # Remove them from the group's record too: discarded calls must not enter the next checkpoint.
            self._calls.remove(call)
            self.is_restarted = True
        self._repeatable_calls.clear()
        return None
