"""The log-ratio of two distributions' log-probs of the same tokens."""

from __future__ import annotations

from torch import Tensor

_BOUND = 20.0


def log_ratio(numerator_logprobs: Tensor, denominator_logprobs: Tensor) -> Tensor:
    """Difference of log-probs per token, bounded so that its exponential and that one's square stay finite in float32.

    Both [tokens]; so is the result. Beyond the bound the gradient is zero. The bound also keeps tokens that no mask
    trains, whose second log-prob may be a placeholder, from turning a zero weight into NaN.
    """
    return (numerator_logprobs - denominator_logprobs).clamp(-_BOUND, _BOUND)
