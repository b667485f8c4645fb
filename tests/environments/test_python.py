"""The Python tool: what the policy is shown, and what its calls get, here and in an environment's process."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from megarl.environments import EnvironmentUnavailableError, Turn, environment_maker, num_processes, with_sandbox
from megarl.environments.environment_pool import process_settings
from megarl.environments.python import Python, _start_shared_sandbox
from megarl.processes.process_tree import descendants
from megarl.processes.server_process import ServerProcess
from megarl.sandbox.sandbox import Sandbox
from megarl.types import ConfigError, Problem, ToolCall

PROBLEM = Problem(0, ({"role": "user", "content": "?"},), (), "")
SETTINGS = with_sandbox("python", {}, {"timeout_seconds": 0.9, "packages": []})


@pytest.fixture
def environment() -> Iterator[Python]:
    """One whose sandbox ends with the test; else it would with the process."""
    made = environment_maker("python", SETTINGS)()
    assert isinstance(made, Python)
    yield made
    _start_shared_sandbox(json.dumps(asdict(made._settings))).close()
    _start_shared_sandbox.cache_clear()


def turn_of(*programs: str) -> Turn:
    calls = tuple(ToolCall(str(place), "python", {"code": program}) for place, program in enumerate(programs))
    return Turn(0, "", "stop", calls=calls)


async def test_programs_reply_with_what_they_print(environment: Python) -> None:
    programs = ("print(6 * 7)", "x = 1", "print(x)", "while True: pass", "import os\nos.fork()")
    step = await environment.step(turn_of(*programs))
    found = [message["content"] for message in step.messages]
    assert found[:2] == ["42\n", "(it printed nothing)"]
    assert found[2].startswith("error: the program failed") and "NameError" in found[2]
    assert found[3] == "error: the program took more than 0.9 seconds of CPU time"
    assert "PermissionError" in found[4]
    assert step.metrics["tools/python/calls"] == 5 and step.metrics["tools/python/errors"] == 3


async def test_a_program_that_waits_took_too_long_by_the_clock() -> None:
    waits = environment_maker("python", {"sandbox": {"wall_timeout_seconds": 1.0, "packages": []}})()
    assert isinstance(waits, Python)
    try:
        step = await waits.step(turn_of("import time\ntime.sleep(3600)"))
    finally:
        _start_shared_sandbox(json.dumps(asdict(waits._settings))).close()
        _start_shared_sandbox.cache_clear()
    [message] = step.messages
    assert re.fullmatch(r"error: the program took more than [\d.]+ seconds by the clock", message["content"])


async def test_a_sandbox_that_fails_is_no_reply_to_the_policy(
    environment: Python, monkeypatch: pytest.MonkeyPatch
) -> None:
    await environment.reset(PROBLEM, 0)
    sandbox = _start_shared_sandbox(json.dumps(asdict(environment._settings)))
    assert isinstance(sandbox, Sandbox) and sandbox._process is not None
    os.kill(sandbox._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patched, pytest.raises(EnvironmentUnavailableError, match="has not begun"):
        patched.setattr("megarl.sandbox.sandbox._START_SECONDS", 0.1)
        patched.setattr("megarl.sandbox.sandbox._KILL_SECONDS", 0.1)
        await environment.step(turn_of("print(1)"))
    broken = Python(sandbox={"packages": ["nowhere"]})
    with pytest.raises(EnvironmentUnavailableError, match="nowhere"):
        await broken.reset(PROBLEM, 0)


def test_in_a_process_that_takes_the_sandbox_with_it() -> None:
    process = ServerProcess(process_settings("python", SETTINGS, 1.0))
    try:
        process.wait_until_ready()
        process.request({"do": "reset", "problem": asdict(PROBLEM), "seed": 0})
        answer = process.request({"do": "step", "turn": asdict(turn_of("print(sum(range(5)))"))})
        assert [message["content"] for message in answer["value"]["messages"]] == ["10\n"]
        below = list(descendants(process._process.pid))
        assert len(below) == 2, "the environment and its sandbox's spawner"
    finally:
        process.close()
    while any(Path(f"/proc/{pid}").exists() for pid in below):
        time.sleep(0.01)


def test_the_policy_is_shown_one_parameter() -> None:
    [tool] = Python(sandbox={"packages": []}).tools
    assert tool["function"]["name"] == "python"
    assert tool["function"]["parameters"]["required"] == ["code"]


def test_it_runs_in_processes_and_takes_the_recipes_sandbox() -> None:
    assert num_processes("python", None) > 0
    assert with_sandbox("python", {}, {"memory_mib": 64}) == {"sandbox": {"memory_mib": 64}}
    assert with_sandbox("python", {"sandbox": {}}, {"memory_mib": 64}) == {"sandbox": {}}
    assert with_sandbox("calculator", {}, {"memory_mib": 64}) == {}


def test_it_is_checked_before_a_start() -> None:
    Python().check()
    with pytest.raises(ConfigError, match=r"sandbox\.url"):
        Python(sandbox={"url": "nowhere"}).check()
