"""Sessions of agents: the model calls of one attempt, sampled and recorded as tokens until the attempt ends."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from megarl.data.tools.calls import ParsedTurn
from megarl.environments import Message
from megarl.rollout.engine_requests import Generates
from megarl.rollout.journal.journal import ReopenedSession
from megarl.rollout.recording import RecordedCall
from megarl.rollout.stitch import ModelCall
from megarl.serving.answers import MAIN, Answer, ModelCallUnderWay
from megarl.serving.codec import Codec, too_long
from megarl.serving.conversation import Conversation
from megarl.serving.history import Answered, AnsweredText, History
from megarl.serving.refusal import RequestError
from megarl.types import Caller, Completion, Request, SamplingSettings

if TYPE_CHECKING:
    from numpy.typing import NDArray

_REMEMBERED = 100_000
"""Number of ended sessions remembered. Late calls to them get status 410; calls to older ones get 401 (unknown
key).
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a session: tokens of prompt plus completion, number of model calls, seconds without a call, and sampled
    tokens of all calls together (None: no limit).
    """

    context_tokens: int
    max_calls: int
    idle_seconds: float
    sampled_tokens: int | None = None


class SessionJournal(Protocol):
    """Journal of a session: facts needed by a later driver, besides the answers, to go on with it."""

    def note_request(self, request_id: str, values: Mapping[str, Any]) -> None:
        """Record a request, before its answer."""
        ...

    def note_received(self, request_id: str, clients: int) -> None:
        """Record that one client more, or one less (-1), has read an answer."""
        ...

    async def close_session(self) -> None:
        """Record that nobody can go on with the session."""
        ...


class Session:
    """Record of one agent's attempt.

    `answers` are the answers delivered to the agent, in the order of their calls' starts. `counts` has numbers of
    dropped calls, joined retries, overridden fields and others, by name.
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
    ) -> None:
        self.name = name
        # 192 random bits: the secret is the only protection of a session.
        self.secret = secrets.token_urlsafe(24)
        self.sampling = sampling
        self.limits = limits
        self.reward: float | None = None
        # As the agent sent them: they are read at the end, when all answers are known.
        self.turn_rewards: Any = None
        self.counts: Counter[str] = Counter()
        self.fork_texts: list[str] = []
        self.ended = asyncio.Event()
        self.outcome: str | None = None
        """Exceeded limit, which ends the attempt, as `KIND: text`; None: there is none."""
        self._num_sampled = 0
        self._seed = seed
        self._pool, self._codec, self._journal = pool, codec, journal
        self._history = History()
        self._by_body: dict[bytes, ModelCallUnderWay] = {}
        self._calls: dict[int, ModelCallUnderWay] = {}
        self._num_started = 0
        self._num_lost = 0
        """Calls that were under way when a driver was killed. They do not count, because clients repeat them."""
        self._times_seen: Counter[bytes] = Counter()

    @property
    def answers(self) -> list[Answer]:
        """Answers delivered to the agent, in the order of their calls' starts."""
        # Calls may overlap and answers arrive in any order; training needs a fixed one.
        return [call.task.result() for call in self._calls.values() if call.is_delivered]

    @property
    def num_under_way(self) -> int:
        """Number of model calls without an answer so far."""
        return sum(not call.task.done() for call in self._calls.values())

    def chat(
        self,
        conversation: Conversation,
        sampling: SamplingSettings,
        identity: bytes,
        caller: Caller = MAIN,
        *,
        is_retry: bool,
    ) -> ModelCallUnderWay:
        """Start a model call answering a conversation, or join the one that a request repeats (see `_begin`).

        Raises RequestError if no call is allowed.
        """

        request_digest = _identify(identity, caller)

        def sample(number: int) -> Coroutine[Any, Any, Answer]:
            return self._chat(number, conversation, sampling, caller, request_digest)

        return self._begin(request_digest, is_retry, sample, partial(self._remember_chat, conversation))

    def complete(
        self,
        prompt: str | NDArray[np.int32],
        sampling: SamplingSettings,
        identity: bytes,
        caller: Caller = MAIN,
        *,
        is_retry: bool,
    ) -> ModelCallUnderWay:
        """Start a model call that completes a text or token ids [prompt], or join the one that a request repeats (see
        `_begin`).

        Raises RequestError if no call is allowed.
        """

        request_digest = _identify(identity, caller)

        def sample(number: int) -> Coroutine[Any, Any, Answer]:
            return self._complete(number, prompt, sampling, caller, request_digest)

        return self._begin(request_digest, is_retry, sample, partial(self._remember_text, prompt))

    def _remember_chat(self, conversation: Conversation, answer: Answer) -> None:
        answered_conversation = conversation.followed_by([answer.message])
        token_ids = answer.call.token_ids.astype(np.int32)
        self._history.add(Answered(answered_conversation, token_ids, answer.number))

    def _remember_text(self, prompt: str | NDArray[np.int32], answer: Answer) -> None:
        if isinstance(prompt, str):
            token_ids = answer.call.token_ids.astype(np.int32)
            self._history.add_text(AnsweredText(prompt + answer.text, token_ids, answer.number))

    async def restore(self, calls: Sequence[tuple[RecordedCall, Mapping[str, Any], bool]], num_started: int) -> None:
        """Take over the answers of a session whose driver was killed, in their order.

        A call has its tokens, the facts given to `SessionJournal.note_request`, and whether a client has read its
        answer. `num_started` calls had begun.
        """
        conversations: dict[int, Conversation] = {}
        for recorded, asked, is_received in calls:
            call = ModelCall(recorded.prompt_token_ids, recorded.parts[0])
            number, continued, prompt = asked["number"], asked["continued"], asked["text"]
            caller, stops = Caller(*asked["caller"]), tuple(asked["stop"])
            conversation = Conversation((), tuple(asked["tools"]), (), ()).followed_by(asked["messages"])
            if continued is not None:
                self._continue(continued)
                if prompt is None:
                    conversation = conversations[continued].followed_by(asked["messages"])
            if asked["messages"]:
                answer = await self._read_chat(number, call, conversation, stops, caller, continued)
                remember: Callable[[Answer], None] = partial(self._remember_chat, conversation)
                conversations[number] = conversation.followed_by([answer.message])
            else:
                answer = await self._read_text(number, call, stops, caller)
                remember = partial(self._remember_text, call.prompt_token_ids if prompt is None else prompt)
            task = asyncio.create_task(_hand_over(answer))
            await task
            restored = ModelCallUnderWay(number, task, remember, num_received=int(is_received))
            self._calls[number] = self._by_body[bytes.fromhex(asked["digest"])] = restored
            # Its client may have read it, even if that was not recorded in time.
            self.remember(restored)
            self._num_sampled += answer.num_sampled_tokens
            self._times_seen[_prompt_hash(call.prompt_token_ids)] += 1
        # The answers' order is that of their ends, and `answers` is in the order of their starts.
        self._calls = dict(sorted(self._calls.items()))
        self._num_started, self._num_lost = num_started, num_started - len(self._calls)

    @contextmanager
    def waiting(self, call: ModelCallUnderWay) -> Iterator[None]:
        """Count an HTTP request as waiting for a model call. If the last waiting client disconnects, the call is
        aborted.
        """
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

    async def answer(self, call: ModelCallUnderWay, seconds: float) -> Answer | None:
        """Wait up to `seconds` for the answer of a model call. None: it is not ready, and the call continues.

        Raises RequestError if the call was refused or the session has ended.
        """
        # asyncio.wait does not cancel the task on timeout, unlike wait_for.
        await asyncio.wait({call.task}, timeout=seconds)
        if not call.task.done():
            return None
        if call.task.cancelled():
            raise ended_error()
        return call.task.result()

    def remember(self, call: ModelCallUnderWay) -> None:
        """Let later calls continue the conversation of an answer. Done before the answer is sent.

        A client may continue before the endpoint knows that it received the last byte.
        """
        if call.is_remembered or self.ended.is_set():
            return
        call.remember(call.task.result())
        call.is_remembered = True

    def deliver(self, call: ModelCallUnderWay) -> None:
        """Record that the answer of a model call was written to a client. Only such answers are trained."""
        # An answer after the end would add tokens to a finished trajectory.
        if not self.ended.is_set():
            call.num_received += 1
            self._note_received(call, 1)

    def withdraw(self, call: ModelCallUnderWay) -> None:
        """Undo one `deliver`: the client's connection ended before it had read the answer.

        If no client has the answer, a repeat of the request gets it. An answer continued by a later call was read.
        """
        if not self.ended.is_set():
            call.num_received -= 1
            self._note_received(call, -1)

    def _note_received(self, call: ModelCallUnderWay, clients: int) -> None:
        if self._journal is not None:
            self._journal.note_received(f"{self.name}.{call.number}", clients)

    async def close_journal(self) -> None:
        """Record that the program has its reward: nobody may go on with the session after a kill."""
        if self._journal is not None:
            await self._journal.close_session()

    def _continue(self, number: int) -> None:
        """Record that a call holds the answer of the earlier call `number`, so its client has received it."""
        self._calls[number].is_continued = True

    async def end(self, reward: float | None = None) -> None:
        """End the session and abort running model calls. Only the first call has an effect, including its reward."""
        if self.ended.is_set():
            return
        self.ended.set()
        self.reward = reward
        # Cancelling a call aborts its request in the engine.
        tasks = [call.task for call in self._calls.values() if not call.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.counts["untrained_tokens"] = sum(
            len(call.task.result().call.completion.token_ids)
            for call in self._calls.values()
            if not call.is_delivered and not call.task.cancelled() and call.task.exception() is None
        )
        # Removes the pool's record of the engine with this session's prefix cached.
        self._pool.forget(self.name)

    def _begin(
        self,
        identity: bytes,
        is_retry: bool,
        sample: Callable[[int], Coroutine[Any, Any, Answer]],
        remember: Callable[[Answer], None],
    ) -> ModelCallUnderWay:
        """Start a model call, or join the call with the same `identity` if no client has received its answer.

        A request marked as a retry (`is_retry`) also gets an answer that was written before. `sample` is called with
        the call's number. Raises RequestError if no call is allowed.
        """
        if self.ended.is_set():
            raise ended_error()
        earlier = self._by_body.get(identity)
        # Not all clients mark their retries. Two trained answers of one turn would be the price of a repeat not joined.
        if earlier is not None and earlier.is_joinable and (is_retry or earlier.lacks_delivery):
            self.counts["joined_retries"] += 1
            return earlier
        if self._num_started - self._num_lost >= self.limits.max_calls:
            self.counts["refused_calls"] += 1
            text = f"this session may make {self.limits.max_calls} model calls (rollout.max_turns), and has made them"
            raise RequestError(text, code="max_turns")
        if self._num_tokens_left == 0:
            self.counts["refused_calls"] += 1
            text = (
                f"this session has sampled {self._num_sampled} tokens; "
                f"{self.limits.sampled_tokens} are allowed (rollout.agent.sampled_tokens)"
            )
            # The program may go on without the model, so its attempt is ended too (`AgentProgram`).
            self.outcome = f"TokenLimit: {text}"
            raise RequestError(text, code="sampled_tokens")
        self._num_started += 1
        # Taken here: parallel calls read the count only when their tasks first run.
        number = self._num_started
        call = ModelCallUnderWay(number, asyncio.create_task(sample(number)), remember)
        self._by_body[identity] = call
        self._calls[number] = call
        return call

    async def prompt(self, conversation: Conversation) -> NDArray[np.int32]:
        """Return the tokens of a conversation's prompt [prompt]. If possible, they repeat those of an earlier answer.

        Raises RequestError if the conversation or its tools are invalid, or if the prompt is too long.
        """
        self._codec.check_tools(conversation.tools)
        return await self._encode(conversation, self._history.find(conversation))

    async def _encode(self, conversation: Conversation, answered: Answered | None) -> NDArray[np.int32]:
        """Return the tokens of a conversation's prompt [prompt]; they begin with those of the part `answered`."""
        # Appending to recorded tokens keeps a trajectory one sequence. Rendering again could tokenise it differently.
        if answered is None:
            return await self._codec.opening(conversation)
        added = conversation.messages[len(answered.conversation.messages) :]
        return await self._codec.extend(answered.token_ids, added, conversation.tools)

    async def _chat(
        self,
        number: int,
        conversation: Conversation,
        sampling: SamplingSettings,
        caller: Caller,
        request_digest: bytes,
    ) -> Answer:
        """Sample an answer to a conversation."""
        self._codec.check_tools(conversation.tools)
        answered = self._history.find(conversation)
        if answered is not None:
            self._continue(answered.number)
        if fork := self._history.fork(conversation, answered):
            self.counts["forks"] += 1
            self.counts[f"forks/{fork.reason}"] += 1
            self.fork_texts.append(fork.text)
        token_ids = await self._encode(conversation, answered)
        continued = None if answered is None else answered.number
        num_known = 0 if answered is None else len(answered.conversation.messages)
        self._note_request(
            number,
            digest=request_digest,
            caller=caller,
            continued=continued,
            sampling=sampling,
            messages=conversation.messages[num_known:],
            # A conversation that is continued has the same tools.
            tools=conversation.tools if answered is None else (),
        )
        call = await self._sample(number, token_ids, sampling)
        return await self._read_chat(number, call, conversation, sampling.stop, caller, continued)

    async def _read_chat(
        self,
        number: int,
        call: ModelCall,
        conversation: Conversation,
        stops: Sequence[str],
        caller: Caller,
        continued: int | None,
    ) -> Answer:
        """Return the answer to a conversation, read from its tokens."""
        # Parsed from tokens, because special tokens mark reasoning and calls.
        decoded = await self._codec.parse_completion(call, conversation.tools, number)
        turn = decoded.turn
        return Answer(
            number,
            call,
            text=_until_stop(turn.text, call.completion, stops),
            completion_text=decoded.full_text,
            is_in_thoughts=decoded.is_in_thoughts,
            prompt_messages=conversation.messages,
            reasoning=turn.reasoning,
            calls=_sent_calls(turn),
            caller=caller,
            continued=continued,
        )

    async def _complete(
        self,
        number: int,
        prompt: str | NDArray[np.int32],
        sampling: SamplingSettings,
        caller: Caller,
        request_digest: bytes,
    ) -> Answer:
        """Sample a completion of a prompt. If possible, the prompt reuses the tokens of an earlier text."""
        continued = None
        if not isinstance(prompt, str):
            token_ids = prompt
        elif (earlier := self._history.find_text(prompt)) is not None:
            continued = earlier.number
            self._continue(continued)
            added_ids = await self._codec.encode_text(prompt[len(earlier.text) :])
            token_ids = np.concatenate([earlier.token_ids, added_ids])
        else:
            token_ids = await self._codec.encode_text(prompt)
        self._note_request(
            number,
            digest=request_digest,
            caller=caller,
            continued=continued,
            sampling=sampling,
            text=prompt if isinstance(prompt, str) else None,
        )
        call = await self._sample(number, token_ids, sampling)
        return await self._read_text(number, call, sampling.stop, caller)

    def _note_request(
        self,
        number: int,
        *,
        digest: bytes,
        caller: Caller,
        continued: int | None,
        sampling: SamplingSettings,
        messages: Sequence[Message] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        text: str | None = None,
    ) -> None:
        """Record request `number` in the journal: a chat, or a `text` to complete.

        A chat has only its new `messages`, after the messages of the earlier call `continued`.
        """
        if self._journal is not None:
            values = {
                "number": number,
                "digest": digest.hex(),
                "caller": list(caller),
                "continued": continued,
                "stop": list(sampling.stop),
                "messages": [dict(message) for message in messages],
                "tools": list(tools),
                "text": text,
            }
            self._journal.note_request(f"{self.name}.{number}", values)

    async def _read_text(self, number: int, call: ModelCall, stops: Sequence[str], caller: Caller) -> Answer:
        """Return the completion of a text, read from its tokens."""
        decoded = await self._codec.parse_completion(call, (), number)
        text = _until_stop(decoded.full_text, call.completion, stops)
        return Answer(
            number,
            call,
            text=text,
            completion_text=decoded.full_text,
            is_in_thoughts=decoded.is_in_thoughts,
            caller=caller,
        )

    async def _sample(self, number: int, token_ids: NDArray[np.int32], sampling: SamplingSettings) -> ModelCall:
        """Sample a completion of `token_ids` [prompt].

        Raises RequestError if the prompt leaves no room, or if the engine refuses it.
        """
        tokens_left = self.limits.context_tokens - len(token_ids)
        if tokens_left <= 0:
            self.counts["refused_calls"] += 1
            raise too_long(self.limits.context_tokens)
        if (allowed := self._num_tokens_left) is not None:
            # At least one: a parallel call may have reached the limit after this one began.
            tokens_left = min(tokens_left, max(allowed, 1))
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, tokens_left))
        # `affinity` sends all calls of a session to the engine with its prefix cached.
        request = Request(f"{self.name}.{number}", token_ids, sampling, self._seed_of(token_ids))
        completion = await self._pool.generate(request, affinity=self.name)
        if completion.finish_reason == "error":
            self.counts["refused_calls"] += 1
            raise RequestError(completion.error or "the engine refuses this request")
        self._num_sampled += len(completion.token_ids)
        return ModelCall(token_ids, completion)

    @property
    def _num_tokens_left(self) -> int | None:
        """Number of tokens left to sample; None: there is no limit."""
        limit = self.limits.sampled_tokens
        return None if limit is None else max(0, limit - self._num_sampled)

    def _seed_of(self, token_ids: NDArray[np.int32]) -> int:
        """Return a 31-bit sampling seed for a prompt [prompt].

        The seed depends on the session, the prompt and how often it was repeated, but not on the order of calls.
        """
        prompt = _prompt_hash(token_ids)
        # An agent with parallel calls starts them in any order, and a repeated run must sample the same.
        drawn = f"{self._seed} {prompt.hex()} {self._times_seen[prompt]}"
        self._times_seen[prompt] += 1
        return int.from_bytes(hashlib.sha256(drawn.encode()).digest()[:4], "big") >> 1


@dataclass(slots=True)
class Sessions:
    """Open sessions of an endpoint, by secret.

    A session without a call for `Limits.idle_seconds` is ended.
    """

    codec: Codec
    _open: dict[str, Session] = field(default_factory=dict)
    _ended: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    _ending: set[asyncio.Task[None]] = field(default_factory=set)
    _expected: dict[str, asyncio.Event] = field(default_factory=dict)
    _num_opened: int = 0

    def open(
        self,
        name: str,
        seed: str | None,
        sampling: SamplingSettings,
        limits: Limits,
        pool: Generates,
        journal: SessionJournal | None = None,
    ) -> Session:
        """Open a session with a unique name. `pool` samples its completions.

        `seed` None: the unique name is the seed, so that sessions with equal prompts draw different completions.
        """
        self._num_opened += 1
        unique_name = f"{name}-{self._num_opened}"
        session = Session(unique_name, seed or unique_name, sampling, limits, pool, self.codec, journal)
        self._open[session.secret] = session
        self.restart_timer(session)
        return session

    async def reopen(self, session: Session, earlier: ReopenedSession) -> None:
        """Give a new session the name, the key and the answers of one whose driver was killed."""
        del self._open[session.secret]
        self._stop_timer(session)
        session.name, session.secret = earlier.name, earlier.key
        await session.restore(earlier.calls, earlier.num_started)
        self._open[session.secret] = session
        self.restart_timer(session)
        self.cease_to_expect(session.secret)

    def expect(self, secrets_of_programs: Sequence[str]) -> None:
        """Let requests with these keys wait: their programs outlived a driver, and their sessions open later."""
        self._expected |= {secret: asyncio.Event() for secret in secrets_of_programs}

    def is_expected(self, secret: str) -> bool:
        """Return whether a key belongs to a program that outlived a driver, and whose session is not open yet."""
        return secret in self._expected

    def cease_to_expect(self, secret: str) -> None:
        """End the wait for a session. Without one its key is refused from now on."""
        if (event := self._expected.pop(secret, None)) is not None:
            if secret not in self._open:
                self._ended[secret] = None
            event.set()

    async def wait_for(self, secret: str, seconds: float) -> None:
        """Wait up to `seconds` for the session of an expected key. Raises RequestError if it does not open."""
        if (event := self._expected.get(secret)) is None:
            return
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            raise RequestError(
                "the run that this program belongs to has not gone on with it yet; send the same request again",
                status=503,
                retry_after=1,
            ) from None

    @property
    def num_open(self) -> int:
        """Number of open sessions."""
        return len(self._open)

    def find(self, secret: str) -> Session | None:
        """Return the open session with this secret; None: unknown. Raises RequestError if the session has ended."""
        if secret in self._ended:
            raise ended_error()
        return self._open.get(secret)

    def restart_timer(self, session: Session) -> None:
        """Restart the timer ending the session after `idle_seconds` without a request."""
        self._stop_timer(session)
        loop = asyncio.get_running_loop()
        self._timers[session.secret] = loop.call_later(session.limits.idle_seconds, self._time_out, session)

    async def end(self, session: Session, reward: float | None = None) -> None:
        """End a session. Only its secret is remembered, to answer late calls."""
        self._stop_timer(session)
        if self._open.pop(session.secret, None) is not None:
            self._ended[session.secret] = None
            # Bounded, because every attempt of a long run opens a session.
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        await session.end(reward)

    async def close(self) -> None:
        """End all sessions."""
        await asyncio.gather(*(self.end(session) for session in list(self._open.values())), *self._ending)

    def _stop_timer(self, session: Session) -> None:
        if timer := self._timers.pop(session.secret, None):
            timer.cancel()

    def _time_out(self, session: Session) -> None:
        """End a session after its idle time, unless a model call is running."""
        # A long completion is not idleness.
        if session.num_under_way:
            self.restart_timer(session)
            return
        session.counts["timed_out"] += 1
        task = asyncio.create_task(self.end(session))
        # asyncio keeps only weak references to tasks, so the set prevents their collection.
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _identify(body: bytes, caller: Caller) -> bytes:
    """Return the identity of a request: two agents with equal bodies want an answer each."""
    # Parallel sub-agents often begin with the same task.
    return hashlib.sha256(body + caller.agent.encode()).digest()


def _prompt_hash(token_ids: NDArray[np.int32]) -> bytes:
    return hashlib.sha256(token_ids.tobytes()).digest()


async def _hand_over(answer: Answer) -> Answer:
    return answer


def ended_error() -> RequestError:
    """Return the error for a call arriving after the end of its session."""
    return RequestError("this session has ended; its agent's attempt is over", status=410, code="session_ended")


def _sent_calls(turn: ParsedTurn) -> tuple[tuple[str, str, str], ...]:
    """Return a turn's tool calls in the form sent to clients.

    An invalid call has the error in place of its arguments, which is not valid JSON.
    """
    return tuple(
        (
            call.id,
            call.name or "invalid_call",
            f"error: {call.error}" if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False),
        )
        for call in turn.calls
    )


def _until_stop(text: str, completion: Completion, stops: Sequence[str]) -> str:
    """Return the text up to the stop string that ended it, as OpenAI does."""
    if completion.finish_reason != "stop":
        return text
    places = [text.find(stop) for stop in stops]
    # The end-of-sequence token ends a text as well, without any stop string in it.
    stops_at = [place for place in places if place >= 0]
    return text[: min(stops_at)] if stops_at else text
