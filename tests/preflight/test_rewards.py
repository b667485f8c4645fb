"""Reward functions are imported and called once before a start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import Recipe
from megarl.preflight import check_rewards
from megarl.types import ConfigError

OWN_REWARDS = """
import time
from megarl.types import Reward


def right(completion_text, answer, correct_score):
    assert completion_text == answer == "3"
    return Reward(correct_score, True, True)


def of_trl(completions, **kwargs):
    return [0.0 for _ in completions]


def a_list(**kwargs):
    return [0.0] * (kwargs["num_tokens"] > 0 and "messages" in kwargs["record"])


def raises(completion_text, answer, correct_score):
    raise ValueError("no such grader")


def hangs(completion_text, answer, correct_score):
    time.sleep(600)


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
            "of_trl", ["its parameter completions is not known. Did you mean completion_text?"], id="signature of TRL"
        ),
        pytest.param("a_list", ["returned [0.0], not a number, None or a megarl.types.Reward"], id="a list"),
        pytest.param("raises", ["first record", "gold answer '3'", "ValueError: no such grader"], id="raises"),
        pytest.param("hangs", ["took more than reward.wall_timeout_seconds = 0.5 by the clock"], id="hangs"),
        pytest.param("huge", ["returned a score outside -1e+06 to 1e+06"], id="1e300"),
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
