"""Tasksets of verifiers in a process that forks for each task: a stand-in of the library, which may do anything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.environments import find_environment, is_agent
from megarl.environments.libraries.library_process import ChildError, ForeignError, check_installed
from megarl.environments.libraries.library_tasks import choose_task
from megarl.environments.shared import close_shared
from megarl.environments.verifiers import Verifiers
from megarl.types import ConfigError

V1 = """
from types import SimpleNamespace as EvalClientConfig
ModelContext = SamplingConfig = EvalClientConfig
"""
LOADERS = """
import asyncio, contextlib, os, time
from types import SimpleNamespace as Space

class Environment:
    def __init__(self, config):
        if config["taskset"]["id"] != "toy":
            raise ModuleNotFoundError(f"taskset {config['taskset']['id']!r} not found")
        self.taskset = ({"number": number} for number in range(config["taskset"]["size"]))

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, context):
        assert context.client.base_url == "http://endpoint/v1" and os.environ[context.client.api_key_var] == "secret"
        kind = task["number"]
        if kind == 1:
            return Space(ok=False, errors=[], traces=[Space(errors=[Space(type="HarnessError", message="no tools")])])
        if kind == 2:
            os._exit(5)
        if kind == 3:
            open("hanging", "w").write(str(os.getpid()))
            time.sleep(100)
        if kind == 4:
            print("noise on standard output", flush=True)
            os.kill(os.getppid(), 9)
            time.sleep(100)
        if kind == 5:
            for name in os.listdir("/proc/self/fd"):
                place = f"/proc/self/fd/{name}"
                if os.path.exists(place) and os.readlink(place).startswith("socket"):
                    os.write(int(name), b"not json\\n")
            time.sleep(100)
        print("noise on standard output")
        return Space(ok=True, errors=[], traces=[Space(errors=[], reward=kind / 10)])

def resolve_env_config(config):
    return config

load_environment = Environment
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A library `verifiers` that the children find."""
    for file, text in {"__init__.py": "", "v1/__init__.py": V1, "v1/utils/loaders.py": LOADERS}.items():
        path = tmp_path / "verifiers" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    check_installed.cache_clear()
    yield
    check_installed.cache_clear()


async def played(play: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await asyncio.wait_for(play(), 60)
    finally:
        await close_shared()


async def reward(task: int) -> float:
    agent = Verifiers("toy", config={"size": 10})
    return await agent.run({"index": task, "record": {}}, "http://endpoint/v1", "secret")


async def test_tasks_are_played_at_once_and_fail_alone(toy: None) -> None:
    async def play() -> None:
        found = await asyncio.gather(*map(reward, (0, 1, 2, 7)), return_exceptions=True)
        assert (found[0], found[3]) == (0.0, 0.7)
        assert isinstance(found[1], ForeignError) and "HarnessError: no tools" in str(found[1])
        assert isinstance(found[2], ForeignError) and "ended with 5" in str(found[2])

    await played(play)


async def test_a_task_that_is_given_up_is_killed(toy: None, tmp_path: Path) -> None:
    async def play() -> None:
        hanging = asyncio.create_task(reward(3))
        while not (tmp_path / "hanging").exists() or not (tmp_path / "hanging").read_text():
            await asyncio.sleep(0.01)
        pid = (tmp_path / "hanging").read_text()
        hanging.cancel()
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.01)
        assert await reward(7) == 0.7

    await played(play)


async def test_a_process_that_died_is_started_again(toy: None) -> None:
    async def play() -> None:
        with pytest.raises(ChildError, match="noise on standard output"):
            await reward(4)
        assert await reward(7) == 0.7

    await played(play)


async def test_a_process_with_an_invalid_answer_is_replaced(toy: None) -> None:
    async def play() -> None:
        outcomes = await asyncio.gather(reward(5), reward(3), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ChildError, ChildError]
        assert "is not valid" in str(outcomes[1])
        assert await reward(7) == 0.7

    await played(play)


def test_the_output_of_a_process_that_ends_at_its_start_is_shown(toy: None, tmp_path: Path) -> None:
    ends = "import os, sys\nif 'child.py' in str(sys.orig_argv): os.write(2, b'no licence'), os._exit(3)\n"
    (tmp_path / "sitecustomize.py").write_text(ends)
    with pytest.raises(ConfigError, match="no licence"):
        Verifiers("toy", config={"size": 2}).check()


def test_what_cannot_be_loaded_is_refused(toy: None) -> None:
    with pytest.raises(ConfigError, match="taskset 'gone' not found"):
        Verifiers("gone").check()
    with pytest.raises(ConfigError, match="less than two tasks"):
        Verifiers("toy", config={"size": 1}).check()
    Verifiers("toy", config={"size": 2}).check()
    with pytest.raises(ValueError, match="heldout"):
        Verifiers("toy", heldout=1.0)


def test_no_task_is_for_training_and_for_validation() -> None:
    train = {choose_task(index, "train", 50, 0.2) for index in range(1000)}
    validation = {choose_task(10**9 + index, "validation", 50, 0.2) for index in range(1000)}
    assert train == set(range(40)) and validation == set(range(40, 50))
    assert {choose_task(index, None, 50, 0.2) for index in range(1000)} == set(range(50))


def test_agents_are_told_from_environments() -> None:
    assert find_environment("verifiers") is Verifiers
    assert is_agent("verifiers") and is_agent("command")
    assert not is_agent("single_turn") and not is_agent("calculator")
