"""The difference of two distributions' log-probs of the same tokens."""

from __future__ import annotations

from torch import Tensor

# exp(2 * 20) is 2e17, far below float32's maximum of 3e38, so sums over many tokens stay finite too.
_BOUND = 20.0


def log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """Return numerator minus denominator log-probs, [tokens] like both, clamped to +-20.

    The exponential and its square thus stay finite in float32. The gradient is zero beyond the bound. Untrained tokens
    may have a placeholder as denominator: the bound prevents a zero weight from becoming NaN.
    """
    return (numerator_logprobs - denominator_logprobs).clamp(-_BOUND, _BOUND)
