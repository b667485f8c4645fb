"""Which results count as rewards, and their sum."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from megarl.config import RewardConfig
from megarl.config.judges import judging
from megarl.rewards.functions.function_score import FunctionScore
from megarl.rewards.scoring.results import (
    SCORE_METRICS,
    accuracy_metrics,
    check_result,
    combine_scores,
    function_metrics,
    group_by_source_name,
    read_scores,
    source_metrics,
)
from megarl.tracking.metric_table import rows
from megarl.types import Judging, Reward


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (None, None),
        (1.5, FunctionScore(1.5)),
        (-2, FunctionScore(-2.0)),
        (True, FunctionScore(1.0)),
        (np.bool_(False), FunctionScore(0.0)),
        (np.float32(0.5), FunctionScore(0.5)),
        (Fraction(1, 4), FunctionScore(0.25)),
        (Reward(2, 1, 0), FunctionScore(2.0, True, False)),  # type: ignore[arg-type]
    ],
)
def test_what_counts_as_a_result(result: object, expected: FunctionScore | None) -> None:
    assert check_result(result) == expected


NOBODY: dict[str, Judging] = {"a": "none", "b": "none"}
FIRST: dict[str, Judging] = {"a": "declared", "b": "none"}
BOTH: dict[str, Judging] = {"a": "declared", "b": "declared"}


@pytest.mark.parametrize(
    ("scores", "judges", "expected"),
    [
        pytest.param(
            {"a": FunctionScore(2.0), "b": FunctionScore(3.0)}, NOBODY, (0.5, True, None), id="a sum is not a verdict"
        ),
        pytest.param(
            {"a": FunctionScore(1.0, True, True), "b": FunctionScore(3.0)}, NOBODY, (-0.5, True, None), id="unasked"
        ),
        pytest.param({"a": FunctionScore(0.0), "b": FunctionScore(-9.0)}, FIRST, (4.5, True, False), id="wrong, paid"),
        pytest.param({"a": FunctionScore(1.0), "b": FunctionScore(9.0)}, FIRST, (-3.5, True, True), id="right, unpaid"),
        pytest.param(
            {"a": FunctionScore(1.0, True, True), "b": FunctionScore(0.0, False, True)},
            BOTH,
            (1, False, True),
            id="all",
        ),
        pytest.param(
            {"a": FunctionScore(1.0, True, True), "b": FunctionScore(0.0)}, BOTH, (1, True, False), id="one refuses"
        ),
        pytest.param({"a": FunctionScore(1.0, True, False), "b": None}, BOTH, (1.0, True, False), id="one applies"),
        pytest.param({"a": None, "b": None}, BOTH, (0.0, False, False), id="none has an opinion"),
        pytest.param({"a": None, "b": None}, NOBODY, (0.0, False, None), id="none has an opinion or judges"),
    ],
)
def test_scores_are_weighed_and_added(
    scores: dict[str, FunctionScore | None],
    judges: dict[str, Judging],
    expected: tuple[float, bool, bool | None],
) -> None:
    reward = combine_scores(scores, {"a": 1.0, "b": -0.5}, judges)
    assert (reward.score, reward.format_valid, reward.answer_correct) == expected
    assert reward.scores == {name: score and score.score for name, score in scores.items()}


def test_the_score_of_a_right_answer_is_the_recipes() -> None:
    for score, is_right in ((10.0, True), (1.0, False)):
        assert (
            combine_scores({"a": FunctionScore(score)}, {"a": 0.2}, FIRST, correct_score=10.0).answer_correct
            is is_right
        )


@pytest.mark.parametrize(("score", "expected"), [(1.0, True), (0.0, False), (0.5, None), (-1.0, None), (2.0, None)])
def test_an_only_functions_score_is_a_verdict_where_it_is_one_or_zero(score: float, expected: bool | None) -> None:
    assert combine_scores({"a": FunctionScore(score)}, {"a": 0.2}, {"a": "by_value"}).answer_correct is expected


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        (["boxed"], {"boxed": "declared"}),
        (["rew.py:exact"], {"rew.py:exact": "by_value"}),
        (["rew.py:exact", "rew.py:brevity"], {"rew.py:exact": "none", "rew.py:brevity": "none"}),
        (
            [{"name": "rew.py:exact", "judges_answer": True}, "length"],
            {"rew.py:exact": "declared", "length": "none"},
        ),
        ([{"name": "boxed", "judges_answer": False}, "a.b:c"], {"boxed": "none", "a.b:c": "none"}),
        (["length"], {"length": "none"}),
        (["reasoning_gym.chain_sum", "format"], {"reasoning_gym.chain_sum": "declared", "format": "none"}),
        (
            ["judge", {"name": "judge.style", "kwargs": {"choices": {"GOOD": 1, "BAD": 0}}}],
            {"judge": "declared", "judge.style": "none"},
        ),
        ([{"name": "remote", "kwargs": {"correct_from": 0.5}}, "judge"], {"remote": "declared", "judge": "declared"}),
        (["remote", "format"], {"remote": "none", "format": "none"}),
    ],
)
def test_who_judges_the_answer(functions: list[Any], expected: dict[str, Judging]) -> None:
    assert judging(RewardConfig.model_validate({"functions": functions}).functions) == expected


def test_accuracy_is_measured_where_all_answers_are_judged() -> None:
    right, wrong, unjudged = (Reward(0.5, True, verdict) for verdict in (True, False, None))
    assert accuracy_metrics([right, wrong]) == {"accuracy": 0.5}
    assert accuracy_metrics([right, right, unjudged, unjudged]) == {"unjudged": 0.5}
    assert accuracy_metrics([]) == {}


@pytest.mark.parametrize("name", sorted(SCORE_METRICS))
def test_a_metric_of_the_scores_is_not_replaced(name: str) -> None:
    assert f"reward/NAME/{name}" in {row.name for row in rows()}
    for result in (FunctionScore(1.0, metrics={name: 7.0}), Reward(1.0, True, True, metrics={name: 7.0})):
        with pytest.raises(ValueError, match=f"returned the metric '{name}'"):
            check_result(result)


def test_metrics_of_each_function() -> None:
    said = [{"a": 1.0, "b": None}, {"a": 4.0, "b": None}, {"a": None, "b": None}, {"a": 1.0, "b": 2.0}]
    failed = Reward(0.0, False, False)
    assert function_metrics([*(Reward(0.0, True, True, scores) for scores in said), failed]) == {
        "reward/unscored": 1.0,
        "reward/a/unscored": 0.25,
        "reward/a/mean": 2.0,
        "reward/a/std": pytest.approx(2**0.5),
        "reward/a/min": 1.0,
        "reward/a/max": 4.0,
        "reward/b/unscored": 0.75,
        "reward/b/mean": 2.0,
        "reward/b/std": 0.0,
        "reward/b/min": 2.0,
        "reward/b/max": 2.0,
    }
    assert function_metrics([failed]) == {}


def test_sources_of_a_mixture_have_functions_of_their_own() -> None:
    of_a = [Reward(1.0, True, True, {"a": 1.0}), Reward(0.0, True, True, {"a": None})]
    found = function_metrics([*of_a, Reward(3.0, True, True, {"b": 3.0})])
    assert found == {
        "reward/unscored": 1.0, "reward/a/unscored": 0.5, "reward/a/mean": 1.0, "reward/a/std": 0.0,
        "reward/a/min": 1.0, "reward/a/max": 1.0,
        "reward/b/unscored": 0.0, "reward/b/mean": 3.0, "reward/b/std": 0.0, "reward/b/min": 3.0, "reward/b/max": 3.0,
    }  # fmt: skip


def test_scores_of_servers_are_added_as_those_of_functions() -> None:
    scores = {"m:a": FunctionScore(2.0), "b": FunctionScore(1.0, format_valid=False), "c": None}
    served = {"judge.x": FunctionScore(0.5, answer_correct=True, metrics={"calls": 1.0})}
    weights = {"m:a": 1.0, "b": -1.0, "c": 1.0, "judge.x": 4.0}
    reward = combine_scores({**scores, **served}, weights, {"judge.x": "declared"})
    assert (reward.score, reward.format_valid, reward.answer_correct) == (3.0, False, True)
    assert reward.scores == {"a": 2.0, "b": 1.0, "c": None, "judge.x": 0.5}
    assert reward.metrics == {"judge.x/calls": 1.0}


@pytest.mark.parametrize(
    ("function_verdict", "expected"), [(True, True), (False, False), (None, True)], ids=["right", "wrong", "no opinion"]
)
def test_functions_and_servers_must_agree_on_the_answer(function_verdict: bool | None, expected: bool) -> None:
    opinion = None if function_verdict is None else FunctionScore(1.0, answer_correct=function_verdict)
    scores = {"a": opinion, "judge": FunctionScore(1.0, answer_correct=True)}
    reward = combine_scores(scores, {"a": 1.0, "judge": 1.0}, {"a": "declared", "judge": "declared"})
    assert reward.answer_correct is expected


def test_metrics_of_each_data_source() -> None:
    right, wrong = Reward(1.0, True, True, {"a": 3.0, "b": None}), Reward(0.0, True, False, {"a": 1.0, "b": None})
    assert source_metrics({"x_y": [right, wrong], "z": [wrong]}) == {
        "reward/source/x_y/count": 2.0, "reward/source/x_y/mean": 0.5, "reward/source/x_y/accuracy": 0.5,
        "reward/source/x_y/format_valid": 1.0, "reward/source/x_y/a": 2.0,
        "reward/source/z/count": 1.0, "reward/source/z/mean": 0.0, "reward/source/z/accuracy": 0.0,
        "reward/source/z/format_valid": 1.0, "reward/source/z/a": 1.0,
    }  # fmt: skip


def test_names_of_data_sources_are_those_of_metrics_and_bounded_in_number() -> None:
    assert group_by_source_name([("x/y", 1), ("", 2), ("x/y", 3)]) == {"x_y": [1, 3], "_": [2]}
    many = group_by_source_name([(f"s{number}", number) for number in range(60)] + [("s59", 60)])
    own_other = group_by_source_name([("other", -1), *((f"s{number:02}", number) for number in range(60))])
    assert sum(map(len, own_other.values())) == 61 and own_other["other"][0] == -1
    many_others = group_by_source_name(
        [(f"s{number}", number) for number in range(60) for _ in range(2)] + [("other", -1)]
    )
    assert sum(map(len, many_others.values())) == 121 and -1 in many_others["other"]
    assert len(many) == 51 and len(many["other"]) == 10 and many["s59"] == [59, 60]


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 1e300, -1.000001e6])
def test_a_score_that_float32_cannot_hold_sums_of_is_refused(score: float) -> None:
    for result in (score, Reward(score, True, True)):
        with pytest.raises(ValueError, match="outside -1e\\+06 to 1e\\+06"):
            check_result(result)


def test_a_sum_beyond_the_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        combine_scores({"a": FunctionScore(6e5), "b": FunctionScore(6e5)}, {"a": 1.0, "b": 1.0}, {})


@pytest.mark.parametrize("result", ["1", [1.0], 1j, Reward("1", True, True), Reward(True, True, True)])  # type: ignore[arg-type]
def test_what_is_no_reward_is_refused(result: object) -> None:
    with pytest.raises(TypeError, match="returned"):
        check_result(result)


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"scores": None},
        {"scores": {}},
        {"scores": {"a": 1.0}},
        {"scores": {"a": {"score": "1"}}},
        {"scores": {"a": {"score": 1.0, "format_valid": 2}}},
        {"scores": {"a": {"score": 1.0, "other": 2}}},
    ],
)
def test_a_reply_that_is_no_reward_is_refused(reply: dict[str, Any]) -> None:
    values = {"score": 1.0, "format_valid": True, "answer_correct": None, "metrics": {"x": 2.0}}
    assert read_scores({"scores": {"a": values, "b": None}}, ["a", "b"]) == {
        "a": FunctionScore(1.0, True, metrics={"x": 2.0}),
        "b": None,
    }
    with pytest.raises((KeyError, TypeError, ValueError)):
        read_scores(reply, ["a"])
