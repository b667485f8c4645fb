"""What reward functions are called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megarl.rewards.scoring.calling import PARAMETERS, BoundFunction, Sample, bind
from megarl.types import Completion, ConfigError, Problem

QUESTION = {"role": "user", "content": "2 + 3?"}
PROBLEM = Problem(4, (QUESTION,), (7, 8), "5", {"level": 3})
COMPLETION = Completion("0.0", np.array([1, 2, 3]), np.zeros(3, np.float32), "length", np.ones(3, np.int32))
OF_REST = sorted(PARAMETERS.keys() - {"sandbox"})
"""The values that `**kwargs` have: a sandbox must be asked for by its name."""
SAMPLE = Sample.from_completion(
    PROBLEM, COMPLETION, "It is 5", prompt_messages=[QUESTION], turn=1, is_in_thoughts=False
)


def called(bound: BoundFunction) -> Any:
    return bound(SAMPLE.values(bound.needs, 10.0))


def of_the_table(completion_text, answer, *, correct_score):
    return completion_text, answer, correct_score


def reward_fn(messages, answer):
    return messages, answer


def of_the_turn(record, finish_reason, num_tokens, truncated, turn, prompt_messages):
    return record, finish_reason, num_tokens, truncated, turn, prompt_messages


def by_position(answer, other="default", /, turn=0):
    return answer, other, turn


def anything(*args, **kwargs):
    return args, sorted(kwargs)


@pytest.mark.parametrize(
    ("function", "kwargs", "expected"),
    [
        pytest.param(of_the_table, {}, ("It is 5", "5", 10.0), id="of the table"),
        pytest.param(of_the_table, {"correct_score": 2}, ("It is 5", "5", 2), id="a score of its own"),
        pytest.param(reward_fn, {}, ([QUESTION, {"role": "assistant", "content": "It is 5"}], "5"), id="RL2"),
        pytest.param(of_the_turn, {}, ({"level": 3}, "length", 3, True, 1, [QUESTION]), id="record and turn"),
        pytest.param(by_position, {}, ("5", "default", 1), id="by position"),
        pytest.param(by_position, {"other": 8}, ("5", 8, 1), id="by position with kwargs"),
        pytest.param(anything, {}, ((), OF_REST), id="anything"),
        pytest.param(anything, {"x": 1}, ((), sorted([*OF_REST, "x"])), id="anything with kwargs"),
        pytest.param(lambda answer, label=None: (answer, label), {"label": "x"}, ("5", "x"), id="a value in kwargs"),
        pytest.param(lambda answer, label="x": (answer, label), {}, ("5", "x"), id="a default of its own"),
        pytest.param(lambda text=None, *, k: (text, k), {"k": [1]}, (None, [1]), id="an own default"),
    ],
)
def test_parameters_are_known_by_name(function: Callable[..., Any], kwargs: dict[str, Any], expected: object) -> None:
    assert called(bind("my:function", function, kwargs)) == expected


def test_only_what_is_needed_is_sent() -> None:
    assert bind("my:function", reward_fn, {}).needs == {"messages", "answer"}


def of_openrlhf(queries, prompts, labels): ...


def of_defaults(completion_text, ground_truth=None, *, extra_info=None): ...


def of_empty_defaults(completion_text, ground_truth="", extra_info={}): ...  # noqa: B006


def of_any_positions(*values): ...


def of_slime(args, sample, **kwargs): ...


def of_trl(completions, completion_ids, trainer_state): ...


def of_verl(solution_str, ground_truth, tokenizer): ...


@pytest.mark.parametrize(
    ("function", "kwargs", "error_text"),
    [
        pytest.param(of_openrlhf, {}, "queries: messages; prompts: prompt_messages; labels: answer", id="OpenRLHF"),
        pytest.param(of_openrlhf, {"prompts": []}, "here: queries: messages; labels: answer", id="a value in kwargs"),
        pytest.param(of_defaults, {}, "here: ground_truth: answer; extra_info: record.", id="defaults of None"),
        pytest.param(of_empty_defaults, {}, "here: ground_truth: answer; extra_info: record.", id="empty defaults"),
        pytest.param(of_any_positions, {}, "takes its values as *args, but gets them by name", id="only *args"),
        pytest.param(of_slime, {}, "here: args: none; sample: record.", id="slime"),
        pytest.param(of_trl, {}, "here: completion_ids: num_tokens; trainer_state: none.", id="only TRL has them"),
        pytest.param(of_verl, {}, "here: tokenizer: none.", id="verl's, and one more"),
        pytest.param(of_verl, {"ground_truth": 4}, "kwargs.ground_truth: every sample has its own", id="verl's value"),
        pytest.param(
            reward_fn, {"k": 1}, "kwargs.k: is not a parameter of the function; it takes messages, answer", id="foreign"
        ),
        pytest.param(
            reward_fn, {"message": 1}, "kwargs.message: is not a parameter of the function; did you mean", id="misspelt"
        ),
        pytest.param(anything, {"answer": "7"}, "kwargs.answer: every sample has its own value", id="reserved"),
        pytest.param(min, {}, "its parameters cannot be read", id="compiled"),
    ],
)
def test_what_cannot_be_called_is_refused(
    function: Callable[..., Any], kwargs: dict[str, Any], error_text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        bind("my.rewards:function", function, kwargs)
    assert error_text in str(caught.value) and "reward.functions: 'my.rewards:function'" in str(caught.value)
    if "here:" in error_text:
        assert ", ".join(PARAMETERS) in str(caught.value)
