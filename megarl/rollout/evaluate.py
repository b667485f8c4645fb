"""Held-out accuracy: greedy answers to the validation sets, scored as in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from megarl.rewards.scores import function_metrics
from megarl.rewards.worker import Failure
from megarl.rollout.groups import GroupSampler
from megarl.types import MegarlError, Problem, SamplingSettings, Trajectory


async def accuracy(
    sampler: GroupSampler, problems: Sequence[Problem], sampling: SamplingSettings
) -> tuple[dict[str, float], list[Trajectory]]:
    """Share of right answers, of valid formats, and the mean length, of one validation set; and the trajectories.

    Beside these each reward function's metrics, `reward/NAME/mean` and so on (`rewards.scores.function_metrics`).
    """
    trajectories = await sampler.sample(problems, sampling, seed="evaluation")
    count = len(trajectories)
    rewards = [t.reward for t in trajectories if t.reward is not None]
    return function_metrics(rewards) | {
        "accuracy": sum(r.answer_correct for r in rewards) / count,
        "format_valid": sum(r.format_valid for r in rewards) / count,
        "completion_tokens/mean": sum(t.num_sampled for t in trajectories) / count,
    }, trajectories


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
