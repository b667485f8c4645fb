"""The log-ratio of two distributions' log-probs of the same tokens."""

from __future__ import annotations

from torch import Tensor

# exp(2 * 20) is 2e17, far below float32's maximum of 3e38, so sums over many tokens stay finite too.
_BOUND = 20.0


def log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """Return the difference of two log-probs per token, all [tokens], bounded to +-20.

    Its exponential and the square of it thus stay finite in float32. Beyond the bound the gradient is zero. Untrained
    tokens may have a placeholder as second log-prob: the bound keeps them from turning a zero weight into NaN.
    """
    return (numerator_logprobs - denominator_logprobs).clamp(-_BOUND, _BOUND)
