"""Driver's side of a reward process: start, query, and replacement after a failure or an exceeded time limit."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal

from megarl.config import RewardConfig, SandboxConfig
from megarl.config.judges import Judging, judging, strongest
from megarl.config.rewards import RewardFunctionConfig
from megarl.processes.frames import FrameError, UnsendableError, receive, receive_answer, send, within
from megarl.processes.process_tree import cpu_seconds_below
from megarl.processes.supervised_process import KillableProcess
from megarl.rewards import locate, served_kind
from megarl.rewards.calling import PARAMETERS, Sample
from megarl.rewards.results import read_reply
from megarl.sandbox.sandbox import SandboxSettings
from megarl.types import ConfigError, PeerLostError, Reward

_SHORT_SECONDS = 0.05
"""CPU time is not measured for answers within this time in seconds, because measuring takes time itself."""
_MAX_REPLY_BYTES = 64 << 10
"""Limit of a reply: scores or a shortened traceback."""
_MAX_OUTPUT_CHARACTERS = 2000
_MAX_LOST = 2
"""Processes tried for a completion. A kill by the kernel or an operator is not its fault, so it is retried once."""

_SERVER = "megarl.rewards.reward_main:serve"

Failure = Literal["error", "timeout", "parse_error"]
"""Why a completion has no score: an error in scoring, a timeout, or a server's answer without a verdict."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Reward of a completion. If scoring failed, it is zero, with the kind of failure and its description."""

    reward: Reward
    failure: Failure | None = None
    detail: str = ""
    judges_format: bool = True
    """Whether any function judged the format."""
    judges_answer: bool = True
    """Whether any function judged the answer."""
    is_left_out: bool = False
    """Whether the failed completion counts as one without a reward."""
    num_lost: int = 0
    """Number of reward processes that ended or were killed from outside while scoring this completion."""

    @property
    def kept_reward(self) -> Reward | None:
        """Return the reward of its trajectory. None: it is left out."""
        return None if self.is_left_out else self.reward

    @classmethod
    def failed(cls, failure: Failure, detail: str) -> Scored:
        return cls(Reward(score=0.0, format_valid=False, answer_correct=False), failure, detail)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of reward processes: functions, folder, limits."""

    functions: tuple[RewardFunctionConfig, ...]
    correct_score: float
    timeout_seconds: float
    """Limit of CPU seconds per completion, for the process and its descendants."""
    wall_timeout_seconds: float
    """Limit of wall-clock seconds per completion."""
    search_path: tuple[str, ...]
    """`sys.path` of the process."""
    folder: str
    """Current folder of the process."""
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    """Sandbox for functions that take one. Its total CPU seconds are added to the first limit."""
    start_timeout_seconds: float = 300.0
    """Limit of wall-clock seconds for importing the functions."""
    served: tuple[RewardFunctionConfig, ...] = ()
    """Rewards from servers, asked by the driver without a process."""
    on_failure: Literal["zero", "leave_out"] = "zero"
    """Treatment of completions with failed scoring."""
    judges: Mapping[str, Judging] = field(default_factory=dict)
    """How each of `functions` and `served` judges the answer, by name. Missing ones do not judge it."""

    @property
    def judging(self) -> Judging:
        """Return how all of them together judge the answer."""
        return strongest(self.judges.values())


def worker_settings(reward: RewardConfig, sandbox: SandboxConfig | None = None) -> WorkerSettings:
    """Return settings for processes in the current folder.

    The folder is on their search path only if the recipe names functions of a module there.
    """
    folder = os.getcwd()
    search_path = [entry for entry in sys.path if entry]
    if any(_is_in(folder, function.name) for function in reward.functions):
        search_path.append(folder)
    return WorkerSettings(
        functions=tuple(function for function in reward.functions if served_kind(function.name) is None),
        served=tuple(function for function in reward.functions if served_kind(function.name) is not None),
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


def _is_in(folder: str, name: str) -> bool:
    """Return whether a folder has the top-level module of a recipe's own reward function, without importing it."""
    if ":" not in name:
        return False
    with suppress(ConfigError):
        module = locate(name).rpartition(":")[0]
        return not module.endswith(".py") and PathFinder.find_spec(module.partition(".")[0], [folder]) is not None
    return False


class RewardWorker:
    """Reward process with its supervisor. One thread at a time uses it; any thread may interrupt or close it."""

    def __init__(self, settings: WorkerSettings, log_file: str | None = None) -> None:
        """Start the process without waiting for it. Output of the functions goes to `log_file`, limited in size.

        Raises PeerLostError if the machine cannot start a process.
        """
        self._settings = settings
        self._log_file = log_file
        self._lock = threading.Lock()
        self._is_closed = False
        self._asking = threading.Lock()
        self._is_asking = self._is_interrupted = False
        self._num_requests = 0
        self._needs: frozenset[str] = frozenset()
        self._start()

    def wait_until_ready(self) -> None:
        """Wait until the functions are imported.

        Raises ConfigError if the import fails or takes too long, PeerLostError if the process ends or is closed.
        """
        if self._is_ready:
            return
        try:
            patience = within(self._settings.start_timeout_seconds)
            message = receive(self._connection, _MAX_REPLY_BYTES, patience)
        except TimeoutError:
            self._restart()
            seconds = self._settings.start_timeout_seconds
            raise ConfigError(f"reward.functions: importing {self._names} took more than {seconds:g} s") from None
        except FrameError as error:
            self._restart()
            raise PeerLostError(f"the reward process of {self._names} sent {error} while it started") from None
        except (EOFError, OSError):
            ended = self._restart(is_ending=True)
            raise _ProcessLostError(
                f"the reward process of {self._names} {ended} while it started{self._output()}"
            ) from None
        if message.get("ready") is not True:
            self._restart()
            raise ConfigError(str(message.get("refused")))
        needs = message.get("needs")
        self._needs = frozenset(needs if isinstance(needs, list) else ()) & PARAMETERS.keys()
        self._is_ready = True

    def ask(self, sample: Sample) -> Scored:
        """Return the reward of a completion: the weighted sum of the functions' scores.

        If the process ends while starting or scoring, a fresh one retries once. Raises the errors of
        `wait_until_ready`, called first; the time limits start after it.
        """
        with self._asking:
            self._is_asking = True
        try:
            for num_lost in range(_MAX_LOST - 1):
                with suppress(_ProcessLostError):
                    self.wait_until_ready()
                    return replace(self._answer(sample), num_lost=num_lost)
                # An interrupt closes the connection too, and must not be answered with another try.
                if self._is_interrupted:
                    return Scored.failed("error", f"{self._names}: the scoring was interrupted")
            self.wait_until_ready()
            return replace(self._answer(sample), num_lost=_MAX_LOST - 1)
        except _ProcessLostError as error:
            if not error.was_scoring:
                raise
            return replace(Scored.failed("error", str(error)), num_lost=_MAX_LOST)
        finally:
            with self._asking:
                is_interrupted, self._is_asking, self._is_interrupted = self._is_interrupted, False, False
            if is_interrupted:
                self._restart()

    def interrupt(self) -> None:
        """Abort the scoring in progress, if any: its process is killed and replaced. Does not wait for it."""
        with self._asking:
            if self._is_asking:
                self._is_interrupted = True
                with suppress(OSError):
                    # Wakes the thread waiting for an answer.
                    self._connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, sample: Sample) -> Scored:
        """Return the process's score of a completion. Raises _ProcessLostError if the process ends meanwhile."""
        self._num_requests += 1
        values = sample.values(self._needs, self._settings.correct_score)
        request = {"id": self._num_requests, "values": values}
        limits = _Limits(self._process.pid, self._limits_with_sandbox())
        try:
            send(self._connection, request, limits.remaining)
            reply = receive_answer(self._connection, self._num_requests, _MAX_REPLY_BYTES, limits.remaining)
            # The function's last work may have exceeded the limit between two checks.
            limits.check_cpu()
            return self._scored(reply)
        except _OverdueError as error:
            self._restart()
            return Scored.failed("timeout", f"{self._names}: {error}")
        except UnsendableError as error:
            return Scored.failed("error", f"{self._names}: the sample cannot be sent to the reward process: {error}")
        except FrameError as error:
            self._restart()
            return Scored.failed("error", f"{self._names}: the reward process sent {error}")
        except (EOFError, OSError):
            # The closed connection was this side's own doing, so the process did not fail.
            if self._is_interrupted:
                return Scored.failed("error", f"{self._names}: the scoring was interrupted")
            ended = self._restart(is_ending=True)
            text = f"{self._names}: the reward process {ended} while scoring"
            raise _ProcessLostError(text, was_scoring=True) from None

    def close(self) -> None:
        """Kill the process and all its descendants."""
        with self._lock:
            self._is_closed = True
            self._process.kill()

    @property
    def _names(self) -> str:
        return ", ".join(function.name for function in self._settings.functions)

    def _limits_with_sandbox(self) -> WorkerSettings:
        """Return the settings, with additional time for programs run in the sandbox."""
        if "sandbox" not in self._needs:
            return self._settings
        settings, seconds = self._settings, self._settings.sandbox.total_timeout_seconds
        return replace(
            settings,
            timeout_seconds=settings.timeout_seconds + seconds,
            # Programs may wait for a CPU on a busy machine, so wall-clock time grows by a multiple.
            wall_timeout_seconds=settings.wall_timeout_seconds + 10 * seconds,
        )

    def _scored(self, reply: dict[str, Any]) -> Scored:
        if "error" in reply:
            return Scored.failed("error", str(reply["error"]))
        try:
            return Scored(
                read_reply(reply, [function.name for function in self._settings.functions]),
                judges_format=reply.get("judges_format") is not False,
                judges_answer=reply.get("judges_answer") is not False,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"the reward process sent an answer that is not a valid reward: {error}") from None

    def _start(self) -> None:
        settings = self._settings
        self._is_ready = False
        try:
            self._process = KillableProcess(
                _SERVER, search_path=settings.search_path, folder=settings.folder, log_file=self._log_file
            )
        except OSError as error:
            raise PeerLostError(f"a reward process for {self._names} cannot be started: {error}") from None
        self._connection = self._process.connection
        start = {
            "functions": [
                {
                    "name": function.name,
                    "weight": function.weight,
                    "kwargs": function.kwargs,
                    "judging": settings.judges.get(function.name, "none"),
                }
                for function in settings.functions
            ],
            "correct_score": settings.correct_score,
            "sandbox": asdict(settings.sandbox),
        }
        with suppress(OSError):  # If it ended already, waiting for its answer fails.
            send(self._connection, start)

    def _restart(self, *, is_ending: bool = False) -> str:
        """Replace the process. Returns how the earlier one ended, if it `is_ending` by itself."""
        with self._lock:
            if self._is_closed:
                raise PeerLostError("the reward processes were closed while a completion was scored")
            ended = self._process.end() if is_ending else self._process.kill()
            self._start()
        return ended

    def _output(self) -> str:
        """Return the end of the functions' output, for an error message."""
        if self._log_file is None:
            return ""
        try:
            text = Path(self._log_file).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""
        return f"; it printed:\n{text[-_MAX_OUTPUT_CHARACTERS:]}" if text else ""


class _ProcessLostError(PeerLostError):
    """A reward process ended by itself or was killed from outside."""

    def __init__(self, text: str, *, was_scoring: bool = False) -> None:
        super().__init__(text)
        self.was_scoring = was_scoring


class _OverdueError(Exception):
    """A time limit is exceeded."""


class _Limits:
    """Time limits of a request: CPU seconds of all descendants of the supervisor process, and wall-clock seconds."""

    def __init__(self, keeper: int, settings: WorkerSettings) -> None:
        self._keeper = keeper
        self._cpu_limit = settings.timeout_seconds
        self._wall_limit = settings.wall_timeout_seconds
        self._started = time.monotonic()
        self._cpu_before: float | None = None
        self._cpu_used = 0.0

    def remaining(self) -> float:
        """Return seconds until the limits must be checked again. Raises _OverdueError if one is exceeded."""
        elapsed = time.monotonic() - self._started
        if elapsed >= self._wall_limit:
            raise _OverdueError(f"took more than reward.wall_timeout_seconds = {self._wall_limit:g} by the clock")
        wall_left = self._wall_limit - elapsed
        if elapsed < min(_SHORT_SECONDS, self._cpu_limit):
            return min(_SHORT_SECONDS, self._cpu_limit, wall_left)
        if self._cpu_before is None:
            self._cpu_before = cpu_seconds_below(self._keeper)
        self.check_cpu()
        # At least 10 ms between checks: reading CPU times in /proc takes time, too.
        return min(max(self._cpu_limit - self._cpu_used, 0.01), wall_left)

    def check_cpu(self) -> None:
        """Raise _OverdueError if the CPU limit is exceeded. A quick answer is not measured."""
        if self._cpu_before is None:
            return
        # The time of descendants that ended may disappear from /proc, so never let it decrease.
        self._cpu_used = max(self._cpu_used, cpu_seconds_below(self._keeper) - self._cpu_before)
        if self._cpu_used >= self._cpu_limit:
            raise _OverdueError(f"took more than reward.timeout_seconds = {self._cpu_limit:g} CPU seconds")
