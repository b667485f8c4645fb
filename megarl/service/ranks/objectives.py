"""Losses of the training service: sums over a call's tokens, by the formulas of `algorithms`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from megarl.algorithms.policy_losses import POLICY_LOSSES, gspo
from megarl.training.objective import compute_sequence_loss
from megarl.training.rows.microbatch import Microbatch

Measured = tuple[Tensor, Microbatch]
"""Log-probs and losses of a row's tokens, float32 [2, own tokens] without gradient, and the row."""
TokenLoss = Callable[[Tensor, Microbatch], Tensor]
"""Function from log-probs [own tokens] and their row to each token's loss [own tokens]."""


def cross_entropy(logprobs: Tensor, batch: Microbatch) -> Tensor:
    """Return minus weight times log-prob, [own tokens]. `logprobs` are [own tokens]."""
    return -batch.per_token["token_weights"] * logprobs


def policy_loss(logprobs: Tensor, batch: Microbatch, *, name: str, settings: Mapping[str, float]) -> Tensor:
    """Return a loss of `algorithms.policy_losses`, [own tokens]. `logprobs` [own tokens] are the policy's."""
    loss, _ = POLICY_LOSSES[name](logprobs, *_old_logprobs_and_advantages(batch), **settings)
    return loss


def compute_gspo_loss(logprobs: Tensor, batch: Microbatch, *, settings: Mapping[str, float]) -> Tensor:
    """Return GSPO's loss, [own tokens]. Each sequence has one ratio, over the tokens in the row's mask."""
    # A context-parallel rank has a part of a sequence, but the ratio needs the whole sequence.
    loss, _ = compute_sequence_loss(gspo, (logprobs, *_old_logprobs_and_advantages(batch)), batch, dict(settings))
    return loss


def _old_logprobs_and_advantages(batch: Microbatch) -> tuple[Tensor, Tensor]:
    return batch.per_token["old_logprobs"], batch.per_token["advantages"]


def _clip_bounds(settings: Mapping[str, float]) -> dict[str, float]:
    """Convert a client's bounds of the ratio to megarl's distances from ratio 1."""
    return {
        "clip_low": 1 - settings.get("clip_low_threshold", 0.8),
        "clip_high": settings.get("clip_high_threshold", 1.2) - 1,
    }


def select_token_loss(name: str, settings: Mapping[str, float]) -> TokenLoss:
    """Return the loss function `name` of `messages.losses.LOSSES`, with a client's settings."""
    if name == "cross_entropy":
        return cross_entropy
    if name == "importance_sampling":
        return partial(policy_loss, name="unclipped", settings={})
    if name == "ppo":
        return partial(policy_loss, name="clipped", settings=_clip_bounds(settings))
    if name == "cispo":
        return partial(policy_loss, name="cispo", settings=_clip_bounds(settings))
    if name == "gspo":
        return partial(compute_gspo_loss, settings=_clip_bounds(settings))
    assert name == "dro", "the driver refuses other names"
    return partial(policy_loss, name="dro", settings={"beta": settings["beta"]})


def make_objective(name: str, settings: Mapping[str, float]) -> Callable[..., tuple[Tensor, Tensor, Measured]]:
    """Return a call's objective for `TrainingEngine.accumulate`. Its loss [1] sums over the micro-batch's tokens."""
    compute_token_losses = select_token_loss(name, settings)

    def objective(output: Tensor, batch: Microbatch) -> tuple[Tensor, Tensor, Measured]:
        """Return the micro-batch's loss [1], a token count of 1, and its log-probs and losses [2, tokens].

        `output[0]` has the log-probs. Its other rows are unused here.
        """
        model_logprobs = output[0]
        # Detach masked tokens too: a gradient of zero times an infinite slope is NaN.
        logprobs = torch.where(batch.mask, model_logprobs, model_logprobs.detach())
        losses = torch.where(batch.mask, compute_token_losses(logprobs, batch), 0.0)
        # Megatron's schedules require a token count. It is not used.
        token_count = torch.ones((), dtype=torch.int, device=losses.device)
        return losses.sum(), token_count, (torch.stack([model_logprobs, losses]).detach(), batch)

    return objective


def measure_losses(
    output: Tensor, batch: Microbatch, non_loss_data: bool, *, name: str, settings: Mapping[str, float]
) -> Measured:
    """Return log-probs and losses [2, tokens], in a pass without gradients."""
    _, _, logprobs_and_losses = make_objective(name, settings)(output, batch)
    return logprobs_and_losses
