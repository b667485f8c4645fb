"""Episodes of other libraries' environments, played in child processes.

A child process plays many episodes, one request at a time. If it hangs, dies or gives an invalid answer, it is killed,
and the episode of the faulty request fails. Other episodes are replayed in a new process, and must get the same
answers.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from megarl.environments import Start, Step, Turn
from megarl.environments.libraries.library_process import (
    ChildError,
    LibraryChild,
    LibraryProcess,
    check_installed,
    make_child_settings,
)
from megarl.environments.shared import get_shared, run_alone
from megarl.files.strict_json import finite_number
from megarl.types import ConfigError, Problem

_SESSION_NUMBERS = itertools.count()


class NotRepeatedError(Exception):
    """Raised if an episode that is replayed in a new child process gets other answers than before."""


class ForeignEnvironment:
    """Environment of another library, run in a child process.

    `python` is the interpreter with the library (default: megarl's own). `processes` is the number of children for all
    attempts together. `seconds` limits the time of one answer, `memory_gib` a child's address space.
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
        self._child_arguments = python or sys.executable, self.library, memory_gib
        self._session = str(next(_SESSION_NUMBERS))
        self._processes = processes
        self._child: _EpisodeChild | None = None
        self._process: LibraryProcess | None = None
        self._history: list[tuple[dict[str, Any], dict[str, Any]]] = []
        check_installed(self._child_arguments[0], self.library, self.package)

    async def reset(self, problem: Problem, seed: int) -> Start:
        """Start an episode in the child process of this problem, and return its question."""
        # Attempts at one problem share a child, which makes the problem only once.
        child_key = (self._child_arguments, problem.index % self._processes)
        self._child = get_shared(child_key, lambda: _EpisodeChild(*self._child_arguments))
        split = problem.record.get("split")
        request = {"do": "reset", "settings": self._settings, "index": problem.index}
        # Without a split (no `environment:COUNT` data) all problems are for training and validation alike.
        value = await self._request({**request, "is_heldout": split and split != "train"})
        has_system = bool(problem.messages) and problem.messages[0]["role"] == "system"
        system = value.get("system")
        system_messages = ({"role": "system", "content": system},) if system and not has_system else ()
        question = {"role": "user", "content": _observation_text(value)}
        return Start((*system_messages, *problem.messages[:-1], question))

    async def step(self, turn: Turn) -> Step:
        """Send the policy's text to the episode. Raises ChildError for an invalid answer."""
        value = await self._request({"do": "step", "text": turn.text})
        reward, done, correct = value.get("reward"), value.get("done"), value.get("correct")
        finite_reward = finite_number(reward)
        if finite_reward is None:
            raise ChildError(f"the reward is {reward!r:.80}, not a finite number")
        if not isinstance(done, bool) or not isinstance(correct, bool | None):
            raise ChildError(
                f"the answer to a turn needs 'done' (true or false) and 'correct' (true, false or null): {value!r:.200}"
            )
        messages = () if done else ({"role": "user", "content": _observation_text(value)},)
        return Step(messages, finite_reward, done, correct)

    async def close(self) -> None:
        if self._child is not None:
            self._child.closed_sessions.append(self._session)
            self._child = None

    def check(self) -> None:
        """Generate the first problem before a run. Raises ConfigError if this fails."""
        try:
            run_alone(lambda: self.reset(Problem(0, ({"role": "user", "content": "."},), (), ""), 0))
        except Exception as error:
            raise ConfigError(
                f"{self.library} cannot generate a problem with the settings {self._settings}: {error}"
            ) from error

    async def _request(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the child and return its answer.

        If another episode has replaced the child meanwhile, first replay this episode in the new child.
        """
        assert self._child is not None
        async with self._child.reserve() as process:
            if process is not self._process:
                # Past answers must repeat exactly. Otherwise the policy's history would not match the episode.
                for earlier_request, answer in self._history:
                    if await self._send(self._child, process, earlier_request) != answer:
                        raise NotRepeatedError(
                            "the environment's process was replaced, and replaying the episode in a new process gave "
                            "other answers; make the environment deterministic"
                        )
                self._process = process
            value = await self._send(self._child, process, request)
        self._history.append((request, value))
        return value

    async def _send(self, child: _EpisodeChild, process: LibraryProcess, request: dict[str, Any]) -> dict[str, Any]:
        closed_sessions, child.closed_sessions = child.closed_sessions, []
        return await process.request({"session": self._session, "closed": closed_sessions, **request}, self._seconds)


def _observation_text(value: Mapping[str, Any]) -> str:
    text = value.get("text")
    if not isinstance(text, str):
        raise ChildError(f"the observation is {text!r:.80}, not a text")
    return text


class _EpisodeChild(LibraryChild):
    def __init__(self, python: str, library: str, memory_gib: float | None) -> None:
        super().__init__(make_child_settings(library, {}, python=python, memory_gib=memory_gib))
        self._turns = asyncio.Lock()
        self.closed_sessions: list[str] = []
        """Ended episodes, which the process closes with the next request."""

    @asynccontextmanager
    async def reserve(self) -> AsyncIterator[LibraryProcess]:
        """Wait until the process is free, and start it if needed. Raises ChildError if the start fails."""
        async with self._turns:
            yield await self.get_process()
