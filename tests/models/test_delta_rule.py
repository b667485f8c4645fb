"""The gated delta rule in chunks against its recurrence, token by token in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from megarl.models.delta_net.rule import causal_convolution, gated_delta_rule

HEADS, KEY, VALUE = 2, 8, 6


def recurrence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    lengths: list[int],
) -> torch.Tensor:
    """The definition: one state per sequence, updated by one token after another."""
    outputs = []
    for q, k, v, g, b in zip(*(x.split(lengths) for x in (query, key, value, log_decay, beta)), strict=True):
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        state = torch.zeros(HEADS, VALUE, KEY, dtype=q.dtype)
        for t in range(len(q)):
            state = state * g[t].exp()[:, None, None]
            missing = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
            state = state + torch.einsum("h,hv,hk->hvk", b[t], missing, k[t])
            outputs.append(torch.einsum("hvk,hk->hv", state, q[t]) * KEY**-0.5)
    return torch.stack(outputs)


def inputs(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(tokens, HEADS, width, generator=generator) for width in (KEY, KEY, VALUE))
    log_decay = -torch.rand(tokens, HEADS, generator=generator).exp() * torch.tensor([0.02, 3.0])
    beta = torch.rand(tokens, HEADS, generator=generator)
    return [q, k, v, log_decay, beta]


@pytest.mark.parametrize("lengths", [[5], [1, 64, 3], [130, 7, 65, 128]], ids=str)
def test_chunks_equal_the_recurrence(lengths: list[int]) -> None:
    narrow = [x.requires_grad_() for x in inputs(sum(lengths))]
    wide = [x.detach().double().requires_grad_() for x in narrow]
    out, expected = gated_delta_rule(*narrow, lengths), recurrence(*wide, lengths)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-6)
    direction = torch.randn_like(out)
    ours = torch.autograd.grad(out, narrow, direction)
    theirs = torch.autograd.grad(expected, wide, direction.double())
    for got, wanted in zip(ours, theirs, strict=True):
        assert (got - wanted).norm() < 1e-6 * wanted.norm()


def test_packed_sequences_equal_single_ones() -> None:
    lengths = [130, 7, 65]
    whole = inputs(sum(lengths))
    alone = [
        gated_delta_rule(*parts, [len(parts[0])]) for parts in zip(*(x.split(lengths) for x in whole), strict=True)
    ]
    torch.testing.assert_close(gated_delta_rule(*whole, lengths), torch.cat(alone), rtol=0, atol=1e-6)


def test_strong_decay_has_finite_gradients() -> None:
    q, k, v, log_decay, beta = (x.requires_grad_() for x in inputs(64))
    gradients = torch.autograd.grad(gated_delta_rule(q, k, v, log_decay * 100, beta, [64]).sum(), (q, k, v, log_decay))
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_convolution_starts_again_with_each_sequence() -> None:
    lengths = [1, 5, 2, 9]
    x, weight = torch.randn(17, 3, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    positions = torch.cat([torch.arange(length) for length in lengths])
    expected = torch.cat([F.conv1d(F.pad(part.T, (3, 0)), weight[:, None], groups=3).T for part in x.split(lengths)])
    torch.testing.assert_close(causal_convolution(x, weight, positions), expected)
