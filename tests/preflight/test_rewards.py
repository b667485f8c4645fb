"""Reward functions are imported and called once before a start."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.datasets.reward_trials import check_rewards
from megarl.types import ConfigError
from tests.preflight.records import RECORD
from tests.rewards.servers import JudgeServer

OWN_REWARDS = """
import time
from megarl.types import Reward


def right(completion_text, answer, correct_score):
    assert completion_text == answer == "3"
    return Reward(correct_score, True, True)


def a_list(**kwargs):
    return [0.0] * (kwargs["num_tokens"] > 0 and "messages" in kwargs["record"])


def raises(completion_text, answer, correct_score):
    raise ValueError("no such grader")


def hangs(completion_text, answer, correct_score):
    time.sleep(600)


def of_trl(prompts, completions, answer, level, scale, more=None, **columns):
    assert len(level) == 1 and scale == 2
    return [1.0]


def huge(completion_text, answer, correct_score):
    return Reward(1e300, True, True)
"""


@pytest.fixture
def own_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder."""
    (tmp_path / "own_rewards_of_preflight.py").write_text(OWN_REWARDS)
    monkeypatch.chdir(tmp_path)
    return "own_rewards_of_preflight"


@pytest.mark.parametrize(
    ("function", "told"),
    [
        pytest.param(
            "a_list", ["the function returned [0.0]; return a number, None or a megarl.types.Reward"], id="a list"
        ),
        pytest.param("raises", ["first record", "gold answer '3'", "ValueError: no such grader"], id="raises"),
        pytest.param("hangs", ["took more than reward.wall_timeout_seconds = 0.5 by the clock"], id="hangs"),
        pytest.param("huge", ["the function returned a score outside -1e+06 to 1e+06"], id="1e300"),
        pytest.param("rihgt", ["has no function 'rihgt'; did you mean 'right'"], id="no function"),
    ],
)
def test_a_reward_function_that_cannot_work_is_refused(
    recipe: Callable[..., Recipe], own_rewards: str, function: str, told: list[str]
) -> None:
    given = {"functions": [f"{own_rewards}:{function}"], "wall_timeout_seconds": 0.5 if function == "hangs" else 60.0}
    with pytest.raises(ConfigError) as caught:
        check_rewards(recipe(reward=given))
    for words in (f"{own_rewards}:{function}", *told):
        assert words in str(caught.value)
    if not function.startswith("rihgt"):
        assert f"def {function}(completion_text: str, answer: str) -> float" in str(caught.value)


def test_a_later_record_without_a_column_of_a_trl_function_is_named(
    recipe: Callable[..., Recipe], own_rewards: str
) -> None:
    """TRL passes columns of the data by name. Optional parameters and kwargs need none."""
    made = recipe(reward={"functions": [{"name": f"{own_rewards}:of_trl", "kwargs": {"scale": 2}}]})
    lines = [RECORD | {"level": 1}, RECORD | {"level": None}, RECORD]
    Path(made.data.train).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError) as caught:
        check_rewards(made)
    text = str(caught.value)
    assert f"{made.data.train}, line 3: reward.functions: '{own_rewards}:of_trl' cannot score this record: " in text
    assert "the record has no field 'level'" in text and "gives no reward" not in text
    Path(made.data.train).write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    check_rewards(made)


def test_all_reward_functions_at_fault_are_told_at_once(
    recipe: Callable[..., Recipe], own_rewards: str, tmp_path: Path
) -> None:
    (tmp_path / "ends_on_import_of_preflight.py").write_text("import os\nprint('goodbye', flush=True)\nos._exit(4)\n")
    functions = ["absent_module:f", f"{own_rewards}:right", "ends_on_import_of_preflight:f"]
    with pytest.raises(ConfigError) as caught:
        check_rewards(recipe(reward={"functions": functions}))
    title, *lines = str(caught.value).splitlines()
    assert title == "rewards of recipe small: 2 errors"
    assert "cannot import absent_module: ModuleNotFoundError" in lines[0]
    assert "ended with exit code 4" in lines[1] and "goodbye" in lines[2]


def test_reward_functions_that_work_are_accepted(recipe: Callable[..., Recipe], own_rewards: str) -> None:
    check_rewards(recipe(reward={"functions": ["boxed", f"{own_rewards}:right"]}))
    check_rewards(recipe(loop="sft", reward={"functions": ["absent_module:f"]}))


@pytest.mark.parametrize(
    ("function", "bad", "told"),
    [
        pytest.param("gsm8k", {"gt_answer": "three"}, "the gold answer 'three' is neither a number", id="gsm8k"),
        pytest.param(
            {"name": "length", "kwargs": {"field": "budget"}},
            {"budget": None},
            "the target length is None",
            id="length",
        ),
        pytest.param({"name": "boxed", "needs": ["a.b"]}, {"a": {"c": 1}}, "the record has no field 'a.b'", id="needs"),
        pytest.param("code", {"test_cases": None}, "no field public_test_cases or private_test_cases", id="code"),
        pytest.param("judge", {"a": {"c": 1}}, "no field 'a.b' for a placeholder of the judge's prompt", id="judge"),
        pytest.param(
            "multiple_choice", {"gt_answer": "77"}, "not one of the record's 26 choices", id="multiple choice"
        ),
        pytest.param("reasoning_gym.gcd", {"metadata": None}, "has no field metadata", id="a task of reasoning-gym"),
        pytest.param("math_competition", {"gt_answer": [None]}, "the gold answer is [None]", id="competition"),
        pytest.param("math_verify", {"gt_answer": {"x": 1}}, "the gold answer is {'x': 1}", id="math-verify"),
        pytest.param("reasoning_gym", {"metadata": {}}, "no field metadata.source_dataset", id="reasoning-gym"),
    ],
)
def test_the_first_line_that_lacks_a_field_is_named(
    recipe: Callable[..., Recipe], tmp_path: Path, function: Any, bad: dict[str, Any], told: str
) -> None:
    good = {
        "a": {"b": 1}, "budget": 9, "metadata": {"source_dataset": "gcd"},
        "test_cases": {"inputs": [1], "outputs": [2]},
        "gt_answer": "A" if function == "multiple_choice" else "3",
    }  # fmt: skip
    (tmp_path / "prompt.txt").write_text("{{completion}} {{record.a.b}}")
    if function == "judge":
        kwargs = {"url": "http://127.0.0.1:9", "model": "m", "prompt": str(tmp_path / "prompt.txt")}
        function = {"name": "judge", "kwargs": kwargs}
    made = recipe(reward={"functions": [function]})
    records = [RECORD | good, RECORD | good, RECORD | good | bad, RECORD | good | bad]
    Path(made.data.train).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    with pytest.raises(ConfigError) as caught:
        check_rewards(made)
    title, line = str(caught.value).splitlines()
    assert title.endswith("1 error") and line.strip().startswith(f"{made.data.train}, line 3: reward.functions: ")
    assert told in line


async def test_a_server_is_asked_once(recipe: Callable[..., Recipe]) -> None:
    async def ask(server: JudgeServer) -> None:
        async with server.serving() as url:
            kwargs = {"url": f"{url}/v1", "model": "m", "max_tries": 1, "system": "s", "pattern": r"(\w+)\W*$"}
            made = recipe(reward={"functions": [{"name": "judge", "kwargs": kwargs}]})
            await asyncio.to_thread(check_rewards, made)

    with pytest.raises(ConfigError, match=r"'judge' gives no score for the first record.*HTTP 500.*start the server"):
        await ask(JudgeServer({None: [500]}))
    server = JudgeServer()
    await ask(server)
    [asked] = server.asked
    assert "1 + 2" in asked["messages"][-1]["content"]


def test_a_server_is_not_asked_where_the_run_will_not_be(recipe: Callable[..., Recipe]) -> None:
    kwargs = {"url": "http://127.0.0.1:9/v1", "model": "m"}
    check_rewards(recipe(reward={"functions": [{"name": "judge", "kwargs": kwargs}]}), is_start=False)
    with pytest.raises(ConfigError, match=r"kwargs\.modle"):
        wrong = {"name": "judge", "kwargs": kwargs | {"modle": "m"}}
        check_rewards(recipe(reward={"functions": [wrong]}), is_start=False)


async def test_a_judge_that_says_nothing_of_use_is_refused_in_spite_of_a_score_for_that(
    recipe: Callable[..., Recipe],
) -> None:
    with pytest.raises(ConfigError, match=r"the last of 3 calls: the judge's answer has no verdict"):
        async with JudgeServer({None: ["nonsense"] * 3}).serving() as url:
            kwargs = {"url": f"{url}/v1", "model": "m", "pause_seconds": 0.0, "parse_error_score": 0.0}
            made = recipe(reward={"functions": [{"name": "judge", "kwargs": kwargs}]})
            await asyncio.to_thread(check_rewards, made)


def test_a_server_that_is_not_there_is_named(recipe: Callable[..., Recipe]) -> None:
    kwargs = {"url": "http://127.0.0.1:9/v1", "max_tries": 2, "pause_seconds": 0.0}
    with pytest.raises(ConfigError, match=r"'remote' gives no score .*the last of 2 calls: Client"):
        check_rewards(recipe(reward={"functions": [{"name": "remote", "kwargs": kwargs}]}))
    with pytest.raises(ConfigError, match=r"'judge': kwargs\.model: Field required"):
        check_rewards(recipe(reward={"functions": [{"name": "judge", "kwargs": kwargs}]}))
