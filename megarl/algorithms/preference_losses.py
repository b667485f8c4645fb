"""Losses of preferences between two answers to the same prompt.

All except `kto` take `policy` and `reference` float [pairs, 2]: the summed log-probs of the answers' tokens, the chosen
answer first. `lengths` [pairs, 2] counts these tokens. They return `(loss [pairs], rewards [pairs, 2])`. A reward is
the value that the loss assigns to an answer, without gradient. A pair is won if the chosen answer has the higher
reward.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

LossAndRewards = tuple[Tensor, Tensor]
"""The loss [pairs], and the implicit rewards of both answers [pairs, 2], without gradient."""


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
    """Return -log sigmoid(`beta` * difference of log-ratios - `margin`): [pairs].

    `label_smoothing` is the probability of a flipped label (conservative DPO). With `normalize_by_length`, log-ratios
    are means over tokens. Source: arXiv 2305.18290, eq. 7.
    """
    rewards = beta * _log_ratios(policy, reference, lengths, normalize_by_length)
    difference = rewards[:, 0] - rewards[:, 1] - margin
    loss = -(1 - label_smoothing) * logsigmoid(difference) - label_smoothing * logsigmoid(-difference)
    return loss, rewards.detach()


def ipo(
    policy: Tensor, reference: Tensor, lengths: Tensor, *, beta: float, normalize_by_length: bool = False
) -> LossAndRewards:
    """Return (difference of log-ratios - 1 / (2 * `beta`))^2: [pairs]. Source: arXiv 2310.12036, eq. 17."""
    ratios = _log_ratios(policy, reference, lengths, normalize_by_length)
    return (ratios[:, 0] - ratios[:, 1] - 1 / (2 * beta)).square(), beta * ratios.detach()


def simpo(policy: Tensor, reference: Tensor, lengths: Tensor, *, beta: float, margin: float = 0.0) -> LossAndRewards:
    """Return -log sigmoid(`beta` * difference of mean log-probs - `margin`): [pairs].

    `reference` is not used. Source: arXiv 2405.14734, eq. 6.
    """
    rewards = beta * policy / lengths
    return -logsigmoid(rewards[:, 0] - rewards[:, 1] - margin), rewards.detach()


def orpo(policy: Tensor, reference: Tensor, lengths: Tensor, *, beta: float) -> LossAndRewards:
    """Return minus the chosen answer's mean log-prob, minus `beta` * log sigmoid(log odds ratio): [pairs].

    `reference` is not used. Source: arXiv 2403.07691, eqs. 6 and 7.
    """
    means = (policy / lengths).clamp(max=-1e-6)
    # The odds of a probability p are p / (1 - p): they are infinite at p = 1, hence the clamp of the mean log-prob.
    log_odds = means - torch.log(-torch.expm1(means))
    return -means[:, 0] - beta * logsigmoid(log_odds[:, 0] - log_odds[:, 1]), means.detach()


def bradley_terry(policy: Tensor, reference: Tensor, lengths: Tensor, *, margin: float = 0.0) -> LossAndRewards:
    """Return -log sigmoid(difference of scores - `margin`): [pairs].

    `policy` [pairs, 2] holds a reward model's scores. Source: InstructGPT (arXiv 2203.02155), eq. 1; the margin, Llama
    2 (arXiv 2307.09288), eq. 2.
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
    """Return weight * (1 - sigmoid(`beta` * distance)): [answers].

    The distance is log-ratio - `kl` for desirable answers, `kl` - log-ratio for undesirable ones. Each answer counts
    alone: `policy` and `reference` are float [answers], `desirable` is bool [answers], loss and rewards are [answers].
    `kl` is the policy's divergence from the reference (nats per answer, not negative), estimated on answers to other
    prompts. Source: arXiv 2402.01306, eqs. 7 and 8.
    """
    rewards = beta * (policy - reference)
    # How much better than `kl` the policy treats the answer: more likely if desirable, less likely if not.
    gain = torch.where(desirable, rewards - beta * kl, beta * kl - rewards)
    weights = torch.where(desirable, desirable_weight, undesirable_weight).to(policy.dtype)
    return weights * (1 - torch.sigmoid(gain)), rewards.detach()


def _log_ratios(policy: Tensor, reference: Tensor, lengths: Tensor, normalize_by_length: bool) -> Tensor:
    ratios = policy - reference
    return ratios / lengths if normalize_by_length else ratios


PREFERENCE_LOSSES = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo, "kto": kto}
