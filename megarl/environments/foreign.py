"""Environments of other libraries, run in child processes with the library's own interpreter.

A child (`foreign_child`) serves many episodes, one request at a time. If it hangs, dies or gives an invalid answer, it
is killed. The episode of the faulty request fails. Other episodes are replayed in a new child, to the same answers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from megarl.environments import Start, Step, Turn
from megarl.environments.shared import Tail, close_shared, shared
from megarl.types import ConfigError, Problem

_SCRIPT = Path(__file__).with_name("foreign_child.py")
_MAX_ANSWER_BYTES = 16 << 20
# Importing a library for the first time can take minutes on a shared file system.
_START_SECONDS = 300.0
_GIB = 1 << 30


_Command = tuple[str, str, int | None]
"""Interpreter, library, and limit of the address space in bytes."""
_NAMES = itertools.count()


class ChildError(Exception):
    """A child process died or gave an invalid answer."""


class ForeignError(Exception):
    """An exception raised by the library."""


class NotRepeatedError(Exception):
    """A replayed episode gave other answers in a new child than before."""


class _LostError(Exception):
    """The child ended before it was asked, because of another episode's request."""


class ForeignEnvironment:
    """Environment of a library, played in a child process.

    `python` is the interpreter with the library (default: megarl's own). `processes` is the number of children for all
    attempts together. `seconds` limits the time of one answer, `memory_gib` a child's address space.
    """

    makes_problems = True
    library: str
    package: str
    """Name of the package for pip."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        python: str | None = None,
        processes: int = 2,
        seconds: float = 60.0,
        memory_gib: float | None = None,
    ) -> None:
        if processes < 1 or seconds <= 0 or (memory_gib is not None and memory_gib <= 0):
            raise ValueError("processes must be 1 at least, seconds and memory_gib above 0")
        self._settings = dict(settings)
        self._seconds = seconds
        self._command = python or sys.executable, self.library, int(memory_gib * _GIB) if memory_gib else None
        self._name = str(next(_NAMES))
        self._processes = processes
        self._child: _Child | None = None
        self._told: list[tuple[dict[str, Any], Any]] = []
        require(self._command[0], self.library, self.package)

    async def reset(self, problem: Problem, seed: int) -> Start:
        self._place = problem.index  # Attempts at one problem share a child: it makes it once.
        split = problem.record.get("split")
        request = {"do": "reset", "settings": self._settings, "index": problem.index}
        # Without a split (no `environment:COUNT` data) problems are not divided into training and validation.
        value = await self._ask({**request, "is_heldout": split and split != "train"})
        has_system = bool(problem.messages) and problem.messages[0]["role"] == "system"
        system = value.get("system")
        own = ({"role": "system", "content": system},) if system and not has_system else ()
        question = {"role": "user", "content": _text(value)}
        return Start((*own, *problem.messages[:-1], question))

    async def step(self, turn: Turn) -> Step:
        value = await self._ask({"do": "step", "text": turn.text})
        reward, done, correct = value.get("reward"), value.get("done"), value.get("correct")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ChildError(f"the reward is {reward!r:.80}, not a finite number")
        if not isinstance(done, bool) or not isinstance(correct, bool | None):
            raise ChildError(
                f"done must be a boolean and correct a boolean or null in the answer to a turn: {value!r:.200}"
            )
        messages = () if done else ({"role": "user", "content": _text(value)},)
        return Step(messages, float(reward), done, correct)

    async def close(self) -> None:
        if self._child is not None:
            self._child.forget(self._name)
            self._child = None

    def check(self) -> None:
        """Make the first problem. Raises ConfigError if this fails."""
        try:
            asyncio.run(self._tried())
        except Exception as error:
            raise ConfigError(f"{self.library} cannot make a problem of {self._settings}: {error}") from error

    async def _tried(self) -> None:
        try:
            await self.reset(Problem(0, ({"role": "user", "content": "."},), (), ""), 0)
        finally:
            await close_shared()

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the child's answer. If another episode made the child end, first replay this one in a new child."""
        while True:
            try:
                if self._child is None or self._child.has_ended:
                    children = shared(self._command, lambda: _Children(self._command))
                    self._child = await children.child(self._place % self._processes)
                    # The answers so far must repeat exactly: otherwise the policy's history would not match the
                    # episode.
                    for earlier, known in self._told:
                        if await self._child.ask(self._name, earlier, self._seconds) != known:
                            raise NotRepeatedError("the environment did not repeat itself in a new process")
                value = await self._child.ask(self._name, request, self._seconds)
            except _LostError:
                continue
            self._told.append((request, value))
            return value


def _text(value: Mapping[str, Any]) -> str:
    text = value.get("text")
    if not isinstance(text, str):
        raise ChildError(f"the observation is {text!r:.80}, not a text")
    return text


@lru_cache(maxsize=64)
def require(python: str, module: str, package: str) -> None:
    """Raise ConfigError if the interpreter lacks the module. The module is not imported."""
    command = [python, "-c", f"import importlib.util as u; raise SystemExit(u.find_spec({module!r}) is None)"]
    try:
        found = subprocess.run(command, capture_output=True, timeout=_START_SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"python = {python!r}: cannot be run ({error}); give the interpreter of an environment"
        ) from None
    if not found:
        where = "this environment" if python == sys.executable else python
        raise ConfigError(
            f"the package {package} is missing in {where}; install it there (`uv pip install --python {python} "
            f"{package}`), or name the interpreter that has it in rollout.environment_kwargs.python"
        )


class _Child:
    """A child process. Its requests wait for each other."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lock = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._said = Tail(process.stderr)
        self.has_ended = False

    @classmethod
    async def start(cls, command: _Command) -> _Child:
        """Start a child. Raises ChildError if this fails."""
        python, library, memory_bytes = command
        process = await asyncio.create_subprocess_exec(
            python, str(_SCRIPT), library, str(os.getpid()), *([str(memory_bytes)] if memory_bytes else []),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            # Its own process group lets `kill` reach processes that the library starts.
            start_new_session=True, limit=_MAX_ANSWER_BYTES,
        )  # fmt: skip
        child = cls(process)
        told = await child._answer(_START_SECONDS)
        if told.get("ready") is not True:
            await child.kill()
            raise ChildError(f"{library} cannot be imported: {told.get('refused')}")
        return child

    async def ask(self, session: str, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a request, within `seconds` after it is sent.

        Raises _LostError if the child had ended before, and ForeignError for errors of the library. Raises TimeoutError
        and ChildError after killing the child.
        """
        async with self._lock:
            if self.has_ended:
                raise _LostError
            number = next(self._numbers)
            self._write({"id": number, "session": session, **request})
            told = await self._answer(seconds)
            # A child out of step would answer later requests with earlier answers.
            if told.get("id") != number or not (isinstance(told.get("value"), dict) or "error" in told):
                await self.kill()
                raise ChildError(f"the child's answer is {told!r:.200}")
        if "error" in told:
            raise ForeignError(str(told["error"]))
        return told["value"]

    def forget(self, session: str) -> None:
        """Close a session without waiting."""
        if not self.has_ended:
            self._write({"session": session, "do": "close"})

    async def kill(self) -> None:
        """Kill the child and its process group."""
        self.has_ended = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.shield(self._process.wait())
        self._said.close()

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin
        with suppress(ConnectionError, RuntimeError):  # If the child ended, waiting for its answer fails.
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout
        is_whole = False
        try:
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
            told = json.loads(line) if line else None
            if told is not None and not isinstance(told, dict):
                raise ValueError("it is not an object")
            is_whole = told is not None
        except TimeoutError:
            raise TimeoutError(f"the environment did not answer within {seconds:g} s") from None
        except ValueError as error:
            raise ChildError(f"the child's answer is not valid: {error}") from None
        finally:
            if not is_whole:  # Also if cancelled: a late answer must not match another request.
                await self.kill()
        if told is None:
            raise ChildError(f"the child ended with {self._process.returncode}: {self._said}")
        return told


class _Children:
    """Children of a library by number, started when first needed and replaced after they end."""

    def __init__(self, command: _Command) -> None:
        self._command = command
        self._running: dict[int, _Child] = {}
        self._locks: dict[int, asyncio.Lock] = {}

    async def child(self, number: int) -> _Child:
        async with self._locks.setdefault(number, asyncio.Lock()):
            if number not in self._running or self._running[number].has_ended:
                self._running[number] = await _Child.start(self._command)
            return self._running[number]

    async def close(self) -> None:
        for child in self._running.values():
            await child.kill()
