"""Staleness metrics: distance of a step's tokens from the trained weights, by age in weight versions."""

from __future__ import annotations

import numpy as np
import torch

from megarl.algorithms.importance import gap_metrics, gap_moments
from megarl.rollout.rl_batch import RLBatch

METRICS = {
    "staleness/tokens/age_N": (
        "share",
        "trained tokens sampled by weights N versions before the step's; age_8 includes older ones",
    ),
    "logprob_gap/mean/age_N": (
        "nats",
        "distance of the trainer's log-probs before the update from the engine's at sampling, mean over tokens of an "
        "age; at age 0 the mismatch of the two programs, at higher ages also the training since then",
    ),
    "logprob_gap/k3/age_N": ("nats", "k3 estimate of the divergence of the sampling weights from the step's"),
    "importance/ratio/age_N": ("ratio", "the step's probability of a token over that at sampling, mean"),
    "importance/ess/age_N": ("share", "effective sample size of these ratios, before a correction clips them"),
}
"""Names, units and meanings, for `tracking.table`."""

OLDEST = 8
"""Largest age reported. Older tokens are counted at this age."""


def metrics_by_age(batch: RLBatch, weight_version: int, *, is_trainers: bool = True) -> dict[str, float]:
    """Return METRICS of the trained tokens, before the update of the weights with this version.

    Only shares are returned if log-probs computed by the trainer are missing for some tokens. `is_trainers` says
    whether `old_logprobs` come from the trainer. Call this before stale log-probs are set to NaN.
    """
    mask = batch.loss_mask
    if not mask.any():
        return {}
    ages = np.minimum(weight_version - batch.weight_versions[mask], OLDEST)
    found = {f"staleness/tokens/age_{age}": float((ages == age).mean()) for age in np.unique(ages)}
    old, rollout = batch.per_token.get("old_logprobs"), batch.per_token["rollout_logprobs"]
    if not is_trainers or old is None or np.isnan(old[mask]).any() or np.isnan(rollout[mask]).any():
        return found
    # float64, because k3 and the ratios are exponentials of small differences.
    moments = gap_moments(torch.from_numpy(old[mask]).double(), torch.from_numpy(rollout[mask]).double())
    for age in np.unique(ages):
        is_of_age = torch.from_numpy(ages == age)
        gap = gap_metrics({name: float(values[is_of_age].mean()) for name, values in moments.items()})
        found |= {f"logprob_gap/{name}/age_{age}": gap[name] for name in ("mean", "k3")}
        found[f"importance/ess/age_{age}"] = gap["ess"]
        found[f"importance/ratio/age_{age}"] = float(moments["ratio"][is_of_age].mean())
    return found
