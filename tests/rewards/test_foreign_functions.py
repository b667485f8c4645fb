"""Reward functions with the signatures of verl and TRL, used as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megarl.rewards.functions.function_score import FunctionScore
from megarl.rewards.scoring.calling import Sample, bind
from megarl.rewards.scoring.results import check_result

QUESTION = {"role": "user", "content": "2 + 2?"}
SAID = {"role": "assistant", "content": "It is 4"}
OF_VERL = {"prompt": [QUESTION], "data_source": "gsm8k", "extra_info": {"index": 7}, "reward_model": {}}


def result_of(function: Callable[..., Any], record: dict[str, Any], **kwargs: Any) -> Any:
    """Bind and call a function as a reward process does."""
    bound = bind("my:function", function, kwargs)
    return bound(Sample("It is 4", "4", (QUESTION,), record).values(bound.needs, 1.0))


def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, solution_str, ground_truth, extra_info) == ("gsm8k", "It is 4", "4", {"index": 7})
    return 0.5


def verl_with_kwargs(data_source, solution_str, ground_truth, extra_info, scale, **kwargs):
    assert (data_source, extra_info, kwargs) == ("other", {}, {})
    return scale


def verl_without_source(solution_str, ground_truth, data_source, method="strict"):
    assert data_source is None
    return {"score": -1.0, "acc": ground_truth in solution_str, "pred": "4", "length": len(method), "source": 0}


@pytest.mark.parametrize(
    ("function", "record", "kwargs", "score"),
    [
        pytest.param(verl, OF_VERL, {}, FunctionScore(0.5), id="number"),
        pytest.param(verl_with_kwargs, {}, {"data_source": "other", "scale": 2}, FunctionScore(2.0), id="kwargs"),
        pytest.param(
            verl_without_source, {}, {"method": "any"},
            FunctionScore(-1.0, answer_correct=True, metrics={"acc": 1.0, "length": 3.0, "source": 0.0}), id="dict",
        ),
    ],
)  # fmt: skip
def test_functions_of_verl(function, record, kwargs, score) -> None:
    assert check_result(result_of(function, record, **kwargs)) == score


def trl(prompts, completions, **kwargs):
    assert (prompts, completions) == ([[QUESTION]], [[SAID]])
    assert kwargs == {"answer": ["4"], "level": [3], "messages": [[QUESTION]]}
    return [0.5]


def trl_of_texts(prompts, completions, level, missing="default", **kwargs):
    assert (prompts, completions, level, missing) == (["2 + 2?"], ["It is 4"], [3], "default")
    return np.array([0.5])


def trl_of_columns(completions, solution, answer, weight):
    assert (completions, solution, answer, weight) == ([[SAID]], ["2 + 2 is 4"], ["4"], 2)
    return [None]


@pytest.mark.parametrize(
    ("function", "record", "kwargs", "score"),
    [
        pytest.param(trl, {"messages": [QUESTION], "level": 3}, {}, FunctionScore(0.5), id="messages"),
        pytest.param(trl_of_texts, {"prompt": "2 + 2?", "level": 3}, {}, FunctionScore(0.5), id="texts"),
        pytest.param(trl_of_columns, {"solution": "2 + 2 is 4"}, {"weight": 2}, None, id="columns, and no score"),
    ],
)
def test_functions_of_trl(function, record, kwargs, score) -> None:
    assert check_result(result_of(function, record, **kwargs)) == score


@pytest.mark.parametrize(
    ("function", "words"),
    [
        pytest.param(trl_of_columns, "no field 'solution'", id="TRL without a column"),
        pytest.param(lambda completions: 1.0, "a list with a score for each completion", id="TRL with a number"),
        pytest.param(lambda completions: [1.0, 0.0], "for 1 completion", id="TRL with two scores"),
        pytest.param(lambda solution_str: {"acc": True}, "without 'score'", id="verl without a score"),
    ],
)
def test_what_cannot_be_scored_says_why(function, words) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        result_of(function, {"weight": 1})
