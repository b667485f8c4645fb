"""Requests that are refused: without a key, with a body that cannot be used, or that are not HTTP."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest

from megarl.serving.body import MAX_BODY_BYTES
from tests.serving.served import Served
from tests.serving.test_endpoint import ADD, QUESTION


async def raw_status(s: Served, request: bytes, body: bytes = b"") -> int:
    """Send bytes over a connection of their own; return the status of the answer, 0 where the connection is closed."""
    address = urlsplit(s.endpoint.base_url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(request + body)
    line = await asyncio.wait_for(reader.readline(), 120)
    writer.close()
    return int(line.split()[1]) if line else 0


async def test_a_client_without_a_key_is_refused_before_its_body_is_read(served: Any) -> None:
    """The answer comes although the body never does, so that none of its bytes were waited for."""
    async with served(token="a token that is long enough") as s:
        session = s.open()
        for path, status in (
            ("/v1/chat/completions", 401),
            ("/v1/completions", 401),
            ("/s/wrong/v1/chat/completions", 401),
            ("/sessions/wrong/reward", 401),
        ):
            head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Length: {MAX_BODY_BYTES}\r\n\r\n".encode()
            assert await raw_status(s, head) == status, path
        assert session.answers == []


async def test_a_key_that_is_not_utf_8_is_a_wrong_key(served: Any) -> None:
    async with served(token="a token that is long enough") as s:
        head = b"GET /v1/models HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"
        assert await raw_status(s, head) == 401


NESTED = '{"a":' * 5000 + "1" + "}" * 5000
BAD_BODIES = [
    pytest.param(rb'{"messages":[{"role":"user","content":"half \ud800"}]}', 400, id="half of a surrogate pair"),
    pytest.param(b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}', 400, id="a surrogate's own bytes"),
    pytest.param(b'{"messages":[{"role":"user","content":"a"}],"seed":1,"seed":2}', 400, id="a key twice"),
    pytest.param(b'{"messages":[{"role":"user","content":"a","content":"b"}]}', 400, id="a key of a message twice"),
    pytest.param(f'{{"messages":{NESTED}}}'.encode(), 400, id="nested beyond Python's recursion"),
    pytest.param(f'{{"messages":{"[" * 100}{"]" * 100}}}'.encode(), 400, id="nested beyond the limit"),
    pytest.param(b'{"messages":[' + b",".join([b"[]"] * (1 << 20)) + b"]}", 413, id="a million lists"),
]


@pytest.mark.parametrize(("raw", "status"), BAD_BODIES)
async def test_a_body_that_cannot_be_used_is_one_refusal(served: Any, raw: bytes, status: int) -> None:
    async with served() as s:
        url = f"{s.endpoint.url_of(s.open())}/chat/completions"
        async with aiohttp.ClientSession() as http, http.post(url, data=raw) as response:
            assert response.status == status and (await response.json())["error"]["type"] == "invalid_request_error"


async def test_deeply_nested_arguments_of_a_call_stay_text(served: Any) -> None:
    async with served() as s:
        nested = ['{"a":' * depth + "1" + "}" * depth for depth in (500, 5000)]
        for arguments in (*nested, '{"a": "half of a surrogate pair \\ud800"}'):
            call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
            messages: Any = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, QUESTION]
            async with s.client(s.open()) as client:
                with pytest.raises(openai.BadRequestError) as error:
                    await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])  # type: ignore[list-item]
                assert error.value.code == "context_length_exceeded"


async def test_malformed_http_is_logged_in_one_line_each_and_not_without_end(
    served: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as s:
        for _ in range(30):
            assert await raw_status(s, b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n") == 400
        post = f"POST /s/{s.open().secret}/v1/completions HTTP/1.1\r\nHost: h\r\n".encode()
        chunked = post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"
        assert await raw_status(s, chunked) == 400
        compressed = post + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n"
        assert await raw_status(s, compressed, b"zzzz") == 400
    logged = [record for record in caplog.records if record.name == "megarl.serving.http_server"]
    assert all(record.exc_info is None and "malformed request" in record.getMessage() for record in logged)
    # The minute of the bound may turn within the test.
    assert 1 <= len(logged) <= 20
