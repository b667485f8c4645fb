"""A session: one agent's attempt."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.rollout.recording import RecordedCall
from megarl.rollout.requests.engine_requests import Generates
from megarl.rollout.stitch import ModelCall
from megarl.serving.answer_reader import read_chat, read_text
from megarl.serving.answer_sampler import AnswerSampler
from megarl.serving.answers import MAIN, Answer, ModelCallUnderWay
from megarl.serving.codec import Codec
from megarl.serving.conversation import Conversation
from megarl.serving.refusal import RequestError
from megarl.serving.session_journal import SessionJournal
from megarl.serving.session_sampler import Limits, SessionSampler
from megarl.types import Caller, SamplingSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Session:
    """Record of one agent's attempt.

    `counts` has numbers of abandoned calls, joined retries, overridden fields and others, by name. `num_aborted` is as
    in `SessionSampler`.
    """

    def __init__(
        self,
        name: str,
        seed: str,
        sampling: SamplingSettings,
        limits: Limits,
        pool: Generates,
        codec: Codec,
        journal: SessionJournal | None = None,
        *,
        num_aborted: int = 0,
    ) -> None:
        self.name = name
        # 192 random bits: the secret is the only protection of a session.
        self.secret = secrets.token_urlsafe(24)
        self.sampling = sampling
        self.limits = limits
        self.reward: float | None = None
        # As the agent sent them: `read_turn_rewards` checks them at the end, when all answers are known.
        self.turn_rewards: Any = None
        self.counts: Counter[str] = Counter()
        self.fork_texts: list[str] = []
        self.ended = asyncio.Event()
        self.outcome: str | None = None
        """Limit that was exceeded and ends the attempt, as `KIND: text`; None: no limit was exceeded."""
        self._pool, self._codec, self._journal = pool, codec, journal
        self._sampler = SessionSampler(seed, limits, pool, self.counts, num_aborted=num_aborted)
        self.answer_sampler = AnswerSampler(
            name,
            codec,
            self._sampler,
            journal,
            counts=self.counts,
            fork_texts=self.fork_texts,
            on_continued=self._mark_continued,
        )
        self._call_by_digest: dict[bytes, ModelCallUnderWay] = {}
        self._calls: dict[int, ModelCallUnderWay] = {}
        self._num_started = 0
        self._end_task: asyncio.Task[None] | None = None

    @property
    def answers(self) -> list[Answer]:
        # Overlapping calls end in any order, but training needs a fixed order.
        return [call.task.result() for call in self._calls.values() if call.is_delivered]

    @property
    def num_under_way(self) -> int:
        return sum(not call.task.done() for call in self._calls.values())

    def chat(
        self,
        conversation: Conversation,
        sampling: SamplingSettings,
        request_hash: bytes,
        caller: Caller = MAIN,
        *,
        is_retry: bool,
    ) -> ModelCallUnderWay:
        """Start a model call that answers a conversation, or join one that a request repeats. Raises RequestError."""

        request_digest = _identify(request_hash, caller)

        def sample_answer(number: int) -> Coroutine[Any, Any, Answer]:
            return self.answer_sampler.answer_chat(number, conversation, sampling, caller, request_digest)

        return self._start_or_join_call(
            request_digest, is_retry, sample_answer, partial(self.answer_sampler.remember_chat, conversation)
        )

    def complete(
        self,
        prompt: str | NDArray[np.int32],
        sampling: SamplingSettings,
        request_hash: bytes,
        caller: Caller = MAIN,
        *,
        is_retry: bool,
    ) -> ModelCallUnderWay:
        """Start a model call that completes a text or token ids [prompt], or join one. Raises RequestError."""

        request_digest = _identify(request_hash, caller)

        def sample_answer(number: int) -> Coroutine[Any, Any, Answer]:
            return self.answer_sampler.answer_text(number, prompt, sampling, caller, request_digest)

        return self._start_or_join_call(
            request_digest, is_retry, sample_answer, partial(self.answer_sampler.remember_text, prompt)
        )

    async def restore(self, calls: Sequence[tuple[RecordedCall, Mapping[str, Any], bool]], *, num_started: int) -> None:
        """Restore the answers of a session whose driver was killed, in their order.

        A call has its tokens, the facts given to `SessionJournal.record_request`, and whether a client has read its
        answer. `num_started` calls had begun.
        """
        conversations: dict[int, Conversation] = {}
        for recorded_call, facts, is_received in calls:
            call = ModelCall(recorded_call.prompt_token_ids, recorded_call.parts[0])
            number, continued_number, prompt_text = facts["number"], facts["continued"], facts["text"]
            caller, stops = Caller(*facts["caller"]), tuple(facts["stop"])
            conversation = Conversation((), tuple(facts["tools"]), (), ()).with_messages(facts["messages"])
            if continued_number is not None:
                self._mark_continued(continued_number)
                if prompt_text is None:
                    conversation = conversations[continued_number].with_messages(facts["messages"])
            if facts["messages"]:
                answer = await read_chat(self._codec, number, call, conversation, stops, caller, continued_number)
                remember: Callable[[Answer], None] = partial(self.answer_sampler.remember_chat, conversation)
                conversations[number] = conversation.with_messages([answer.message])
            else:
                answer = await read_text(self._codec, number, call, stops, caller)
                remember = partial(
                    self.answer_sampler.remember_text, call.prompt_token_ids if prompt_text is None else prompt_text
                )
            task = asyncio.create_task(_return_answer(answer))
            await task
            call_under_way = ModelCallUnderWay(number, task, remember, num_received=int(is_received))
            self._calls[number] = self._call_by_digest[bytes.fromhex(facts["digest"])] = call_under_way
            # The client may have read it, even if that was not recorded in time.
            self.remember(call_under_way)
            self._sampler.restore(call)
        # `calls` are ordered by their ends, `answers` by the starts of their calls.
        self._calls = dict(sorted(self._calls.items()))
        self._num_started = num_started

    @contextmanager
    def count_waiting(self, call: ModelCallUnderWay) -> Iterator[None]:
        """Count an HTTP request as waiting for a call. If the last waiting client disconnects, abort the call."""
        call.num_waiting += 1
        try:
            yield
        except (asyncio.CancelledError, ConnectionError):
            if call.num_waiting == 1 and not call.task.done():
                self.counts["abandoned_calls"] += 1
                call.task.cancel()
            raise
        finally:
            call.num_waiting -= 1

    async def wait_for_answer(self, call: ModelCallUnderWay, seconds: float) -> Answer | None:
        """Wait up to `seconds` for a call's answer; None: it is not ready, and the call continues.

        Raises RequestError if the call was refused or the session has ended.
        """
        # Unlike wait_for, asyncio.wait does not cancel the task on timeout.
        await asyncio.wait({call.task}, timeout=seconds)
        if not call.task.done():
            return None
        if call.task.cancelled():
            raise ended_error()
        return call.task.result()

    def remember(self, call: ModelCallUnderWay) -> None:
        """Let later calls continue an answer's conversation. Call it before sending the answer.

        A client may continue before the endpoint knows that it has received the last byte.
        """
        if call.is_remembered or self.ended.is_set():
            return
        call.remember(call.task.result())
        call.is_remembered = True

    def record_delivery(self, call: ModelCallUnderWay) -> None:
        """Record that an answer was written to a client. Only written answers are trained."""
        # An answer after the end would add tokens to a finished trajectory.
        if not self.ended.is_set():
            call.num_received += 1
            self._record_received(call, 1)

    def withdraw_delivery(self, call: ModelCallUnderWay) -> None:
        """Undo one `record_delivery`: the connection ended before the client had read the answer.

        If no client has the answer, a repeat gets it. An answer that a later call continues stays received.
        """
        if not self.ended.is_set():
            call.num_received -= 1
            self._record_received(call, -1)

    def _record_received(self, call: ModelCallUnderWay, clients: int) -> None:
        if self._journal is not None:
            self._journal.record_received(f"{self.name}.{call.number}", clients)

    async def close_journal(self) -> None:
        """Record that the program has its reward: no later driver may continue the session."""
        if self._journal is not None:
            await self._journal.close_session()

    def _mark_continued(self, number: int) -> None:
        """Record that a later call continues the answer of call `number`: its client has received it."""
        self._calls[number].is_continued = True

    async def end(self, reward: float | None = None) -> None:
        """End the session and abort running model calls. Each caller waits; the first one's reward counts."""
        if self._end_task is None:
            self.ended.set()
            self.reward = reward
            # Cancelling a call aborts its request in the engine.
            tasks = [call.task for call in self._calls.values() if not call.task.done()]
            for task in tasks:
                task.cancel()
            self._end_task = asyncio.create_task(self._count_unreceived_tokens(tasks))
        # Shielded: the client that posts the reward may disconnect before the engines report.
        await asyncio.shield(self._end_task)

    async def _count_unreceived_tokens(self, cancelled_tasks: Sequence[asyncio.Task[Answer]]) -> None:
        """Wait for the cancelled calls, and count sampled tokens that no client received."""
        await asyncio.gather(*cancelled_tasks, return_exceptions=True)
        # Engines abort requests with a delay, and only then know their numbers of tokens.
        self.counts["unreported_calls"] = await self._sampler.wait_for_reports()
        num_delivered = sum(answer.num_sampled_tokens for answer in self.answers)
        self.counts["untrained_tokens"] = self._sampler.num_sampled - num_delivered
        # Remove the pool's record of the engine that caches this session's prefix.
        self._pool.forget(self.name)

    def _start_or_join_call(
        self,
        request_digest: bytes,
        is_retry: bool,
        sample: Callable[[int], Coroutine[Any, Any, Answer]],
        remember: Callable[[Answer], None],
    ) -> ModelCallUnderWay:
        """Start a model call, or join the call with the same `request_digest` if no client has received its answer.

        A request marked as a retry (`is_retry`) also joins a call with a written answer. `sample` gets the call's
        number. Raises RequestError if no call is allowed.
        """
        if self.ended.is_set():
            raise ended_error()
        earlier_call = self._call_by_digest.get(request_digest)
        # Not all clients mark retries. A repeat that is not joined would add a second trained answer to a turn.
        if earlier_call is not None and earlier_call.is_joinable and (is_retry or earlier_call.lacks_delivery):
            self.counts["joined_retries"] += 1
            return earlier_call
        # Calls that ran when a driver was killed do not count, because clients repeat them.
        if len(self._calls) >= self.limits.max_calls:
            self.counts["refused_calls"] += 1
            reason = f"this session may make {self.limits.max_calls} model calls (rollout.max_turns), and has made them"
            raise RequestError(reason, code="max_turns")
        if self._sampler.num_tokens_left == 0:
            self.counts["refused_calls"] += 1
            reason = (
                f"this session has sampled {self._sampler.num_sampled} tokens; "
                f"{self.limits.sampled_tokens} are allowed (rollout.agent.sampled_tokens)"
            )
            # The program may continue without the model, so `AgentProgram` ends the attempt too.
            self.outcome = f"TokenLimit: {reason}"
            raise RequestError(reason, code="sampled_tokens")
        self._num_started += 1
        # Read here: tasks of parallel calls run only later.
        number = self._num_started
        call = ModelCallUnderWay(number, asyncio.create_task(sample(number)), remember)
        self._call_by_digest[request_digest] = call
        self._calls[number] = call
        return call


def _identify(body: bytes, caller: Caller) -> bytes:
    """Return a digest of body and caller: equal bodies of two agents are different requests."""
    # Parallel sub-agents often begin with the same task.
    return hashlib.sha256(body + caller.agent.encode()).digest()


async def _return_answer(answer: Answer) -> Answer:
    return answer


def ended_error() -> RequestError:
    return RequestError("this session has ended; its agent's attempt is over", status=410, code="session_ended")
