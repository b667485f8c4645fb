"""Open sessions of an endpoint."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.rollout.journal.journal import ReopenedSession
from megarl.rollout.requests.engine_requests import Generates
from megarl.serving.codec import Codec
from megarl.serving.refusal import RequestError
from megarl.serving.session import Session, ended_error
from megarl.serving.session_journal import SessionJournal
from megarl.serving.session_sampler import REPORT_SECONDS, Limits
from megarl.terminal import FirstOfEachKind
from megarl.types import SamplingSettings

_REMEMBERED = 100_000
"""Number of ended sessions remembered. Late calls to them get status 410; calls to older ones get 401 (unknown key)."""


@dataclass(slots=True)
class Sessions:
    """Open sessions of an endpoint, by secret.

    A session without a call for `Limits.idle_seconds` is ended. `notices` gets a text if a session ends before the
    engines have reported all tokens of its aborted calls.
    """

    codec: Codec
    notices: FirstOfEachKind = field(default_factory=lambda: FirstOfEachKind(lambda text: None))
    _open_sessions: dict[str, Session] = field(default_factory=dict)
    _ended_secrets: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    _end_tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _expected_sessions: dict[str, asyncio.Event] = field(default_factory=dict)
    _num_opened: int = 0

    def open(
        self,
        name: str,
        seed: str | None,
        sampling: SamplingSettings,
        limits: Limits,
        pool: Generates,
        journal: SessionJournal | None = None,
        *,
        num_aborted: int = 0,
    ) -> Session:
        """Open a session with a unique name. `pool` samples its completions.

        With `seed` None the name is the seed, so that sessions with equal prompts sample different completions.
        `num_aborted` is as in `SessionSampler`.
        """
        self._num_opened += 1
        unique_name = f"{name}-{self._num_opened}"
        session = Session(
            unique_name, seed or unique_name, sampling, limits, pool, self.codec, journal, num_aborted=num_aborted
        )
        self._open_sessions[session.secret] = session
        self.restart_timer(session)
        return session

    async def reopen(self, session: Session, reopened: ReopenedSession) -> None:
        """Give a new session the name, key and answers of a session whose driver was killed."""
        del self._open_sessions[session.secret]
        self._stop_timer(session)
        session.name, session.secret = reopened.name, reopened.key
        await session.restore(reopened.calls, num_started=reopened.num_started)
        self._open_sessions[session.secret] = session
        self.restart_timer(session)
        self.stop_expecting(session.secret)

    def expect(self, secrets_of_programs: Sequence[str]) -> None:
        """Let requests with these keys wait until their sessions reopen."""
        self._expected_sessions |= {secret: asyncio.Event() for secret in secrets_of_programs}

    def is_expected(self, secret: str) -> bool:
        return secret in self._expected_sessions

    def stop_expecting(self, secret: str) -> None:
        """Let requests of this session wait no longer. Unless it is open, they are refused."""
        if (event := self._expected_sessions.pop(secret, None)) is not None:
            if secret not in self._open_sessions:
                self._ended_secrets[secret] = None
            event.set()

    async def wait_for_expected(self, secret: str, seconds: float) -> None:
        """Wait up to `seconds` for the session expected with this key.

        Returns at once for other keys. Raises RequestError if the session does not open.
        """
        if (event := self._expected_sessions.get(secret)) is None:
            return
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            raise RequestError(
                "the run has restarted, and has not opened this program's session yet; send the same request again",
                status=503,
                retry_after=1,
            ) from None

    @property
    def num_open(self) -> int:
        return len(self._open_sessions)

    def find(self, secret: str) -> Session | None:
        """Return the open session with this secret, or None. Raises RequestError if it has ended."""
        if secret in self._ended_secrets:
            raise ended_error()
        return self._open_sessions.get(secret)

    def restart_timer(self, session: Session) -> None:
        self._stop_timer(session)
        loop = asyncio.get_running_loop()
        self._timers[session.secret] = loop.call_later(session.limits.idle_seconds, self._end_if_idle, session)

    async def end(self, session: Session, reward: float | None = None) -> None:
        """End a session. Remember only its secret, to answer late calls."""
        self._stop_timer(session)
        if self._open_sessions.pop(session.secret, None) is not None:
            self._ended_secrets[session.secret] = None
            # Bounded: every attempt of a long run opens a session.
            if len(self._ended_secrets) > _REMEMBERED:
                self._ended_secrets.popitem(last=False)
        await session.end(reward)
        if num_unreported := session.counts["unreported_calls"]:
            self.notices.tell(
                "unreported_calls",
                f"session {session.name} ended without tokens of {num_unreported} aborted calls, because their engine "
                f"was lost, or did not report them within {REPORT_SECONDS:g} s (environment/unreported_calls). "
                "environment/untrained_tokens lacks them. `megarl samples RUN --account` has them if the engine still "
                "reports them; if it is lost, their number is unknown. Look for a hung engine in the ranks' logs",
            )

    async def close(self) -> None:
        await asyncio.gather(*(self.end(session) for session in list(self._open_sessions.values())), *self._end_tasks)

    def _stop_timer(self, session: Session) -> None:
        if timer := self._timers.pop(session.secret, None):
            timer.cancel()

    def _end_if_idle(self, session: Session) -> None:
        """End a session after its idle time, unless a model call is running."""
        # A long completion is not idleness.
        if session.num_under_way:
            self.restart_timer(session)
            return
        session.counts["timed_out"] += 1
        task = asyncio.create_task(self.end(session))
        # asyncio keeps only weak references to tasks; the set prevents their collection.
        self._end_tasks.add(task)
        task.add_done_callback(self._end_tasks.discard)
