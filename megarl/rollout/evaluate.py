"""Evaluation: completions of the validation sets, scored as in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from megarl.rewards.scores import function_metrics
from megarl.rewards.worker import Failure
from megarl.rollout.sources import Source, sampling_settings
from megarl.types import MegarlError, Trajectory


async def evaluate(
    sources: Sequence[Source], max_failed_fraction: float
) -> tuple[dict[str, float], dict[str, list[Trajectory]]]:
    """Sample and score every validation set as its source does; the metrics, and the trajectories of each set.

    Metrics: `val/SET/accuracy` and `/format_valid`, shares of all; `/completion_tokens/mean`; those of each reward
    function, `/reward/NAME/mean` and so on (`rewards.scores.function_metrics`); those of `failure_metrics`. Raises
    AbandonedError where the run is to stop, MegarlError as `failure_metrics`.
    """
    metrics: dict[str, float] = {}
    found: dict[str, list[Trajectory]] = {}
    sets = [(source, name, problems) for source in sources for name, problems in source.validation.items()]
    for source, name, problems in sets:
        sampling = sampling_settings(source.recipe.evaluation_sampling)
        found[name] = await source.sampler.sample(problems, sampling, seed="evaluation")
        metrics |= {f"val/{name}/{key}": value for key, value in _accuracy(found[name]).items()}
        metrics |= failure_metrics(found[name], max_failed_fraction, f"val/{name}/reward_")
    return metrics, found


def _accuracy(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    count = len(trajectories)
    rewards = [t.reward for t in trajectories if t.reward is not None]
    return function_metrics(rewards) | {
        "accuracy": sum(r.answer_correct for r in rewards) / count,
        "format_valid": sum(r.format_valid for r in rewards) / count,
        "completion_tokens/mean": sum(t.num_sampled for t in trajectories) / count,
    }


def failure_metrics(trajectories: Sequence[Trajectory], max_failed_fraction: float, prefix: str) -> dict[str, float]:
    """Completions whose scoring raised or gave no proper reward, PREFIX`errors`, or took too long, PREFIX`timeouts`.

    Raises MegarlError if they, and attempts that ended with an error, are more than `max_failed_fraction` of all.
    """
    failures = [t.failure for t in trajectories]
    metrics = {f"{prefix}{kind}s": float(failures.count(kind)) for kind in get_args(Failure)}
    failed = sum(failure is not None for failure in failures)
    if failed > max_failed_fraction * len(trajectories):
        ends = {"rollout/ended/error": float(sum(t.ended == "error" for t in trajectories))}
        counts = ", ".join(f"{name} {count:.0f}" for name, count in (metrics | ends).items() if count)
        raise MegarlError(
            f"{failed} of {len(trajectories)} completions could not be scored ({counts}), which is more than "
            f"reward.max_failed_fraction = {max_failed_fraction:g}; a warning above shows the first of each kind. Mend "
            "the reward function or the environment, or raise reward.timeout_seconds, reward.wall_timeout_seconds or "
            "this fraction."
        )
    return metrics
