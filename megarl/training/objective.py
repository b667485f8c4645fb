"""What is minimised: per-token losses of a microbatch, from the algorithms' formulas."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megarl.algorithms.kl import k3
from megarl.algorithms.policy_losses import POLICY_LOSSES
from megarl.config import AlgorithmConfig
from megarl.training.batch import Microbatch

Objective = Callable[[Tensor, Tensor, Microbatch], tuple[Tensor, dict[str, Tensor]]]
"""(policy log-probs, entropies, microbatch) -> (loss, metrics), all of them per token."""


def supervised(policy_logprobs: Tensor, entropies: Tensor, batch: Microbatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of the trained tokens."""
    return -policy_logprobs, {"train/entropy": entropies}


def policy_objective(config: AlgorithmConfig) -> Objective:
    """The policy loss a recipe names, plus k3 KL to the reference model where its coefficient is not zero."""
    policy_loss = POLICY_LOSSES[config.policy_loss]

    def objective(policy_logprobs: Tensor, entropies: Tensor, batch: Microbatch) -> tuple[Tensor, dict[str, Tensor]]:
        known = batch.known
        # With one update per rollout the trainer's log-probs before the update are those of this very pass.
        old_logprobs = known.get("old_logprobs", policy_logprobs.detach())
        loss, metrics = policy_loss(
            policy_logprobs,
            old_logprobs,
            known["advantages"],
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
        )
        metrics = {f"train/{name}": value for name, value in metrics.items()} | {"train/entropy": entropies}
        if config.kl_coefficient:
            divergence = k3(policy_logprobs, known["reference_logprobs"])
            loss = loss + config.kl_coefficient * divergence
            metrics["kl/reference"] = divergence
        return loss, metrics

    return objective
