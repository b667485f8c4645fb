"""Choice of tokens by the covariance of log-prob and advantage. Tokens with a high one lower the policy's entropy most.

All functions take the tokens of a whole step, so the choice does not depend on its split into microbatches. Source: Cui
et al. 2025, The Entropy Mechanism of Reinforcement Learning (arXiv 2505.22617).
"""

from __future__ import annotations

import torch
from torch import Tensor


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return (log-prob - mean log-prob) * (advantage - mean advantage): float64 [tokens], 0 where not masked.

    The means are over masked tokens (eq. 10). All arguments are [tokens].
    """
    # float64: over millions of tokens, float32 sums would move the means, and with them tokens at the bounds.
    logprobs, advantages = (torch.where(mask, values, 0.0).double() for values in (logprobs, advantages))
    # Without masked tokens the means would be 0 / 0, which is NaN.
    count = mask.sum().clamp(min=1)
    token_covariances = (logprobs - logprobs.sum() / count) * (advantages - advantages.sum() / count)
    return torch.where(mask, token_covariances, 0.0)


def highest_covariance_mask(token_covariances: Tensor, mask: Tensor, draws: Tensor, *, share: float) -> Tensor:
    """Return bool [tokens]: the fraction `share` of masked tokens with the highest covariance (KL-Cov penalises them).

    `token_covariances` is the result of `covariances`. Among equal values, the tokens with the smallest `draws`, random
    numbers, are chosen. All arguments are [tokens].
    """
    if not mask.any():
        return mask
    count = _count_chosen(mask, share)
    threshold = torch.topk(token_covariances[mask], count).values[-1]
    # Many tokens have log-prob 0 and the same advantage. A threshold alone would take all of them.
    is_above, is_at_threshold = mask & (token_covariances > threshold), mask & (token_covariances == threshold)
    return is_above | _choose_smallest_draws(draws, is_at_threshold, count - int(is_above.sum()))


def drawn_covariance_mask(
    token_covariances: Tensor, mask: Tensor, draws: Tensor, *, share: float, low: float, high: float
) -> Tensor:
    """Return bool [tokens]: random tokens with a covariance between `low` and `high` (Clip-Cov drops their loss).

    Their number is the fraction `share` of all masked tokens, or less. The tokens with the smallest `draws`, random
    numbers [tokens], are chosen.
    """
    is_candidate = mask & (token_covariances > low) & (token_covariances < high)
    count = min(_count_chosen(mask, share), int(is_candidate.sum()))
    return _choose_smallest_draws(draws, is_candidate, count)


def _choose_smallest_draws(draws: Tensor, is_candidate: Tensor, count: int) -> Tensor:
    """Return bool [tokens]: the `count` candidates with the smallest draws. All draws differ."""
    if not count:
        return torch.zeros_like(is_candidate)
    largest_chosen_draw = torch.topk(draws[is_candidate], count, largest=False).values[-1]
    return is_candidate & (draws <= largest_chosen_draw)


def _count_chosen(mask: Tensor, share: float) -> int:
    """Return `share` times the number of masked tokens, rounded down, but at least 1 (as in verl)."""
    return max(1, int(share * int(mask.sum())))
