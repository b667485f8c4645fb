"""Environment with Python as a tool."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

from megarl.environments import EnvironmentUnavailableError, Start
from megarl.environments.tools import ToolEnvironment, ToolError, start_call, tool
from megarl.sandbox.sandbox import RunResult, SandboxError, SandboxSettings
from megarl.sandbox.sandbox_fusion import AnySandbox, open_sandbox
from megarl.types import ConfigError, Problem


class Python(ToolEnvironment):
    """Environment with the problem's messages and the tool `python`. `sandbox` is by default the recipe's section
    sandbox.
    """

    def __init__(self, *, sandbox: Mapping[str, Any] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        sandbox_settings = SandboxSettings(**(sandbox or {}))
        # The sandbox must end a program, even one that uses no CPU, before the tool's own limit. Beyond this limit the
        # call would hang in a thread, and the process would have to be replaced. A busy machine may delay the sandbox,
        # so its limits are below the tool's: half for an idle program, 0.8 for any.
        wall_seconds = min(sandbox_settings.wall_seconds, 0.5 * self.tool_seconds)
        longest_seconds = 0.8 * self.tool_seconds
        self._settings = replace(sandbox_settings, wall_timeout_seconds=wall_seconds, longest_seconds=longest_seconds)

    def check(self) -> None:
        """Run a trial program before a run. Raises ConfigError if the sandbox does not work."""
        with contextlib.closing(open_sandbox(self._settings)) as sandbox:
            try:
                sandbox.start()
            except SandboxError as error:
                raise ConfigError(str(error)) from None

    async def reset(self, problem: Problem, seed: int) -> Start:
        """Start the attempt, and the sandbox if needed. Raises EnvironmentUnavailableError."""
        await start_call(self._start_sandbox, {})
        return await super().reset(problem, seed)

    def _start_sandbox(self) -> AnySandbox:
        try:
            return _start_shared_sandbox(json.dumps(asdict(self._settings)))
        except (SandboxError, ConfigError) as error:
            raise EnvironmentUnavailableError(f"the sandbox does not start: {error}") from None

    @tool
    def python(self, code: str) -> str:
        """Run a Python program and see what it prints.

        code: a whole program; nothing is kept from one call to the next
        """
        try:
            result = self._start_sandbox().run(code)
        except (SandboxError, ConfigError) as error:
            raise EnvironmentUnavailableError(f"the sandbox failed: {error}") from None
        if result.outcome == "ok":
            return result.stdout or "(it printed nothing)"
        reason = {
            "error": "the program failed",
            "timeout": f"the program took more than {self._describe_time_limit(result)}",
            "output": f"the program printed more than {self._settings.output_kib} KiB",
        }[result.outcome]
        raise ToolError("\n".join(filter(None, (reason, result.stdout.rstrip(), result.stderr.rstrip()))))

    def _describe_time_limit(self, result: RunResult) -> str:
        """Return the exceeded limit in words: seconds of CPU time or wall-clock time."""
        if not result.is_wall_clock_timeout:
            return f"{self._settings.timeout_seconds:g} seconds of CPU time"
        # A server of a sandbox applies `timeout_seconds` to the clock. This machine's sandbox stops a program later.
        limit_seconds = self._settings.timeout_seconds if self._settings.url else result.wall_seconds
        return f"{limit_seconds:.3g} seconds by the clock"


@lru_cache(maxsize=4)
def _start_shared_sandbox(settings: str) -> AnySandbox:
    """Return this process's running sandbox with these settings, shared by all attempts."""
    # `settings` is JSON, a hashable key for the cache. JSON turned tuples into lists.
    fields = json.loads(settings)
    tuple_fields = {name: tuple(fields[name]) for name in ("require", "packages")}
    sandbox = open_sandbox(SandboxSettings(**{**fields, **tuple_fields}))
    sandbox.start()
    return sandbox
