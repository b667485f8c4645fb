"""Metrics of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import torch

from megarl.algorithms.importance import mismatch_metrics, mismatch_moments
from megarl.config import Recipe
from megarl.data.formats import value_at
from megarl.rewards.scoring.results import accuracy_metrics, function_metrics, group_by_source_name, source_metrics
from megarl.rollout.state import flatten
from megarl.rollout.step.rl_batch import RLBatch
from megarl.tracking.metric_rows import PER_ATTEMPT, MetricRow
from megarl.types import Ended, Group, Reward, Trajectory

METRICS = (
    MetricRow("reward/{mean,std,min,max}", "score", "reward of the step's samples"),
    MetricRow(
        "reward/accuracy", "share", "scored samples with a right answer; only if all have a verdict (judges_answer)"
    ),
    MetricRow(
        "reward/unjudged", "share", "scored samples without a verdict on their answer; then reward/accuracy is absent"
    ),
    MetricRow("reward/format_valid", "share", "scored samples with a valid format"),
    MetricRow("reward/zero_variance_groups", "share", "groups with all rewards equal: no learning signal"),
    MetricRow("rollout/completion_tokens/{mean,max}", "tokens", "sampled tokens of an attempt"),
    MetricRow("rollout/prompt_tokens/{mean,max}", "tokens", "first prompt of an attempt"),
    MetricRow("rollout/truncated", "share", "attempts ended by the length limit"),
    MetricRow("rollout/temperature", "1", "sampling temperature", PER_ATTEMPT),
    MetricRow("rollout/turns/{mean,max}", "completions", "completions of an attempt"),
    MetricRow("rollout/turn_tokens/{mean,max}", "tokens", "sampled tokens of a completion"),
    MetricRow("rollout/observed_tokens/{mean,max}", "tokens", "tokens added to an attempt by environment and tools"),
    MetricRow("rollout/segments/mean", "sequences", "training sequences per attempt, mean"),
    MetricRow(
        "rollout/forks",
        "count",
        "how often an attempt's prompt did not extend its earlier tokens and began a new sequence",
    ),
    MetricRow("rollout/restarted", "count", "how often attempts were restarted from the beginning"),
    MetricRow("rollout/ended/WHY", "share", "attempts ended for this reason: done, length, error and so on"),
    MetricRow("rollout/errors/KIND", "count", "attempts ended by an error of this kind"),
    MetricRow(
        "rollout/candidates_left/{mean,max}",
        "tokens",
        "candidate tokens left by top-p, top-k and min-p, over positions where any was cut",
    ),
    MetricRow(
        "rollout/candidates_left_bytes", "bytes", "size of the recorded candidate sets left by top-p, top-k and min-p"
    ),
    MetricRow(
        "time/engine_wait_seconds/{mean,max}",
        "seconds",
        "how long an attempt waited for completions (after a resume, since then)",
    ),
    MetricRow("time/environment_wait_seconds/{mean,max}", "seconds", "how long an attempt waited for its environment"),
    MetricRow(
        "staleness/{mean,max}",
        "versions",
        "weight versions between a trajectory's oldest token and the weights it updates",
    ),
    MetricRow(
        "staleness/tokens/age_N",
        "share",
        "trained tokens sampled by weights N versions before the step's; age_8 includes older ones",
    ),
    MetricRow(
        "logprob_gap/mean/age_N",
        "nats",
        "distance of the trainer's log-probs before the update from the engine's at sampling, mean over tokens of an "
        "age; at age 0 the mismatch of the two programs, at higher ages also the training since then",
    ),
    MetricRow("logprob_gap/k3/age_N", "nats", "k3 estimate of the divergence of the sampling weights from the step's"),
    MetricRow("importance/ratio/age_N", "ratio", "the step's probability of a token over that at sampling, mean"),
    MetricRow("importance/ess/age_N", "share", "effective sample size of these ratios, before a correction clips them"),
    MetricRow("environment/SOURCE/share", "share", "attempts of this source, in a mixture"),
    MetricRow(
        "environment/OWN",
        "own",
        "a number reported by the environment itself, mean over the attempts having it; in a mixture also SOURCE/ and "
        "any metric of rewards and rollouts for this source",
    ),
)

OLDEST = 8
"""Largest staleness, in weight versions, with a metric of its own. Older tokens count in this metric too."""


def step_metrics(
    sampled: Sequence[Trajectory], groups: Sequence[Group], recipe: Recipe, weight_version: int
) -> dict[str, float]:
    """Return reward and rollout metrics of a step's samples, and the staleness of the groups to train on.

    If enough groups were waiting, nothing was sampled. Then all metrics describe the groups to train on.
    """
    trained = flatten(groups)
    # Sampled trajectories include the filtered-out ones, so a filter does not bias the metrics.
    measured = sampled or trained
    rewards = reward_metrics(measured, trained=trained if recipe.reward.model else None)
    rewards |= data_source_metrics(measured, recipe.reward.source_field)
    metrics = rewards | rollout_metrics(measured) | staleness_metrics(trained, weight_version)
    for source in recipe.sources if recipe.mixture else ():
        metrics |= environment_metrics(source.name, measured)
    return metrics


def environment_metrics(name: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of one source of a mixture.

    Their names are `environment/SOURCE/` plus the usual name without `rollout/` or `environment/`.
    """
    episodes = [t for t in trajectories if t.environment == name]
    metrics = {"share": len(episodes) / len(trajectories)}
    if episodes:
        episode_metrics = rollout_metrics(episodes) | (
            reward_metrics(episodes) if any(t.reward for t in episodes) else {}
        )
        metrics |= {
            key.removeprefix("rollout/").removeprefix("environment/"): value for key, value in episode_metrics.items()
        }
    return {f"environment/{name}/{key}": value for key, value in metrics.items()}


def by_data_source(trajectories: Sequence[Trajectory], field: str | None) -> dict[str, list[Trajectory]]:
    """Group trajectories by data source: the text in this field of their records. Records without the field are
    omitted.
    """
    if field is None:
        return {}
    named_trajectories = ((value_at(t.problem.record, field), t) for t in trajectories if t.problem.record)
    return group_by_source_name((name, t) for name, t in named_trajectories if isinstance(name, str))


def data_source_metrics(trajectories: Sequence[Trajectory], field: str | None) -> dict[str, float]:
    """Return reward metrics per data source, named by a record's `field`. Unscored trajectories are left out."""
    rewarded = [t for t in trajectories if t.reward is not None]
    # A source may stop having verdicts within a step. The mean of its earlier verdicts would be biased.
    unjudged_environments = {t.environment for t in rewarded if t.reward and t.reward.answer_correct is None}
    rewards: dict[str, list[Reward]] = {}
    for name, source_trajectories in by_data_source(rewarded, field).items():
        for t in source_trajectories:
            assert t.reward is not None
            reward = replace(t.reward, answer_correct=None) if t.environment in unjudged_environments else t.reward
            rewards.setdefault(name, []).append(reward)
    return source_metrics(rewards)


def staleness_metrics(trajectories: Sequence[Trajectory], weight_version: int) -> dict[str, float]:
    staleness = [weight_version - t.oldest_version for t in trajectories if t.num_sampled]
    return {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(max(staleness))}


def reward_metrics(trajectories: Sequence[Trajectory], trained: Sequence[Trajectory] | None = None) -> dict[str, float]:
    """Return reward metrics of a step's completions, in total and per reward function.

    Unscored attempts do not count. A reward model scores only the trajectories in `trained`, so the total then
    describes only these; None: all.
    """
    all_rewards = [t.reward for t in trajectories if t.reward is not None]
    scored = [(t, t.reward) for t in (trajectories if trained is None else trained) if t.reward is not None]
    scores = np.array([reward.score for _, reward in scored])
    lengths = np.array([t.num_sampled for t in trajectories])
    groups = np.array([t.group for t, _ in scored])
    has_equal_rewards = [np.ptp(scores[groups == group]) == 0 for group in np.unique(groups)]
    metric_names = {"accuracy": "reward/accuracy", "unjudged": "reward/unjudged"}
    verdicts = {metric_names[name]: value for name, value in accuracy_metrics(all_rewards).items()}
    return (
        function_metrics(all_rewards)
        | verdicts
        | {
            "reward/mean": float(scores.mean()),
            "reward/std": float(scores.std()),
            "reward/min": float(scores.min()),
            "reward/max": float(scores.max()),
            "reward/format_valid": float(np.mean([reward.format_valid for reward in all_rewards])),
            "reward/zero_variance_groups": float(np.mean(has_equal_rewards)),
            "rollout/completion_tokens/mean": float(lengths.mean()),
            "rollout/completion_tokens/max": float(lengths.max()),
            "rollout/truncated": float(np.mean([t.ended == "length" for t in trajectories])),
        }
    )


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return rollout metrics of a step's attempts.

    The environment's own metrics get the prefix `environment/`, except `tools/`.
    """
    return (
        _compute_size_metrics(trajectories)
        | _compute_ended_shares(trajectories)
        | _compute_candidate_metrics(trajectories)
        | _count_errors_by_kind(trajectories)
        | _average_environment_metrics(trajectories)
    )


def _compute_size_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of tokens, turns, segments, restarts and waits of attempts."""
    count = len(trajectories)
    prompt_lengths = [_count_first_prompt_tokens(t) for t in trajectories]
    num_turns = [t.num_turns for t in trajectories]
    turn_lengths = [num_tokens for t in trajectories for num_tokens in t.turn_tokens]
    segment_counts = [len(t.segments) for t in trajectories]
    values_by_metric = {
        "rollout/observed_tokens": [t.num_observed for t in trajectories],
        "time/engine_wait_seconds": [t.engine_seconds for t in trajectories],
        "time/environment_wait_seconds": [t.environment_seconds for t in trajectories],
    }
    metrics = {
        "rollout/temperature": sum(t.temperature for t in trajectories) / count,
        "rollout/prompt_tokens/mean": sum(prompt_lengths) / count,
        "rollout/prompt_tokens/max": float(max(prompt_lengths)),
        "rollout/turns/mean": sum(num_turns) / count,
        "rollout/turns/max": float(max(num_turns)),
        "rollout/turn_tokens/mean": sum(turn_lengths) / max(len(turn_lengths), 1),
        "rollout/turn_tokens/max": float(max(turn_lengths, default=0)),
        "rollout/restarted": float(sum(t.restarts for t in trajectories)),
        "rollout/segments/mean": sum(segment_counts) / count,
        "rollout/forks": float(sum(num_segments - 1 for num_segments in segment_counts if num_segments)),
    }
    for name, attempt_values in values_by_metric.items():
        metrics |= {f"{name}/mean": sum(attempt_values) / count, f"{name}/max": float(max(attempt_values))}
    return metrics


def _compute_ended_shares(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    # Zeros too, so that each reason has a curve without gaps.
    return {
        f"rollout/ended/{end_reason}": sum(t.ended == end_reason for t in trajectories) / len(trajectories)
        for end_reason in get_args(Ended)
    }


def _compute_candidate_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return how many tokens top_p, top_k and min_p left to choose from. Empty if they cut off none."""
    retained_sets = [s.retained_sets for t in trajectories for s in t.segments if s.retained_sets is not None]
    if not retained_sets:
        return {}
    # Count 0 means that nothing was cut off at this position, or nothing sampled.
    candidate_counts = np.concatenate([sets.counts[sets.counts > 0] for sets in retained_sets])
    return {
        "rollout/candidates_left/mean": float(candidate_counts.mean()),
        "rollout/candidates_left/max": float(candidate_counts.max()),
        "rollout/candidates_left_bytes": float(sum(sets.nbytes for sets in retained_sets)),
    }


def _count_errors_by_kind(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for trajectory in trajectories:
        if trajectory.ended == "error" and trajectory.failure is not None:
            # A failure is "Kind: reason". Reasons are unbounded, so only the kind names a metric.
            name = f"rollout/errors/{trajectory.failure.partition(':')[0]}"
            metrics[name] = metrics.get(name, 0.0) + 1
    return metrics


def _average_environment_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the means of the environments' own metrics, over the attempts that have them."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for t in trajectories for name in t.metrics):
        values = [t.metrics[name] for t in trajectories if name in t.metrics]
        metrics[name if name.startswith("tools/") else f"environment/{name}"] = sum(values) / len(values)
    return metrics


def _count_first_prompt_tokens(trajectory: Trajectory) -> int:
    first_sampled_mask = next((segment.loss_mask for segment in trajectory.segments if segment.loss_mask.any()), None)
    return len(trajectory.problem.prompt_token_ids) if first_sampled_mask is None else int(first_sampled_mask.argmax())


def metrics_by_version(batch: RLBatch, weight_version: int, *, has_trainer_logprobs: bool = True) -> dict[str, float]:
    """Return metrics of the trained tokens before the update, by age (weight versions since sampling).

    `has_trainer_logprobs`: `old_logprobs` come from the trainer. If log-probs are missing, only shares of tokens are
    returned. Call this before stale log-probs become NaN.
    """
    mask = batch.loss_mask
    if not mask.any():
        return {}
    ages = np.minimum(weight_version - batch.weight_versions[mask], OLDEST)
    metrics = {f"staleness/tokens/age_{age}": float((ages == age).mean()) for age in np.unique(ages)}
    old_logprobs, rollout_logprobs = batch.per_token.get("old_logprobs"), batch.per_token["rollout_logprobs"]
    if (
        not has_trainer_logprobs
        or old_logprobs is None
        or np.isnan(old_logprobs[mask]).any()
        or np.isnan(rollout_logprobs[mask]).any()
    ):
        return metrics
    # float64, because k3 and the ratios are exponentials of small differences.
    moments = mismatch_moments(
        torch.from_numpy(old_logprobs[mask]).double(), torch.from_numpy(rollout_logprobs[mask]).double()
    )
    for age in np.unique(ages):
        has_age = torch.from_numpy(ages == age)
        mismatch = mismatch_metrics({name: float(values[has_age].mean()) for name, values in moments.items()})
        metrics |= {f"logprob_gap/{name}/age_{age}": mismatch[name] for name in ("mean", "k3")}
        metrics[f"importance/ess/age_{age}"] = mismatch["ess"]
        metrics[f"importance/ratio/age_{age}"] = float(moments["ratio"][has_age].mean())
    return metrics
