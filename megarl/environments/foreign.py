"""Environments of other libraries, run in child processes. Their Python interpreter has the library installed.

A child runs `foreign_child.py` and serves many episodes, one request at a time. If it hangs, dies or gives an invalid
answer, it is killed. The episode of the faulty request fails. Other episodes are replayed in a new child, where they
must give the same answers.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from megarl.environments import Start, Step, Turn
from megarl.environments.shared import close_shared, shared
from megarl.platform.commands import run_command
from megarl.processes.process_pool import Place, ProcessPool
from megarl.processes.server_process import RequestLimits, Server, ServerSettings
from megarl.types import ConfigError, PeerLostError, Problem

_SCRIPT = Path(__file__).with_name("foreign_child.py")
# Importing a library for the first time can take minutes on a shared file system.
_START_SECONDS = 300.0
_GIB = 1 << 30


_Command = tuple[str, str, int | None]
"""Identity of a kind of child process: interpreter, library, and limit of the address space in bytes (None: no
limit).
"""
_NAMES = itertools.count()


class ChildError(Exception):
    """Raised if a child process died or gave an invalid answer."""


class ForeignError(Exception):
    """Raised for an exception of the library in its child process."""


class NotRepeatedError(Exception):
    """Raised if an episode replayed in a new child gave other answers than before."""


class ForeignEnvironment:
    """Environment of another library, run in a child process.

    `python` is the interpreter with the library (default: megarl's own). `processes` is the number of children for
    all attempts together. `seconds` limits the time of one answer, `memory_gib` a child's address space.
    """

    makes_problems = True
    library: str
    package: str
    """Name under which pip installs the library."""

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
            raise ValueError("processes must be at least 1; seconds and memory_gib must be above 0")
        self._settings = dict(settings)
        self._seconds = seconds
        self._command = python or sys.executable, self.library, int(memory_gib * _GIB) if memory_gib else None
        self._name = str(next(_NAMES))
        self._processes = processes
        self._child: _Child | None = None
        self._process: Server | None = None
        self._answered: list[tuple[dict[str, Any], Any]] = []
        require(self._command[0], self.library, self.package)

    async def reset(self, problem: Problem, seed: int) -> Start:
        # Attempts at one problem share a child: it makes it once.
        key = (self._command, problem.index % self._processes)
        self._child = shared(key, lambda: _Child(self._command))
        split = problem.record.get("split")
        request = {"do": "reset", "settings": self._settings, "index": problem.index}
        # Without a split (no `environment:COUNT` data) problems are not divided into training and validation.
        value = await self._request({**request, "is_heldout": split and split != "train"})
        has_system = bool(problem.messages) and problem.messages[0]["role"] == "system"
        system = value.get("system")
        own = ({"role": "system", "content": system},) if system and not has_system else ()
        question = {"role": "user", "content": _text(value)}
        return Start((*own, *problem.messages[:-1], question))

    async def step(self, turn: Turn) -> Step:
        value = await self._request({"do": "step", "text": turn.text})
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
            self._child.closed_sessions.append(self._name)
            self._child = None

    def check(self) -> None:
        """Generate the first problem, as a test before a run. Raises ConfigError if this fails."""
        try:
            asyncio.run(self._tried())
        except Exception as error:
            raise ConfigError(
                f"{self.library} cannot generate a problem with the settings {self._settings}: {error}"
            ) from error

    async def _tried(self) -> None:
        try:
            await self.reset(Problem(0, ({"role": "user", "content": "."},), (), ""), 0)
        finally:
            await close_shared()

    async def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the child and return its answer.

        If the child was replaced meanwhile, because of another episode, this episode is first replayed in the new
        child.
        """
        assert self._child is not None
        async with self._child.place() as place:
            if place.process is not self._process:
                # The answers so far must repeat exactly: otherwise the policy's history would not match the episode.
                for earlier, known in self._answered:
                    if await self._child.request(place, self._name, earlier, self._seconds) != known:
                        raise NotRepeatedError(
                            "the environment's process was replaced, and replaying the episode in a new process gave "
                            "other answers; make the environment deterministic"
                        )
                self._process = place.process
            value = await self._child.request(place, self._name, request, self._seconds)
        self._answered.append((request, value))
        return value


def _text(value: Mapping[str, Any]) -> str:
    text = value.get("text")
    if not isinstance(text, str):
        raise ChildError(f"the observation is {text!r:.80}, not a text")
    return text


@lru_cache(maxsize=64)
def require(python: str, module: str, package: str) -> None:
    """Raise ConfigError if the interpreter `python` does not have `module`. The module is not imported."""
    command = [python, "-c", f"import importlib.util as u; raise SystemExit(u.find_spec({module!r}) is None)"]
    try:
        found = run_command(command, seconds=_START_SECONDS).returncode == 0
    except OSError as error:
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
    """A child process of a library, started at its first use and restarted after it ended.

    Requests are sent one at a time.
    """

    def __init__(self, command: _Command) -> None:
        python, library, memory_bytes = command
        settings = ServerSettings(
            (python, str(_SCRIPT), library), library, "rollout.environment", {}, (), os.getcwd(),
            memory_bytes=memory_bytes, start_seconds=_START_SECONDS,
        )  # fmt: skip
        self._pool = ProcessPool(settings, 1, log_name=library)
        self.closed_sessions: list[str] = []
        """Episodes that the child may close when it gets the next request."""

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        """Wait for the child to be free and ready for a request. Raises ChildError if it does not start."""
        async with self._pool.place() as place:
            try:
                await place.ready()
            except (ConfigError, PeerLostError) as error:
                raise ChildError(str(error)) from None
            yield place

    async def request(self, place: Place, session: str, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Send a request and return the answer, within `seconds`.

        Raises ForeignError for errors of the library. Raises TimeoutError and ChildError after killing the child.
        """
        closed, self.closed_sessions = self.closed_sessions, []
        message = {"session": session, "closed": closed, **request}
        answer = await place.request(message, RequestLimits(wall_seconds=seconds))
        if "overdue" in answer:
            raise TimeoutError(f"the environment did not answer within {seconds:g} s")
        if "ended" in answer:
            raise ChildError(f"the child process of the environment {answer['ended']}: {answer.get('output', '')}")
        if "violation" in answer:
            raise ChildError(f"the answer of the environment's child process is not valid: it {answer['violation']}")
        if "error" in answer:
            raise ForeignError(str(answer["error"]))
        if not isinstance(answer.get("value"), dict):
            place.kill()
            raise ChildError(f"the answer of the environment's child process is not valid: {answer!r:.200}")
        return answer["value"]

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.close)
