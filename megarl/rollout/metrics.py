"""Metrics of a step: of its updates, of what was sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megarl.algorithms.importance import gap_metrics
from megarl.tracking.metrics import Metric, merge, values
from megarl.types import Reward, Trajectory


def update_metrics(updates: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """The metrics of a step's updates together; `logprob_gap/` is the gap between trainer and engine.

    Both log-probs of a token are those of the weights that sampled it: in a later update, and for trajectories that
    waited since an earlier step, the trainer's are `old_logprobs`. `logprob_gap/max` and `/mean` are of
    |trainer - engine|, in nats, over the trained tokens; `/measured` is the share of them with both at hand: 1, but
    with algorithm.old_logprobs rollout that of the first update's tokens which did not wait. The others are those of
    `algorithms.importance.gap_metrics`.
    """
    found = values(merge(updates))
    gap = {
        name.removeprefix("logprob_gap/"): found.pop(name) for name in list(found) if name.startswith("logprob_gap/")
    }
    if "mean" in gap:
        found |= {f"logprob_gap/{name}": value for name, value in gap_metrics(gap).items()}
    return found | {f"logprob_gap/{name}": gap[name] for name in ("max", "measured") if name in gap}


def staleness_metrics(trajectories: Sequence[Trajectory], weight_version: int) -> dict[str, float]:
    """`staleness/mean`, `/max`: weight versions from a trajectory's oldest token to the weights that it updates."""
    staleness = [weight_version - t.oldest_version for t in trajectories]
    return {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(max(staleness))}


def reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What a step's completions were like.

    `reward/mean`, `/std`, `/accuracy`, `/format_valid`; `reward/zero_variance_groups`: share of groups whose rewards
    are all equal and teach nothing; `rollout/completion_tokens/mean`, `/max`; `rollout/truncated`: share that hit the
    limit.
    """
    scores = np.array([r.score for r in _rewards(trajectories)])
    lengths = np.array([t.num_sampled for t in trajectories])
    groups = np.array([t.group for t in trajectories])
    flat = [np.ptp(scores[groups == group]) == 0 for group in np.unique(groups)]
    return {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std()),
        "reward/accuracy": float(np.mean([r.answer_correct for r in _rewards(trajectories)])),
        "reward/format_valid": float(np.mean([r.format_valid for r in _rewards(trajectories)])),
        "reward/zero_variance_groups": float(np.mean(flat)),
        "rollout/completion_tokens/mean": float(lengths.mean()),
        "rollout/completion_tokens/max": float(lengths.max()),
        "rollout/truncated": float(np.mean([t.ended == "length" for t in trajectories])),
    }


def _rewards(trajectories: Sequence[Trajectory]) -> list[Reward]:
    rewards = [t.reward for t in trajectories if t.reward is not None]
    assert len(rewards) == len(trajectories)
    return rewards
