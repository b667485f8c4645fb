"""HTTP clients of the endpoint of agents for its benchmark, in a process of their own."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from megarl.files.pid_space import stat_fields
from megarl.processes.open_files import allow_open_files

MAX_NEW_TOKENS = 1024
"""Limit of an answer, in each request."""
_KEEP_ALIVE_SECONDS = 70.0
"""Seconds that a client keeps its idle connection. The endpoint closes it after 75 s."""
_OTHER_FILES = 64
"""Open files of this process in addition to its connections."""


class Wire(NamedTuple):
    """A dialect: its page, its fields of the conversation and of the limit of tokens, and the text of an answer."""

    page: str
    messages: str
    limit: str
    text_of: Callable[[Any], str]


WIRES = {
    "chat": Wire("chat/completions", "messages", "max_tokens", lambda body: body["choices"][0]["message"]["content"]),
    "messages": Wire("messages", "messages", "max_tokens", lambda body: body["content"][0]["text"]),
    "responses": Wire("responses", "input", "max_output_tokens", lambda body: body["output"][0]["content"][0]["text"]),
}


@dataclass(frozen=True)
class Load:
    """Requests of the clients. `rate` is those of all clients a second, in the paced part of a round.

    Each part of a round takes `seconds` or longer. The first message of a conversation has `opening_sentences`, and
    after `turns` answers the conversation begins again.
    """

    dialect: str
    rounds: int
    rate: float
    seconds: float
    opening_sentences: int
    turns: int


class Talk:
    """The client of one session, with a connection of its own and one request at a time."""

    def __init__(self, http: ClientSession, url: str, load: Load) -> None:
        self._wire, self._num_messages = WIRES[load.dialect], 2 * load.turns
        self._http, self._url = http, f"{url}/{self._wire.page}"
        self._messages = [{"role": "user", "content": "Add the numbers. " * load.opening_sentences}]
        self.num_answers = 0

    async def ask(self) -> float:
        """Send the conversation, and add the answer and the next question. Returns the milliseconds of the request."""
        body = {"model": "bench", self._wire.limit: MAX_NEW_TOKENS, self._wire.messages: self._messages}
        began = time.perf_counter()
        async with self._http.post(self._url, json=body, raise_for_status=True) as response:
            text = self._wire.text_of(await response.json())
        milliseconds = 1000 * (time.perf_counter() - began)
        self.num_answers += 1
        self._messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And {text[:80]}?"}]
        if len(self._messages) > self._num_messages:
            # The same question again, since another one would be a fork.
            del self._messages[1:]
        return milliseconds


def drive_clients(urls: Sequence[str], endpoint: int, load: Load) -> tuple[list[dict[str, float]], int]:
    """Run the rounds with a client for each URL. `endpoint` is the process of the endpoint.

    Returns the values of each round but the first, which warms up, and the number of answers of all rounds.
    """
    allow_open_files(len(urls) + _OTHER_FILES)
    return asyncio.run(_run_rounds(urls, endpoint, load))


async def _run_rounds(urls: Sequence[str], endpoint: int, load: Load) -> tuple[list[dict[str, float]], int]:
    async with AsyncExitStack() as stack:
        talks = []
        for url in urls:
            # A connector each: a shared one would use few connections for all sessions.
            connector = TCPConnector(limit=1, keepalive_timeout=_KEEP_ALIVE_SECONDS)
            http = ClientSession(connector=connector, timeout=ClientTimeout(total=None))
            talks.append(Talk(await stack.enter_async_context(http), url, load))
        rounds = [await _run_round(talks, endpoint, load) for _ in range(1 + load.rounds)]
        return rounds[1:], sum(talk.num_answers for talk in talks)


async def _run_round(talks: Sequence[Talk], endpoint: int, load: Load) -> dict[str, float]:
    """Let the clients ask at a fixed rate, then as fast as they can. Returns the round's values by name."""
    cpu_before = _cpu_seconds(endpoint)
    # Each session asks at least once.
    milliseconds = await _run_paced(talks, load.rate, max(load.seconds, len(talks) / load.rate))
    paced_cpu, num_before = _cpu_seconds(endpoint) - cpu_before, sum(talk.num_answers for talk in talks)
    cpu_before, began, client_before = _cpu_seconds(endpoint), time.perf_counter(), time.process_time()
    await asyncio.gather(*(_run_saturated(talk, began + load.seconds) for talk in talks))
    seconds, num_answers = time.perf_counter() - began, sum(talk.num_answers for talk in talks) - num_before
    return {
        "added_ms": statistics.median(milliseconds),
        "added_ms_p95": statistics.quantiles(milliseconds, n=20)[-1],
        "cpu_ms": 1000 * paced_cpu / len(milliseconds),
        "saturated_requests": num_answers / seconds,
        "saturated_cpu_ms": 1000 * (_cpu_seconds(endpoint) - cpu_before) / num_answers,
        "saturated_client": (time.process_time() - client_before) / seconds,
    }


async def _run_paced(talks: Sequence[Talk], rate: float, seconds: float) -> list[float]:
    """Let the talks ask in turn, `rate` requests a second together. Returns the milliseconds of all requests."""
    began, milliseconds = time.perf_counter(), []

    async def ask(number: int, talk: Talk) -> None:
        for request_number in range(number, round(rate * seconds), len(talks)):
            await asyncio.sleep(began + request_number / rate - time.perf_counter())
            milliseconds.append(await talk.ask())

    await asyncio.gather(*map(ask, range(len(talks)), talks))
    return milliseconds


async def _run_saturated(talk: Talk, end: float) -> None:
    """Ask without a pause until the clock shows `end`."""
    while time.perf_counter() < end:
        await talk.ask()


def _cpu_seconds(process: int) -> float:
    """Return the CPU time of all threads of a process."""
    user, system = map(int, stat_fields(process)[11:13])
    return (user + system) / os.sysconf("SC_CLK_TCK")
