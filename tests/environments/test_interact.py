"""RL2's `interact(messages)` as an environment: what it is told, what its answers do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.environments import Start, Step, Turn, environment_maker, find_environment
from megarl.types import ConfigError, Problem, ToolCall

FILE = """
TOOL = {"name": "double", "description": "Twice a number.", "parameters": {"type": "object", "properties": {}}}
seen = []

def interact(messages):
    seen.append([(message["role"], message["content"]) for message in messages])
    last = messages.pop()["content"]
    return [{"role": "tool", "content": str(2 * int(last.split("|")[1]))}] if "|" in last else []

async def with_answer(messages, answer, *, reply="no"):
    return [{"role": "user", "content": f"{reply}, {answer}"}]

def gives_text(messages):
    return "more"

def needs_more(messages, judge):
    return []

def reward(completion_text):
    return 0.0
"""
PROBLEM = Problem(0, ({"role": "user", "content": "2 x 3?"},), (1,), "6", {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "env.py").write_text(FILE)
    return tmp_path


async def played(name: str, *turns: Turn, **settings: Any) -> tuple[Start, list[Step]]:
    environment = environment_maker(name, settings)()
    start = await environment.reset(PROBLEM, 0)
    steps = [await environment.step(turn) for turn in turns]
    await environment.close()
    return start, steps


async def test_the_function_answers_until_it_has_nothing_to_say(folder: Path) -> None:
    call = Turn(0, "", "stop", calls=(ToolCall("a", "double", {}),), completion="Call |3| now")
    start, steps = await played(f"{folder}/env.py:interact", call, Turn(1, "6", "stop", completion="6"))
    assert start.messages == PROBLEM.messages
    assert [tool["function"]["name"] for tool in start.tools] == ["double"]
    assert steps == [Step(({"role": "tool", "content": "6"},)), Step(done=True)]
    factory = find_environment(f"{folder}/env.py:interact")
    seen = factory.args[0].__globals__["seen"]  # type: ignore[attr-defined]
    assert seen[1] == [("user", "2 x 3?"), ("assistant", "Call |3| now"), ("tool", "6"), ("assistant", "6")]


async def test_it_is_not_called_after_the_last_turn(folder: Path) -> None:
    _, steps = await played(f"{folder}/env.py:interact", Turn(0, "", "stop", completion="|3|", is_last=True))
    assert steps == [Step(done=True)]


async def test_it_is_told_what_its_parameters_name_and_settings(folder: Path) -> None:
    _, steps = await played(f"{folder}/env.py:with_answer", Turn(0, "7", "stop", completion="7"), reply="Wrong")
    assert steps == [Step(({"role": "user", "content": "Wrong, 6"},))]


async def test_an_answer_that_is_no_list_fails_the_attempt(folder: Path) -> None:
    with pytest.raises(TypeError, match="not a list of messages"):
        await played(f"{folder}/env.py:gives_text", Turn(0, "7", "stop", completion="7"))


def test_functions_that_cannot_be_called_are_refused(folder: Path) -> None:
    with pytest.raises(TypeError, match="judge"):
        environment_maker(f"{folder}/env.py:needs_more", {})()
    with pytest.raises(TypeError, match="temperature"):
        environment_maker(f"{folder}/env.py:interact", {"temperature": 1})()
    with pytest.raises(ConfigError, match=r"interact\(messages\)"):
        environment_maker(f"{folder}/env.py:reward", {})
