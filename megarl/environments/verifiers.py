"""Agent that plays tasksets of the library verifiers (its `v1`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.environments.libraries.library_process import ForeignError
from megarl.environments.libraries.library_tasks import LibraryTasks
from megarl.files.strict_json import finite_number


class Verifiers:
    """Agent that plays tasks of a verifiers taskset. Its model calls go to the endpoint that records them for training.

    `taskset` is an installed package or a module of the current folder, with settings `config`. `harness` (one of
    verifiers' or your own, with `harness_config`) plays a task in separate processes on this machine. `env` has further
    fields of the environment's config. `python` is the interpreter of a virtual environment with verifiers and uv.

    The first `max_tasks` tasks are used. With data `environment:COUNT`, validation uses the last tasks, a share of
    `heldout`. Training uses the others.
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
        agent = {"harness": {"id": harness, **(harness_config or {})}, "runtime": {"type": "subprocess"}}
        settings = {"taskset": {"id": taskset, **(config or {})}, "agent": agent, **(env or {})}
        child_settings = {"env": settings, "max_tasks": max_tasks}
        self._tasks = LibraryTasks("verifiers", child_settings, python=python, heldout=heldout)

    async def run(self, problem: Mapping[str, Any], base_url: str, api_key: str) -> float:
        """Play the problem's task against the endpoint, and return its reward. Raises ForeignError and ChildError."""
        process = await self._tasks.get_process()
        task_number = self._tasks.choose_task_number(problem, process)
        value = await process.request({"task": task_number, "base_url": base_url, "api_key": api_key})
        reward = value.get("reward")
        finite_reward = finite_number(reward)
        if finite_reward is None:
            raise ForeignError(f"the reward is {reward!r:.80}, not a finite number")
        return finite_reward

    def check(self) -> None:
        self._tasks.check("the taskset")
