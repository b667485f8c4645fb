"""Sandbox on a SandboxFusion server, by its POST /run_code (https://bytedance.github.io/SandboxFusion)."""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from megarl.files.strict_json import make_object
from megarl.sandbox.sandbox import Outcome, RunResult, Sandbox, SandboxError, SandboxSettings
from megarl.types import ConfigError

MAX_TRIES = 5
_FIRST_WAIT_SECONDS = 0.25
_PATIENCE_SECONDS = 30.0
"""Seconds to wait for an answer beyond the run's own limit, because a server queues requests."""
_MAX_ANSWER_BYTES = 64 << 20
# HTTP status codes of a busy server: request timeout, too early, too many requests.
_BUSY = (408, 425, 429)


class AnySandbox(Protocol):
    """Protocol of a sandbox, on this machine or on a server."""

    @property
    def settings(self) -> SandboxSettings: ...

    def start(self) -> None:
        """Start the sandbox and run a trial program. Raises ConfigError or SandboxError if it does not work."""
        ...

    def run(
        self, program: str, stdin: str = "", *, cpu_seconds: float | None = None, output_bytes: int | None = None
    ) -> RunResult:
        """Run a Python program with this standard input. The arguments override limits of the settings."""
        ...

    def close(self) -> None: ...


def open_sandbox(settings: SandboxSettings) -> AnySandbox:
    """Return a sandbox on the server of `url`, else on this machine. The caller closes it."""
    return Sandbox(settings) if settings.url is None else RemoteSandbox(settings)


class RemoteSandbox:
    """Runs programs on a SandboxFusion server. `run` raises SandboxError if every try fails.

    Without an answer, or after a server error (5xx, 429, SandboxError), the request is repeated: at most `MAX_TRIES`
    tries, with doubling pauses. `RunResult.retries` counts the repetitions. Time limits are in the server's wall-clock
    time. A user and password in the address are sent as HTTP basic authorization.
    """

    def __init__(self, settings: SandboxSettings, *, sleep: Callable[[float], None] = time.sleep) -> None:
        assert settings.url is not None
        self._settings = settings
        self._sleep = sleep
        url_parts = urlsplit(settings.url)
        if url_parts.scheme not in ("http", "https") or not url_parts.hostname:
            address = settings.url.rpartition("@")[2]
            raise ConfigError(
                f"sandbox.url = {address!r}: is not a valid address; give one such as http://127.0.0.1:8080"
            )
        self._connect = http.client.HTTPSConnection if url_parts.scheme == "https" else http.client.HTTPConnection
        self._host = url_parts.netloc.rpartition("@")[2]
        self._headers = {"Content-Type": "application/json"}
        if url_parts.username is not None:
            user_and_password = f"{unquote(url_parts.username)}:{unquote(url_parts.password or '')}"
            self._headers["Authorization"] = f"Basic {base64.b64encode(user_and_password.encode()).decode()}"
        # The address for messages, without user and password.
        self._url = f"{url_parts.scheme}://{self._host}{url_parts.path}"
        self._path = url_parts.path.rstrip("/").removesuffix("/run_code") + "/run_code"

    @property
    def settings(self) -> SandboxSettings:
        return self._settings

    def start(self) -> None:
        try:
            # The sum of 0 to 9 is 45: it shows that the server executes the program.
            result = self.run("print(sum(range(10)))")
        except SandboxError as error:
            raise ConfigError(f"sandbox.url: {error}; start the server, or correct its address") from None
        if result.outcome != "ok" or result.stdout.strip() != "45":
            raise ConfigError(f"sandbox.url = {self._url}: the server does not run Python: {result}")

    def run(
        self, program: str, stdin: str = "", *, cpu_seconds: float | None = None, output_bytes: int | None = None
    ) -> RunResult:
        """Run a program on the server. Transient faults are retried with growing waits."""
        seconds = self._settings.timeout_seconds if cpu_seconds is None else cpu_seconds
        # SandboxFusion compiles before running. Both get the run's limit.
        request = {
            "code": program,
            "language": "python",
            "stdin": stdin,
            "compile_timeout": seconds,
            "run_timeout": seconds,
            "memory_limit_MB": self._settings.memory_mib,
        }
        body = json.dumps(request).encode()
        wait_seconds, fault = _FIRST_WAIT_SECONDS, ""
        start_time = time.monotonic()
        for retries in range(MAX_TRIES):
            if retries:
                self._sleep(wait_seconds)
                wait_seconds *= 2
            try:
                answer = self._post(body, seconds + _PATIENCE_SECONDS)
                max_bytes = max(self._settings.output_kib << 10, output_bytes or 0)
                return _read_result(answer, max_bytes, time.monotonic() - start_time, retries)
            except (OSError, http.client.HTTPException, _BusyError) as error:
                fault = f"{type(error).__name__}: {error}"
        raise SandboxError(f"{self._url} gave no answer in {MAX_TRIES} tries; the last one failed with {fault}")

    def close(self) -> None:
        """Do nothing: no connection stays open."""

    def _post(self, body: bytes, seconds: float) -> Mapping[str, Any]:
        """Send a request and return the server's answer. Raises _BusyError if a retry may help, else SandboxError."""
        connection = self._connect(self._host, timeout=seconds)
        try:
            connection.request("POST", self._path, body, self._headers)
            response = connection.getresponse()
            text = response.read(_MAX_ANSWER_BYTES)
        finally:
            connection.close()
        # An overloaded server may answer later, so the caller retries. Other errors are permanent.
        if response.status >= 500 or response.status in _BUSY:
            raise _BusyError(f"HTTP {response.status}")
        if response.status != 200:
            raise SandboxError(f"{self._url} answers HTTP {response.status}: {text[:200]!r}")
        try:
            answer = json.loads(text, object_pairs_hook=make_object)
        except ValueError as error:
            raise _BusyError(f"the sandbox server's answer is not valid JSON ({error}): {text[:200]!r}") from None
        if not isinstance(answer, dict) or answer.get("status") not in ("Success", "Failed"):
            raise _BusyError(f"the sandbox server's answer has neither status Success nor Failed: {text[:200]!r}")
        return answer


class _BusyError(Exception):
    """Raised for a failure of the server, not of the program. A retry may succeed."""


def _read_result(answer: Mapping[str, Any], max_bytes: int, wall_seconds: float, retries: int) -> RunResult:
    """Return the result in SandboxFusion's answer. Raises _BusyError if it has none."""
    result = answer.get("run_result") or answer.get("compile_result")
    if not isinstance(result, Mapping):
        raise _BusyError("the sandbox server's answer has neither run_result nor compile_result")
    stdout, stderr = (str(result.get(name) or "") for name in ("stdout", "stderr"))
    exit_code = result.get("return_code")
    exit_code = exit_code if isinstance(exit_code, int) else 1
    outcome: Outcome = "ok" if result.get("status") == "Finished" and exit_code == 0 else "error"
    if result.get("status") == "TimeLimitExceeded":
        outcome = "timeout"
    elif len(stdout.encode("utf-8", "replace")) > max_bytes:
        outcome = "output"
    cpu_seconds = result.get("execution_time")
    cpu_seconds = float(cpu_seconds) if isinstance(cpu_seconds, int | float) else 0.0
    return RunResult(
        outcome,
        stdout[:max_bytes],
        stderr,
        exit_code,
        cpu_seconds=cpu_seconds,
        wall_seconds=wall_seconds,
        retries=retries,
        is_wall_clock_timeout=outcome == "timeout",
    )
