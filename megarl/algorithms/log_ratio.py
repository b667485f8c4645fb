"""The difference of two log-probs of the same tokens."""

from __future__ import annotations

from torch import Tensor

# exp(2 * 20) is 2e17, far below float32's maximum of 3e38, so sums over many tokens stay finite too.
_BOUND = 20.0


def log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """Return numerator minus denominator log-probs, clamped to +-20: [tokens], like both.

    So its exponential and the exponential's square stay finite in float32. Beyond the bound the gradient is zero. The
    denominator of an untrained token may be a placeholder: infinity times its weight of zero would be NaN.
    """
    return (numerator_logprobs - denominator_logprobs).clamp(-_BOUND, _BOUND)
