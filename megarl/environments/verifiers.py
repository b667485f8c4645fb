"""Tasksets of the library verifiers (its `v1`), played by one of its harnesses against the training engines."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.environments.foreign import ChildError, ForeignError, require
from megarl.environments.shared import close_shared, shared
from megarl.processes.supervised_process import Ended, SupervisedProcess
from megarl.types import ConfigError

_SCRIPT = Path(__file__).with_name("verifiers_child.py")
_START_SECONDS = 300.0
"""Time limit in seconds for loading a taskset."""


class Verifiers:
    """Agent that plays tasks of a verifiers taskset through the recording endpoint.

    `taskset` is an installed package or a module of the current folder, with settings `config`. `harness` (one of
    verifiers' or your own, with `harness_config`) plays a task in processes of its own on this machine. `env` has
    further fields of the environment's config. The first `max_tasks` tasks are used. With data `environment:COUNT` the
    last tasks, a share of `heldout`, are for validation only, and the others for training only. `python` is the
    interpreter of a virtual environment with verifiers and uv.
    """

    makes_problems = True

    def __init__(
        self,
        taskset: str,
        *,
        config: Mapping[str, Any] | None = None,
        harness: str = "null",
        harness_config: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        max_tasks: int = 10_000,
        heldout: float = 0.2,
        python: str | None = None,
    ) -> None:
        if max_tasks < 2 or not 0 < heldout < 1:
            raise ValueError("max_tasks must be at least 2; heldout must be between 0 and 1")
        seat = {"harness": {"id": harness, **(harness_config or {})}, "runtime": {"type": "subprocess"}}
        settings = {"taskset": {"id": taskset, **(config or {})}, "agent": seat, **(env or {})}
        self._heldout = heldout
        self._command = python or sys.executable, json.dumps({"env": settings, "max_tasks": max_tasks})
        require(self._command[0], "verifiers", "verifiers")

    async def run(self, problem: Mapping[str, Any], base_url: str, api_key: str) -> float:
        """Play the problem's task against the endpoint and return its reward. Raises ForeignError and ChildError."""
        player = _player(self._command)
        num_tasks = await player.start()
        task = task_of(problem["index"], problem["record"].get("split"), num_tasks, self._heldout)
        return await player.play({"task": task, "base_url": base_url, "api_key": api_key})

    def check(self) -> None:
        """Load the taskset, as a test before a run. Raises ConfigError if this fails."""
        try:
            asyncio.run(self._tried())
        except Exception as error:
            raise ConfigError(f"rollout.environment = verifiers: {error}") from error

    async def _tried(self) -> None:
        try:
            if await _player(self._command).start() < 2:
                raise ChildError(
                    "the taskset has less than two tasks; at least one each is needed for training and validation"
                )
        finally:
            await close_shared()


def task_of(index: int, split: str | None, num_tasks: int, heldout: float) -> int:
    """Return the number of the task used for a problem. The last tasks are for validation."""
    num_heldout = max(1, math.floor(num_tasks * heldout))
    if split is None:
        return index % num_tasks
    if split == "train":
        return index % (num_tasks - num_heldout)
    return num_tasks - num_heldout + index % num_heldout


def _player(command: tuple[str, str]) -> _Player:
    return shared(command, lambda: _Player(*command))


class _Player:
    """Child process that has loaded a taskset and forks for each task. It starts at its first use, and again if it
    ended.
    """

    def __init__(self, python: str, settings: str) -> None:
        self._python, self._settings = python, settings
        self._lock = asyncio.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[float]] = {}
        self._process: SupervisedProcess | None = None
        self._num_tasks = 0

    async def start(self) -> int:
        """Start the process if needed and return the number of tasks. Raises ChildError if they cannot be loaded."""
        async with self._lock:
            if self._process is not None:
                return self._num_tasks
            process = SupervisedProcess([self._python, str(_SCRIPT)], has_connection=True)
            reader, self._writer = await asyncio.open_connection(sock=process.connection)
            first: dict[str, Any] = {}
            try:
                self._writer.write(self._settings.encode() + b"\n")
                # A child that ends without reading its settings resets the connection.
                with suppress(ConnectionError):
                    async with asyncio.timeout(_START_SECONDS):
                        first = json.loads(await reader.readline() or b"{}")
                if first.get("ready") is not True:
                    ended = await self._stop(process)
                    reason = (
                        first.get("refused")
                        or ended.refused
                        or f"the process that loads the taskset {ended}: {ended.stderr_tail()}"
                    )
                    raise ChildError(reason)
            except BaseException:
                await self._stop(process)
                raise
            self._process = process
            self._num_tasks = int(first["num_tasks"])
            self._reading = asyncio.create_task(self._read(process, reader))
            return self._num_tasks

    async def play(self, request: Mapping[str, Any]) -> float:
        """Play a task and return its reward. Raises ForeignError, and ChildError if the process ended."""
        number = next(self._numbers)
        result = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._write({"id": number, **request})
            return await result
        finally:
            del self._waiting[number]
            # Nobody waits for this task any more (cancelled), so free its resources.
            if not result.done() or result.cancelled():
                self._write({"kill": number})

    async def close(self) -> None:
        if self._process is not None:
            self._reading.cancel()
            await self._stop(self._process)

    async def _stop(self, process: SupervisedProcess) -> Ended:
        # First take the socket from the event loop: the process closes it.
        self._writer.transport.abort()
        return await process.stop()

    def _write(self, message: Mapping[str, Any]) -> None:
        if self._process is None:
            raise ChildError("the process that plays the tasks ended")
        with suppress(ConnectionError, RuntimeError):
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self, process: SupervisedProcess, reader: asyncio.StreamReader) -> None:
        """Pass answers to the coroutines waiting for them, until the process ends. It may then be started again."""
        reason = "the process that plays the tasks ended"
        try:
            while line := await reader.readline():
                answer = json.loads(line)
                result = self._waiting.get(answer.get("id"))
                if result is None or result.done():
                    continue
                if isinstance(reward := answer.get("reward"), float) and math.isfinite(reward):
                    result.set_result(reward)
                else:
                    result.set_exception(ForeignError(str(answer.get("error", answer))))
        except ConnectionError:
            pass
        except ValueError as error:
            reason = f"its answer is not valid: {error}"
        async with self._lock:
            # Under the lock, so that no request starts another process before this one has ended.
            ended = await self._stop(process)
            self._process = None
        for result in self._waiting.values():
            if not result.done():
                result.set_exception(ChildError(f"{reason}: {ended.stderr_tail()}"))
