"""Trials of Harbor in a process that forks for each: a stand-in of the library, which may do anything.

`tools/check.py adapters --only harbor` trains with the library itself, which needs Python 3.12.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megarl.environments import find_environment, is_agent
from megarl.environments.harbor import Harbor
from megarl.environments.libraries.harbor_adapter import LIVE, Library
from megarl.environments.libraries.library_process import ChildError, ForeignError, LibraryProcess, check_installed
from megarl.environments.shared import close_shared
from megarl.processes.process_tree import ENDING_SIGNALS, descendants, send_signal
from megarl.types import ConfigError
from tests.child_processes import is_alive
from tests.rewards.pools import wait_until

LIBRARY = {
    "models/task/task.py": """
import pathlib
from types import SimpleNamespace as Space
class Task:
    short_name = "task"
    def __init__(self, folder):
        self.task_dir = folder
        self.paths = Space(tests_dir=pathlib.Path(folder, "tests"))
        mode = pathlib.Path(folder, "task.toml").read_text() or "public"
        phase = Space(network_mode=None, environment=None)
        self.config = Space(environment=Space(network_mode=mode), agent=phase, verifier=phase, steps=None)
        (pathlib.Path(folder) / "tests/test.sh").read_text()
""",
    "models/task/config.py": """
from types import SimpleNamespace
class EnvironmentConfig(SimpleNamespace):
    @classmethod
    def model_validate(cls, values):
        return cls(**values)
    def model_dump(self, mode, exclude=()):
        return vars(self)
NetworkPolicy = EnvironmentConfig
""",
    "models/task/verifier_mode.py": """
from types import SimpleNamespace as Space
def resolve_verifier_environment_definition(config, paths):
    if config.environment.network_mode != "separate verifier":
        return None
    environment = Space(resolve_baseline=lambda: "no-network")
    return Space(config=environment, directory=paths.tests_dir)
""",
    "trial/network_policy.py": """
def resolve_verifier_phase_policy(config, *, baseline):
    return baseline
""",
    "models/trial/config.py": """
from types import SimpleNamespace
class Config:
    @classmethod
    def model_validate(cls, values):
        defaults = {"type": None, "import_path": None, "delete": True, "extra_docker_compose": []}
        return SimpleNamespace(**defaults | values)
AgentConfig = EnvironmentConfig = Config
class TrialConfig(Config):
    model_fields = dict.fromkeys(["task", "trial_name", "trials_dir", "agent", "environment", "verifier"])
    @classmethod
    def model_validate(cls, values):
        return super().model_validate(values | {"environment": Config.model_validate(values["environment"])})
""",
    "models/trial/paths.py": """
import pathlib
TrialPaths = pathlib.Path
""",
    "environments/factory.py": """
import asyncio, pathlib
from types import SimpleNamespace
class Environment:
    def __init__(self, session_id, trial_paths, kwargs, **made_with):
        self.made_with = made_with
        if made_with["network_policy"] == "no-network":
            raise ValueError(f"network_mode='no-network' is not supported: {made_with['environment_dir']}")
        # A folder is the container, and outlives its process. Other files say how it stops.
        self.folder = trial_paths.parent.parent
        self.container = self.folder / "containers" / session_id
        if kwargs.get("compose"):
            self.stop, self._run_docker_compose_command = self.stop_by_compose, self.run
            self.start = self.start_by_compose
    async def start(self):
        self.container.mkdir(parents=True)
    async def stop(self, delete):
        if "stuck" in self.container.name or (self.folder / "no_daemon").exists():
            raise OSError("no daemon")
        while (self.folder / "slow").exists():
            (self.folder / "stopping").touch()
            await asyncio.sleep(0.01)
        if self.container.exists():
            self.container.rmdir()
            with (self.folder / "stopped").open("a") as file:
                print(self.made_with, file=file)
    async def run(self, command):
        if command[0] == "down":
            return await Environment.stop(self, command)
        if (self.folder / "hanging_up").exists():
            up = await asyncio.create_subprocess_exec("sleep", "600")
            (self.folder / "up").write_text(f"{up.pid}")
            await up.wait()
        await Environment.start(self)
    async def start_by_compose(self):
        await self._run_docker_compose_command(["up"])
    async def stop_by_compose(self, delete):
        # Harbor only logs the error.
        try:
            await self._run_docker_compose_command(["down", "--volumes"])
        except Exception:
            pass
class EnvironmentFactory:
    @classmethod
    def create_environment_from_config(cls, *, config, session_id, trial_paths, **made_with):
        return Environment(session_id, trial_paths, config.kwargs, **made_with)
    @staticmethod
    def get_environment_class(kind):
        compose = ("podman-compose", "--in-pod=false")
        return SimpleNamespace(runtime=lambda: SimpleNamespace(compose=compose))
    @staticmethod
    def run_preflight(kind, import_path, kwargs):
        if kind == "docker":
            raise SystemExit("Docker is not installed or not on PATH.")
""",
    "agents/factory.py": """
from harbor.agents.installed.base import BaseInstalledAgent as Installed
class AgentFactory:
    @staticmethod
    def get_agent_class_from_config(config):
        if vars(config).get("name") == "claude-code":
            return Installed
        return type("Agent", (), {"MODEL_CONNECTION": None if vars(config).get("name") == "oracle" else object()})
""",
    "agents/installed/base.py": """
class BaseInstalledAgent:
    MODEL_CONNECTION = object()
""",
    "trial/trial.py": """
import asyncio, json, os, pathlib
from types import SimpleNamespace as Space
from harbor.environments.factory import EnvironmentFactory
from harbor.models.task import config as task
class Trial:
    @classmethod
    async def create(cls, config):
        trial = cls()
        trial.config = config
        if pathlib.Path(config.task["path"], "task.toml").read_text() == "no-network":
            raise ValueError("network_mode='no-network' is not supported")
        return trial
    async def run(self):
        config = self.config
        folder = pathlib.Path(config.trials_dir, config.trial_name)
        folder.mkdir(parents=True)
        (folder / "trajectory.json").write_text(json.dumps(config.agent | {"key": os.environ["OPENAI_API_KEY"]}))
        outcome = json.loads(pathlib.Path(config.task["path"], "outcome").read_text())
        session = f"{config.trial_name}__env" + ("-stuck" if outcome == "stuck" else "")
        environment = EnvironmentFactory.create_environment_from_config(
            config=config.environment,
            session_id=session,
            trial_paths=folder,
            # As those of a verifier with an environment of its own.
            environment_dir=pathlib.Path(config.task["path"], "tests"),
            environment_name="task",
            task_env_config=task.EnvironmentConfig(cpus=2),
            network_policy=task.NetworkPolicy(network_mode="no-network"),
            phase_network_policies=[],
        )
        is_late = outcome in ("error", {"reward": 0.25})
        errors = [Space(exception_type="AgentTimeoutError", exception_message="late")] if is_late else []
        try:
            await environment.start()
            if outcome in ("hangs", "stuck"):
                (folder / "pid").write_text(str(os.getpid()))
                await asyncio.Event().wait()
        finally:
            # As in Harbor.
            try:
                await asyncio.shield(environment.stop(delete=True))
            except asyncio.CancelledError:
                (folder.parent.parent / "cancelled").touch()
            except Exception as error:
                errors.append(Space(exception_type=type(error).__name__, exception_message=str(error)))
        verdict = None if outcome == "error" else Space(rewards=outcome)
        return Space(recorded_exceptions=lambda: errors, verifier_result=verdict)
""",
}
OUTCOMES = (
    {"reward": 0.5}, {"passed": 1}, {"a": 1, "b": 0}, {"reward": float("nan")}, None, "error", {"reward": 0.25},
    {"reward": 10**400},
)  # fmt: skip


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of tasks with these outcomes, and a library `harbor` that the children find."""
    for file, text in LIBRARY.items():
        path = tmp_path / "library/harbor" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for number, outcome in enumerate(OUTCOMES):
        folder = tmp_path / f"tasks/{number}"
        (folder / "tests").mkdir(parents=True)
        (folder / "task.toml").touch()
        (folder / "tests/test.sh").touch()
        (folder / "outcome").write_text(json.dumps(outcome))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "library"))
    monkeypatch.chdir(tmp_path)
    check_installed.cache_clear()
    yield tmp_path / "tasks"
    check_installed.cache_clear()


async def test_a_trial_gives_its_verifier_s_reward_and_keeps_its_trajectory(
    tasks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(task: int) -> float:
        agent = Harbor("tasks", agent="my:Agent", environment="my:Environment", agent_kwargs={"depth": 2})
        return await agent.run({"index": task, "record": {}}, "http://endpoint/v1", "secret")

    try:
        rewards = await asyncio.gather(*map(play, range(len(OUTCOMES))), return_exceptions=True)
    finally:
        await close_shared()
    # The verifier judged the last one although its agent was late, which the log says.
    assert rewards[:2] == [0.5, 1.0] and rewards[6] == 0.25
    assert isinstance(rewards[7], ForeignError) and "not a finite number" in str(rewards[7])
    assert "AgentTimeoutError: late" in caplog.text
    for reward, reason in zip(
        rewards[2:6],
        ("none is named reward", "Out of range float", "gave no reward", "AgentTimeoutError: late"),
        strict=True,
    ):
        assert isinstance(reward, ForeignError) and reason in str(reward)
    trials = [json.loads(path.read_text()) for path in tasks.parent.glob("trials/*/trajectory.json")]
    assert len(trials) == len(OUTCOMES)
    assert [*tasks.parent.glob("containers/*")] == [*tasks.parent.glob("trials/.live/*")] == []
    assert trials[0] == {
        "import_path": "my:Agent", "kwargs": {"depth": 2}, "model_name": "openai/policy",
        "base_url": "http://endpoint/v1", "model_api_key_name": "OPENAI_API_KEY", "key": "secret",
    }  # fmt: skip


async def begin_trial(tasks: Path, outcome: str) -> tuple[asyncio.Task[float], int]:
    """Begin a trial that never ends. Return it with its process once its container runs."""
    (tasks / "0/outcome").write_text(json.dumps(outcome))
    agent = Harbor("tasks", agent="my:Agent", environment="my:Environment")
    running = asyncio.create_task(agent.run({"index": 0, "record": {}}, "http://endpoint/v1", "secret"))
    while not (files := [path for path in tasks.parent.glob("trials/*/pid") if path.read_text()]):
        assert not running.done(), running.exception()
        await asyncio.sleep(0.02)
    [file] = files
    return running, int(file.read_text())


@pytest.mark.parametrize("ends", ["cancelled", "closed"])
async def test_a_trial_that_is_ended_stops_its_container(tasks: Path, ends: str) -> None:
    try:
        running, _ = await begin_trial(tasks, "hangs")
        [container] = tasks.parent.glob("containers/*")
        if ends == "cancelled":
            running.cancel()
            while container.exists():
                await asyncio.sleep(0.02)
    finally:
        await close_shared()
    await asyncio.gather(running, return_exceptions=True)
    assert [*tasks.parent.glob("containers/*")] == [*tasks.parent.glob("trials/.live/*")] == []


async def test_a_trial_that_is_cancelled_during_compose_up_ends_it_before_down(tasks: Path) -> None:
    (tasks.parent / "hanging_up").touch()
    (tasks.parent / "slow").touch()
    kwargs = {"compose": True}
    agent = Harbor("tasks", agent="my:Agent", environment="my:Environment", environment_kwargs=kwargs)
    running = asyncio.create_task(agent.run({"index": 0, "record": {}}, "http://endpoint/v1", "secret"))
    up, stopping = tasks.parent / "up", tasks.parent / "stopping"
    try:
        while not (up.exists() and up.read_text()):
            assert not running.done(), running.exception()
            await asyncio.sleep(0.02)
        running.cancel()
        while not stopping.exists():
            await asyncio.sleep(0.02)
        assert not is_alive(int(up.read_text()))
        (tasks.parent / "slow").unlink()
    finally:
        await close_shared()


DRIVER = """
import asyncio
from megarl.environments.harbor import Harbor
agent = Harbor("tasks", agent="my:Agent", environment="my:Environment")
async def make_trials():
    problems = [{"index": index, "record": {}} for index in range(2)]
    await asyncio.gather(*(agent.run(problem, "http://endpoint/v1", "secret") for problem in problems))
asyncio.run(make_trials())
"""


def test_a_trial_stops_its_container_after_a_kill_of_the_driver(tasks: Path) -> None:
    """Also after the end of another trial, which cannot be reported to the driver."""
    (tasks / "0/outcome").write_text(json.dumps("stuck"))
    (tasks / "1/outcome").write_text(json.dumps("hangs"))
    folder = tasks.parent
    (folder / "slow").touch()
    with subprocess.Popen([sys.executable, "-c", DRIVER]) as driver:
        wait_until(lambda: driver.poll() is not None or len([*folder.glob("trials/*/pid")]) == 2, seconds=120)
        assert driver.poll() is None
        [pid] = [path.read_text() for path in folder.glob("trials/0-*/pid")]
        [container] = folder.glob("containers/1-*")
        driver.kill()
    wait_until(lambda: not Path("/proc", pid).exists() and (folder / "stopping").exists(), seconds=60)
    # Time for the parent of both to end, if it could not report the first one's end.
    time.sleep(1.0)
    (folder / "slow").unlink()
    wait_until(lambda: not container.exists(), seconds=60)
    wait_until(lambda: len([*folder.glob("trials/.live/*")]) == 1, seconds=60)


@pytest.mark.parametrize("number", ENDING_SIGNALS, ids=lambda number: number.name)
def test_a_trial_stops_its_container_after_a_signal_to_all_processes(tasks: Path, number: signal.Signals) -> None:
    (tasks / "0/outcome").write_text(json.dumps("hangs"))
    (tasks / "1/outcome").write_text(json.dumps("hangs"))
    folder = tasks.parent
    # Under nohup SIGHUP is ignored, and the driver would inherit that. It does not inherit a function.
    is_ignored = signal.getsignal(number) == signal.SIG_IGN
    if is_ignored:
        signal.signal(number, lambda *_: None)
    try:
        process = subprocess.Popen([sys.executable, "-c", DRIVER])
    finally:
        if is_ignored:
            signal.signal(number, signal.SIG_IGN)
    with process as driver:
        wait_until(lambda: driver.poll() is not None or len([*folder.glob("trials/*/pid")]) == 2, seconds=120)
        assert driver.poll() is None and len([*folder.glob("containers/*")]) == 2
        for pid in [driver.pid, *descendants(driver.pid)]:
            # A process may end because its parent, signalled before it, has ended.
            with suppress(ProcessLookupError):
                send_signal(pid, number)
    wait_until(lambda: not [*folder.glob("containers/*")], seconds=60)
    wait_until(lambda: not [*folder.glob("trials/.live/*")], seconds=60)


@pytest.mark.parametrize("outcome", ["hangs", "stuck"])
async def test_the_container_of_a_killed_trial_is_stopped_by_the_next(
    tasks: Path, outcome: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An environment that does not stop is reported, and the next trial tries again."""
    try:
        killed, pid = await begin_trial(tasks, outcome)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ForeignError, match="ended with -9"):
            await killed
        [container] = tasks.parent.glob("containers/*")
        agent = Harbor("tasks", agent="my:Agent", environment="my:Environment")
        for _ in range(2):
            assert await agent.run({"index": 1, "record": {}}, "http://endpoint/v1", "secret") == 1.0
    finally:
        await close_shared()
    is_stuck = outcome == "stuck"
    if not is_stuck:
        [first, *_] = (tasks.parent / "stopped").read_text().splitlines()
        # Not those of the task: a verifier with an environment of its own has other files and another network.
        assert all(part in first for part in ("tasks/0/tests'", "cpus=2", "network_mode='no-network'"))
    assert container.exists() == is_stuck and len([*tasks.parent.glob("trials/.live/*")]) == is_stuck
    assert ("no daemon" in caplog.text) == is_stuck


@pytest.mark.parametrize("kwargs", [{}, {"compose": True}], ids=["raises", "logs"])
async def test_an_environment_whose_stop_fails_is_stopped_by_the_next_trial(
    tasks: Path, kwargs: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    agent = Harbor("tasks", agent="my:Agent", environment="my:Environment", environment_kwargs=kwargs)
    no_daemon = tasks.parent / "no_daemon"
    no_daemon.touch()
    try:
        for _ in range(2):
            assert await agent.run({"index": 0, "record": {}}, "http://endpoint/v1", "secret") == 0.5
        left = {*tasks.parent.glob("containers/*")}
        assert len(left) == len([*tasks.parent.glob("trials/.live/*")]) == 2
        assert "no daemon" in caplog.text
        no_daemon.unlink()
        assert await agent.run({"index": 1, "record": {}}, "http://endpoint/v1", "secret") == 1.0
    finally:
        await close_shared()
    assert [*tasks.parent.glob("containers/*")] == [*tasks.parent.glob("trials/.live/*")] == []


async def test_a_trial_that_is_cancelled_while_its_container_stops_waits_for_it(tasks: Path) -> None:
    slow = tasks.parent / "slow"
    slow.touch()
    agent = Harbor("tasks", agent="my:Agent", environment="my:Environment")
    running = asyncio.create_task(agent.run({"index": 0, "record": {}}, "http://endpoint/v1", "secret"))
    try:
        while not (tasks.parent / "stopping").exists():
            assert not running.done(), running.exception()
            await asyncio.sleep(0.02)
        [container] = tasks.parent.glob("containers/*")
        running.cancel()
        while not (tasks.parent / "cancelled").exists():
            await asyncio.sleep(0.02)
        slow.unlink()
    finally:
        await close_shared()
    assert not container.exists() and not [*tasks.parent.glob("trials/.live/*")]


async def test_further_signals_do_not_cancel_the_stop_of_a_trial_s_container(tasks: Path) -> None:
    slow, stopping = tasks.parent / "slow", tasks.parent / "stopping"
    slow.touch()
    try:
        running, pid = await begin_trial(tasks, "hangs")
        [container] = tasks.parent.glob("containers/*")
        for _ in range(6):
            os.kill(pid, signal.SIGTERM)
            while not stopping.exists():
                assert not running.done(), running.exception()
                await asyncio.sleep(0.02)
            stopping.unlink()
        slow.unlink()
        await asyncio.gather(running, return_exceptions=True)
    finally:
        await close_shared()
    assert not container.exists() and not [*tasks.parent.glob("trials/.live/*")]


class Trials:
    """The adapter without the library, on a disk whose locks are those of NFS or missing."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, has_locks: bool = True) -> None:
        self.library: Any = object.__new__(Library)
        self.library.settings = {"trials_dir": str(folder), "environment": {}}
        self.library.stop_environment = self.stop_environment
        self.stopped: list[str] = []
        flock = fcntl.flock

        def flock_on_disk(file: Any, operation: int) -> None:
            if not has_locks:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
            # An exclusive lock needs a file open for writing: flock(2).
            if not file.writable():
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            flock(file, operation)

        monkeypatch.setattr(fcntl, "flock", flock_on_disk)

    async def stop_environment(self, trial_name: str, settings: Any, session: str, values: dict[str, Any]) -> None:
        self.stopped.append(session)


async def test_a_damaged_file_of_a_killed_trial_stops_no_later_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = Trials(tmp_path, monkeypatch)
    with trials.library.live_trial("lives") as live_trial:
        live_trial.record("stopped", {})
        live_trial.record("stopped", None)
        live_trial.record("living", {})
        facts = (tmp_path / LIVE / "lives").read_bytes()
        for name, content in {"empty": b"", "cut": facts[:-4], "killed": facts.replace(b"living", b"dead")}.items():
            (tmp_path / LIVE / name).write_bytes(content)
        live_trial.record("living", None)
        errors = await trials.library.stop_leftovers()
        assert trials.stopped == ["dead"] and os.listdir(tmp_path / LIVE) == ["lives"]
    assert len(errors) == 2
    for name in ("cut", "empty"):
        assert any(f"trial {name} is damaged" in error and "Stop the environment" in error for error in errors)


def test_a_disk_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(tmp_path, monkeypatch, has_locks=False)
    refused = pytest.raises(RuntimeError, match=rf"trials = {tmp_path}: its disk has no file locks \(.*\); choose")
    with refused, trials.library.live_trial("name"):
        pass
    assert not [*(tmp_path / LIVE).iterdir()]


async def test_a_trial_that_is_cancelled_while_its_process_is_closed_is_cancelled(
    tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[LibraryProcess] = []
    start = LibraryProcess.start

    async def start_noted(settings: Any) -> LibraryProcess:
        processes.append(await start(settings))
        return processes[-1]

    monkeypatch.setattr(LibraryProcess, "start", start_noted)
    late: list[asyncio.Task[Any]] = []
    try:
        running, _ = await begin_trial(tasks, "hangs")
        [process] = processes
        write_eof = process._writer.write_eof

        def write_eof_and_cancel() -> None:
            write_eof()
            running.cancel()
            late.append(asyncio.create_task(process.request({})))

        monkeypatch.setattr(process._writer, "write_eof", write_eof_and_cancel)
    finally:
        await close_shared()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(ChildError, match="ended"):
        await late[0]


def test_what_cannot_be_tried_is_refused(tasks: Path) -> None:
    Harbor("tasks", agent="oracle", environment="my:Environment").check()
    with pytest.raises(ConfigError, match="Docker is not installed"):
        Harbor("tasks", agent="oracle").check()
    for agent, environment in (("claude-code", "modal"), ("claude-code", "singularity"), ("terminus-2", "modal")):
        trial = Harbor("tasks", agent=agent, environment=environment)
        trial.check()
        assert trial.runs_elsewhere == (agent == "claude-code" and environment == "modal")
    with pytest.raises(ConfigError, match="podman-compose only"):
        Harbor("tasks", agent="oracle", environment="podman").check()
    (tasks / "5/task.toml").write_text("no-network")
    with pytest.raises(ConfigError, match=r"5/task\.toml: environment = my:Environment cannot run .*no-network"):
        Harbor("tasks", agent="oracle", environment="my:Environment").check()
    (tasks / "5/task.toml").write_text("separate verifier")
    with pytest.raises(ConfigError, match=r"5/task\.toml: environment = my:Environment .*no-network.*5/tests"):
        Harbor("tasks", agent="oracle", environment="my:Environment").check()
    (tasks / "5/task.toml").write_text("")
    with pytest.raises(ConfigError, match="less than two tasks"):
        Harbor("gone", agent="oracle", environment="my:Environment").check()
    with pytest.raises(ConfigError, match=r"trial\.timeouts: Harbor's TrialConfig has no such field"):
        Harbor("tasks", agent="oracle", environment="my:Environment", trial={"timeouts": 3}).check()
    (tasks / "3/tests/test.sh").unlink()
    with pytest.raises(ConfigError, match=r"3/tests/test\.sh"):
        Harbor("tasks", agent="oracle", environment="my:Environment").check()
    with pytest.raises(ValueError, match=r"trial\.agent"):
        Harbor("tasks", agent="oracle", trial={"agent": {}})
    with pytest.raises(ValueError, match="heldout"):
        Harbor("tasks", agent="oracle", heldout=1.0)


def test_it_is_an_agent() -> None:
    assert find_environment("harbor") is Harbor and is_agent("harbor")
