"""Rewards from a scoring server over HTTP: requests, retries, and counts of their results.

The driver's event loop sends the requests, so one process can wait for many. No answer of a server is executed, and an
answer beyond a size limit is not read.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar
from urllib.parse import SplitResult, urlsplit

import aiohttp
from pydantic import ValidationError

from megarl.config.sections.http_rewards import ServedConfig
from megarl.config.sections.rewards import RewardFunctionConfig
from megarl.files.strict_json import RepeatedKeyError, make_object
from megarl.rewards import SERVED, metric_name, server_kind
from megarl.rewards.functions.function_score import FunctionScore
from megarl.rewards.scoring.calling import Sample
from megarl.rewards.scoring.results import check_result
from megarl.rewards.scoring.reward_process import Failure
from megarl.tracking.metric_rows import MetricRow
from megarl.types import ConfigError

MAX_ANSWER_BYTES = 4 << 20
_MAX_PAUSE_SECONDS = 60.0
_SHOWN_CHARACTERS = 300
# HTTP status codes of a busy server: request timeout, too early, too many requests.
_BUSY = (408, 425, 429)
METRICS = (
    MetricRow("reward/NAME/calls", "count", "HTTP requests to a scoring server"),
    MetricRow("reward/NAME/retries", "count", "retries of requests"),
    MetricRow("reward/NAME/errors", "count", "requests ending with an error"),
    MetricRow("reward/NAME/timeouts", "count", "requests without an answer in time"),
    MetricRow("reward/NAME/parse_errors", "count", "answers without a readable score"),
    MetricRow("reward/NAME/cancelled", "count", "requests aborted because the sample was aborted"),
    MetricRow("reward/NAME/substituted", "count", "samples with the function's parse_error_score"),
)

_COUNTED = tuple(row.name.rpartition("/")[2] for row in METRICS)
COUNTED_FOR: ContextVar[str] = ContextVar("COUNTED_FOR", default="training")
"""Purpose under which server calls are counted: `training` or `evaluation`. Both may run at once."""

Config = TypeVar("Config", bound=ServedConfig)


class ServerFailedError(Exception):
    """Raised if all calls to a scoring server failed for a completion. The text describes the last failure."""

    def __init__(self, kind: Failure, text: str) -> None:
        super().__init__(text)
        self.kind: Failure = kind


class RefusedError(Exception):
    """Raised if a scoring server refuses a request. A retry is useless."""


class FailedCallError(Exception):
    """Raised if a call to a scoring server failed. A retry may succeed."""

    def __init__(self, text: str, wait_seconds: float = 0.0) -> None:
        super().__init__(text)
        self.wait_seconds = wait_seconds


@dataclass(frozen=True, slots=True)
class _NoScore:
    """A failed call to a scoring server: the kind of failure and its text."""

    kind: Failure
    text: str
    wait_seconds: float = 0.0
    is_final: bool = False
    """Whether a retry would fail in the same way."""


class ServedReward(Generic[Config]):
    """Reward from a scoring server over HTTP. A subclass sets `path`, makes the request and reads the answer.

    Each call ends as one of: a score, `errors` (no connection, invalid JSON, a status other than 200), `timeouts`,
    `parse_errors` (an answer without a score), `cancelled` (the completion is no longer needed). `notify_once(kind,
    text)` shows the user the first event of each kind.
    """

    path = ""
    """Path of the service, appended to the recipe's url."""
    left_out_path = ""
    """Ending of the url that is removed before `path` is appended."""
    amount_names: tuple[str, ...] = ()
    """Names of the quantities in `amounts`, for example prompt_tokens."""

    def __init__(self, name: str, config: Config) -> None:
        """Raise ConfigError for an invalid url, or if the key's environment variable is missing."""
        self.name, self.config = name, config
        parts = urlsplit(config.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise self.fault(
                f"kwargs.url = {config.url!r}: is not a valid address; give one such as http://127.0.0.1:8000/v1"
            )
        self._url, self._shown_url = self._make_call_url(parts), f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._headers = {"Content-Type": "application/json", **config.headers}
        if config.api_key_env:
            self._headers["Authorization"] = f"Bearer {self._read_api_key()}"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(config.max_in_flight)
        self._counts: dict[str, defaultdict[str, float]] = {}
        self._is_closed = False
        self._random = random.Random()
        self.notify_once: Callable[[str, str], object] = lambda kind, text: None

    def request(self, sample: Sample) -> Mapping[str, Any]:
        """Return the body of the request for a sample, as JSON values."""
        raise NotImplementedError

    def read(self, answer: Any) -> float:
        """Return the score in a server's answer (a JSON value). Raises ValueError if there is none."""
        raise NotImplementedError

    def amounts(self, answer: Any) -> Mapping[str, float]:
        """Return quantities in a server's answer by name, for example tokens and dollars. Metrics sum them."""
        return {}

    @property
    def reads_records(self) -> bool:
        """Return whether requests contain fields of the data records."""
        return False

    def check_record(self, sample: Sample) -> None:
        """Raise ValueError if a record lacks a field that the request needs."""

    def score_without_call(self, sample: Sample) -> FunctionScore | None:
        """Return the score of a sample that needs no call of the server, else None."""
        return None

    async def score(self, sample: Sample) -> FunctionScore:
        """Return the score of a completion, retrying failed calls. Raises ServerFailedError if all calls fail."""
        if (known_score := self.score_without_call(sample)) is not None:
            return known_score
        self._adopt_loop()
        try:
            body = json.dumps(self.request(sample)).encode()
        except (ValueError, RecursionError) as error:
            raise ServerFailedError("error", str(error)) from None
        pause, failure, num_calls = self.config.pause_seconds, _NoScore("error", ""), 0
        while num_calls < self.config.max_tries and not failure.is_final:
            if num_calls:
                self._count("retries")
                # Random pauses, so that requests that failed together do not retry together.
                wait = max(pause * (1 + self._random.random()), failure.wait_seconds)
                await asyncio.sleep(min(wait, _MAX_PAUSE_SECONDS))
                pause *= 2
            async with self._slots:
                result = await self._call_server(body)
            if isinstance(result, FunctionScore):
                return result
            num_calls, failure = num_calls + 1, result
        if failure.kind == "parse_error" and self.config.parse_error_score is not None:
            return self._substitute_score(failure.text)
        raise ServerFailedError(failure.kind, f"{self._shown_url}, the last of {num_calls} calls: {failure.text}")

    async def _call_server(self, body: bytes) -> FunctionScore | _NoScore:
        """Call the server once, and count how the call ends. Return the score, or the failure."""
        self._count("calls")
        try:
            async with asyncio.timeout(self.config.timeout_seconds):
                answer = await self._post(body)
        except asyncio.CancelledError:
            self._count("cancelled")
            raise
        except TimeoutError:
            self._count("timeouts")
            return _NoScore("timeout", f"no answer within {self.config.timeout_seconds:g} s")
        except RefusedError as error:
            self._count("errors")
            return _NoScore("error", str(error), is_final=True)
        except (aiohttp.ClientError, OSError, ValueError, FailedCallError) as error:
            self._count("errors")
            return _NoScore("error", f"{type(error).__name__}: {error}", getattr(error, "wait_seconds", 0.0))
        return self._score_answer(answer)

    def _score_answer(self, answer: Any) -> FunctionScore | _NoScore:
        """Return the score in a server's answer, or why it has none. Adds the answer's `amounts` to the metrics."""
        try:
            for name, amount in self.amounts(answer).items():
                self._count(name, amount)
            return self._make_function_score(self.read(answer))
        except (ValueError, OverflowError, RecursionError) as error:
            self._count("parse_errors")
            return _NoScore("parse_error", str(error))

    def _substitute_score(self, text: str) -> FunctionScore:
        """Return `parse_error_score` in place of an unreadable score. The first one is reported."""
        self._count("substituted")
        score = self.config.parse_error_score
        assert score is not None
        self.notify_once(
            f"{self.name} substituted",
            f"{self.name}: an answer has no score that can be read, and the completion gets parse_error_score = "
            f"{score:g} (more are only counted, reward/{metric_name(self.name)}/substituted): {text}",
        )
        return self._make_function_score(score)

    def _count(self, name: str, amount: float = 1) -> None:
        self._counts.setdefault(COUNTED_FOR.get(), defaultdict(float))[name] += amount

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call of this method: counts of calls (METRICS), and summed `amounts`.

        Only calls for the current purpose count, training or evaluation.
        """
        counts = self._counts.pop(COUNTED_FOR.get(), {})
        names = (*_COUNTED, *self.amount_names)
        return {f"reward/{metric_name(self.name)}/{name}": counts.get(name, 0.0) for name in names}

    async def aclose(self) -> None:
        self._is_closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def fault(self, text: str) -> ConfigError:
        return ConfigError(f"reward.functions: {self.name!r}: {text}")

    def _make_function_score(self, score: float) -> FunctionScore:
        right_from = self.config.right_from
        function_score = check_result(
            FunctionScore(score, answer_correct=None if right_from is None else score >= right_from)
        )
        assert function_score is not None
        return function_score

    async def _post(self, body: bytes) -> Any:
        if self._session is None or self._session.closed:
            raise FailedCallError(
                "the reward no longer calls its scoring server, because the run closed the connections"
            )
        # A redirect could send the key to another server.
        request = self._session.post(self._url, data=body, headers=self._headers, allow_redirects=False)
        async with request as response:
            text = await _read_body(response)
            if response.status >= 500 or response.status in _BUSY:
                raise FailedCallError(f"HTTP {response.status}: {_shorten(text)}", _retry_after(response))
            if response.status != 200:
                raise RefusedError(f"HTTP {response.status}: {_shorten(text)}")
        try:
            return json.loads(text, object_pairs_hook=make_object)
        except RepeatedKeyError as error:
            raise RefusedError(f"the answer has two values: {error}: {_shorten(text)}") from None
        except (ValueError, RecursionError):
            raise FailedCallError(f"the answer is not valid JSON: {_shorten(text)}") from None

    def _adopt_loop(self) -> None:
        """Create new connections and a new limit of concurrent calls if the event loop changed.

        Both work in one event loop only.
        """
        loop = asyncio.get_running_loop()
        if self._is_closed or (self._loop is loop and self._session is not None):
            return
        self._loop = loop
        self._slots = asyncio.Semaphore(self.config.max_in_flight)
        connector = aiohttp.TCPConnector(limit=0)
        # Proxies of the environment are for outside servers. Servers of this cluster are reached by http, without them.
        trusts_environment = self._url.startswith("https:")
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None), trust_env=trusts_environment
        )

    def _read_api_key(self) -> str:
        name = self.config.api_key_env
        key = os.environ.get(name or "", "").strip()
        if not key:
            raise self.fault(
                f"kwargs.api_key_env = {name}: this environment variable is not set; export it with the key"
            )
        if not (key.isascii() and key.isprintable()):
            raise self.fault(f"kwargs.api_key_env = {name}: the variable is not printable ASCII; export the key alone")
        return key

    def _make_call_url(self, url_parts: SplitResult) -> str:
        path = url_parts.path.rstrip("/").removesuffix(self.path).removesuffix(self.left_out_path) + self.path
        return url_parts._replace(path=path, fragment="").geturl()


def make_server_client(function: RewardFunctionConfig) -> ServedReward[Any]:
    """Return the client of a recipe's scoring server. Raises ConfigError for unknown keyword arguments."""
    kind = server_kind(function.name)
    assert kind is not None
    module, _, name = SERVED[kind].partition(":")
    client_class = getattr(import_module(module), name)
    try:
        config = client_class.config_class.model_validate(function.kwargs)
    except ValidationError as error:
        faults = [
            f"kwargs{''.join(f'.{part}' for part in fault['loc'])}: {fault['msg']}"
            for fault in error.errors(include_url=False, include_input=False)
        ]
        raise ConfigError(f"reward.functions: {function.name!r}: {'; '.join(faults)}") from None
    return client_class(function.name, config)


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    parts = bytearray()
    async for part in response.content.iter_chunked(1 << 16):
        parts += part
        if len(parts) > MAX_ANSWER_BYTES:
            raise FailedCallError(f"the server's answer exceeds {MAX_ANSWER_BYTES} bytes")
    return bytes(parts)


def _retry_after(response: aiohttp.ClientResponse) -> float:
    seconds = response.headers.get("Retry-After", "")
    # Only seconds are read; the header's other form, a date, is rare and ignored.
    return float(seconds) if seconds.isdecimal() and len(seconds) < 6 else 0.0


def _shorten(text: bytes) -> str:
    return repr(text[:_SHOWN_CHARACTERS].decode("utf-8", "replace"))
