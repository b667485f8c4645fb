"""Limit of the mismatch between the trainer's and the engine's log-probs, beyond which a step skips its updates."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megarl.config import TrainConfig
from megarl.rollout.rl_batch import RLBatch
from megarl.tracking.metrics import Metric


def known_gap(batch: RLBatch) -> float | None:
    """Return the mean distance, in nats, of the trainer's old log-probs from the engine's over trained tokens.

    None if it is unknown before the update, because some of the trainer's log-probs are still missing.
    """
    old_logprobs = batch.per_token.get("old_logprobs")
    if old_logprobs is None:
        return None
    # float64: a batch has millions of tokens, and float32 sums lose the small differences.
    gaps = np.abs(old_logprobs - batch.per_token["rollout_logprobs"])[batch.loss_mask].astype(np.float64)
    return None if not len(gaps) or np.isnan(gaps).any() else float(gaps.mean())


def gap_metrics_before(batch: RLBatch, train: TrainConfig) -> dict[str, float]:
    """Return `train/gap_exceeded` = 1 and `logprob_gap/mean` if the mismatch is known to be too large before any
    update.
    """
    if train.max_logprob_gap is None:
        return {}
    gap = known_gap(batch)
    if gap is None or gap <= train.max_logprob_gap:
        return {}
    return {"train/gap_exceeded": 1.0, "logprob_gap/mean": gap}


def is_gap_exceeded(metrics: Mapping[str, Metric]) -> bool:
    """Return whether an update was skipped because of the mismatch."""
    return "train/gap_exceeded" in metrics and metrics["train/gap_exceeded"].number > 0


def told(train: TrainConfig, step: int, gap: float) -> str:
    """Return the error message for a step with too large a mismatch."""
    return (
        f"train.max_logprob_gap = {train.max_logprob_gap:g}: the trainer's log-probs of step {step} were {gap:.3g} "
        "nats from the engine's on average, so updates were skipped. Look for the cause in rollout.vllm, model.dtype "
        "and logprob_gap/ of earlier steps; or raise the limit"
    )
