"""Results of reward functions: validation, weighted sum, and metrics by function.

A reward function returns one of
- a `megarl.types.Reward`: a score, a valid or invalid format, a right or wrong answer;
- a number, or True or False for 1 and 0: a score without verdicts on format and answer;
- a `FunctionScore`: a score with metrics, and the function's verdicts, if any;
- None: the function does not apply to the sample, and is excluded from the sum and from its own metrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from statistics import fmean, pstdev
from typing import Any, TypeVar

from megarl.rewards import metric_name
from megarl.rewards.functions.function_score import FunctionScore
from megarl.tracking.metric_rows import MetricRow
from megarl.types import Judging, Reward, strongest

METRICS = (
    MetricRow(
        "reward/NAME/{mean,std,min,max}",
        "score",
        "score of a reward function, without its weight, over the samples scored by it",
    ),
    MetricRow("reward/NAME/unscored", "share", "samples without a score of the function"),
    MetricRow("reward/unscored", "count", "samples without a score of any function"),
    MetricRow("reward/source/SOURCE/count", "count", "scored samples of a data source (reward.source_field)"),
    MetricRow("reward/source/SOURCE/mean", "score", "reward of a data source's samples, mean"),
    MetricRow(
        "reward/source/SOURCE/accuracy", "share", "right answers of a data source, if all its answers are judged"
    ),
    MetricRow("reward/source/SOURCE/unjudged", "share", "unjudged answers of a data source, instead of accuracy"),
    MetricRow("reward/source/SOURCE/format_valid", "share", "answers of a data source in a valid format"),
    MetricRow("reward/source/SOURCE/FUNCTION", "score", "score of a reward function in a data source, mean"),
    MetricRow("reward/NAME/OWN", "own", "a metric of the function itself, mean over the samples with it"),
)
SCORE_METRICS = frozenset({"mean", "std", "min", "max", "unscored"})
"""Names of metrics `reward/NAME/...` of each reward function's scores. A function must not return them."""
MAX_SOURCES = 50
"""Maximum number of data sources with their own metrics."""
_OTHER_SOURCES = "other"

Item = TypeVar("Item")

MAX_ABSOLUTE_SCORE = 1e6
"""Limit of a score's absolute value. Float32 sums of squares of millions of scores stay finite and exact enough."""


def check_result(result: Any) -> FunctionScore | None:
    """Convert a reward function's return value to a score. None: the function does not apply to the sample.

    Raises TypeError or ValueError for an invalid value.
    """
    if result is None:
        return None
    if isinstance(result, FunctionScore):
        return _check_function_score(result)
    if not isinstance(result, Reward):
        if not is_number(result):
            raise TypeError(f"the function returned {result!r:.200}; return a number, None or a megarl.types.Reward")
        return FunctionScore(_check_score(result, result))
    if isinstance(result.score, bool) or not isinstance(result.score, Real):
        raise TypeError(f"the function returned a score that is not a number: {result!r:.200}")
    for name in ("format_valid", "answer_correct"):
        if getattr(result, name) not in (True, False):
            raise TypeError(f"the function returned a Reward whose {name} is not True or False: {result!r:.200}")
    score = _check_score(result.score, result)
    return FunctionScore(score, bool(result.format_valid), bool(result.answer_correct), _check_metrics(result.metrics))


def _check_function_score(result: FunctionScore) -> FunctionScore:
    if isinstance(result.score, bool) or not isinstance(result.score, Real):
        raise TypeError(f"the function returned a score that is not a number: {result!r:.200}")
    for name in ("format_valid", "answer_correct"):
        if getattr(result, name) not in (True, False, None):
            raise TypeError(
                f"the function returned a FunctionScore whose {name} is not True, False or None: {result!r:.200}"
            )
    metrics = _check_metrics(result.metrics)
    return FunctionScore(_check_score(result.score, result), result.format_valid, result.answer_correct, metrics)


def combine_scores(
    scores: Mapping[str, FunctionScore | None],
    weights: Mapping[str, float],
    judges: Mapping[str, Judging],
    correct_score: float = 1.0,
) -> Reward:
    """Return a sample's reward: the weighted sum of the scores of all functions and servers that apply.

    The format is valid unless a function that judges it says no. The answer is right if all in `judges` say so, and
    wrong if none of them applies. Its verdict is None without a judge, or if a judge's verdict is missing. Raises
    ValueError if the sum is too large.
    """
    applied_scores = {name: score for name, score in scores.items() if score is not None}
    total = float(sum(weights[name] * function_score.score for name, function_score in applied_scores.items()))
    formats = [
        function_score.format_valid
        for function_score in applied_scores.values()
        if function_score.format_valid is not None
    ]
    return Reward(
        score=_check_score(total, total),
        format_valid=all(formats) if applied_scores else False,
        answer_correct=_combine_verdicts(applied_scores, judges, correct_score),
        scores={metric_name(name): None if score is None else score.score for name, score in scores.items()},
        metrics={
            f"{metric_name(name)}/{key}": value
            for name, function_score in applied_scores.items()
            for key, value in function_score.metrics.items()
        },
    )


def _combine_verdicts(
    applied_scores: Mapping[str, FunctionScore], judges: Mapping[str, Judging], correct_score: float
) -> bool | None:
    """Return whether all judging functions find the answer correct; None: one cannot say."""
    if strongest(judges.values()) == "none":
        return None
    verdicts = [
        verdict(function_score, judges[name], correct_score)
        for name, function_score in applied_scores.items()
        if judges.get(name, "none") != "none"
    ]
    if None in verdicts:
        return None
    return bool(verdicts) and all(verdicts)


def verdict(function_score: FunctionScore, judging: Judging, correct_score: float) -> bool | None:
    """Return whether a reward function calls the answer right. None: its score is not a verdict.

    A verdict in the function's result comes first. Otherwise `judging` decides. `declared`: a score of at least
    `correct_score` means right. Any other value: score 1 means right, score 0 wrong.
    """
    if function_score.answer_correct is not None:
        return function_score.answer_correct
    # Without a verdict of its own, a function declared as judge says right from the score of a right answer on.
    if judging == "declared":
        return function_score.score >= correct_score
    return verdict_by_value(function_score.score)


def verdict_by_value(score: float) -> bool | None:
    """Return the verdict of a score: True for 1, False for 0, None for any other score."""
    return bool(score) if score in (0.0, 1.0) else None


def read_scores(reply: Mapping[str, Any], names: Iterable[str]) -> dict[str, FunctionScore | None]:
    """Return the scores in a reward process's reply, by name of the functions `names`.

    Raises KeyError, TypeError or ValueError if the reply is invalid.
    """
    scores: dict[str, FunctionScore | None] = {}
    for name in names:
        values = reply["scores"][name]
        scores[name] = None if values is None else check_result(FunctionScore(**values))
    return scores


def function_metrics(rewards: Iterable[Reward]) -> dict[str, float]:
    """Return the metrics of each reward function: its scores, and the metrics in its results.

    A sample to which no function applies has score zero. Samples without a score, after a failure, are excluded.
    """
    rewards = list(rewards)
    score_tables = [reward.scores for reward in rewards if reward.scores]
    if not score_tables:
        return {}
    num_unscored = sum(all(score is None for score in scores.values()) for scores in score_tables)
    metrics = {"reward/unscored": float(num_unscored)}
    # Sources of a mixture may have different functions.
    for name in dict.fromkeys(name for scores in score_tables for name in scores):
        values = [scores[name] for scores in score_tables if name in scores]
        applied_scores = [score for score in values if score is not None]
        metrics[f"reward/{name}/unscored"] = 1 - len(applied_scores) / len(values)
        if applied_scores:
            metrics[f"reward/{name}/mean"] = fmean(applied_scores)
            metrics[f"reward/{name}/std"] = pstdev(applied_scores)
            metrics[f"reward/{name}/min"] = float(min(applied_scores))
            metrics[f"reward/{name}/max"] = float(max(applied_scores))
    for key in dict.fromkeys(key for reward in rewards for key in reward.metrics):
        values = [reward.metrics[key] for reward in rewards if key in reward.metrics]
        metrics[f"reward/{key}"] = fmean(values)
    return metrics


def accuracy_metrics(rewards: Sequence[Reward]) -> dict[str, float]:
    """Return `accuracy`, the share of right answers, or `unjudged`, the share without a verdict, if any."""
    verdicts = [reward.answer_correct for reward in rewards]
    if None in verdicts:
        return {"unjudged": verdicts.count(None) / len(verdicts)}
    return {"accuracy": fmean([bool(verdict) for verdict in verdicts])} if verdicts else {}


def group_by_source_name(named_items: Iterable[tuple[str, Item]]) -> dict[str, list[Item]]:
    """Group items by data source, under the source's name in metrics.

    In a name, characters other than letters, digits, dot, - and _ become _. The 50 largest sources have their own
    groups; all further items are in the group `other`.
    """
    groups: dict[str, list[Item]] = {}
    for name, item in named_items:
        groups.setdefault(re.sub(r"[^\w.-]", "_", name) or "_", []).append(item)
    largest = sorted(groups, key=lambda name: (-len(groups[name]), name))
    remaining_items = [item for name in largest[MAX_SOURCES:] for item in groups.pop(name)]
    if remaining_items:
        groups[_OTHER_SOURCES] = [*groups.get(_OTHER_SOURCES, ()), *remaining_items]
    return groups


def source_metrics(rewards: Mapping[str, Sequence[Reward]]) -> dict[str, float]:
    """Return reward metrics per data source, named `reward/source/SOURCE/...`."""
    metrics: dict[str, float] = {}
    for name, source_rewards in rewards.items():
        values = {
            "count": float(len(source_rewards)),
            "mean": fmean([reward.score for reward in source_rewards]),
            "format_valid": fmean([reward.format_valid for reward in source_rewards]),
            **accuracy_metrics(source_rewards),
        }
        for function in dict.fromkeys(function for reward in source_rewards for function in reward.scores):
            scores = [score for reward in source_rewards if (score := reward.scores.get(function)) is not None]
            if scores:
                values.setdefault(function, fmean(scores))
        metrics |= {f"reward/source/{name}/{key}": value for key, value in values.items()}
    return metrics


def is_number(value: Any) -> bool:
    """Return whether a value of a reward function is a number or a truth value, also of numpy."""
    # numpy's bool is not a Real. Compare its class by name: importing numpy would take half of the process's start.
    kind = type(value)
    return isinstance(value, Real) or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


def _check_metrics(metrics: Any) -> dict[str, float]:
    """Return a reward function's metrics. Raises TypeError or ValueError if they are not finite numbers by name."""
    if not isinstance(metrics, Mapping) or not all(
        isinstance(name, str) and is_number(value) for name, value in metrics.items()
    ):
        raise TypeError(f"the function returned metrics that are not numbers by name: {metrics!r:.200}")
    if replaced := SCORE_METRICS & metrics.keys():
        name = min(replaced)
        raise ValueError(
            f"the function returned the metric {name!r}, but reward/NAME/{name} is measured from its scores; give the "
            "metric another name"
        )
    numbers = {name: float(value) for name, value in metrics.items()}
    if not all(map(math.isfinite, numbers.values())):
        raise ValueError(f"the function returned metrics that are not finite: {metrics!r:.200}")
    return numbers


def _check_score(value: Real | float, result: Any) -> float:
    try:
        score = float(value)
    except OverflowError:  # An integer exceeds all floats.
        score = math.inf
    if not math.isfinite(score) or abs(score) > MAX_ABSOLUTE_SCORE:
        raise ValueError(
            f"the function returned a score outside -{MAX_ABSOLUTE_SCORE:g} to {MAX_ABSOLUTE_SCORE:g}: {result!r:.200}"
        )
    return score
