"""Divergences of two distributions over the same tokens, from their log-probs.

All take `policy_logprobs` and `teacher_logprobs`, both [..., vocabulary tokens]. The probabilities sum to one over the
last dimension, or over all its parts if it is split. All return `(terms, slopes)` of the same shape. The sum of `terms`
over the vocabulary is the divergence D in nats. With p the policy's probabilities, `slopes` is p_j * dD/dp_j, up to p_j
times a constant. The gradient for the policy's logits is then slopes_j - p_j * sum(slopes).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TermsAndSlopes = tuple[Tensor, Tensor]

_LEAST_LOGPROB = -1e4
"""Lower bound, in nats, of the joint log-prob of all unselected tokens. It must be finite: 0 * infinity is NaN."""


def reverse_kl(policy_logprobs: Tensor, teacher_logprobs: Tensor) -> TermsAndSlopes:
    """Return KL(policy || teacher), which is mode seeking: [..., vocabulary].

    Source: MiniLLM (arXiv 2306.08543, section 2.1).
    """
    terms = policy_logprobs.exp() * (policy_logprobs - teacher_logprobs)
    return terms, terms


def forward_kl(policy_logprobs: Tensor, teacher_logprobs: Tensor) -> TermsAndSlopes:
    """Return KL(teacher || policy), which covers all modes of the teacher: [..., vocabulary].

    Source: Hinton et al. (arXiv 1503.02531).
    """
    probabilities = teacher_logprobs.exp()
    return probabilities * (teacher_logprobs - policy_logprobs), -probabilities


def jsd(policy_logprobs: Tensor, teacher_logprobs: Tensor, *, beta: float) -> TermsAndSlopes:
    """Return beta * KL(teacher || m) + (1 - beta) * KL(policy || m): [..., vocabulary].

    The mixture is m = beta * teacher + (1 - beta) * policy. For beta to 0, result / beta tends to the forward KL. For
    beta to 1, result / (1 - beta) tends to the reverse KL. Source: generalised Jensen-Shannon divergence of GKD (arXiv
    2306.13649, eq. 1).
    """
    mixture = torch.logaddexp(teacher_logprobs + math.log(beta), policy_logprobs + math.log1p(-beta))
    slopes = (1 - beta) * policy_logprobs.exp() * (policy_logprobs - mixture)
    return beta * teacher_logprobs.exp() * (teacher_logprobs - mixture) + slopes, slopes


def with_tail(logprobs: Tensor, others_logprobs: Tensor) -> Tensor:
    """Append to log-probs [..., k] one outcome that stands for all remaining tokens: [..., k + 1].

    `others_logprobs` [...] is their joint log-prob. The divergence of two results is at most the divergence of the full
    distributions (data processing inequality).
    """
    return torch.cat([logprobs, others_logprobs[..., None].clamp(min=_LEAST_LOGPROB)], -1)


def renormalize(logprobs: Tensor, others_logprobs: Tensor) -> Tensor:
    """Return log-probs [..., k] renormalised to a distribution over these k tokens alone. `others_logprobs` is
    ignored.
    """
    return logprobs.log_softmax(-1)


DIVERGENCES = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": jsd}
TAILS = {"bucket": with_tail, "renormalize": renormalize}
