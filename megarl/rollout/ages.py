"""How far a step's tokens are from the weights that they train, by their age in weight versions."""

from __future__ import annotations

import numpy as np
import torch

from megarl.algorithms.importance import gap_metrics, gap_moments
from megarl.rollout.batch import RLBatch

METRICS = {
    "staleness/tokens/age_N": (
        "share",
        "trained tokens that weights of N versions before the step's sampled; age_8 has the older ones too",
    ),
    "logprob_gap/mean/age_N": (
        "nats",
        "distance of the trainer's log-probs before the update from the engine's at sampling, mean over tokens of an "
        "age; at age 0 the gap of the two programs, beyond that training since then too",
    ),
    "logprob_gap/k3/age_N": ("nats", "the divergence of the weights that sampled from the step's, by k3"),
    "importance/ratio/age_N": ("ratio", "the step's probability of a token over that at sampling, mean"),
    "importance/ess/age_N": ("share", "effective sample size of these ratios, before a correction cuts them"),
}
"""Names, units and meanings, for `tracking.table`."""

OLDEST = 8
"""Tokens of this age and all older ones are one age."""


def metrics_by_age(batch: RLBatch, weight_version: int, *, is_trainers: bool = True) -> dict[str, float]:
    """METRICS of the trained tokens before the update of the weights of this version.

    Without log-probs of the trainer's own for all of them, shares alone; `is_trainers` says whether `old_logprobs` are.
    Call it before stale log-probs are forgotten.
    """
    mask = batch.loss_mask
    if not mask.any():
        return {}
    ages = np.minimum(weight_version - batch.weight_versions[mask], OLDEST)
    found = {f"staleness/tokens/age_{age}": float((ages == age).mean()) for age in np.unique(ages)}
    old, rollout = batch.per_token.get("old_logprobs"), batch.per_token["rollout_logprobs"]
    if not is_trainers or old is None or np.isnan(old[mask]).any() or np.isnan(rollout[mask]).any():
        return found
    moments = gap_moments(torch.from_numpy(old[mask]).double(), torch.from_numpy(rollout[mask]).double())
    for age in np.unique(ages):
        is_of_age = torch.from_numpy(ages == age)
        gap = gap_metrics({name: float(values[is_of_age].mean()) for name, values in moments.items()})
        found |= {f"logprob_gap/{name}/age_{age}": gap[name] for name in ("mean", "k3")}
        found[f"importance/ess/age_{age}"] = gap["ess"]
        found[f"importance/ratio/age_{age}"] = float(moments["ratio"][is_of_age].mean())
    return found
