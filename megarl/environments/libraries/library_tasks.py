"""Numbered tasks of an environment library."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from megarl.environments.libraries.library_process import (
    ChildError,
    LibraryChild,
    LibraryProcess,
    check_installed,
    make_child_settings,
)
from megarl.environments.shared import get_shared, run_alone
from megarl.types import ConfigError


class LibraryTasks:
    """Tasks that a library's child process has loaded with `settings`. Attempts with equal settings share the process.

    `library` is the library's name, as a module and as a value of rollout.environment. `python` is the interpreter of a
    virtual environment with the library; None: this one. The last tasks, a share of `heldout` (between 0 and 1), are
    for validation. Attempts get `end_seconds` to stop what they have started.
    """

    def __init__(
        self,
        library: str,
        settings: Mapping[str, Any],
        *,
        python: str | None,
        heldout: float,
        end_seconds: float = 0.0,
    ) -> None:
        self._library, self._settings, self._end_seconds = library, settings, end_seconds
        self._python = python or sys.executable
        self._heldout = heldout
        check_installed(self._python, library, library)

    async def get_process(self) -> LibraryProcess:
        """Return the process that has loaded the tasks, started at the first call. Raises ChildError."""
        child_key = self._library, self._python, json.dumps(self._settings)
        settings = make_child_settings(
            self._library, self._settings, python=self._python, end_seconds=self._end_seconds
        )
        child = get_shared(child_key, lambda: LibraryChild(settings))
        return await child.get_process()

    def choose_task_number(self, problem: Mapping[str, Any], process: LibraryProcess) -> int:
        """Return the number of a problem's task. Raises ChildError for an invalid number of tasks."""
        return choose_task(problem["index"], problem["record"].get("split"), _count_tasks(process), self._heldout)

    def check(self, source: str) -> Mapping[str, Any]:
        """Load the tasks of `source` before a run, and return the introduction of their process.

        Raises ConfigError if this fails.
        """
        try:
            process = run_alone(self.get_process)
            if _count_tasks(process) < 2:
                raise ChildError(
                    f"{source} has less than two tasks; at least one each is needed for training and validation"
                )
        except Exception as error:
            raise ConfigError(f"rollout.environment = {self._library}: {error}") from error
        return process.introduction


def _count_tasks(process: LibraryProcess) -> int:
    num_tasks = process.introduction.get("num_tasks")
    if not isinstance(num_tasks, int) or num_tasks < 0:
        raise ChildError(f"the number of tasks is {num_tasks!r:.80}, not a whole number")
    return num_tasks


def choose_task(index: int, split: str | None, num_tasks: int, heldout: float) -> int:
    """Return the number of a problem's task. The last tasks, a share of `heldout`, are for validation."""
    num_heldout = max(1, math.floor(num_tasks * heldout))
    if split is None:
        return index % num_tasks
    if split == "train":
        return index % (num_tasks - num_heldout)
    return num_tasks - num_heldout + index % num_heldout
