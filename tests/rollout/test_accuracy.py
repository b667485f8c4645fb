"""Accuracy of rewards that are verdicts only as long as they are 0 or 1."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.rollout.accuracy import Answers, had_unjudged_answers
from megarl.rollout.step.step_metrics import data_source_metrics, reward_metrics
from megarl.types import Problem, Reward, Trajectory


def attempt(score: float, answer_correct: bool | None, source: str = "a") -> Trajectory:
    problem = Problem(0, (), (1,), "1", {"data_source": source})
    return Trajectory("mine", problem, 0, 0, (), Reward(score, True, answer_correct, {"mine": score}))


def verdicts(found: list[Trajectory]) -> list[bool | None]:
    return [t.reward.answer_correct for t in found if t.reward is not None]


def test_the_first_reward_without_a_verdict_ends_accuracy_for_good_and_is_logged_once() -> None:
    notices: list[tuple[str, str]] = []
    answers = Answers("by_value", "mine", lambda kind, text: notices.append((kind, text)))
    first = [answers.drop_biased_verdict(attempt(score, verdict)) for score, verdict in ((1.0, True), (0.0, False))]
    assert verdicts(first) == [True, False] and not notices
    second = [
        answers.drop_biased_verdict(attempt(score, verdict))
        for score, verdict in ((1.0, True), (0.3, None), (1.0, True))
    ]
    third = [answers.drop_biased_verdict(attempt(score, verdict)) for score, verdict in ((0.0, False), (0.7, None))]
    assert verdicts(second) == [True, None, None] and verdicts(third) == [None, None]
    [(_, text)] = notices
    assert "0.3" in text and "judges_answer: true" in text
    assert reward_metrics(first)["reward/accuracy"] == 0.5 and "reward/unjudged" not in reward_metrics(first)
    assert reward_metrics(second)["reward/unjudged"] == pytest.approx(2 / 3)
    assert "reward/accuracy" not in reward_metrics(second) and reward_metrics(third)["reward/unjudged"] == 1.0


def test_a_data_source_is_not_measured_by_the_verdicts_before_the_end() -> None:
    found = data_source_metrics([attempt(1.0, True, "a"), attempt(0.3, None, "b")], "data_source")
    assert found["reward/source/a/unjudged"] == 1.0 and not any("accuracy" in name for name in found)


def test_declared_verdicts_never_end() -> None:
    for judging in ("declared", "none"):
        answers = Answers(judging, "mine", has_unjudged=True)
        assert verdicts(
            [answers.drop_biased_verdict(attempt(1.0, True)), answers.drop_biased_verdict(attempt(0.3, None))]
        ) == [True, None]
    unscored = replace(attempt(1.0, True), reward=None)
    assert Answers("by_value").drop_biased_verdict(unscored) == unscored


def test_a_resumed_run_knows_that_accuracy_has_ended() -> None:
    rows = [{"step": 1, "reward/accuracy": 0.5}, {"step": 2, "environment/mine/reward/unjudged": 1.0}]
    assert had_unjudged_answers(rows, "mine", ["easy"], is_mixture=True)
    assert not had_unjudged_answers(rows, "other", ["easy"], is_mixture=True) and not had_unjudged_answers(
        rows, "mine", [], is_mixture=False
    )
    assert had_unjudged_answers([{"step": 1, "val/easy/unjudged": 0.1}], "mine", ["easy"], is_mixture=False)
