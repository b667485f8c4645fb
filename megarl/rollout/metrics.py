"""Metrics of a step: of its updates, of what was sampled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from megarl.algorithms.importance import gap_metrics
from megarl.config import Recipe
from megarl.data.formats import value_at
from megarl.rewards.scores import accuracy_metrics, by_source_name, function_metrics, source_metrics
from megarl.rollout.state import Group, in_one
from megarl.tracking.metrics import Mean, Metric, merge, values
from megarl.types import Ended, Reward, Trajectory

METRICS = {
    "reward/mean": ("score", "reward of the step's samples, mean"),
    "reward/std": ("score", "standard deviation of the samples' rewards"),
    "reward/min": ("score", "least reward of the step's samples"),
    "reward/max": ("score", "largest reward of the step's samples"),
    "reward/accuracy": ("share", "scored samples whose answer is right, where all are judged (judges_answer)"),
    "reward/unjudged": ("share", "scored samples whose answer nothing judged; then there is no reward/accuracy"),
    "reward/format_valid": ("share", "scored samples whose format is valid"),
    "reward/zero_variance_groups": ("share", "groups whose rewards are all equal: no learning signal"),
    "rollout/completion_tokens/mean": ("tokens", "sampled tokens of an attempt, mean"),
    "rollout/completion_tokens/max": ("tokens", "sampled tokens of an attempt, the most"),
    "rollout/prompt_tokens/mean": ("tokens", "first prompt of an attempt, mean"),
    "rollout/prompt_tokens/max": ("tokens", "first prompt of an attempt, the most"),
    "rollout/truncated": ("share", "attempts that ended at the length limit"),
    "rollout/temperature": ("1", "sampling temperature, mean over attempts"),
    "rollout/turns/mean": ("completions", "completions of an attempt, mean"),
    "rollout/turns/max": ("completions", "completions of an attempt, the most"),
    "rollout/turn_tokens/mean": ("tokens", "sampled tokens of a completion, mean"),
    "rollout/turn_tokens/max": ("tokens", "sampled tokens of a completion, the most"),
    "rollout/observed_tokens/mean": ("tokens", "tokens that environment and tools added to an attempt, mean"),
    "rollout/observed_tokens/max": ("tokens", "tokens that environment and tools added to an attempt, the most"),
    "rollout/segments/mean": ("sequences", "sequences that an attempt is trained in, mean"),
    "rollout/forks": ("count", "how often attempts did not go on from the tokens that they had"),
    "rollout/restarted": ("count", "how often attempts were begun anew"),
    "rollout/ended/WHY": ("share", "attempts that ended so: done, length, error and so on"),
    "rollout/errors/KIND": ("count", "attempts that an error of this kind ended"),
    "rollout/kept_tokens/mean": (
        "tokens",
        "tokens that top-p, top-k and min-p left to sample from, where they cut any off, mean",
    ),
    "rollout/kept_tokens/max": (
        "tokens",
        "tokens that top-p, top-k and min-p left to sample from, where they cut any off, the most",
    ),
    "rollout/kept_tokens_bytes": ("bytes", "size of the sets of tokens that top-p, top-k and min-p left"),
    "time/engine_wait_seconds/mean": (
        "seconds",
        "how long an attempt waited for completions (after a resume, since then), mean",
    ),
    "time/engine_wait_seconds/max": ("seconds", "how long an attempt waited for completions, the longest"),
    "time/environment_wait_seconds/mean": ("seconds", "how long an attempt waited for its environment, mean"),
    "time/environment_wait_seconds/max": ("seconds", "how long an attempt waited for its environment, the longest"),
    "staleness/mean": (
        "versions",
        "weight versions from a trajectory's oldest token to the weights that it updates, mean",
    ),
    "staleness/max": (
        "versions",
        "weight versions from a trajectory's oldest token to the weights that it updates, the most",
    ),
    "environment/SOURCE/share": ("share", "attempts that are this source's, in a mixture"),
    "environment/OWN": (
        "own",
        "a number of the environment's own, mean over the attempts that have it; in a mixture SOURCE/ and any "
        "metric of rewards and rollouts, of this source",
    ),
}
"""Names, units and meanings, for `tracking.table`."""


def merge_updates(updates: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Reduce the metrics of a step's updates of one model: the loss, a sum within an update, to the updates' mean."""
    return merge({**update, **_loss_of(update)} for update in updates)


def _loss_of(update: Mapping[str, Metric]) -> dict[str, Metric]:
    return {"train/loss": Mean(update["train/loss"].number)} if "train/loss" in update else {}


def update_metrics(updates: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """The metrics of a step's updates together; `logprob_gap/` is the gap between trainer and engine.

    Both log-probs of a token are those of the weights that sampled it: in a later update, and for trajectories that
    waited since an earlier step, the trainer's are `old_logprobs`. `logprob_gap/measured` is 1, but with
    algorithm.old_logprobs rollout the share of the first update's tokens which did not wait.
    """
    found = values(merge_updates(updates))
    if len(updates) == 1:
        # Measured in the pass before the update: there the policy is still that of before the step.
        found.pop("kl/update", None)
    gap = {
        name.removeprefix("logprob_gap/"): found.pop(name) for name in list(found) if name.startswith("logprob_gap/")
    }
    if "mean" in gap:
        found |= {f"logprob_gap/{name}": value for name, value in gap_metrics(gap).items()}
    return found | {f"logprob_gap/{name}": gap[name] for name in ("max", "measured") if name in gap}


def step_metrics(
    sampled: Sequence[Trajectory], groups: Sequence[Group], recipe: Recipe, weight_version: int
) -> dict[str, float]:
    """Rewards and rollouts of what was sampled for a step, and the staleness of the groups that it was trained on.

    Where nothing was sampled, since enough groups had waited, all is of these.
    """
    kept = in_one(groups)
    measured = sampled or kept
    rewards = reward_metrics(measured, kept=kept if recipe.reward.model else None)
    rewards |= data_source_metrics(measured, recipe.reward.source_field)
    found = rewards | rollout_metrics(measured) | staleness_metrics(kept, weight_version)
    for source in recipe.sources if recipe.mixture else ():
        found |= environment_metrics(source.name, measured)
    return found


def environment_metrics(name: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of one source of a mixture, of those trajectories that are its.

    `environment/NAME/reward/...`, `/tools/...` and the others are those of `reward_metrics` and `rollout_metrics`,
    there without `rollout/` and `environment/`: `/observed_tokens/mean`, `/time/engine_wait_seconds/mean`.
    """
    own = [t for t in trajectories if t.environment == name]
    metrics = {"share": len(own) / len(trajectories)}
    if own:
        found = rollout_metrics(own) | (reward_metrics(own) if any(t.reward for t in own) else {})
        metrics |= {key.removeprefix("rollout/").removeprefix("environment/"): value for key, value in found.items()}
    return {f"environment/{name}/{key}": value for key, value in metrics.items()}


def by_data_source(trajectories: Sequence[Trajectory], field: str | None) -> dict[str, list[Trajectory]]:
    """The trajectories of each data source that this field of records names (`rewards.scores.by_source_name`).

    Those whose record has no such text are left out.
    """
    if field is None:
        return {}
    named = ((value_at(t.problem.record, field), t) for t in trajectories if t.problem.record)
    return by_source_name((name, t) for name, t in named if isinstance(name, str))


def data_source_metrics(trajectories: Sequence[Trajectory], field: str | None) -> dict[str, float]:
    """Metrics of the rewards of each data source (`rewards.scores.source_metrics`); without those that have none."""
    rewarded = [t for t in trajectories if t.reward is not None]
    # Accuracy may have ended within these attempts: then the verdicts before that do not count by themselves.
    unjudged = {t.environment for t in rewarded if t.reward and t.reward.answer_correct is None}
    rewards: dict[str, list[Reward]] = {}
    for name, own in by_data_source(rewarded, field).items():
        for t in own:
            assert t.reward is not None
            reward = replace(t.reward, answer_correct=None) if t.environment in unjudged else t.reward
            rewards.setdefault(name, []).append(reward)
    return source_metrics(rewards)


def staleness_metrics(trajectories: Sequence[Trajectory], weight_version: int) -> dict[str, float]:
    """`staleness/` of trajectories that update these weights."""
    staleness = [weight_version - t.oldest_version for t in trajectories if t.num_sampled]
    return {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(max(staleness))}


def reward_metrics(trajectories: Sequence[Trajectory], kept: Sequence[Trajectory] | None = None) -> dict[str, float]:
    """Reward metrics of a step's completions, and of each reward function (`rewards.scores.function_metrics`).

    Attempts that were not scored are left out of those of rewards. All are of the attempts drawn in this step,
    `trajectories`; but where a reward model scores only those `kept`, the metrics of the whole reward are of these.
    """
    judged = [t.reward for t in trajectories if t.reward is not None]
    scored = [(t, t.reward) for t in (trajectories if kept is None else kept) if t.reward is not None]
    scores = np.array([reward.score for _, reward in scored])
    lengths = np.array([t.num_sampled for t in trajectories])
    groups = np.array([t.group for t, _ in scored])
    flat = [np.ptp(scores[groups == group]) == 0 for group in np.unique(groups)]
    names = {"accuracy": "reward/accuracy", "unjudged": "reward/unjudged"}
    verdicts = {names[name]: value for name, value in accuracy_metrics(judged).items()}
    return (
        function_metrics(judged)
        | verdicts
        | {
            "reward/mean": float(scores.mean()),
            "reward/std": float(scores.std()),
            "reward/min": float(scores.min()),
            "reward/max": float(scores.max()),
            "reward/format_valid": float(np.mean([reward.format_valid for reward in judged])),
            "reward/zero_variance_groups": float(np.mean(flat)),
            "rollout/completion_tokens/mean": float(lengths.mean()),
            "rollout/completion_tokens/max": float(lengths.max()),
            "rollout/truncated": float(np.mean([t.ended == "length" for t in trajectories])),
        }
    )


def rollout_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of a step's attempts.

    Numbers of the environment's own are `environment/OWN`, but `tools/...` go by their own names
    (`environments.tools.ToolEnvironment`).
    """
    count = len(trajectories)
    prompts = [_first_prompt_tokens(t) for t in trajectories]
    turns = [t.num_turns for t in trajectories]
    sizes = [size for t in trajectories for size in t.turn_tokens]
    segments = [len(t.segments) for t in trajectories]
    by_attempt = {
        "rollout/observed_tokens": [t.num_observed for t in trajectories],
        "time/engine_wait_seconds": [t.engine_seconds for t in trajectories],
        "time/environment_wait_seconds": [t.environment_seconds for t in trajectories],
    }
    metrics = {
        "rollout/temperature": sum(t.temperature for t in trajectories) / count,
        "rollout/prompt_tokens/mean": sum(prompts) / count,
        "rollout/prompt_tokens/max": float(max(prompts)),
        "rollout/turns/mean": sum(turns) / count,
        "rollout/turns/max": float(max(turns)),
        "rollout/turn_tokens/mean": sum(sizes) / max(len(sizes), 1),
        "rollout/turn_tokens/max": float(max(sizes, default=0)),
        "rollout/restarted": float(sum(t.restarts for t in trajectories)),
        "rollout/segments/mean": sum(segments) / count,
        "rollout/forks": float(sum(number - 1 for number in segments if number)),
    }
    for name, found in by_attempt.items():
        metrics |= {f"{name}/mean": sum(found) / count, f"{name}/max": float(max(found))}
    for why in get_args(Ended):
        metrics[f"rollout/ended/{why}"] = sum(t.ended == why for t in trajectories) / count
    kept_sets = [s.kept_sets for t in trajectories for s in t.segments if s.kept_sets is not None]
    if kept_sets:
        sizes = np.concatenate([kept.counts[kept.counts > 0] for kept in kept_sets])
        metrics["rollout/kept_tokens/mean"] = float(sizes.mean())
        metrics["rollout/kept_tokens/max"] = float(sizes.max())
        metrics["rollout/kept_tokens_bytes"] = float(sum(kept.nbytes for kept in kept_sets))
    for trajectory in trajectories:
        if trajectory.ended == "error" and trajectory.failure is not None:
            name = f"rollout/errors/{trajectory.failure.partition(':')[0]}"
            metrics[name] = metrics.get(name, 0.0) + 1
    for name in dict.fromkeys(name for t in trajectories for name in t.metrics):
        found = [t.metrics[name] for t in trajectories if name in t.metrics]
        metrics[name if name.startswith("tools/") else f"environment/{name}"] = sum(found) / len(found)
    return metrics


def _first_prompt_tokens(trajectory: Trajectory) -> int:
    """Tokens before the first that was sampled; of an attempt without any, those of its problem."""
    sampled = next((segment.loss_mask for segment in trajectory.segments if segment.loss_mask.any()), None)
    return len(trajectory.problem.prompt_token_ids) if sampled is None else int(sampled.argmax())
