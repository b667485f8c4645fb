"""Policy losses per token, on flat packed tensors.

A policy loss has this form, in this module or in the user's file (`algorithm.policy_loss: path/to/file.py:name`):

    def name(policy_logprobs, old_logprobs, advantages, *, clip_high, ...) -> tuple[Tensor, dict[str, Tensor]]

The tensors are float [tokens]. It returns `(loss, metrics)`: the loss float [tokens], and metrics by name, each float
[tokens] and detached, or {}. The caller sums weight times loss, and averages metrics with the same weights. Gradient
flows through `policy_logprobs` alone. Keywords are fields of the recipe, or of `algorithm.policy_loss_kwargs`. `trial`
checks the result.

Losses of whole sequences also take `cu_seqlens` int [sequences + 1] and `mask` bool [tokens], True on trained tokens,
as fourth and fifth argument. Here a sequence is a trajectory: all its segments, one after the other. In a token's
gradient, all further tokens of its sequence are constants. So a token needs the gradient of its own log-prob only, even
if the rest of the sequence is on another rank. If all tokens of a sequence have equal weights, the loss equals the
paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature

import torch
from torch import Tensor

from megarl.algorithms.log_ratio import log_ratio
from megarl.algorithms.sequences import broadcast_to_tokens, sequence_means, sequence_sums
from megarl.tracking.metric_rows import MetricRow

METRICS = (
    MetricRow(
        "train/ratio",
        "ratio",
        "mean over tokens of the probability under the policy divided by the probability before the update",
    ),
    MetricRow(
        "train/clip_fraction",
        "share",
        "fraction of tokens without policy gradient, because their ratio or probability is beyond the clip bounds",
    ),
    MetricRow("train/dual_clip_fraction", "share", "fraction of tokens with a loss limited by algorithm.dual_clip"),
    MetricRow(
        "train/sequence_weight",
        "ratio",
        "mean over tokens of the weight that policy_loss vespo gives to their sequence; 1 if the policy has not moved",
    ),
)

_VESPO_LOG_RATIOS = (math.log(1e-8), 20.0)
"""Bounds of a sequence's summed log-ratio in `vespo`, as in its authors' code and TRL."""
_PROBABILITY_EPSILON = 1e-8
"""Added in `dppo_kl` to the joint probability of all other tokens: its logarithm stays finite (as in verl)."""

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


def is_sequence_loss(policy_loss: Callable[..., object]) -> bool:
    """Return whether a policy loss takes whole sequences, by its argument `cu_seqlens`."""
    return "cu_seqlens" in signature(policy_loss).parameters


def ratio(policy_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return each token's probability under the policy divided by its probability before the update: [tokens].

    Both arguments are [tokens]. No gradient flows through `old_logprobs`.
    """
    return log_ratio(policy_logprobs, old_logprobs.detach()).exp()


def clip(ratios: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Return ratios [tokens] clamped to the range from 1 - `clip_low` to 1 + `clip_high`."""
    return ratios.clamp(1.0 - clip_low, 1.0 + clip_high)


def policy_gradient(policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> LossAndMetrics:
    """Return minus advantage times log-prob, [tokens]: correct for one update per rollout.

    Source: REINFORCE (Williams 1992).
    """
    ratios = ratio(policy_logprobs.detach(), old_logprobs)
    return -advantages.detach() * policy_logprobs, {"ratio": ratios}


def clipped(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    max_ratio: float | None = None,
) -> LossAndMetrics:
    """Return PPO's clipped loss: -min(ratio * advantage, clipped ratio * advantage), [tokens].

    With `dual_clip` (above 1) the loss of a negative advantage is at most `dual_clip` times |advantage|. `max_ratio`
    limits ratios first. Metrics per token: `ratio` (without limit), `clip_fraction` and, with `dual_clip`,
    `dual_clip_fraction`. `clip_fraction` is 1 where the clip or `max_ratio` stops the gradient.

    Source: PPO (arXiv 1707.06347, eq. 7); clip-higher: DAPO (arXiv 2503.14476, eq. 10); dual clip: arXiv 1912.09729,
    eq. 5; `max_ratio`: ColossalChat.
    """
    ratios = ratio(policy_logprobs, old_logprobs)
    clamped = ratios if max_ratio is None else ratios.clamp(max=max_ratio)
    loss, metrics = _clipped_surrogate(clamped, advantages.detach(), clip_low, clip_high, dual_clip)
    is_clamped = (clamped != ratios).to(loss.dtype)
    return loss, metrics | {
        "ratio": ratios.detach(),
        "clip_fraction": torch.maximum(metrics["clip_fraction"], is_clamped),
    }


def gspo(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossAndMetrics:
    """Return the clipped loss of the sequence's ratio, the geometric mean of its tokens' ratios: [tokens].

    The clip range is two to three orders of magnitude narrower than for single tokens (paper: 3e-4 below, 4e-4 above).
    `cu_seqlens` is [sequences + 1]. Metrics as in `clipped`. Source: Group Sequence Policy Optimization (arXiv
    2507.18071, eqs. 5, 7 and 13).
    """
    log_ratios = log_ratio(policy_logprobs, old_logprobs.detach())
    mean_log_ratio = broadcast_to_tokens(sequence_means(log_ratios.detach(), cu_seqlens, mask), cu_seqlens, len(mask))
    # The value is the sequence's ratio; the gradient is the token's own (GSPO-token, eq. 13).
    ratios = (mean_log_ratio + (log_ratios - log_ratios.detach())).exp()
    return _clipped_surrogate(ratios, advantages.detach(), clip_low, clip_high, None)


def gmpo(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossAndMetrics:
    """Return minus advantage times the geometric mean of the sequence's ratios, clipped token by token: [tokens].

    A log-ratio is at least -`clip_low` for a negative advantage, and at most `clip_high` otherwise (paper: 0.4 both).
    Metrics as in `clipped`; `ratio` is the geometric mean. Source: Geometric-Mean Policy Optimization (arXiv
    2507.20673).
    """
    advantages = advantages.detach()
    log_ratios = log_ratio(policy_logprobs, old_logprobs.detach())
    clipped_log_ratios = torch.where(advantages < 0, log_ratios.clamp(min=-clip_low), log_ratios.clamp(max=clip_high))
    sequence_ratio = broadcast_to_tokens(
        sequence_means(clipped_log_ratios.detach(), cu_seqlens, mask), cu_seqlens, len(mask)
    ).exp()
    # The value is the sequence's ratio; the gradient is the token's share of its gradient.
    loss = -advantages * sequence_ratio * (1 + clipped_log_ratios - clipped_log_ratios.detach())
    return loss, {"ratio": sequence_ratio, "clip_fraction": (clipped_log_ratios != log_ratios).to(loss.dtype)}


def cispo(
    policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> LossAndMetrics:
    """Return minus clipped ratio * advantage * log-prob: [tokens].

    The clipped ratio is a constant in the gradient, so no token loses its gradient. Metrics as in `clipped`, but
    `clip_fraction` counts every ratio out of bounds. Source: MiniMax-M1 (arXiv 2506.13585, eqs. 4 and 5).
    """
    ratios = ratio(policy_logprobs.detach(), old_logprobs)
    clamped = clip(ratios, clip_low=clip_low, clip_high=clip_high)
    loss = -clamped * advantages.detach() * policy_logprobs
    return loss, {"ratio": ratios, "clip_fraction": (clamped != ratios).to(loss.dtype)}


def sapo(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> LossAndMetrics:
    """Return minus advantage times a sigmoid gate around ratio 1: [tokens].

    The gradient fades smoothly, without a clip. Source: Soft Adaptive Policy Optimization (arXiv 2511.20347).
    """
    advantages = advantages.detach()
    ratios = ratio(policy_logprobs, old_logprobs)
    temperature = torch.where(advantages > 0, temperature_positive, temperature_negative).to(ratios.dtype)
    gate = torch.sigmoid(temperature * (ratios - 1)) * 4 / temperature
    return -gate * advantages, {"ratio": ratios.detach()}


def unclipped(policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> LossAndMetrics:
    """Return minus ratio * advantage, [tokens]: PPO's loss without its clip (arXiv 1707.06347, eq. 6)."""
    ratios = ratio(policy_logprobs, old_logprobs)
    return -ratios * advantages.detach(), {"ratio": ratios.detach()}


def dppo_tv(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    log_ratio_penalty: float = 0.0,
) -> LossAndMetrics:
    """Return minus ratio * advantage, masked where a token's probability moved too far: [tokens].

    A positive advantage is masked if the probability rose by more than `clip_high`, a negative one if it fell by more
    than `clip_low`. Unlike PPO's clip, this spares rare tokens: from 0.01 to 0.05 the ratio is 5. `log_ratio_penalty`
    times the squared log-ratio is added, also where masked. Metrics as in `clipped`.

    Source: DPPO, total variation of the binary distribution (arXiv 2602.04879); penalty: Kimi K2.5 (arXiv 2602.02276).
    """
    # The mask is a constant to the gradient: a token at a bound gets all of its gradient, or none.
    change = policy_logprobs.detach().exp() - old_logprobs.detach().exp()
    is_masked = ((advantages > 0) & (change > clip_high)) | ((advantages < 0) & (change < -clip_low))
    return _masked_surrogate(policy_logprobs, old_logprobs, advantages, is_masked, log_ratio_penalty)


def dppo_kl(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    log_ratio_penalty: float = 0.0,
) -> LossAndMetrics:
    """Return minus ratio * advantage, masked where the KL divergence of a token's probability is large: [tokens].

    The KL has two outcomes, this token or any other token, under the old policy. A positive advantage is masked if the
    probability rose and the KL exceeds `clip_high`, a negative one if it fell and the KL exceeds `clip_low`. Penalty,
    metrics and source as in `dppo_tv`.
    """
    policy, old = policy_logprobs.detach(), old_logprobs.detach()
    # A log-prob of 0 may be rounded to slightly above 0.
    other_probs, old_other_probs = (
        (-logprobs.expm1()).clamp(min=0) + _PROBABILITY_EPSILON for logprobs in (policy, old)
    )
    divergence = old.exp() * (old - policy) + (-old.expm1()) * (old_other_probs / other_probs).log()
    is_masked = ((advantages > 0) & (policy > old) & (divergence > clip_high)) | (
        (advantages < 0) & (policy < old) & (divergence > clip_low)
    )
    return _masked_surrogate(policy_logprobs, old_logprobs, advantages, is_masked, log_ratio_penalty)


def dro(policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, beta: float) -> LossAndMetrics:
    """Return minus advantage * log-prob, plus `beta` / 2 times the squared log-ratio: [tokens].

    The advantage is a reward minus a value or baseline. The penalty replaces ratio and clip, so samples of any policy
    can be trained. Source: Direct Reward Optimisation (arXiv 2405.19107).
    """
    log_ratios = log_ratio(policy_logprobs, old_logprobs.detach())
    loss = -advantages.detach() * policy_logprobs + beta / 2 * log_ratios.square()
    return loss, {"ratio": log_ratios.detach().exp()}


def vespo(
    policy_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor,
    *,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
) -> LossAndMetrics:
    """Return minus weight * advantage * log-prob, [tokens], with one smooth weight for each sequence.

    The weight is exp(decay) * W^power * exp(-decay * W), without gradient; W is the product of the sequence's ratios.
    The weight is 1 at W = 1, and fades far from W = power / decay. Advantages below 0 have their own power and decay.
    All tokens of a sequence must have the same advantage. Metrics: `ratio` of each token, `sequence_weight`.

    Source: Variational Sequence-Level Soft Policy Optimization (arXiv 2602.10693).
    """
    advantages = advantages.detach()
    log_ratios = log_ratio(policy_logprobs.detach(), old_logprobs.detach())
    log_products = sequence_sums(log_ratios, cu_seqlens, mask).clamp(*_VESPO_LOG_RATIOS)
    log_products = broadcast_to_tokens(log_products, cu_seqlens, len(mask))
    power = torch.where(advantages < 0, power_negative, power_positive).to(log_products.dtype)
    decay = torch.where(advantages < 0, decay_negative, decay_positive).to(log_products.dtype)
    # In logarithms: the product of a long sequence's ratios would overflow before its exponential vanishes.
    weights = (decay + power * log_products - decay * log_products.exp()).exp()
    return -weights * advantages * policy_logprobs, {"ratio": log_ratios.exp(), "sequence_weight": weights}


def _masked_surrogate(
    policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, is_masked: Tensor, log_ratio_penalty: float
) -> LossAndMetrics:
    """Return (loss, metrics), all [tokens]: minus ratio * advantage, zero where masked, plus the penalty everywhere."""
    log_ratios = log_ratio(policy_logprobs, old_logprobs.detach())
    ratios = log_ratios.exp()
    loss = torch.where(is_masked, 0.0, -ratios * advantages.detach()) + log_ratio_penalty * log_ratios.square()
    return loss, {"ratio": ratios.detach(), "clip_fraction": is_masked.to(loss.dtype)}


def _clipped_surrogate(
    ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> LossAndMetrics:
    """Return the clipped loss of probability ratios [tokens], and its metrics, all [tokens]."""
    unclipped = ratios * advantages
    bounded = clip(ratios, clip_low=clip_low, clip_high=clip_high) * advantages
    objective = torch.minimum(unclipped, bounded)
    metrics = {"ratio": ratios.detach(), "clip_fraction": (bounded < unclipped).to(ratios.dtype)}
    if dual_clip is not None:
        floor = dual_clip * advantages
        is_floored = (advantages < 0) & (objective < floor)
        objective = torch.where(is_floored, floor, objective)
        metrics["dual_clip_fraction"] = is_floored.to(ratios.dtype)
    return -objective, metrics


POLICY_LOSSES = {
    "policy_gradient": policy_gradient,
    "clipped": clipped,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "unclipped": unclipped,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "vespo": vespo,
}
