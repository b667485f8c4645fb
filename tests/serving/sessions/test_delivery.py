"""Answers whose client loses its connection: each turn has one trained answer, whatever the client had read of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from megarl.serving.session import Session
from tests.serving.scripted_pool import Scripted, ScriptedPool, scripted_endpoint

pytestmark = pytest.mark.anyio
QUESTION = {"role": "user", "content": "Add 2 and 3."}
PAGES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [QUESTION]},
    "completions": {"prompt": "Add 2 and 3."},
    "messages": {"messages": [QUESTION], "max_tokens": 200},
    "responses": {"input": [QUESTION], "store": False},
}


async def read_and_reset(s: Scripted, session: Session, page: str, body: Any, count: int, head: str) -> int:
    """Send a request, read `count` bytes of its answer, and reset the connection. Returns how many bytes there were."""
    url = urlsplit(f"{s.endpoint.url_of(session)}/{page}")
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"POST {url.path} HTTP/1.1\r\nHost: {url.netloc}\r\n{head}Content-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    received = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            while len(received) < count and (part := await reader.read(count - len(received))):
                received += part
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return len(received)


@pytest.mark.parametrize("head", ["", "Connection: close\r\n"], ids=["alive", "close"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("page", PAGES)
async def test_a_reset_at_any_byte_leaves_one_trained_answer(page: str, is_streamed: bool, head: str) -> None:
    body = {"model": "policy", "stream": is_streamed} | PAGES[page]
    async with scripted_endpoint() as s, aiohttp.ClientSession() as http:
        size = await read_and_reset(s, s.open(), page, body, 1 << 21, head)
        assert size > 300
        # Every byte would take minutes. The last bytes are the interesting ones.
        places = {*range(0, size, max(1, size // 12)), *range(size - 3, size + 1)}
        for place in sorted(places):
            session = s.open()
            # Names of sessions in the answer differ in length.
            assert await read_and_reset(s, session, page, body, place, head) >= place - 3
            async with http.post(f"{s.endpoint.url_of(session)}/{page}", json=body | {"stream": False}) as response:
                assert response.status == 200
                await response.read()
            assert len(session.answers) == 1, f"reset after {place} of {size} bytes"
            await s.sessions.end(session)
            assert len(session.answers) == 1 and session.counts["untrained_tokens"] == 0


async def test_an_answer_that_a_later_call_continues_was_received() -> None:
    """The client reads its answer, resets the connection, and goes on at another one."""
    page, body = "chat/completions", {"messages": [QUESTION]}
    async with scripted_endpoint() as s, aiohttp.ClientSession() as http:
        session = s.open()
        size = await read_and_reset(s, s.open(), page, body, 1 << 21, "")
        url = f"{s.endpoint.url_of(session)}/{page}"
        await read_and_reset(s, session, page, body, size, "")
        while session.answers:
            await asyncio.sleep(0.001)
        [call] = session._calls.values()
        answer = call.task.result().message
        continued = {"messages": [QUESTION, answer, {"role": "user", "content": "Go on."}]}
        async with http.post(url, json=continued) as response:
            assert response.status == 200
        assert [answer.number for answer in session.answers] == [1, 2] and session.counts["forks"] == 0
        # Now a repeat of the first question asks for another sample: its answer was received.
        async with http.post(url, json=body) as response:
            assert response.status == 200
        assert [answer.number for answer in session.answers] == [1, 2, 3]


async def test_equal_questions_on_connections_that_end_in_order_are_samples_of_their_own() -> None:
    async with scripted_endpoint() as s:
        session = s.open()
        for _ in range(3):
            async with aiohttp.ClientSession(headers={"Connection": "close"}) as http:
                url = f"{s.endpoint.url_of(session)}/chat/completions"
                async with http.post(url, json={"messages": [QUESTION]}) as response:
                    await response.read()
        assert len(session.answers) == 3 and session.counts["joined_retries"] == 0


async def test_an_answer_that_one_of_two_clients_has_read_stays_delivered() -> None:
    page, body = "chat/completions", {"messages": [QUESTION]}
    async with scripted_endpoint(ScriptedPool(seconds=0.2)) as s, aiohttp.ClientSession() as http:
        session = s.open()

        async def read() -> None:
            async with http.post(f"{s.endpoint.url_of(session)}/{page}", json=body) as response:
                await response.read()

        await asyncio.gather(read(), read_and_reset(s, session, page, body, 100, ""))
        [call] = session._calls.values()
        while call.num_received != 1:
            await asyncio.sleep(0.001)
        assert len(session.answers) == 1 and session.counts["joined_retries"] == 1
