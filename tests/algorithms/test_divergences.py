"""Divergences: closed forms, gradients against autograd, and the parts of a vocabulary."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.divergences import DIVERGENCES, forward_kl, jsd, renormalize, reverse_kl, with_tail

ALL = [
    pytest.param(reverse_kl, id="reverse"),
    pytest.param(forward_kl, id="forward"),
    pytest.param(partial(jsd, beta=0.5), id="jsd"),
    pytest.param(partial(jsd, beta=0.1), id="jsd 0.1"),
]


def logs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def drawn(seed: int, tokens: int = 7, vocabulary: int = 11) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(tokens, vocabulary, generator=g, dtype=torch.float64)


def others(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of all tokens but these together."""
    return logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1)


@pytest.mark.parametrize(
    ("divergence", "value"),
    [
        # Of the policy (1/2, 1/4, 1/4) and the teacher (1/4, 1/4, 1/2).
        pytest.param(reverse_kl, 0.5 * math.log(2) - 0.25 * math.log(2), id="reverse"),
        pytest.param(forward_kl, 0.5 * math.log(2) - 0.25 * math.log(2), id="forward"),
        # The mixture is (3/8, 1/4, 3/8).
        pytest.param(partial(jsd, beta=0.5), 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3), id="jsd"),
        # The mixture is (7/16, 1/4, 5/16).
        pytest.param(
            partial(jsd, beta=0.25),
            0.25 * (0.25 * math.log(4 / 7) + 0.5 * math.log(8 / 5))
            + 0.75 * (0.5 * math.log(8 / 7) + 0.25 * math.log(4 / 5)),
            id="jsd 0.25",
        ),
    ],
)
def test_closed_forms(divergence: Any, value: float) -> None:
    terms, _ = divergence(logs(0.5, 0.25, 0.25), logs(0.25, 0.25, 0.5))
    assert terms.sum().item() == pytest.approx(value, abs=1e-15)


def test_directions_differ_and_swap() -> None:
    policy, teacher = logs(0.8, 0.15, 0.05), logs(0.3, 0.3, 0.4)
    reverse, forward = (one(policy, teacher)[0].sum().item() for one in (reverse_kl, forward_kl))
    assert reverse == pytest.approx(0.8 * math.log(8 / 3) + 0.15 * math.log(0.5) + 0.05 * math.log(1 / 8))
    assert forward == pytest.approx(reverse_kl(teacher, policy)[0].sum().item()) and abs(forward - reverse) > 0.1


@pytest.mark.parametrize("divergence", ALL)
def test_slopes_give_the_gradient_of_the_logits(divergence: Any) -> None:
    logits, teacher = drawn(1).requires_grad_(), drawn(2).log_softmax(-1)
    policy = logits.log_softmax(-1)
    divergence(policy, teacher)[0].sum().backward()
    _, slopes = divergence(policy.detach(), teacher)
    expected = slopes - policy.detach().exp() * slopes.sum(-1, keepdim=True)
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-14)
    assert expected.abs().max() > 0.01


@pytest.mark.parametrize("divergence", ALL)
def test_equal_distributions_have_no_divergence(divergence: Any) -> None:
    policy = drawn(3).log_softmax(-1)
    terms, slopes = divergence(policy, policy.clone())
    torch.testing.assert_close(terms.sum(-1), torch.zeros(7, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(slopes, policy.exp() * slopes.sum(-1, keepdim=True), rtol=0, atol=1e-15)


def test_the_ends_of_jensen_shannon_are_the_two_kls() -> None:
    policy, teacher = drawn(4).log_softmax(-1), drawn(5).log_softmax(-1)
    for beta, scale, limit in ((1e-7, 1e-7, forward_kl), (1 - 1e-7, 1e-7, reverse_kl)):
        found = jsd(policy, teacher, beta=beta)[0].sum(-1) / scale
        torch.testing.assert_close(found, limit(policy, teacher)[0].sum(-1), rtol=1e-4, atol=1e-6)


def test_jensen_shannon_is_symmetric_and_bounded_at_a_half() -> None:
    policy, teacher = (50 * drawn(6)).log_softmax(-1), (50 * drawn(7)).log_softmax(-1)
    one, other = (jsd(*pair, beta=0.5)[0].sum(-1) for pair in ((policy, teacher), (teacher, policy)))
    torch.testing.assert_close(one, other)
    assert one.max() <= math.log(2) + 1e-12 and one.max() > 0.69


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_tail_in_one_bucket_bounds_the_divergence_from_below(name: str) -> None:
    divergence = partial(jsd, beta=0.5) if name == "jsd" else DIVERGENCES[name]
    policy, teacher = drawn(8, 200).log_softmax(-1), drawn(9, 200).log_softmax(-1)
    ids = teacher.topk(4).indices
    parts = [(logprobs.gather(-1, ids), others(logprobs, ids)) for logprobs in (policy, teacher)]
    found = divergence(*(with_tail(*part) for part in parts))[0].sum(-1)
    whole = divergence(policy, teacher)[0].sum(-1)
    assert (found <= whole + 1e-12).all() and (found > 0).all() and (whole - found).max() > 0.1


def test_the_bucket_has_what_is_left() -> None:
    parts = logs(0.5, 0.3), logs(0.2)[0]
    assert with_tail(*parts).exp().tolist() == pytest.approx([0.5, 0.3, 0.2], abs=1e-12)
    assert renormalize(*parts).exp().tolist() == pytest.approx([0.625, 0.375], abs=1e-12)


@pytest.mark.parametrize("divergence", ALL)
def test_an_empty_bucket_stays_finite(divergence: Any) -> None:
    logits, nothing = torch.tensor([[40.0, 0.0]], requires_grad=True), torch.tensor([-torch.inf])
    teacher = with_tail(torch.tensor([[80.0, 0.0]]).log_softmax(-1), nothing)
    terms, _ = divergence(with_tail(logits.log_softmax(-1), nothing), teacher)
    terms.sum().backward()
    assert terms.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()
