"""Agent that plays tasks of the library Harbor."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.environments.libraries.library_process import ForeignError
from megarl.environments.libraries.library_tasks import LibraryTasks
from megarl.files.strict_json import finite_number
from megarl.terminal import FirstOfEachKind

_NOTICES = FirstOfEachKind(logging.getLogger(__name__).warning)
_END_SECONDS = 60.0
"""Seconds for a trial to stop its environment. Harbor runs `docker compose down`; programs get 10 s of them."""
_ARGUMENT_FIELDS = ("task", "trial_name", "trials_dir", "agent", "environment")
"""Fields of Harbor's TrialConfig that the arguments of `Harbor` set."""


class Harbor:
    """Agent that makes trials of Harbor's tasks. Its model calls go to the endpoint that records them for training.

    `tasks` is a folder of tasks. `agent` is one of Harbor's, or your own as `module:Class`; it gets the endpoint's
    address and the attempt's key. `environment` is one of Harbor's, such as docker, or `module:Class`. `agent_kwargs`
    and `environment_kwargs` are their arguments. `trial` has further fields of Harbor's TrialConfig. `python` is the
    interpreter of a virtual environment with harbor (Python 3.12 or newer).

    Each attempt has a folder in `trials` with Harbor's result, logs and trajectory. A verifier's reward counts even if
    the trial had an error; the first error of each kind is logged. A cancelled trial stops its environment within a
    minute, also if the run was killed. The next trial on a machine stops the environments of killed trials.

    With data `environment:COUNT`, validation uses the last tasks, a share of `heldout`. Training uses the others.
    """

    makes_problems = True
    runs_elsewhere = False
    """Whether the agent runs in an environment that cannot reach a loopback address of this machine. See `check`."""

    def __init__(
        self,
        tasks: str,
        *,
        agent: str,
        environment: str = "docker",
        agent_kwargs: Mapping[str, Any] | None = None,
        environment_kwargs: Mapping[str, Any] | None = None,
        trial: Mapping[str, Any] | None = None,
        trials: str = "trials",
        heldout: float = 0.2,
        python: str | None = None,
    ) -> None:
        """Check the arguments, and prepare the process that makes trials. `trials`: folder for Harbor's records."""
        if not 0 < heldout < 1:
            raise ValueError("heldout must be between 0 and 1")
        if overridden := sorted({*(trial or {})} & {*_ARGUMENT_FIELDS}):
            raise ValueError(
                f"trial.{overridden[0]}: is set by the other arguments; use agent, environment, tasks or trials"
            )
        self._folder = str(Path(tasks).resolve())
        settings = {
            "tasks": self._folder,
            "trial": {
                **(trial or {}),
                "trials_dir": str(Path(trials).resolve()),
                "agent": _choice(agent, "name", agent_kwargs),
                "environment": _choice(environment, "type", environment_kwargs),
            },
        }
        self._tasks = LibraryTasks("harbor", settings, python=python, heldout=heldout, end_seconds=_END_SECONDS)

    async def run(self, problem: Mapping[str, Any], base_url: str, api_key: str) -> float:
        """Make a trial of the problem's task against the endpoint, and return its reward.

        Raises ForeignError and ChildError.
        """
        process = await self._tasks.get_process()
        task_number = self._tasks.choose_task_number(problem, process)
        # A random part, because an attempt may be made again after a kill.
        trial_name = f"{problem['index']}-{secrets.token_hex(4)}"
        request = {"task": task_number, "trial_name": trial_name, "base_url": base_url, "api_key": api_key}
        answer = await process.request(request)
        for note in answer.get("notes") or []:
            _NOTICES.tell(str(note).partition(":")[0], f"trial {trial_name}: {note!s:.400}")
        rewards = answer.get("rewards")
        if not isinstance(rewards, dict) or not rewards:
            raise ForeignError(f"the verifier of trial {trial_name} gave no reward")
        if "reward" not in rewards and len(rewards) > 1:
            raise ForeignError(
                f"the verifier's rewards are {sorted(rewards)[:5]}, and none is named reward; name one of them so"
            )
        # A task with one number may give it any name.
        reward = rewards.get("reward", next(iter(rewards.values())))
        finite_reward = finite_number(reward)
        if finite_reward is None:
            raise ForeignError(f"the reward is {reward!r:.80}, not a finite number")
        return finite_reward

    def check(self) -> None:
        self.runs_elsewhere = self._tasks.check(self._folder)["runs_elsewhere"] is True


def _choice(name: str, field: str, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the config of an agent or environment, by Harbor's name or as `module:Class`."""
    return {"import_path" if ":" in name else field: name, "kwargs": dict(kwargs or {})}
