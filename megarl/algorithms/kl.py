"""Estimators per token of the KL divergence of the policy from the reference, on tokens sampled by the policy.

All take `policy_logprobs` and `reference_logprobs`, both [tokens], and return [tokens]. Gradient may flow through both.
Source: J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from torch import Tensor

from megarl.algorithms.log_ratio import log_ratio


def k1(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return policy - reference log-prob [tokens]: an unbiased KL estimate of either sign."""
    return policy_logprobs - reference_logprobs


def k2(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return half the squared log-prob difference [tokens]: a biased KL estimate with an unbiased gradient."""
    return 0.5 * (policy_logprobs - reference_logprobs).square()


def k3(policy_logprobs: Tensor, reference_logprobs: Tensor, *, k3_max: float | None = None) -> Tensor:
    """Return exp(d) - d - 1 with d = reference - policy log-prob, [tokens]: an unbiased KL estimate, never negative.

    `k3_max` limits a token's estimate (verl's low_var_kl: 10). The gradient is zero where the limit applies. Source:
    GRPO (arXiv 2402.03300, eq. 4).
    """
    difference = log_ratio(reference_logprobs, policy_logprobs)
    estimate = difference.expm1() - difference
    return estimate if k3_max is None else estimate.clamp(max=k3_max)


def absolute(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return the absolute difference of policy and reference log-probs [tokens]."""
    return (policy_logprobs - reference_logprobs).abs()


def adapted_coefficient(
    coefficient: float, divergence: float, *, target: float, horizon: float, num_samples: int
) -> float:
    """Return the KL coefficient after a step with mean divergence `divergence` (nats).

    The coefficient grows above `target` and falls below, by at most a fifth per `horizon` samples and per step. Source:
    arXiv 1909.08593, section 2.2.
    """
    error = min(max(divergence / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * min(num_samples / horizon, 1.0))


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "absolute": absolute}
