"""Sessions of programs that outlived their driver, opened again by the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megarl.rollout.journal.journal import ReopenedSession
from megarl.rollout.recording import RecordedCall
from megarl.serving.conversation import Conversation
from megarl.serving.refusal import RequestError
from megarl.serving.session_sampler import Limits
from megarl.types import SamplingSettings
from tests.serving.scripted_pool import CONTEXT_TOKENS, scripted_endpoint

SAMPLING = SamplingSettings(200)
QUESTION = {"role": "user", "content": "Add."}


class Notes:
    """A journal that holds the requests."""

    def __init__(self) -> None:
        self.requests: list[Mapping[str, Any]] = []

    def record_request(self, request_id: str, values: Mapping[str, Any]) -> None:
        self.requests.append(values)

    def record_received(self, request_id: str, clients: int) -> None:
        pass

    async def close_session(self) -> None:
        pass


async def test_a_call_under_way_at_a_kill_does_not_count() -> None:
    """Two calls are allowed, and the driver is killed in the second one. The client repeats it."""
    notes, limits = Notes(), Limits(CONTEXT_TOKENS, 2, 60.0)
    async with scripted_endpoint() as s:
        first = s.sessions.open("t", "s", SAMPLING, limits, s.pool, notes)
        answer = await first.chat(Conversation.read([QUESTION]), SAMPLING, b"1", is_retry=False).task
    recorded = RecordedCall(answer.call.prompt_token_ids, [answer.call.completion], is_done=True)
    calls = ((recorded, notes.requests[0], True),)
    earlier = ReopenedSession(first.name, first.secret, "driver", "container", calls, num_started=2)
    follow_up = Conversation.read([QUESTION, answer.message, QUESTION])
    async with scripted_endpoint() as s:
        second = s.sessions.open("t", "s", SAMPLING, limits, s.pool, num_aborted=5)
        await s.sessions.reopen(second, earlier)
        repeated = await second.chat(follow_up, SAMPLING, b"2", is_retry=True).task
        assert (repeated.number, repeated.continued) == (3, 1)
        num_answered = sum(len(a.call.completion.token_ids) for a in (answer, repeated))
        assert second._sampler.num_sampled == num_answered + 5
        with pytest.raises(RequestError, match=r"rollout\.max_turns"):
            second.chat(Conversation.read([QUESTION, answer.message]), SAMPLING, b"3", is_retry=False)
