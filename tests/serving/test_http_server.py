"""Connections that are only held: they take neither the driver's files nor its log, and clients are served."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from urllib.parse import urlsplit

import pytest

from megarl.serving.http_server import SPARE_FILES, STRANGERS
from tests.serving.test_monitor import TOKEN, get, monitor

MAX_CONNECTIONS = 64
HALF_HEAD = b"GET /health HTTP/1.1\r\nHost: h\r\n"
MALFORMED = b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n"


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def hold(url: str, count: int, sent: bytes) -> list[socket.socket]:
    """Connect `count` times, and send the start of a request on each connection."""
    address = urlsplit(url)
    held = []
    for _ in range(count):
        held.append(socket.create_connection((address.hostname, address.port)))
        held[-1].sendall(sent)
        await asyncio.sleep(0.001)
    return held


@pytest.mark.parametrize("sent", [b"", HALF_HEAD, b"GET /nothing HTTP/1.1\r\nHost: h\r\n\r\n"])
async def test_connections_without_a_key_take_a_bounded_number_of_files(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.serving.http_server.HEAD_SECONDS", 0.5)
    async with monitor(token=TOKEN) as (made, *_):
        before = num_files()
        held = await hold(made.base_url, 160, sent)
        assert num_files() - before - len(held) <= MAX_CONNECTIONS + STRANGERS + 1
        status, _ = await get(f"{made.base_url}/health", TOKEN)
        assert status == 200
        async with asyncio.timeout(30):
            while num_files() - before - len(held) > 0:
                await asyncio.sleep(0.05)
        for connection in held:
            connection.close()


async def test_the_last_files_are_not_given_to_connections(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with monitor(token=TOKEN) as (made, *_):
        before = num_files()
        # A connection has two ends in this process, so the limit is reached after 50.
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + SPARE_FILES + 100, hard))
        try:
            held = await hold(made.base_url, 90, HALF_HEAD)
            assert num_files() - before - len(held) <= 60
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for connection in held:
            connection.close()
        status, _ = await get(f"{made.base_url}/health", TOKEN)
        assert status == 200
    assert 1 <= len(caplog.records) <= 20
    assert all("too few open files" in record.getMessage() for record in caplog.records)


async def test_malformed_requests_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with monitor(token=TOKEN) as (made, *_):
        for connection in await hold(made.base_url, 40, MALFORMED):
            connection.close()
    # The minute of the bound may turn within the test.
    assert 1 <= len(caplog.records) <= 20
    assert all(record.exc_info is None and "malformed request" in record.getMessage() for record in caplog.records)
