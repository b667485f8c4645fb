"""Clip-Cov and KL-Cov: weaken the updates most likely to lower the policy's entropy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.algorithms.covariance import covariances, drawn_covariance_mask, highest_covariance_mask
from megarl.config import Recipe
from megarl.data.token_batch import TokenBatch
from megarl.rollout.step.rl_batch import RLBatch
from megarl.tracking.metric_rows import MetricRow

METRICS = (
    MetricRow(
        "covariance/dropped_share",
        "share",
        "trained tokens without policy loss, because their log-prob and advantage vary together",
        condition="algorithm.clip_cov_share",
    ),
    MetricRow(
        "covariance/penalised_share",
        "share",
        "trained tokens with a penalty, because their log-prob and advantage vary together most",
        condition="algorithm.kl_cov_share",
    ),
)


def select_by_covariance(batch: RLBatch, recipe: Recipe, weight_version: int) -> dict[str, float]:
    """Drop or penalise tokens with a high covariance of log-prob and advantage, if the recipe says so. Return metrics.

    Needs advantages, and log-probs before the first update. Sets some importance weights to zero, so call this after
    they are computed. `weight_version` changes the random draw from step to step.
    """
    algorithm, mask = recipe.algorithm, torch.from_numpy(batch.loss_mask)
    if not algorithm.selects_by_covariance or not mask.any():
        return {}
    logprobs, advantages = (torch.from_numpy(batch.per_token[name]) for name in ("old_logprobs", "advantages"))
    token_covariances = covariances(logprobs, advantages, mask)
    random_numbers = torch.from_numpy(draw_token_numbers(batch, (recipe.seed, weight_version)))
    metrics: dict[str, float] = {}
    # Clip-Cov: drop randomly drawn tokens with a covariance within the range.
    if (share := algorithm.clip_cov_share) is not None:
        low, high = algorithm.clip_cov_range
        is_dropped = drawn_covariance_mask(token_covariances, mask, random_numbers, share=share, low=low, high=high)
        weights = batch.per_token.get("importance_weights", batch.loss_mask.astype(np.float32))
        batch.per_token["importance_weights"] = np.where(is_dropped.numpy(), np.float32(0), weights)
        metrics["covariance/dropped_share"] = float(is_dropped.sum() / mask.sum())
    # KL-Cov: penalise the tokens with the highest covariances.
    if (share := algorithm.kl_cov_share) is not None:
        is_penalised = highest_covariance_mask(token_covariances, mask, random_numbers, share=share)
        coefficient = np.float32(algorithm.kl_cov_coefficient)
        batch.per_token["log_ratio_penalties"] = np.where(is_penalised.numpy(), coefficient, np.float32(0))
        metrics["covariance/penalised_share"] = float(is_penalised.sum() / mask.sum())
    return metrics


def draw_token_numbers(batch: TokenBatch, seed: Sequence[int]) -> NDArray[np.float64]:
    """Return a random number between 0 and 1 for each token, [tokens].

    It depends only on `seed`, the sequence's tokens and the token's position. So it does not change with the order of
    sequences or the number of ranks. Equal sequences get different numbers.
    """
    random_numbers: list[NDArray[np.float64]] = []
    num_earlier_equal: Counter[bytes] = Counter()
    for token_ids in np.split(batch.token_ids, batch.cu_seqlens[1:-1]):
        # Not Python's `hash`: it differs between processes, and a resumed run must draw the same tokens.
        digest = blake2b(token_ids.astype(np.int64).tobytes(), digest_size=16).digest()
        words = np.frombuffer(digest, np.uint32).tolist()
        random_numbers.append(np.random.default_rng([*seed, num_earlier_equal[digest], *words]).random(len(token_ids)))
        num_earlier_equal[digest] += 1
    return np.concatenate(random_numbers)
