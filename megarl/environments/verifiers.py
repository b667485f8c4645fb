"""Tasksets of the library verifiers (its `v1`), played by one of its harnesses against the training engines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from megarl.environments.libraries.library_process import (
    ChildError,
    ForeignError,
    LibraryChild,
    LibraryProcess,
    check_installed,
    child_settings,
)
from megarl.environments.shared import get_shared, run_alone
from megarl.types import ConfigError


class Verifiers:
    """Agent playing tasks of a verifiers taskset. Its model calls go to the endpoint that records them for training.

    `taskset` is an installed package or a module of the current folder, with settings `config`. `harness` (one of
    verifiers' or your own, with `harness_config`) plays a task in separate processes on this machine. `env` has further
    fields of the environment's config. The first `max_tasks` tasks are used. With data `environment:COUNT` the last
    tasks, a share of `heldout`, are for validation only, and the others for training only. `python` is the interpreter
    of a virtual environment with verifiers and uv.
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
        self._heldout = heldout
        self._python = python or sys.executable
        self._settings = {"env": settings, "max_tasks": max_tasks}
        check_installed(self._python, "verifiers", "verifiers")

    async def run(self, problem: Mapping[str, Any], base_url: str, api_key: str) -> float:
        """Play the problem's task against the endpoint and return its reward. Raises ForeignError and ChildError."""
        process = await self._loaded_process()
        task = task_of(problem["index"], problem["record"].get("split"), count_tasks(process), self._heldout)
        value = await process.request({"task": task, "base_url": base_url, "api_key": api_key})
        reward = value.get("reward")
        if not isinstance(reward, float) or not math.isfinite(reward):
            raise ForeignError(f"the reward is {reward!r:.80}, not a finite number")
        return reward

    def check(self) -> None:
        """Load the taskset, as a test before a run. Raises ConfigError if the test fails."""
        try:
            if count_tasks(run_alone(self._loaded_process)) < 2:
                raise ChildError(
                    "the taskset has less than two tasks; at least one each is needed for training and validation"
                )
        except Exception as error:
            raise ConfigError(f"rollout.environment = verifiers: {error}") from error

    async def _loaded_process(self) -> LibraryProcess:
        """Return the process that has loaded the taskset. All attempts with equal settings share it."""
        key = "verifiers", self._python, json.dumps(self._settings)
        child = get_shared(key, lambda: LibraryChild(child_settings("verifiers", self._settings, python=self._python)))
        return await child.process()


def count_tasks(process: LibraryProcess) -> int:
    """Return the number of tasks that a library's process has loaded. Raises ChildError for an invalid number."""
    num_tasks = process.introduction.get("num_tasks")
    if not isinstance(num_tasks, int) or num_tasks < 0:
        raise ChildError(f"the number of tasks is {num_tasks!r:.80}, not a whole number")
    return num_tasks


def task_of(index: int, split: str | None, num_tasks: int, heldout: float) -> int:
    """Return the number of the task used for a problem. The last tasks, a share of `heldout`, are for validation."""
    num_heldout = max(1, math.floor(num_tasks * heldout))
    if split is None:
        return index % num_tasks
    if split == "train":
        return index % (num_tasks - num_heldout)
    return num_tasks - num_heldout + index % num_heldout
