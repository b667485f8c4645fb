"""The driver's side of reward processes: makes their settings and reads the scores in their answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.machinery import PathFinder
from typing import Any, Literal

from megarl.config import RewardConfig, SandboxConfig
from megarl.config.judges import judging
from megarl.config.sections.rewards import RewardFunctionConfig
from megarl.processes.server_process import RequestLimits, ServerSettings
from megarl.rewards import find_import_path, server_kind
from megarl.rewards.functions.function_score import FunctionScore
from megarl.rewards.scoring.results import read_scores
from megarl.sandbox.sandbox import SandboxSettings
from megarl.types import ConfigError, Judging, Reward, strongest

_MEMORY_BYTES = 4 << 30
"""Limit of a reward process's address space."""
_MAX_REPLY_BYTES = 64 << 10
"""Maximum bytes of a reply with scores or a shortened traceback."""

Failure = Literal["error", "timeout", "parse_error"]
"""Reason for a missing score. parse_error: a server's answer has no verdict."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Reward of a completion. If scoring failed, the reward is zero, and `failure` and a text describe the failure."""

    reward: Reward
    failure: Failure | None = None
    detail: str = ""
    is_left_out: bool = False
    """If scoring failed: True if the completion has no reward, False if its reward is zero."""

    @property
    def trajectory_reward(self) -> Reward | None:
        """Return the reward. None: the completion is left out."""
        return None if self.is_left_out else self.reward


@dataclass(frozen=True, slots=True)
class FunctionScores:
    """Scores of a completion by name of function or server. If scoring failed, `failure` and a text give the reason."""

    scores: Mapping[str, FunctionScore | None] = field(default_factory=dict)
    failure: Failure | None = None
    detail: str = ""
    num_lost: int = 0
    """Number of reward processes that ended while they scored this completion, without being killed by megarl."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    functions: tuple[RewardFunctionConfig, ...]
    correct_score: float
    timeout_seconds: float
    """Limit of CPU seconds per completion, for the process and its descendants."""
    wall_timeout_seconds: float
    """Limit of wall-clock seconds per completion."""
    search_path: tuple[str, ...]
    """Import paths (`sys.path`) of the process."""
    folder: str
    """Working folder of the process."""
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    """Sandbox for functions that take one. The CPU seconds of its programs are added to the CPU limit."""
    start_timeout_seconds: float = 300.0
    """Limit of wall-clock seconds for importing the reward functions."""
    served: tuple[RewardFunctionConfig, ...] = ()
    """Rewards from scoring servers. The driver sends their requests."""
    on_failure: Literal["zero", "leave_out"] = "zero"
    """Reward of completions whose scoring failed: zero, or none (left out)."""
    judges: Mapping[str, Judging] = field(default_factory=dict)
    """How each function and server judges answers, by name. A missing name does not judge."""

    @property
    def names(self) -> str:
        return ", ".join(function.name for function in self.functions)

    @property
    def judging(self) -> Judging:
        return strongest(self.judges.values())


def worker_settings(reward: RewardConfig, sandbox: SandboxConfig | None = None) -> WorkerSettings:
    """Return the settings of reward processes in the current folder.

    The folder is an import path only if the recipe names functions of a module in it.
    """
    folder = os.getcwd()
    search_path = [entry for entry in sys.path if entry]
    if any(_has_module_of(folder, function.name) for function in reward.functions):
        search_path.append(folder)
    return WorkerSettings(
        functions=tuple(function for function in reward.functions if server_kind(function.name) is None),
        served=tuple(function for function in reward.functions if server_kind(function.name) is not None),
        on_failure=reward.on_failure,
        judges=judging(reward.functions),
        correct_score=reward.correct_score,
        timeout_seconds=reward.timeout_seconds,
        # Wall-clock time includes waiting for a CPU, so its limit is more generous.
        wall_timeout_seconds=reward.wall_timeout_seconds or max(10 * reward.timeout_seconds, 30.0),
        search_path=tuple(search_path),
        folder=folder,
        sandbox=SandboxSettings(**sandbox.model_dump()) if sandbox else SandboxSettings(),
    )


def _has_module_of(folder: str, name: str) -> bool:
    """Return whether `folder` has the top-level module of the reward function `name`, without importing it."""
    if ":" not in name:
        return False
    with suppress(ConfigError):
        module = find_import_path(name).rpartition(":")[0]
        return not module.endswith(".py") and PathFinder.find_spec(module.partition(".")[0], [folder]) is not None
    return False


def server_settings(settings: WorkerSettings) -> ServerSettings:
    start_settings = {
        "functions": [{"name": function.name, "kwargs": function.kwargs} for function in settings.functions],
        "sandbox": asdict(settings.sandbox),
    }
    return ServerSettings(
        "megarl.rewards.scoring.reward_main:start",
        settings.names,
        "reward.functions",
        start_settings,
        settings.search_path,
        settings.folder,
        memory_bytes=_MEMORY_BYTES,
        start_seconds=settings.start_timeout_seconds,
        max_answer_bytes=_MAX_REPLY_BYTES,
    )


def request_limits(settings: WorkerSettings, *, has_sandbox: bool) -> RequestLimits:
    """Return the time limits for scoring a completion, including programs in the sandbox."""
    seconds = settings.sandbox.total_timeout_seconds if has_sandbox else 0.0
    # Programs may wait for a CPU on a busy machine, so wall-clock time grows by a multiple.
    return RequestLimits(
        cpu_seconds=settings.timeout_seconds + seconds,
        wall_seconds=settings.wall_timeout_seconds + 10 * seconds,
    )


def read_answer(answer: Mapping[str, Any], settings: WorkerSettings, limits: RequestLimits) -> FunctionScores:
    """Return the scores in a reward process's answer. Raises ValueError for an invalid answer."""
    if "overdue" in answer:
        by_cpu = f"reward.timeout_seconds = {limits.cpu_seconds:g} CPU seconds"
        by_clock = f"reward.wall_timeout_seconds = {limits.wall_seconds:g} by the clock"
        limit_text = by_cpu if answer["overdue"] == "cpu" else by_clock
        return FunctionScores(failure="timeout", detail=f"{settings.names}: took more than {limit_text}")
    if "invalid" in answer:
        text = f"the sample cannot be sent to the reward process: {answer['invalid']}"
        return FunctionScores(failure="error", detail=f"{settings.names}: {text}")
    if "violation" in answer:
        return FunctionScores(failure="error", detail=f"{settings.names}: the reward process {answer['violation']}")
    if "error" in answer:
        return FunctionScores(failure="error", detail=str(answer["error"]))
    try:
        return FunctionScores(read_scores(answer, [function.name for function in settings.functions]))
    except (KeyError, TypeError, ValueError) as error:
        text = f"the reward process sent an answer that is not a valid reward: {error}"
        raise ValueError(f"{settings.names}: {text}") from None
