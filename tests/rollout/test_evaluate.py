"""What is measured of trajectories: accuracy of validation sets, failures, turns and ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.algorithms.estimates import Measure, wilson
from megarl.config import Recipe
from megarl.console.results import print_evaluation
from megarl.rewards.scoring.reward_process import Failure
from megarl.rollout.evaluate import EvaluatedSet, compute_measures, evaluate, failure_metrics
from megarl.rollout.source import Source
from megarl.rollout.step.step_metrics import environment_metrics, rollout_metrics
from megarl.types import MegarlError, Problem, Reward, SamplingSettings, Segment, Trajectory

PROBLEM = Problem(7, ({"role": "user"},), (3,), "3")

NO_FAILURES = {"reward/errors": 0.0, "reward/timeouts": 0.0, "reward/parse_errors": 0.0}


def segment(*turns: int) -> Segment:
    """Tokens of so many turns; -1 is context."""
    of_tokens = np.array(turns, np.int16)
    mask = of_tokens >= 0
    versions = np.where(mask, 2, -1).astype(np.int32)
    return Segment(np.arange(len(turns)), mask, np.zeros(len(turns), np.float32), versions, of_tokens)


def trajectory(score: float, segments: tuple[Segment, ...] = (), **more: Any) -> Trajectory:
    reward = Reward(score, format_valid=score >= 0, answer_correct=score > 0, scores={"boxed": score, "mine": None})
    return Trajectory("single_turn", PROBLEM, 0, 0, segments, reward, **more)


def test_every_validation_set_is_sampled_and_measured() -> None:
    found = [trajectory(1.0, (segment(-1, 0),)), trajectory(-1.0, (segment(-1, 0, 0),)), trajectory(2.0)]
    asked: list[Any] = []

    class Sampler:
        async def sample(
            self, problems: Any, sampling: SamplingSettings, *, samples_per_prompt: int, seed: str
        ) -> list[Trajectory]:
            asked.append((problems, sampling.temperature, samples_per_prompt, seed))
            return found

    sampler: Any = Sampler()
    sets = {"easy": [PROBLEM], "hard": [PROBLEM, PROBLEM]}
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": "m"},
            "mixture": {
                "a": {"data": {"train": "t"}},
                "b": {"data": {"train": "t"}, "evaluation": {"sampling": {"temperature": 0.5}}},
            },
        }
    )  # fmt: skip
    sources = [
        Source(of.name, 1.0, of.recipe, sampler, validation={name: sets[name]})
        for of, name in zip(recipe.sources, sets, strict=True)
    ]
    done = everything(sources)
    assert asked == [([PROBLEM], 0.0, 1, "evaluation"), ([PROBLEM, PROBLEM], 0.5, 1, "evaluation")]
    assert {of.name: of.trajectories for of in done} == {"easy": found, "hard": found}
    metrics = {name: value for of in done for name, value in of.metrics.items()}
    low, high = wilson(2, 3)
    expected = {"accuracy": 2 / 3, "accuracy/low": low, "accuracy/high": high}
    expected |= {"format_valid": 2 / 3, "completion_tokens/mean": 1.0}
    of_functions = {"reward/boxed/mean": 2 / 3, "reward/boxed/std": 14**0.5 / 3, "reward/boxed/unscored": 0.0}
    of_functions |= {"reward/boxed/min": -1.0, "reward/boxed/max": 2.0}
    for measure in ("reward/mean", "reward/boxed/mean"):
        of_functions |= {measure: 2 / 3, f"{measure}/low": -1.0, f"{measure}/high": 2.0}
    silent = {"reward/mine/unscored": 1.0, "reward/unscored": 0.0}
    of_set = (
        expected | of_functions | silent | {"reward_errors": 0.0, "reward_timeouts": 0.0, "reward_parse_errors": 0.0}
    )
    assert metrics == pytest.approx({f"val/{name}/{key}": value for name in sets for key, value in of_set.items()})


def test_a_set_whose_answers_were_not_all_judged_has_rewards_only() -> None:
    unjudged = replace(trajectory(0.4), reward=Reward(0.4, True, None))
    found = [trajectory(1.0), unjudged, trajectory(1.0), trajectory(0.0)]
    measures = compute_measures(found, 2, (1, 2), None)
    assert measures.keys() == {"reward/mean", "reward/boxed/mean"} and measures["reward/mean"].value == pytest.approx(
        (0.7 + 0.5) / 2
    )
    done = EvaluatedSet("easy", found, 2, 1.0, measures, {}, {})
    metrics = done.metrics
    assert metrics["val/easy/unjudged"] == 0.25 and not any("accuracy" in name for name in metrics)


def test_graded_rewards_have_a_mean_with_an_interval() -> None:
    """Scores between -0.5 and 1 without verdicts, as environments give them. A failed attempt is left out."""

    def attempt(score: float | None, shape: float | None) -> Trajectory:
        scored = None if score is None else Reward(score, True, None, {"shape": shape})
        return replace(trajectory(0.0), reward=scored)

    attempts = [
        attempt(-0.5, 0.25), attempt(1.0, None), attempt(0.25, 0.75), attempt(None, None), attempt(None, None),
        attempt(None, None),
    ]  # fmt: skip
    measures = compute_measures(attempts, 2, (1,), None)
    assert {name: measure.value for name, measure in measures.items()} == {
        "reward/mean": 0.25,
        "reward/shape/mean": 0.5,
    }
    assert -0.5 <= measures["reward/shape/mean"].low <= 0.5 <= measures["reward/shape/mean"].high <= 1.0
    assert compute_measures(attempts[3:5], 2, (), None).keys() == {"accuracy"}


def test_the_table_of_an_evaluation_cuts_no_name_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    share, score = Measure(0.5, 0.25, 0.75, "bootstrap"), Measure(-0.25, -0.5, 0.125, "bootstrap")
    measures = {"accuracy": share, "majority_at_16": share, "majority_at_128": share, "reward/longest_word/mean": score}
    judged = EvaluatedSet("competition_problems_2026", [trajectory(1.0)] * 256, 128, 0.6, measures, {}, {})
    graded = EvaluatedSet("game", [trajectory(1.0)] * 2, 2, 1.0, {"reward/mean": score}, {}, {})
    print_evaluation([judged, graded], Path("out"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    for texts in (
        ("majority_at_16 ", "50.0 (25.0 to 75.0)"), ("majority_at_128 ", "50.0 (25.0 to 75.0)"),
        ("reward/longest_word/mean ", "-0.25 (-0.5 to 0.125)"), ("game", "not judged"), ("reward/mean ", "-0.25"),
    ):  # fmt: skip
        assert any(all(text in line for text in texts) for line in lines), texts


def everything(sources: list[Source]) -> list[EvaluatedSet]:
    async def collect() -> list[EvaluatedSet]:
        return [done async for done in evaluate(sources, 0.0)]

    return asyncio.run(collect())


def test_several_attempts_at_each_problem_are_measured_by_problem_and_by_data_source() -> None:
    def attempts(index: int, data_source: str, said: str, right: str) -> list[Trajectory]:
        problem = Problem(index, ({"role": "user"},), (3,), right, {"data_source": data_source})
        made = [trajectory(float(answer == right), texts=(f"\\boxed{{ {answer} }}",)) for answer in said]
        return [replace(one, problem=problem, number=number) for number, one in enumerate(made)]

    found = [
        *attempts(0, "org/easy", "1123", "1"),
        *attempts(1, "org/easy", "2222", "1"),
        *attempts(2, "b", "1111", "1"),
    ]

    class Sampler:
        async def sample(self, problems: Any, sampling: SamplingSettings, **given: Any) -> list[Trajectory]:
            assert (given["samples_per_prompt"], sampling.temperature) == (4, 0.7)
            return found

    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t"},
            "rollout": {"sampling": {"temperature": 0.7}},
            "evaluation": {"samples_per_prompt": 4, "k": [1, 2, 4]},
        }
    )  # fmt: skip
    sampler: Any = Sampler()
    [done] = everything([Source("s", 1.0, recipe, sampler, validation={"both": [PROBLEM]})])
    expected = {
        "accuracy": (0.5 + 0 + 1) / 3, "pass_at_1": 0.5, "pass_at_2": (5 / 6 + 0 + 1) / 3, "pass_at_4": 2 / 3,
        "majority_at_1": 0.5,
        # Of the six pairs of 1, 1, 2, 3: 1 and 1 wins, four are a draw of one right and one wrong, 2 and 3 loses.
        "majority_at_2": ((1 + 4 / 2) / 6 + 0 + 1) / 3, "majority_at_4": 2 / 3,
    }  # fmt: skip
    expected |= dict.fromkeys(("reward/mean", "reward/boxed/mean"), 0.5)
    assert {name: measure.value for name, measure in done.measures.items()} == pytest.approx(expected)
    assert done.by_data_source.keys() == {"org_easy", "b"}
    assert done.metrics["val/both/data_source/org_easy/pass_at_2"] == pytest.approx(5 / 12)
    assert done.metrics["val/both/data_source/b/majority_at_4/low"] == pytest.approx(wilson(1, 1)[0])
    assert [(line["attempt"], line["final_answer"]) for line in done.records()[:4]] == [
        (0, "1"), (1, "1"), (2, "2"), (3, "3")
    ]  # fmt: skip


def test_what_states_no_answer_has_no_majority() -> None:
    assert compute_measures([trajectory(1.0), trajectory(0.0)], 2, (2,), None).keys() > {"accuracy", "pass_at_2"}
    found = compute_measures([trajectory(1.0), trajectory(0.0)], 2, (2,), lambda text, record: None)
    assert found["majority_at_2"].value == 1.0  # the wrong one does not vote


def test_each_environment_of_a_mixture_is_measured_alone() -> None:
    games = [
        replace(
            trajectory(score, (segment(-1, 0, -1, 1),), metrics={"moves": 4.0}, engine_seconds=2 + score),
            environment="games",
        )
        for score in (1.0, 0.0)
    ]
    metrics = environment_metrics("games", [*games, trajectory(5.0, (segment(-1, 0),))])
    expected = {
        "share": 2 / 3, "reward/mean": 0.5, "reward/accuracy": 0.5, "turns/mean": 2.0, "ended/done": 1.0, "moves": 4.0,
        "reward/boxed/mean": 0.5, "completion_tokens/mean": 2.0, "observed_tokens/max": 1.0,
        "time/engine_wait_seconds/mean": 2.5,
    }  # fmt: skip
    assert {name: metrics[f"environment/games/{name}"] for name in expected} == pytest.approx(expected)
    assert environment_metrics("absent", games) == {"environment/absent/share": 0.0}


def test_the_line_of_samples() -> None:
    line = trajectory(2.0, (segment(-1, 0, 0),), texts=("5",), ended="length").record()
    assert line == {
        "source": "single_turn",
        "problem": 7,
        "prompt": ({"role": "user"},),
        "completion": "5",
        "answer": "3",
        "reward": 2.0,
        "reward_failure": None,
        "answer_correct": True,
        "format_valid": True,
        "finish_reason": "length",
        "tokens": 2,
    }


def test_the_line_of_samples_has_the_turns_and_what_an_environment_asked() -> None:
    asked, hint = {"role": "user", "content": "Guess."}, {"role": "user", "content": "Higher."}
    line = trajectory(
        1.0,
        (segment(-1, 0, -1, 1),),
        texts=("4", "6"),
        messages=((asked,), (hint,), ()),
        turn_rewards=((1, 1.0),),
    ).record()
    assert line["prompt"] == (asked,) and "completion" not in line, "the turns have it"
    assert line["turns"] == [
        {"completion": "4", "reward": None, "observation": (hint,)},
        {"completion": "6", "reward": 1.0, "observation": ()},
    ]
    # One that ended before its first completion.
    line = trajectory(0.0, messages=((asked,),), ended="error").record()
    assert line["prompt"] == (asked,) and "turns" not in line


def test_turns_and_ends_are_counted() -> None:
    found = [
        trajectory(1.0, (segment(-1, 0, 0, -1, -1, 1, -1, 2),), metrics={"moves": 2.0}, engine_seconds=3.0),
        trajectory(1.0, (segment(-1, 0, 0),), ended="length"),
        trajectory(0.0, ended="error", failure="Refused: too long"),
        trajectory(
            0.0,
            (segment(-1, 0), segment(-1, -1, -1, 1)),
            failure="timeout",
            metrics={"moves": 5.0},
            environment_seconds=2.0,
        ),
    ]
    assert rollout_metrics(found) == {
        "rollout/temperature": 1.0,
        "rollout/prompt_tokens/mean": 1.0,
        "rollout/prompt_tokens/max": 1.0,
        "rollout/turns/mean": 1.5,
        "rollout/turns/max": 3.0,
        "rollout/turn_tokens/mean": 8 / 6,
        "rollout/turn_tokens/max": 2.0,
        "rollout/observed_tokens/mean": 0.75,
        "rollout/observed_tokens/max": 3.0,
        "time/engine_wait_seconds/mean": 0.75,
        "time/engine_wait_seconds/max": 3.0,
        "time/environment_wait_seconds/mean": 0.5,
        "time/environment_wait_seconds/max": 2.0,
        "rollout/restarted": 0.0,
        "rollout/segments/mean": 1.0,
        "rollout/forks": 1.0,
        "rollout/ended/done": 0.5,
        "rollout/ended/length": 0.25,
        "rollout/ended/turns": 0.0,
        "rollout/ended/calls": 0.0,
        "rollout/ended/invalid_calls": 0.0,
        "rollout/ended/seconds": 0.0,
        "rollout/ended/error": 0.25,
        "rollout/errors/Refused": 1.0,
        "environment/moves": 3.5,
    }


@pytest.mark.parametrize("limit", [0.05, 0.5])
def test_completions_that_could_not_be_scored_are_counted_and_end_a_run_where_they_are_too_many(limit: float) -> None:
    failures: tuple[Failure | None, ...] = ("error", None, "timeout", "error", None, None)
    trajectories = [trajectory(0.0, failure=failure) for failure in failures]
    if limit == 0.5:
        counted = failure_metrics(trajectories, limit, "val/easy/reward_")
        assert counted == {
            "val/easy/reward_errors": 2.0, "val/easy/reward_timeouts": 1.0, "val/easy/reward_parse_errors": 0.0,
        }  # fmt: skip
        assert failure_metrics([], limit, "reward/") == NO_FAILURES
        return
    with pytest.raises(MegarlError) as caught:
        failure_metrics(trajectories, limit, "reward/")
    assert caught.value.exit_code == 70
    for words in ("3 of 6 completions", "reward/errors 2, reward/timeouts 1", "reward.max_failed_fraction = 0.05"):
        assert words in str(caught.value)


def test_attempts_that_an_error_ended_count_as_failed_too() -> None:
    found = [trajectory(0.0), trajectory(0.0, ended="error", failure="KeyError: 'x'")]
    with pytest.raises(MegarlError, match="1 of 2 completions"):
        failure_metrics(found, 0.4, "reward/")
    assert failure_metrics(found, 0.5, "reward/") == NO_FAILURES
