"""Parallel calls of one session, and calls that a client repeats: ids are unique, a turn is trained once."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from megarl.serving.session import Session
from tests.serving.served import Served
from tests.serving.test_endpoint import ADD
from tests.serving.tool_model import LOOP

BODY: dict[str, Any] = {"model": "policy", "prompt": f"The{LOOP}", "max_tokens": 60}
ROUNDS = int(os.environ.get("PARALLEL_ROUNDS", "3"))
"""Rounds of parallel calls. A measurement may ask for more."""


@pytest.mark.parametrize("width", [2, 4, 8])
async def test_parallel_calls_of_a_session_have_ids_of_their_own(served: Any, width: int) -> None:
    async with served() as s:
        session = s.open(max_calls=width * ROUNDS)
        async with s.client(session) as client:

            async def ask(number: int) -> Any:
                messages: Any = [{"role": "user", "content": f"Add {number} and 3."}]
                return await client.chat.completions.create(
                    model="policy", messages=messages, tools=[ADD], max_tokens=40
                )

            answers: list[Any] = []
            for first in range(0, width * ROUNDS, width):
                answers += await asyncio.gather(*(ask(first + place) for place in range(width)))
        assert [answer.number for answer in session.answers] == list(range(1, len(answers) + 1))
        assert len({answer.id for answer in answers}) == len(answers) == width * ROUNDS
        requests = [name for name, _, _ in await s.requests()]
        assert len(set(requests)) == len(requests) == len(answers)
        calls = [call.id for answer in answers for call in answer.choices[0].message.tool_calls or ()]
        assert len(set(calls)) == len(calls) > 0


@pytest.mark.parametrize("mark", [{}, {"x-stainless-retry-count": "0"}], ids=["none", "zero"])
async def test_a_repeat_without_a_mark_joins_its_call_until_the_answer_is_written(
    served: Any, mark: dict[str, str]
) -> None:
    async with served() as s:
        session = s.open()
        async with aiohttp.ClientSession() as http:

            async def ask(**more: Any) -> Any:
                url = f"{s.endpoint.url_of(session)}/completions"
                async with http.post(url, json=BODY | more, headers=mark) as response:
                    return await response.json()

            first = asyncio.create_task(ask())
            while not session.num_under_way:
                await asyncio.sleep(0.001)
            answers = await asyncio.gather(first, ask(), ask(user="another"))
            assert answers[0]["id"] == answers[1]["id"] != answers[2]["id"]
            assert len(session.answers) == len(await s.requests()) == 2
            # The answer was written: now the same body asks for a further sample.
            assert (await ask())["id"] != answers[0]["id"]
        assert len(session.answers) == 3 and session.counts["joined_retries"] == 1


async def test_a_client_told_to_come_back_finds_its_call_without_a_mark(served: Any) -> None:
    async with served(hold_seconds=0.02) as s:
        session = s.open()
        statuses = []
        async with aiohttp.ClientSession() as http:
            while 200 not in statuses:
                async with http.post(f"{s.endpoint.url_of(session)}/completions", json=BODY) as response:
                    statuses.append(response.status)
        assert set(statuses) == {200, 503}
        assert len(await s.requests()) == len(session.answers) == 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_connection_reset_before_the_answer_is_written_leaves_one_trained_answer(
    served: Any, is_streamed: bool
) -> None:
    async with served() as s:
        session = s.open()
        client = await send(s, session, BODY | {"stream": is_streamed})
        while not session.num_under_way:
            await asyncio.sleep(0.001)
        [call] = session._calls.values()
        # The answer is ready, and the handler has not gone on.
        call.task.add_done_callback(lambda task: reset(client))
        await asyncio.wait({call.task})
        await asyncio.sleep(0.05)
        assert not session.answers
        async with aiohttp.ClientSession() as http:
            url = f"{s.endpoint.url_of(session)}/completions"
            async with http.post(url, data=json.dumps(BODY | {"stream": is_streamed})) as response:
                assert response.status == 200 and LOOP in (await response.text()).replace('", "', "")
        assert len(session.answers) == len(await s.requests()) == 1
        assert session.counts["joined_retries"] == 1
        await session.end()
        assert session.counts["untrained_tokens"] == 0


async def send(s: Served, session: Session, body: dict[str, Any]) -> socket.socket:
    """Send a request on a connection of its own, and leave its answer unread."""
    url = urlsplit(f"{s.endpoint.url_of(session)}/completions")
    content = json.dumps(body).encode()
    head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(content)}\r\n\r\n"
    client = socket.create_connection((url.hostname, url.port))
    client.sendall(head.encode() + content)
    return client


def reset(client: socket.socket) -> None:
    """Close a connection by RST, as a killed process or a lost network does."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
