"""Corrections of the mismatch between engine and trainer log-probs, and measures of this mismatch.

A correction takes `log_ratios` float [tokens], `cu_seqlens` int [sequences + 1] and `mask` bool [tokens], True on
trained tokens. A log-ratio is the trainer's log-prob before the update minus the engine's log-prob of the same token.
The correction returns one weight per token, [tokens], without gradient. The policy loss is multiplied by the weight;
zero rejects a token. `low` and `high` bound ratios, not log-ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.keywords import supported_kwargs
from megarl.algorithms.log_ratio import log_ratio
from megarl.algorithms.sequences import broadcast_to_tokens, sequence_means, sequence_sums
from megarl.tracking.metric_rows import MetricRow

METRICS = (
    MetricRow(
        "logprob_gap/mean",
        "nats",
        "mean over tokens of the absolute difference of trainer and engine log-probs, both under the sampling weights",
    ),
    MetricRow("logprob_gap/k1", "nats", "KL divergence of the engine from the trainer, k1 estimate"),
    MetricRow("logprob_gap/k3", "nats", "KL divergence of the engine from the trainer, k3 estimate, never negative"),
    MetricRow("logprob_gap/ess", "share", "effective sample size of the ratios of trainer to engine probabilities"),
    MetricRow("logprob_gap/chi2", "1", "chi-squared divergence of trainer and engine"),
    MetricRow(
        "logprob_gap/perplexity_ratio", "ratio", "perplexity of the samples under the trainer, divided by the engine's"
    ),
    MetricRow("logprob_gap/correlation", "1", "correlation of trainer and engine log-probs over the tokens"),
    MetricRow("importance/mean", "ratio", "mean token weight of algorithm.importance_sampling"),
    MetricRow("importance/rejected", "share", "fraction of tokens with weight zero by algorithm.importance_sampling"),
    MetricRow(
        "importance/clipped_share",
        "share",
        "fraction of tokens with a weight clipped or zeroed by a bound, beyond rounding",
    ),
)

_ROUNDING = 1e-4
"""Relative rounding of a ratio: float32 log-probs differ by about 1e-6, and a product of ratios adds up thousands."""


def tis(log_ratios: Tensor, cu_seqlens: Tensor, mask: Tensor, *, high: float) -> Tensor:
    """Return each token's ratio, at most `high`: [tokens].

    Source: truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training"; cap 2).
    """
    return log_ratios.exp().clamp(max=high)


def icepop(log_ratios: Tensor, cu_seqlens: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """Return each token's ratio if it is between `low` and `high`, else zero: [tokens].

    Source: IcePop (Ring-1T, arXiv 2510.18855; bounds 0.5 and 5).
    """
    ratios = log_ratios.exp()
    return torch.where((ratios >= low) & (ratios <= high), ratios, 0.0)


def sequence_tis(log_ratios: Tensor, cu_seqlens: Tensor, mask: Tensor, *, high: float) -> Tensor:
    """Return the product of the sequence's ratios, at most `high`, for each token: [tokens].

    Source: sequence-level importance sampling (Liu et al. 2025, "When speed kills stability").
    """
    return broadcast_to_tokens(sequence_sums(log_ratios, cu_seqlens, mask), cu_seqlens, len(mask)).exp().clamp(max=high)


def sequence_rejection(log_ratios: Tensor, cu_seqlens: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """Return 1 if the product of the sequence's ratios is between `low` and `high`, else 0, for each token:
    [tokens].
    """
    return _is_within(
        broadcast_to_tokens(sequence_sums(log_ratios, cu_seqlens, mask), cu_seqlens, len(mask)), low, high
    )


def sequence_mask(log_ratios: Tensor, cu_seqlens: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """Return the product of the sequence's ratios if between `low` and `high`, else 0, for each token: [tokens].

    Like TRL's sequence_mask, with bounds 0 and 3 there.
    """
    ratios = broadcast_to_tokens(sequence_sums(log_ratios, cu_seqlens, mask), cu_seqlens, len(mask)).exp()
    return torch.where((ratios >= low) & (ratios <= high), ratios, 0.0)


def geometric_rejection(log_ratios: Tensor, cu_seqlens: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """Return 1 if the geometric mean of the sequence's ratios is between `low` and `high`, else 0, for each token:
    [tokens].

    The bounds are close to 1. Source: geometric sequence masking (Liu et al. 2025; 0.99 and 1.001 there).
    """
    return _is_within(
        broadcast_to_tokens(sequence_means(log_ratios, cu_seqlens, mask), cu_seqlens, len(mask)), low, high
    )


def is_of_single_tokens(name: str) -> bool:
    """Return whether a named correction computes a token's weight from the token's own ratio alone."""
    return IMPORTANCE_SAMPLING[name] in (tis, icepop)


def importance_weights(
    name: str,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    **settings: Any,
) -> Tensor:
    """Return the weights of a named correction: [tokens], zero where `mask` is False.

    The log-probs and `mask` are [tokens], `cu_seqlens` is [sequences + 1]. Settings that the correction does not take
    are ignored.
    """
    correction: Callable[..., Tensor] = IMPORTANCE_SAMPLING[name]
    log_ratios = log_ratio(old_logprobs, rollout_logprobs).detach()
    weights = correction(log_ratios, cu_seqlens, mask, **supported_kwargs(correction, settings))
    return torch.where(mask, weights, 0.0)


def unbounded_weights(
    name: str, old_logprobs: Tensor, rollout_logprobs: Tensor, cu_seqlens: Tensor, mask: Tensor
) -> Tensor:
    """Return the weights of `importance_weights` without bounds: [tokens]; ones if the correction only rejects."""
    return importance_weights(name, old_logprobs, rollout_logprobs, cu_seqlens, mask, low=0.0, high=float("inf"))


def weight_metrics(weights: Tensor, unbounded: Tensor) -> dict[str, Tensor]:
    """Return metrics of a correction's weights for each token; all tensors are [tokens].

    `importance/mean` is the weight. `importance/rejected` is 1 where the weight is zero. `importance/clipped_share` is
    1 where a bound made the weight smaller than `unbounded`.
    """
    return {
        "importance/mean": weights,
        "importance/rejected": (weights == 0).float(),
        # A bound makes weights only smaller. An infinite ratio stays infinite in this product.
        "importance/clipped_share": (weights < unbounded * (1 - _ROUNDING)).float(),
    }


def mismatch_moments(policy_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Return values [tokens] by name. `mismatch_metrics` computes metrics from their means."""
    trainer, rollout = policy_logprobs.detach(), rollout_logprobs.detach()
    log_ratios = log_ratio(trainer, rollout)
    ratios = log_ratios.exp()
    return {
        # Only means are exchanged between ranks and microbatches, so variances and correlations need these moments.
        "mean": log_ratios.abs(), "k1": -log_ratios, "k3": ratios - 1 - log_ratios, "ratio": ratios,
        "ratio_squared": ratios.square(), "trainer": trainer, "rollout": rollout, "trainer_squared": trainer.square(),
        "rollout_squared": rollout.square(), "product": trainer * rollout,
    }  # fmt: skip


def mismatch_metrics(means: dict[str, float]) -> dict[str, float]:
    """Return metrics of the mismatch of trainer and engine, from the means over tokens of `mismatch_moments`.

    `mean` is |trainer - engine| in nats. `k1` and `k3` estimate the engine's KL divergence from the trainer. `ess` is
    the effective share of the samples. `chi2` is the chi-squared divergence. `perplexity_ratio` is the trainer's
    perplexity divided by the engine's. `correlation` is the correlation of the log-probs.
    """
    covariance = means["product"] - means["trainer"] * means["rollout"]
    variance_product = (means["trainer_squared"] - means["trainer"] ** 2) * (
        means["rollout_squared"] - means["rollout"] ** 2
    )
    mean_log_ratio = torch.tensor(means["rollout"] - means["trainer"], dtype=torch.float64)
    return {
        "mean": means["mean"],
        "k1": means["k1"],
        "k3": means["k3"],
        "ess": means["ratio"] ** 2 / means["ratio_squared"],
        "chi2": means["ratio_squared"] - 1,
        "perplexity_ratio": mean_log_ratio.exp().item(),
        "correlation": covariance / max(variance_product, 1e-12) ** 0.5,
    }


def _is_within(log_values: Tensor, low: float, high: float) -> Tensor:
    values = log_values.exp()
    return ((values >= low) & (values <= high)).to(log_values.dtype)


IMPORTANCE_SAMPLING = {
    "tis": tis,
    "icepop": icepop,
    "sequence_tis": sequence_tis,
    "sequence_rejection": sequence_rejection,
    "sequence_mask": sequence_mask,
    "geometric_rejection": geometric_rejection,
}
