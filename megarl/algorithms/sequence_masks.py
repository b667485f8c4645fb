"""Masks of whole sequences, around any policy loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.policy_losses import LossAndMetrics, is_sequence_loss
from megarl.algorithms.sequences import broadcast_to_tokens, sequence_means
from megarl.algorithms.trial import ResultError, checked_policy_loss
from megarl.tracking.metric_rows import MetricRow

METRICS = (
    MetricRow(
        "train/off_policy_fraction",
        "share",
        "fraction of tokens without policy loss, because their sequence has a negative advantage and left the policy",
        condition="algorithm.off_policy_limit",
    ),
)
_FRACTION = "off_policy_fraction"


def is_off_policy(
    policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, cu_seqlens: Tensor, mask: Tensor, *, limit: float
) -> Tensor:
    """Return whether each token's sequence has a negative advantage and left the policy: bool [tokens].

    The arguments are those of a policy loss of sequences. A sequence left the policy if old - policy log-prob, averaged
    over its trained tokens, is above `limit`, in nats. The policy no longer writes such texts, and learning from them
    is unstable. Source: off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
    """
    mean_log_ratio = sequence_means((old_logprobs - policy_logprobs).detach(), cu_seqlens, mask)
    return (advantages < 0) & (broadcast_to_tokens(mean_log_ratio, cu_seqlens, len(mask)) > limit)


def drop_off_policy(policy_loss: Callable[..., LossAndMetrics], *, limit: float) -> Callable[..., LossAndMetrics]:
    """Return `policy_loss` as a loss of sequences, with loss zero on the tokens of `is_off_policy`.

    Token weights stay unchanged, so dropped sequences count in the loss's denominator (as in TRL and slime).
    """
    is_of_sequences = is_sequence_loss(policy_loss)

    def masked_loss(
        policy_logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        cu_seqlens: Tensor,
        mask: Tensor,
        **settings: Any,
    ) -> LossAndMetrics:
        # Computed before the loss, because a user's loss may write into its arguments.
        is_dropped = is_off_policy(policy_logprobs, old_logprobs, advantages, cu_seqlens, mask, limit=limit)
        sequence_arguments = (cu_seqlens, mask) if is_of_sequences else ()
        # Detach too: selecting the loss alone is not enough, because zero times an infinite slope is NaN.
        trained_logprobs = torch.where(is_dropped, policy_logprobs.detach(), policy_logprobs)
        result = policy_loss(trained_logprobs, old_logprobs, advantages, *sequence_arguments, **settings)
        loss, metrics = checked_policy_loss(result, policy_logprobs)
        if _FRACTION in metrics:
            raise ResultError(f"the function returned a metric {_FRACTION!r}, which this filter measures; rename it")
        # `where` instead of a product: zero times an infinite loss is NaN.
        return torch.where(is_dropped, 0.0, loss), metrics | {_FRACTION: is_dropped.to(loss.dtype)}

    return masked_loss
