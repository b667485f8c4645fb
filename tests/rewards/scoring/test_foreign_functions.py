"""Reward functions with the signatures of verl and TRL, used as they are."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megarl.rewards.functions.function_score import FunctionScore
from megarl.rewards.scoring.calling import Sample, bind
from megarl.rewards.scoring.foreign_functions import result_of
from megarl.rewards.scoring.results import check_result
from megarl.types import Reward

QUESTION = {"role": "user", "content": "2 + 2?"}
SAID = {"role": "assistant", "content": "It is 4"}
OF_VERL = {"prompt": [QUESTION], "data_source": "gsm8k", "extra_info": {"index": 7}, "reward_model": {}}


def call(function: Callable[..., Any], record: dict[str, Any], **kwargs: Any) -> Any:
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


def verl_of_any_values(solution_str, ground_truth, **kwargs):
    assert kwargs == {"data_source": "gsm8k", "extra_info": {"index": 7}}
    return 0.25


@pytest.mark.parametrize(
    ("function", "record", "kwargs", "score"),
    [
        pytest.param(lambda solution_str: {"score": True}, {}, {}, FunctionScore(1.0), id="a truth value as score"),
        pytest.param(
            lambda solution_str: {"score": np.True_, "acc": np.False_}, {}, {},
            FunctionScore(1.0, answer_correct=False, metrics={"acc": 0.0}), id="truth values of numpy",
        ),
        pytest.param(verl_of_any_values, OF_VERL, {}, FunctionScore(0.25), id="**kwargs"),
        pytest.param(verl, OF_VERL, {}, FunctionScore(0.5), id="number"),
        pytest.param(verl_with_kwargs, {}, {"data_source": "other", "scale": 2}, FunctionScore(2.0), id="kwargs"),
        pytest.param(
            verl_without_source, {}, {"method": "any"},
            FunctionScore(-1.0, answer_correct=True, metrics={"acc": 1.0, "length": 3.0, "source": 0.0}), id="dict",
        ),
    ],
)  # fmt: skip
def test_functions_of_verl(function, record, kwargs, score) -> None:
    assert check_result(call(function, record, **kwargs)) == score


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
    assert check_result(call(function, record, **kwargs)) == score


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
        call(function, {"weight": 1})


async def plain_async(completion_text, answer):
    await asyncio.sleep(0)
    return float(answer in completion_text)


async def verl_async(solution_str, ground_truth):
    return {"score": 0.5, "acc": ground_truth in solution_str}


async def trl_async(completions, **kwargs):
    return [0.5 for _ in completions]


class AsyncObject:
    async def __call__(self, completion_text):
        return Reward(0.5, True, True)


async def async_without_opinion(completion_text):
    return None


@pytest.mark.parametrize(
    ("function", "score"),
    [
        (plain_async, FunctionScore(1.0)),
        (verl_async, FunctionScore(0.5, answer_correct=True, metrics={"acc": 1.0})),
        (trl_async, FunctionScore(0.5)),
        (AsyncObject(), FunctionScore(0.5, True, True)),
        (async_without_opinion, None),
    ],
)
def test_asynchronous_functions_are_awaited(function, score) -> None:
    assert check_result(call(function, {})) == score


class Connected:
    """A scorer that keeps a connection, like the client of a server with a judge."""

    def __init__(self) -> None:
        self._client, self.server = socket.socketpair()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __call__(self, completion_text: str) -> float:
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._client)
        self.server.send(b"7")
        return float(await self._streams[0].readexactly(1))

    async def close(self) -> None:
        assert self._streams is not None
        self._streams[1].close()
        await self._streams[1].wait_closed()


def test_a_connection_of_an_asynchronous_function_lasts_for_all_calls() -> None:
    scorer = Connected()
    with scorer.server:
        assert [call(scorer, {}) for _ in range(2)] == [7.0, 7.0]
        result_of(scorer.close())


async def raises(completion_text):
    raise ZeroDivisionError


def test_an_error_of_an_asynchronous_function_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        call(raises, {})


FORMS = {
    "object": (type("Scorer", (), {"__call__": lambda self, completion_text: 1})(), 1.0),
    "partial": (functools.partial(lambda scale, completion_text: scale, 2.0), 2.0),
    "partial by name": (functools.partial(lambda scale, completion_text: scale, scale=2.0), 2.0),
    "bool of numpy": (lambda completion_text: np.bool_(True), 1.0),
    "integer of numpy": (lambda completion_text: np.int64(3), 3.0),
    "half precision of numpy": (lambda completion_text: np.float16(0.5), 0.5),
}
NO_SCORES = {
    "class": type("Scorer", (), {"__call__": lambda self, completion_text: 1}),
    "generator": lambda completion_text: (score for score in (1.0,)),
    "text": lambda completion_text: "1",
    "object of a score": lambda completion_text: {"score": 1.0},
    "pair": lambda completion_text: (1.0, {}),
    "complex": lambda completion_text: 1 + 0j,
    "array": lambda completion_text: np.array([1.0, 2.0]),
    "not a number": lambda completion_text: np.float64("nan"),
    "infinity": lambda completion_text: float("inf"),
    "too large": lambda completion_text: 10**7,
    "too many digits": lambda completion_text: 10**400,
    "two for one": lambda completions: [1.0, 2.0],
    "one for a batch": lambda completions: 1.0,
    "objects in a batch": lambda completions: [{"score": 1.0}],
    "verl without score": lambda solution_str: {"reward": 1.0},
    "verl with a pair": lambda solution_str: (1.0, "x"),
}


@pytest.mark.parametrize(("function", "score"), FORMS.values(), ids=FORMS)
def test_forms_of_functions_and_numbers(function, score) -> None:
    assert check_result(call(function, {})) == FunctionScore(score)


@pytest.mark.parametrize("function", NO_SCORES.values(), ids=NO_SCORES)
def test_other_results_are_no_scores(function) -> None:
    with pytest.raises((TypeError, ValueError)):
        check_result(call(function, {}))
