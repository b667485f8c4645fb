"""Which results count as rewards, and their sum."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from megarl.rewards.scores import (
    FunctionScore,
    by_source_name,
    checked,
    combined,
    function_metrics,
    read_reply,
    source_metrics,
    with_served,
)
from megarl.types import Reward


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
    assert checked(result) == expected


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        pytest.param({"a": FunctionScore(2.0), "b": FunctionScore(3.0)}, (0.5, True, True), id="numbers alone"),
        pytest.param({"a": FunctionScore(1.0), "b": FunctionScore(3.0)}, (-0.5, True, False), id="a negative sum"),
        pytest.param(
            {"a": FunctionScore(1.0, True, True), "b": FunctionScore(3.0)}, (-0.5, True, True), id="one judges"
        ),
        pytest.param(
            {"a": FunctionScore(1.0, True, True), "b": FunctionScore(0.0, False, True)}, (1, False, True), id="all"
        ),
        pytest.param({"a": FunctionScore(1.0, True, False), "b": None}, (1.0, True, False), id="one has no opinion"),
        pytest.param({"a": None, "b": None}, (0.0, False, False), id="none has an opinion"),
    ],
)
def test_scores_are_weighed_and_added(
    scores: dict[str, FunctionScore | None], expected: tuple[float, bool, bool]
) -> None:
    reward = combined(scores, {"a": 1.0, "b": -0.5})
    assert (reward.score, reward.format_valid, reward.answer_correct) == expected
    assert reward.scores == {name: score and score.score for name, score in scores.items()}


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
    scores = {"a": FunctionScore(2.0), "b": FunctionScore(1.0, format_valid=False), "c": None}
    served = {"judge.x": FunctionScore(0.5, answer_correct=True)}
    weights = {"a": 1.0, "b": -1.0, "c": 1.0, "judge.x": 4.0}
    own = combined(scores, weights)
    merged = with_served(own, served, weights, judges_format=True, judges_answer=False)
    assert merged == combined({**scores, **served}, weights)
    assert (merged.score, merged.format_valid, merged.answer_correct) == (3.0, False, True)
    alone = with_served(None, served, weights)
    assert alone == combined(served, weights)
    nothing = combined({"c": None}, weights)
    assert with_served(nothing, served, weights) == combined({"c": None, **served}, weights)


def test_metrics_of_each_data_source() -> None:
    right, wrong = Reward(1.0, True, True, {"a": 3.0, "b": None}), Reward(0.0, True, False, {"a": 1.0, "b": None})
    assert source_metrics({"x_y": [right, wrong], "z": [wrong]}) == {
        "reward/source/x_y/count": 2.0, "reward/source/x_y/mean": 0.5, "reward/source/x_y/accuracy": 0.5,
        "reward/source/x_y/format_valid": 1.0, "reward/source/x_y/a": 2.0,
        "reward/source/z/count": 1.0, "reward/source/z/mean": 0.0, "reward/source/z/accuracy": 0.0,
        "reward/source/z/format_valid": 1.0, "reward/source/z/a": 1.0,
    }  # fmt: skip


def test_names_of_data_sources_are_those_of_metrics_and_bounded_in_number() -> None:
    assert by_source_name([("x/y", 1), ("", 2), ("x/y", 3)]) == {"x_y": [1, 3], "_": [2]}
    many = by_source_name([(f"s{number}", number) for number in range(60)] + [("s59", 60)])
    own_other = by_source_name([("other", -1), *((f"s{number:02}", number) for number in range(60))])
    assert sum(map(len, own_other.values())) == 61 and own_other["other"][0] == -1
    many_others = by_source_name([(f"s{number}", number) for number in range(60) for _ in range(2)] + [("other", -1)])
    assert sum(map(len, many_others.values())) == 121 and -1 in many_others["other"]
    assert len(many) == 51 and len(many["other"]) == 10 and many["s59"] == [59, 60]


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 1e300, -1.000001e6])
def test_a_score_that_float32_cannot_hold_sums_of_is_refused(score: float) -> None:
    for result in (score, Reward(score, True, True)):
        with pytest.raises(ValueError, match="outside -1e\\+06 to 1e\\+06"):
            checked(result)


def test_a_sum_beyond_the_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        combined({"a": FunctionScore(6e5), "b": FunctionScore(6e5)}, {"a": 1.0, "b": 1.0})


@pytest.mark.parametrize("result", ["1", [1.0], 1j, Reward("1", True, True), Reward(True, True, True)])  # type: ignore[arg-type]
def test_what_is_no_reward_is_refused(result: object) -> None:
    with pytest.raises(TypeError, match="returned"):
        checked(result)


@pytest.mark.parametrize(
    "wrong", [{"scores": {}}, {"scores": {"a": "1"}}, {"scores": None}, {"score": "1"}, {"format_valid": 2}]
)
def test_a_reply_that_is_no_reward_is_refused(wrong: dict[str, object]) -> None:
    reply = {"score": 1.0, "format_valid": True, "answer_correct": False, "scores": {"a": 0.5}}
    assert read_reply(reply, ["a"]) == Reward(1.0, True, False, {"a": 0.5})
    with pytest.raises((KeyError, TypeError, ValueError)):
        read_reply(reply | wrong, ["a"])
