"""The objective of distillation by distributions: the divergence of a policy from its teacher."""

from __future__ import annotations

from torch import Tensor

from megarl.tracking.metric_rows import MetricRow
from megarl.training.objective import RowLoss, StepNumbers, mismatch_metrics, weighted_loss
from megarl.training.rows.microbatch import Microbatch

METRICS = (
    MetricRow(
        "distillation/divergence",
        "nats",
        "mean divergence per token of the policy from its teacher, by distillation.divergence",
    ),
)


def divergence_objective(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> RowLoss:
    """Return a row's loss: the divergence of the policy from its teacher, in nats, weighted per token.

    `output` [3, tokens] holds log-probs, entropies and divergences. Metrics: `distillation/divergence` (nats per
    token), `train/entropy`, and `logprob_gap/`.
    """
    policy_logprobs, entropies, divergences = output
    metrics = {"distillation/divergence": divergences, "train/entropy": entropies}
    total, count, logged = weighted_loss(divergences, metrics, batch, batch.mask)
    if (rollout_logprobs := batch.per_token.get("rollout_logprobs")) is not None:
        logged |= mismatch_metrics(policy_logprobs.detach(), rollout_logprobs, batch.mask)
    return total, count, logged
