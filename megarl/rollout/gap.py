"""Limit of the gap between trainer and engine that a step is trained with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megarl.config import TrainConfig
from megarl.rollout.batch import RLBatch
from megarl.tracking.metrics import Metric


def known_gap(batch: RLBatch) -> float | None:
    """Mean distance in nats of the trainer's old log-probs from the engine's, over the trained tokens.

    None where it is only known in the update: the trainer's log-probs of some tokens, or all, are still to come.
    """
    old_logprobs = batch.per_token.get("old_logprobs")
    if old_logprobs is None:
        return None
    gaps = np.abs(old_logprobs - batch.per_token["rollout_logprobs"])[batch.loss_mask].astype(np.float64)
    return None if not len(gaps) or np.isnan(gaps).any() else float(gaps.mean())


def gap_metrics_before(batch: RLBatch, train: TrainConfig) -> dict[str, float]:
    """`train/gap_exceeded` 1 and `logprob_gap/mean`, where the gap is known to be too large before any update."""
    if train.max_logprob_gap is None:
        return {}
    gap = known_gap(batch)
    if gap is None or gap <= train.max_logprob_gap:
        return {}
    return {"train/gap_exceeded": 1.0, "logprob_gap/mean": gap}


def is_gap_exceeded(metrics: Mapping[str, Metric]) -> bool:
    """Whether an update was skipped because of the gap."""
    return "train/gap_exceeded" in metrics and metrics["train/gap_exceeded"].number > 0


def told(train: TrainConfig, step: int, gap: float) -> str:
    """The message of a step whose gap was too large."""
    return (
        f"train.max_logprob_gap = {train.max_logprob_gap:g}: the trainer's log-probs of step {step} were {gap:.3g} "
        "nats from the engine's on average, and updates were left out. Look for what parts the two: rollout.vllm, "
        "model.dtype, logprob_gap/ of the steps before; or raise it"
    )
