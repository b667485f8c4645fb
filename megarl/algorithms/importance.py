"""Correction of the gap between the engine that sampled and the trainer that learns, and measures of that gap.

A correction takes `log_ratios` float [tokens], the trainer's log-probs before the update less the engine's of the same
tokens, `cu_seqlens` int [sequences + 1] and `mask` bool [tokens], True on trained tokens. It returns a weight per
token, [tokens], without gradient, that the policy loss is multiplied with; zero rejects a token. `low` and `high` bound
ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.keywords import supported_kwargs
from megarl.algorithms.log_ratio import log_ratio
from megarl.algorithms.sequences import on_tokens, sequence_means, sequence_sums

METRICS = {
    "logprob_gap/mean": (
        "nats",
        "distance of the trainer's log-probs from the engine's under the weights that sampled, mean over tokens",
    ),
    "logprob_gap/k1": ("nats", "the engine's divergence from the trainer, estimated by k1"),
    "logprob_gap/k3": ("nats", "the engine's divergence from the trainer, estimated by k3, never negative"),
    "logprob_gap/ess": ("share", "effective sample size of the trainer's ratios to the engine"),
    "logprob_gap/chi2": ("1", "chi-squared divergence of trainer and engine"),
    "logprob_gap/perplexity_ratio": ("ratio", "the trainer's perplexity of the samples over the engine's"),
    "logprob_gap/correlation": ("1", "correlation of the two log-probs over the tokens"),
    "importance/mean": ("ratio", "weight of a token by algorithm.importance_sampling, mean"),
    "importance/rejected": ("share", "tokens that algorithm.importance_sampling gives no weight"),
    "importance/cut": ("share", "tokens whose weight is not their own ratio"),
}
"""Names, units and meanings, for `tracking.table`."""


def tis(log_ratios: Tensor, cu_seqlens: Tensor, mask: Tensor, *, high: float) -> Tensor:
    """Each token's ratio, at most `high`.

    Source: truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy
    RL training"; cap 2).
    """
    return log_ratios.exp().clamp(max=high)


def icepop(log_ratios: Tensor, cu_seqlens: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """Each token's ratio where it is within `low` and `high`, else zero.

    Source: IcePop (Ring-1T, arXiv 2510.18855; 0.5 and 5).
    """
    ratios = log_ratios.exp()
    return torch.where((ratios >= low) & (ratios <= high), ratios, 0.0)


def sequence_tis(log_ratios: Tensor, cu_seqlens: Tensor, mask: Tensor, *, high: float) -> Tensor:
    """The product of a sequence's ratios, at most `high`, on all its tokens.

    Source: sequence-level importance sampling (Liu et al. 2025, "When speed kills stability").
    """
    return on_tokens(sequence_sums(log_ratios, cu_seqlens, mask), cu_seqlens, len(mask)).exp().clamp(max=high)


def sequence_rejection(log_ratios: Tensor, cu_seqlens: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """One on sequences whose product of ratios is within `low` and `high`, zero on the others."""
    return _within(on_tokens(sequence_sums(log_ratios, cu_seqlens, mask), cu_seqlens, len(mask)), low, high)


def sequence_mask(log_ratios: Tensor, cu_seqlens: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """The product of a sequence's ratios on all its tokens where it is within `low` and `high`, else zero.

    As `sequence_rejection`, but accepted sequences keep their ratio (TRL's sequence_mask; 0 and 3 there).
    """
    ratios = on_tokens(sequence_sums(log_ratios, cu_seqlens, mask), cu_seqlens, len(mask)).exp()
    return torch.where((ratios >= low) & (ratios <= high), ratios, 0.0)


def geometric_rejection(log_ratios: Tensor, cu_seqlens: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """One on sequences whose geometric mean of ratios is within `low` and `high` (close to 1), zero on the others.

    Source: geometric sequence masking (Liu et al. 2025; 0.99 and 1.001 there).
    """
    return _within(on_tokens(sequence_means(log_ratios, cu_seqlens, mask), cu_seqlens, len(mask)), low, high)


def importance_weights(
    name: str,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    **settings: Any,
) -> Tensor:
    """The weights of a named correction: [tokens], zero where the mask is False; all tensors but `cu_seqlens` too.

    Of the settings those that the correction takes count.
    """
    correction: Callable[..., Tensor] = IMPORTANCE_SAMPLING[name]
    log_ratios = log_ratio(old_logprobs, rollout_logprobs).detach()
    weights = correction(log_ratios, cu_seqlens, mask, **supported_kwargs(correction, settings))
    return torch.where(mask, weights, 0.0)


def weight_metrics(weights: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Of a correction's weights over the masked tokens, all tensors [tokens].

    `mean` the mean weight; `rejected` the share of zeros; `cut` the share of weights that are not the token's ratio.
    """
    kept = weights[mask]
    own = log_ratio(old_logprobs, rollout_logprobs).exp()[mask]
    return {
        "mean": float(kept.mean()),
        "rejected": float((kept == 0).float().mean()),
        "cut": float((kept != own).float().mean()),
    }


def gap_moments(policy_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Tensor]:
    """Per token, [tokens] each: what the mean over tokens tells of the gap; see `gap_metrics`."""
    ours, theirs = policy_logprobs.detach(), rollout_logprobs.detach()
    log_ratios = log_ratio(ours, theirs)
    ratios = log_ratios.exp()
    return {
        "mean": log_ratios.abs(), "k1": -log_ratios, "k3": ratios - 1 - log_ratios, "ratio": ratios,
        "ratio_squared": ratios.square(), "trainer": ours, "rollout": theirs, "trainer_squared": ours.square(),
        "rollout_squared": theirs.square(), "product": ours * theirs,
    }  # fmt: skip


def gap_metrics(means: dict[str, float]) -> dict[str, float]:
    """From the moments' means over tokens:

    `mean` |trainer - engine| in nats; `k1`, `k3` estimates of the engine's divergence from the trainer; `ess` effective
    share of the samples; `chi2` divergence; `perplexity_ratio` trainer's over engine's; `correlation` of the log-probs.
    """
    covariance = means["product"] - means["trainer"] * means["rollout"]
    spread = (means["trainer_squared"] - means["trainer"] ** 2) * (means["rollout_squared"] - means["rollout"] ** 2)
    difference = torch.tensor(means["rollout"] - means["trainer"], dtype=torch.float64)
    return {
        "mean": means["mean"],
        "k1": means["k1"],
        "k3": means["k3"],
        "ess": means["ratio"] ** 2 / means["ratio_squared"],
        "chi2": means["ratio_squared"] - 1,
        "perplexity_ratio": difference.exp().item(),
        "correlation": covariance / max(spread, 1e-12) ** 0.5,
    }


def _within(log_values: Tensor, low: float, high: float) -> Tensor:
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
