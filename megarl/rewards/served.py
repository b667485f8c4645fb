"""Rewards that a server gives over HTTP: calls, tries, and exact counts of how each ended.

The driver's event loop asks, so that a single process has many calls in flight; nothing that a server answers is
executed, and no answer is read beyond its bound.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import aiohttp
from pydantic import ValidationError

from megarl.config import RewardFunctionConfig
from megarl.config.served import ServedConfig
from megarl.rewards import SERVED, metric_name, served_kind
from megarl.rewards.calling import Sample
from megarl.rewards.scores import FunctionScore, checked
from megarl.rewards.worker import Failure
from megarl.types import ConfigError

MAX_ANSWER_BYTES = 4 << 20
_MAX_PAUSE_SECONDS = 60.0
_SHOWN_CHARACTERS = 300
_BUSY = (408, 425, 429)
_COUNTED = ("calls", "errors", "timeouts", "parse_errors", "retries", "cancelled")

Config = TypeVar("Config", bound=ServedConfig)


class ServerFailedError(Exception):
    """No call for a completion got a score; its text is how the last one ended."""

    def __init__(self, kind: Failure, text: str) -> None:
        super().__init__(text)
        self.kind: Failure = kind


class RefusedError(Exception):
    """The server refuses the request: another try would be refused too."""


class FailedCallError(Exception):
    """The server answered with an error: another try may succeed."""

    def __init__(self, text: str, wait_seconds: float = 0.0) -> None:
        super().__init__(text)
        self.wait_seconds = wait_seconds


class ServedReward(Generic[Config]):
    """A reward that a server gives. A kind of server has a `path`, makes a `request` and has its answer `read`.

    Of the calls each ends as one of: a score, `errors` (no connection, an answer that is no JSON, another status than
    200), `timeouts`, `parse_errors` (an answer without a score), `cancelled` (nobody wants it any more).
    """

    path = ""
    """Where the server answers, below its url."""
    amount_names: tuple[str, ...] = ()
    """The names of all amounts."""

    def __init__(self, name: str, config: Config) -> None:
        """Raises ConfigError for a url that is none, and for a key that is not in the environment."""
        self.name, self.config = name, config
        parts = urlsplit(config.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise self.fault(f"kwargs.url = {config.url!r}: is no address; give one such as http://127.0.0.1:8000/v1")
        self._url = config.url.rstrip("/").removesuffix(self.path) + self.path
        self._headers = {"Authorization": f"Bearer {self._key()}"} if config.api_key_env else {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(config.max_in_flight)
        self._counts: Counter[str] = Counter()
        self._amounts: dict[str, float] = {}

    def request(self, sample: Sample) -> Mapping[str, Any]:
        """The request's body, JSON values."""
        raise NotImplementedError

    def read(self, answer: Any) -> float:
        """The score of an answer, a JSON value. Raises ValueError where it has none."""
        raise NotImplementedError

    def amounts(self, answer: Any) -> Mapping[str, float]:
        """Amounts by name that are added up over all answers: tokens, money."""
        return {}

    def check_record(self, sample: Sample) -> None:
        """Raise ValueError for a record that this reward cannot score."""

    async def score(self, sample: Sample) -> FunctionScore:
        """The score of a completion, after as many calls as it takes. Raises ServerFailedError where none gave one."""
        self._adopt_loop()
        try:
            body = json.dumps(self.request(sample)).encode()
        except ValueError as error:
            raise ServerFailedError("error", str(error)) from None
        pause = self.config.pause_seconds
        kind: Failure = "error"
        text = ""
        for number in range(self.config.max_tries):
            if number:
                self._counts["retries"] += 1
            wait = 0.0
            async with self._slots:
                self._counts["calls"] += 1
                try:
                    async with asyncio.timeout(self.config.timeout_seconds):
                        answer = await self._post(body)
                    for name, amount in self.amounts(answer).items():
                        self._amounts[name] = self._amounts.get(name, 0.0) + amount
                    return self._scored(self.read(answer))
                except asyncio.CancelledError:
                    self._counts["cancelled"] += 1
                    raise
                except TimeoutError:
                    self._counts["timeouts"] += 1
                    kind, text = "timeout", f"no answer within {self.config.timeout_seconds:g} s"
                except RefusedError as error:
                    self._counts["errors"] += 1
                    raise ServerFailedError("error", f"{self._url}: {error}") from None
                except (aiohttp.ClientError, OSError, FailedCallError) as error:
                    self._counts["errors"] += 1
                    kind, text = "error", f"{type(error).__name__}: {error}"
                    wait = getattr(error, "wait_seconds", 0.0)
                except ValueError as error:
                    self._counts["parse_errors"] += 1
                    kind, text = "parse_error", str(error)
            if number + 1 < self.config.max_tries:
                await asyncio.sleep(min(max(pause, wait), _MAX_PAUSE_SECONDS))
                pause *= 2
        if kind == "parse_error" and self.config.parse_error_score is not None:
            return self._scored(self.config.parse_error_score)
        raise ServerFailedError(kind, f"{self._url}, the last of {self.config.max_tries} calls: {text}")

    def metrics(self) -> dict[str, float]:
        """Counts since the last time, as reward/NAME/...

        `calls`: HTTP requests; `retries`: those that repeat one; `errors`, `timeouts`, `parse_errors`, `cancelled`: how
        they ended but for those that gave a score; and the amounts of the kind of server.
        """
        found = {name: float(self._counts[name]) for name in _COUNTED}
        found |= {name: self._amounts.get(name, 0.0) for name in self.amount_names}
        self._counts, self._amounts = Counter(), {}
        return {f"reward/{metric_name(self.name)}/{name}": value for name, value in found.items()}

    async def aclose(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def fault(self, text: str) -> ConfigError:
        """The error of a setting in the recipe."""
        return ConfigError(f"reward.functions: {self.name!r}: {text}")

    def _scored(self, score: float) -> FunctionScore:
        correct_from = self.config.correct_from
        found = checked(FunctionScore(score, answer_correct=None if correct_from is None else score >= correct_from))
        assert found is not None
        return found

    async def _post(self, body: bytes) -> Any:
        assert self._session is not None
        headers = {"Content-Type": "application/json", **self._headers}
        async with self._session.post(self._url, data=body, headers=headers, allow_redirects=False) as response:
            text = await _bounded(response)
            if response.status >= 500 or response.status in _BUSY:
                raise FailedCallError(f"HTTP {response.status}: {_shown(text)}", _retry_after(response))
            if response.status != 200:
                raise RefusedError(f"HTTP {response.status}: {_shown(text)}")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise FailedCallError(f"an answer that is no JSON: {_shown(text)}") from None

    def _adopt_loop(self) -> None:
        """Connections and places belong to one event loop: another gets its own."""
        loop = asyncio.get_running_loop()
        if self._loop is loop and self._session is not None:
            return
        self._loop = loop
        self._slots = asyncio.Semaphore(self.config.max_in_flight)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    def _key(self) -> str:
        name = self.config.api_key_env
        key = os.environ.get(name or "", "")
        if not key:
            raise self.fault(f"kwargs.api_key_env = {name}: the environment has no such variable; export it")
        return key


def served_reward(function: RewardFunctionConfig) -> ServedReward[Any]:
    """The reward of a server that a recipe names. Raises ConfigError for keyword arguments that it does not take."""
    kind = served_kind(function.name)
    assert kind is not None
    module, _, name = SERVED[kind].partition(":")
    made = getattr(import_module(module), name)
    try:
        config = made.config_class.model_validate(function.kwargs)
    except ValidationError as error:
        faults = [
            f"kwargs{''.join(f'.{part}' for part in fault['loc'])}: {fault['msg']}"
            for fault in error.errors(include_url=False, include_input=False)
        ]
        raise ConfigError(f"reward.functions: {function.name!r}: {'; '.join(faults)}") from None
    return made(function.name, config)


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """The answer's body. Raises FailedCallError for one that is too long."""
    parts = bytearray()
    async for part in response.content.iter_chunked(1 << 16):
        parts += part
        if len(parts) > MAX_ANSWER_BYTES:
            raise FailedCallError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return bytes(parts)


def _retry_after(response: aiohttp.ClientResponse) -> float:
    given = response.headers.get("Retry-After", "")
    return float(given) if given.isdecimal() and len(given) < 6 else 0.0


def _shown(text: bytes) -> str:
    return repr(text[:_SHOWN_CHARACTERS].decode("utf-8", "replace"))
