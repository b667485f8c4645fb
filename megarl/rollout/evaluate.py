"""Evaluation: attempts at the problems of the validation sets, scored like training samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megarl.algorithms.estimates import Measure, majority_at_k, mean_score, mean_with_interval, pass_at_k
from megarl.rewards.functions.final_answers import ReadAnswer, find_answer_reader
from megarl.rewards.scoring.http_rewards import COUNTED_FOR
from megarl.rewards.scoring.results import accuracy_metrics, function_metrics
from megarl.rollout.source import Source, sampling_settings, served_metrics
from megarl.rollout.step.step_metrics import by_data_source
from megarl.tracking.metric_rows import MetricRow
from megarl.types import MegarlError, Reward, Trajectory

METRICS = (
    MetricRow(
        "val/SET/accuracy",
        "share",
        "right answers of a validation set; only if all have a verdict (judges_answer). With preferences: pairs won",
    ),
    MetricRow(
        "val/SET/unjudged", "share", "scored answers without a verdict; then accuracy, pass and majority are absent"
    ),
    MetricRow(
        "val/SET/pass_at_K",
        "share",
        "problems solved by at least one of K attempts; unbiased estimate over all sets of K",
    ),
    MetricRow(
        "val/SET/majority_at_K", "share", "problems for which the most frequent final answer of K attempts is right"
    ),
    MetricRow("val/SET/reward/mean", "score", "reward of the scored attempts: mean by problem, then over the problems"),
    MetricRow(
        "val/SET/MEASURE/low",
        "own",
        "lower bound of the 95 % interval of accuracy, pass_at_K, majority_at_K, reward/mean or reward/FUNCTION/mean",
    ),
    MetricRow("val/SET/MEASURE/high", "own", "upper bound of that interval"),
    MetricRow("val/SET/data_source/NAME/MEASURE", "own", "one of these measures, of one data source of a set"),
    MetricRow("val/SET/data_source/NAME/MEASURE/BOUND", "own", "a bound of that measure's 95 % interval"),
    MetricRow("val/SET/format_valid", "share", "answers of a validation set with a valid format"),
    MetricRow("val/SET/completion_tokens/mean", "tokens", "length of an answer, mean"),
    MetricRow(
        "val/SET/reward_FAULT",
        "count",
        "answers with failed scoring: it raised or gave an invalid reward (errors), took too long (timeouts), or a "
        "scoring server's reply could not be parsed (parse_errors)",
    ),
    MetricRow("reward/errors", "count", "samples whose scoring raised or gave an invalid reward"),
    MetricRow("reward/timeouts", "count", "samples whose scoring took too long"),
    MetricRow("reward/parse_errors", "count", "samples for which a scoring server's reply could not be parsed"),
)


@dataclass(frozen=True, slots=True)
class EvaluatedSet:
    """A validation set with the attempts at its problems, grouped by problem."""

    name: str
    trajectories: Sequence[Trajectory]
    samples_per_prompt: int
    temperature: float
    measures: Mapping[str, Measure]
    """Means over problems with 95 % intervals, by the name of the measure."""
    by_data_source: Mapping[str, Mapping[str, Measure]]
    """Means by data source (field `reward.source_field` of the records), then by measure. Empty with a single
    source.
    """
    counts: Mapping[str, float]
    """Counts of completions without a score, and of calls to scoring servers."""
    read_answer: ReadAnswer | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of this validation set, named `val/SET/...` (METRICS)."""
        trajectories = self.trajectories
        rewards = [t.reward for t in trajectories if t.reward is not None]
        metrics = function_metrics(rewards) | _flatten_measures(self.measures)
        for name, measures in self.by_data_source.items():
            metrics |= {f"data_source/{name}/{key}": value for key, value in _flatten_measures(measures).items()}
        if unjudged := accuracy_metrics(rewards).get("unjudged"):
            metrics["unjudged"] = unjudged
        metrics["format_valid"] = sum(r.format_valid for r in rewards) / len(trajectories)
        metrics["completion_tokens/mean"] = sum(t.num_sampled for t in trajectories) / len(trajectories)
        return {f"val/{self.name}/{key}": value for key, value in metrics.items()} | dict(self.counts)

    def records(self) -> list[dict[str, Any]]:
        """Return one JSON object per attempt: the trajectory's record, the set's name, and the attempt's number.

        `final_answer` is counted in majority votes. It is absent if no reward function defines its format.
        """
        return [{"set": self.name, "attempt": t.number} | self._final_answer(t) | t.record() for t in self.trajectories]

    def _final_answer(self, trajectory: Trajectory) -> dict[str, Any]:
        return {} if self.read_answer is None else {"final_answer": final_answer(trajectory, self.read_answer)}


async def evaluate(sources: Sequence[Source], max_failed_fraction: float) -> AsyncGenerator[EvaluatedSet, None]:
    """Sample and score each validation set with its source's settings, one set after another.

    Raises AbandonedError if the run must stop. Raises MegarlError if more than `max_failed_fraction` of a set's
    completions could not be scored.
    """
    sets = [(source, name, problems) for source in sources for name, problems in source.validation.items()]
    for source, name, problems in sets:
        settings = source.recipe.evaluation
        sampling = sampling_settings(
            source.recipe.evaluation_sampling, repetition_penalty=settings.sampling.repetition_penalty
        )
        # Tasks created below inherit this context variable, so the pool counts their tokens for the evaluation.
        context_token = COUNTED_FOR.set("evaluation")
        try:
            trajectories = await source.sampler.sample(
                # The same seed at every step, so that evaluations differ only by the weights.
                problems,
                sampling,
                samples_per_prompt=settings.samples_per_prompt,
                seed="evaluation",
            )
            reward_call_metrics = served_metrics([source])
        finally:
            COUNTED_FOR.reset(context_token)
        counts = failure_metrics(trajectories, max_failed_fraction, f"val/{name}/reward_")
        counts |= {f"val/{name}/{key}": value for key, value in reward_call_metrics.items()}
        yield await _measure_set(source, name, trajectories, sampling.temperature, counts)


async def _measure_set(
    source: Source, name: str, trajectories: list[Trajectory], temperature: float, counts: Mapping[str, float]
) -> EvaluatedSet:
    """Return a sampled validation set with its measures, of the whole set and by data source."""
    recipe, settings = source.recipe, source.recipe.evaluation
    read_answer = find_answer_reader([(function.name, function.kwargs) for function in recipe.reward.functions])
    measure_arguments = (settings.samples_per_prompt, settings.ks, read_answer)
    grouped = by_data_source(trajectories, recipe.reward.source_field)
    # Majority votes take a while. Count them in a thread, so that the event loop can answer calls.
    set_measures = await asyncio.to_thread(compute_measures, trajectories, *measure_arguments)
    # A single data source would only repeat the numbers of the set.
    data_source_parts = grouped.items() if len(grouped) > 1 else ()
    measures_by_part = {
        key: await asyncio.to_thread(compute_measures, part, *measure_arguments) for key, part in data_source_parts
    }
    return EvaluatedSet(
        name,
        trajectories,
        settings.samples_per_prompt,
        temperature,
        set_measures,
        measures_by_part,
        counts,
        read_answer,
    )


def compute_measures(
    trajectories: Sequence[Trajectory], samples_per_prompt: int, ks: Sequence[int], read_answer: ReadAnswer | None
) -> dict[str, Measure]:
    """Return measures over problems with 95 % intervals. Each problem has `samples_per_prompt` consecutive attempts.

    `accuracy` is the share of correct attempts (avg@n). Each k of `ks` adds `pass_at_K` and, with `read_answer`,
    `majority_at_K`. Unscored attempts count as not correct. If a scored answer has no verdict, all three are absent.
    `reward/mean` and `reward/NAME/mean` are means over scored attempts.
    """
    first_attempts = range(0, len(trajectories), samples_per_prompt)
    problems = [trajectories[start : start + samples_per_prompt] for start in first_attempts]
    reward_measures = _compute_reward_measures(
        [[t.reward for t in attempts if t.reward is not None] for attempts in problems]
    )
    if any(t.reward is not None and t.reward.answer_correct is None for t in trajectories):
        return reward_measures
    return _compute_verdict_measures(problems, ks, read_answer) | reward_measures


def _compute_reward_measures(problems: Sequence[Sequence[Reward]]) -> dict[str, Measure]:
    """Return the mean scores. `problems` has the rewards of each problem's scored attempts."""
    function_names = dict.fromkeys(name for rewards in problems for reward in rewards for name in reward.scores)
    scores: dict[str, list[list[float]]] = {"reward/mean": [[r.score for r in rewards] for rewards in problems]}
    for name in function_names:
        by_problem = [[reward.scores.get(name) for reward in rewards] for rewards in problems]
        scores[f"reward/{name}/mean"] = [
            [score for score in problem_scores if score is not None] for problem_scores in by_problem
        ]
    problem_means = {
        measure: [fmean(problem_scores) for problem_scores in by_problem if problem_scores]
        for measure, by_problem in scores.items()
    }
    return {measure: mean_score(mean_values) for measure, mean_values in problem_means.items() if mean_values}


def _compute_verdict_measures(
    problems: Sequence[Sequence[Trajectory]], ks: Sequence[int], read_answer: ReadAnswer | None
) -> dict[str, Measure]:
    """Return accuracy, pass@k and majority@k over problems. `problems` has each problem's attempts."""
    is_correct = [[t.reward is not None and bool(t.reward.answer_correct) for t in attempts] for attempts in problems]
    measures = {
        "accuracy": mean_with_interval([sum(problem_flags) / len(problem_flags) for problem_flags in is_correct])
    }
    for k in ks:
        measures[f"pass_at_{k}"] = mean_with_interval(
            [pass_at_k(len(problem_flags), sum(problem_flags), k) for problem_flags in is_correct]
        )
    if read_answer is not None:
        final_answers = [[final_answer(t, read_answer) for t in attempts] for attempts in problems]
        for k in ks:
            majority_values = [
                majority_at_k(problem_flags, problem_answers, k, problem=problem_number)
                for problem_number, (problem_flags, problem_answers) in enumerate(
                    zip(is_correct, final_answers, strict=True)
                )
            ]
            measures[f"majority_at_{k}"] = mean_with_interval(majority_values)
    return measures


def final_answer(trajectory: Trajectory, read_answer: ReadAnswer) -> str | None:
    """Return the final answer in an attempt's last completion, without white space; None: it has none."""
    if trajectory.is_in_thoughts:
        return None
    answer = read_answer(trajectory.texts[-1], trajectory.problem.record or {}) if trajectory.texts else None
    # Votes compare texts, and "x = 1" and "x=1" are the same answer.
    return None if answer is None else "".join(answer.split())


def _flatten_measures(measures: Mapping[str, Measure]) -> dict[str, float]:
    """Return each measure's value, and the ends of its interval as NAME/low and NAME/high."""
    scalars = {name: measure.value for name, measure in measures.items()}
    for name, measure in measures.items():
        scalars |= {f"{name}/low": measure.low, f"{name}/high": measure.high}
    return scalars


def failure_metrics(trajectories: Sequence[Trajectory], max_failed_fraction: float, prefix: str) -> dict[str, float]:
    """Return the numbers of completions whose scoring failed, by kind. Metric names begin with `prefix`.

    Raises MegarlError if more than `max_failed_fraction` of all attempts failed, in scoring or before.
    """
    failures = [t.failure for t in trajectories]
    metrics = {
        f"{prefix}errors": float(failures.count("error")),
        f"{prefix}timeouts": float(failures.count("timeout")),
        f"{prefix}parse_errors": float(failures.count("parse_error")),
    }
    num_failed = sum(failure is not None for failure in failures)
    if num_failed > max_failed_fraction * len(trajectories):
        other_errors = {"rollout/ended/error": float(sum(t.ended == "error" for t in trajectories))}
        counts = ", ".join(f"{name} {count:.0f}" for name, count in (metrics | other_errors).items() if count)
        raise MegarlError(
            f"{num_failed} of {len(trajectories)} completions could not be scored ({counts}), which is more than "
            f"reward.max_failed_fraction = {max_failed_fraction:g}; a warning above shows the first of each kind. Fix "
            "the reward function or the environment, or raise reward.timeout_seconds, reward.wall_timeout_seconds or "
            "reward.max_failed_fraction."
        )
    return metrics
