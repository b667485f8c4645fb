"""The Python tool: what the policy is shown, and what its calls get."""

from __future__ import annotations

import asyncio

import pytest

from megarl.environments import Turn, environment_maker, num_processes, with_sandbox
from megarl.environments.python import Python, _sandbox
from megarl.types import ConfigError, Problem, ToolCall


@pytest.fixture(autouse=True, scope="module")
def no_sandbox_is_left():
    yield
    # Its process would end it; this one goes on.
    for sandbox in SANDBOXES:
        sandbox.close()
    _sandbox.cache_clear()


SANDBOXES: list = []


def replies(*programs: str, **settings):
    environment = environment_maker("python", with_sandbox("python", settings, {"timeout_seconds": 0.9}))()
    calls = tuple(ToolCall(str(place), "python", {"code": program}) for place, program in enumerate(programs))

    async def play():
        await environment.reset(Problem(0, ({"role": "user", "content": "?"},), (), ""), 0)
        return await environment.step(Turn(0, "", "stop", calls=calls))

    step = asyncio.run(play())
    import json
    from dataclasses import asdict

    SANDBOXES.append(_sandbox(json.dumps(asdict(environment._settings))))
    return [message["content"] for message in step.messages], step.metrics


def test_programs_reply_with_what_they_print():
    found, metrics = replies("print(6 * 7)", "x = 1", "print(x)", "while True: pass", "import os\nos.fork()")
    assert found[:2] == ["42\n", "(it printed nothing)"]
    assert found[2].startswith("error: the program failed") and "NameError" in found[2]
    assert found[3] == "error: the program took more than 0.9 seconds"
    assert "PermissionError" in found[4]
    assert metrics["tools/python/calls"] == 5 and metrics["tools/python/errors"] == 3


def test_the_policy_is_shown_one_parameter():
    [tool] = Python(sandbox={"packages": []}).tools
    assert tool["function"]["name"] == "python"
    assert tool["function"]["parameters"]["required"] == ["code"]


def test_it_runs_in_processes_and_takes_the_recipes_sandbox():
    assert num_processes("python", None) > 0
    assert with_sandbox("python", {}, {"memory_mib": 64}) == {"sandbox": {"memory_mib": 64}}
    assert with_sandbox("python", {"sandbox": {}}, {"memory_mib": 64}) == {"sandbox": {}}
    assert with_sandbox("calculator", {}, {"memory_mib": 64}) == {}


def test_it_is_checked_before_a_start():
    Python().check()
    with pytest.raises(ConfigError, match=r"sandbox\.url"):
        Python(sandbox={"url": "nowhere"}).check()
