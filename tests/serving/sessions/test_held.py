"""Sessions over a reshard: their calls wait while the engines are held, and go on under the new weights."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from megarl.config.sections.rollout import EndpointConfig
from megarl.serving.endpoint import Endpoint
from megarl.serving.session import Session
from tests.serving.served import Served
from tests.serving.tool_model import LOOP

BODY: dict[str, Any] = {"model": "policy", "prompt": f"The{LOOP}", "max_tokens": 200}


async def asked(served: Served, session: Session) -> str:
    async with served.client(session) as client:
        return (await client.completions.create(**BODY)).choices[0].text


def versions(session: Session) -> list[int]:
    [answer] = session.answers
    return answer.call.completion.weight_versions.tolist()


async def test_calls_that_wait_during_a_reshard_are_answered_after_it(served: Any) -> None:
    """Five sessions wait as it begins, one calls during it, one is told to come back and joins its call."""
    async with served() as s:
        waiting, late, during = [s.open(seed=f"{n}") for n in range(4)], s.open(seed="late"), s.open(seed="during")
        impatient = Endpoint(s.sessions, EndpointConfig(hold_seconds=0.2), model="policy")
        await impatient.start()
        async with AsyncOpenAI(base_url=impatient.url_of(late), api_key="unused", max_retries=0) as client:
            calls = [asyncio.create_task(asked(s, session)) for session in waiting]
            turned_away = asyncio.create_task(client.completions.create(**BODY))
            seen: set[str] = set()
            while len(seen) < 5:
                seen |= {name for name, _, _ in await s.requests()}
            await s.pool.pause()
            assert await s.group.call("unfinished") == [0]
            calls.append(asyncio.create_task(asked(s, during)))
            with pytest.raises(openai.APIStatusError) as caught:
                await turned_away
            assert caught.value.status_code == 503 and float(caught.value.response.headers["retry-after"]) >= 0
            while not during.num_under_way:
                await asyncio.sleep(0.01)
            assert not any(call.done() for call in calls)
            await s.group.call("update", 1.0)
            s.pool.resume()
            assert await asyncio.gather(*calls) == [LOOP * 200] * 5
            retry = {"x-stainless-retry-count": "1"}
            assert (await client.completions.create(**BODY, extra_headers=retry)).choices[0].text == LOOP * 200
        new = versions(during)[0]
        assert versions(during) == [new] * 200
        for session in (*waiting, late):
            assert set(versions(session)) == {new - 1, new} and versions(session) == sorted(versions(session))
        assert late.counts["joined_retries"] == 1 and not any(session.counts["forks"] for session in waiting)
        # Each was sent twice: its beginning, and after the reshard the rest.
        sent = await s.requests()
        # A few tokens may have been sampled before the pause, or many.
        shortest = min(len(prompt) for _, prompt, _ in sent)
        again = [name for name, prompt, _ in sent if len(prompt) > shortest]
        assert sorted(again) == sorted(f"{session.name}.1" for session in (*waiting, late))
        await s.sessions.end(late)
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{s.endpoint.url_of(late)}/completions", json=BODY) as gone,
        ):
            assert gone.status == 410 and gone.headers["x-should-retry"] == "false"
        await impatient.close()
