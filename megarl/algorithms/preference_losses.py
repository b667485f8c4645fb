"""Losses of preferences between two answers to the same prompt.

All but `kto` take `policy` and `reference` float [pairs, 2], the summed log-probs of the answers' tokens, the chosen
one first, and `lengths` [pairs, 2], their tokens. They return `(loss [pairs], rewards [pairs, 2])`: what an answer is
worth to the loss, without gradient; a pair is won where the chosen answer's is higher.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

LossAndRewards = tuple[Tensor, Tensor]


def dpo(
    policy: Tensor,
    reference: Tensor,
    lengths: Tensor,
    *,
    beta: float,
    margin: float = 0.0,
    label_smoothing: float = 0.0,
    normalize_by_length: bool = False,
) -> LossAndRewards:
    """Minus log sigmoid of `beta` times the log-ratios' difference, less `margin`.

    `label_smoothing` is the probability that a pair's label is flipped (conservative DPO); with `normalize_by_length`
    log-ratios are means over tokens. Source: arXiv 2305.18290, eq. 7.
    """
    rewards = beta * _log_ratios(policy, reference, lengths, normalize_by_length)
    difference = rewards[:, 0] - rewards[:, 1] - margin
    loss = -(1 - label_smoothing) * logsigmoid(difference) - label_smoothing * logsigmoid(-difference)
    return loss, rewards.detach()


def ipo(
    policy: Tensor, reference: Tensor, lengths: Tensor, *, beta: float, normalize_by_length: bool = False
) -> LossAndRewards:
    """Squared distance of the log-ratios' difference from 1 / (2 * `beta`). Source: arXiv 2310.12036, eq. 17."""
    ratios = _log_ratios(policy, reference, lengths, normalize_by_length)
    return (ratios[:, 0] - ratios[:, 1] - 1 / (2 * beta)).square(), beta * ratios.detach()


def simpo(policy: Tensor, reference: Tensor, lengths: Tensor, *, beta: float, margin: float = 0.0) -> LossAndRewards:
    """Minus log sigmoid of `beta` times the difference of mean log-probs, less `margin`; no reference.

    Source: arXiv 2405.14734, eq. 6.
    """
    rewards = beta * policy / lengths
    return -logsigmoid(rewards[:, 0] - rewards[:, 1] - margin), rewards.detach()


def orpo(policy: Tensor, reference: Tensor, lengths: Tensor, *, beta: float) -> LossAndRewards:
    """Minus the chosen answer's mean log-prob, plus `beta` times minus log sigmoid of the log odds ratio; no reference.

    Source: arXiv 2403.07691, eqs. 6 and 7.
    """
    means = (policy / lengths).clamp(max=-1e-6)
    # Odds of a probability p: p / (1 - p).
    log_odds = means - torch.log(-torch.expm1(means))
    return -means[:, 0] - beta * logsigmoid(log_odds[:, 0] - log_odds[:, 1]), means.detach()


def bradley_terry(policy: Tensor, reference: Tensor, lengths: Tensor, *, margin: float = 0.0) -> LossAndRewards:
    """Minus log sigmoid of the scores' difference, less `margin`; `policy` holds a reward model's scores.

    Source: InstructGPT (arXiv 2203.02155), eq. 1; the margin, Llama 2 (arXiv 2307.09288), eq. 2.
    """
    return -logsigmoid(policy[:, 0] - policy[:, 1] - margin), policy.detach()


def kto(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    *,
    beta: float,
    kl: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossAndRewards:
    """One minus sigmoid of `beta` times how far an answer's log-ratio is on its right side of `kl`, weighted.

    Answers stand alone here: `policy`, `reference` float [answers], `desirable` bool [answers]; so do loss and rewards.
    `kl` is the policy's divergence from the reference (nats an answer, not negative), estimated on answers to other
    prompts. Source: arXiv 2402.01306, eqs. 7 and 8.
    """
    rewards = beta * (policy - reference)
    side = torch.where(desirable, rewards - beta * kl, beta * kl - rewards)
    weights = torch.where(desirable, desirable_weight, undesirable_weight).to(policy.dtype)
    return weights * (1 - torch.sigmoid(side)), rewards.detach()


def _log_ratios(policy: Tensor, reference: Tensor, lengths: Tensor, normalize_by_length: bool) -> Tensor:
    ratios = policy - reference
    return ratios / lengths if normalize_by_length else ratios


PREFERENCE_LOSSES = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo, "kto": kto}
