"""Divergences of two distributions over the same tokens, from their log-probs.

All take `policy_logprobs` and `teacher_logprobs`, both [..., tokens of the vocabulary], natural logarithms of
probabilities that sum to one over the last dimension, or over all parts that it is split into. They return two tensors
of that shape: `terms`, whose sum over the vocabulary is the divergence in nats, and `slopes`, p_j * dD/dp_j with p the
policy's probabilities, up to p_j times a constant. The gradient with respect to the policy's logits is then
slopes_j - p_j * sum(slopes).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TermsAndSlopes = tuple[Tensor, Tensor]

_LEAST_LOGPROB = -1e4
"""Log-prob of no tokens at all, in nats: finite, for zero times infinity is NaN."""


def reverse_kl(policy_logprobs: Tensor, teacher_logprobs: Tensor) -> TermsAndSlopes:
    """KL(policy || teacher): seeks the teacher's modes. Source: MiniLLM (arXiv 2306.08543, section 2.1)."""
    terms = policy_logprobs.exp() * (policy_logprobs - teacher_logprobs)
    return terms, terms


def forward_kl(policy_logprobs: Tensor, teacher_logprobs: Tensor) -> TermsAndSlopes:
    """KL(teacher || policy): covers all that the teacher does. Source: Hinton et al. (arXiv 1503.02531)."""
    probabilities = teacher_logprobs.exp()
    return probabilities * (teacher_logprobs - policy_logprobs), -probabilities


def jsd(policy_logprobs: Tensor, teacher_logprobs: Tensor, *, beta: float) -> TermsAndSlopes:
    """beta * KL(teacher || m) + (1 - beta) * KL(policy || m) of the mixture m = beta * teacher + (1 - beta) * policy.

    Divided by beta it is the forward KL in the limit of beta to 0, by 1 - beta the reverse KL in that of beta to 1.
    Source: generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649, eq. 1).
    """
    mixture = torch.logaddexp(teacher_logprobs + math.log(beta), policy_logprobs + math.log1p(-beta))
    slopes = (1 - beta) * policy_logprobs.exp() * (policy_logprobs - mixture)
    return beta * teacher_logprobs.exp() * (teacher_logprobs - mixture) + slopes, slopes


def with_tail(logprobs: Tensor, of_others: Tensor) -> Tensor:
    """Log-probs of some tokens and, as one outcome more, of all others together: [..., k] and [...] to [..., k + 1].

    The divergence of two such distributions is at most that of the whole ones (data processing inequality).
    """
    return torch.cat([logprobs, of_others[..., None].clamp(min=_LEAST_LOGPROB)], -1)


def renormalized(logprobs: Tensor, of_others: Tensor) -> Tensor:
    """Log-probs of some tokens as a distribution over these alone: [..., k] in and out; those `of_others` are left."""
    return logprobs.log_softmax(-1)


DIVERGENCES = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": jsd}
TAILS = {"bucket": with_tail, "renormalize": renormalized}
