"""Divergences of whole vocabularies, log-probs of several tokens and top-k, against plain float64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.divergences import forward_kl, jsd, reverse_kl
from tests.models.test_logprobs import largest_difference, peak
from tests.rank_pool import RankPool

TOKENS, HIDDEN, TEACHER_HIDDEN, VOCABULARY, K = 13, 6, 9, 29, 5
DIVERGENCES = {"reverse": reverse_kl, "forward": forward_kl, "jsd": partial(jsd, beta=0.3)}


def problem(tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Both models' hidden states and heads, tokens to look up, and the gradients that come back."""
    g = torch.Generator().manual_seed(3)
    return {
        "hidden": torch.randn(tokens, HIDDEN, generator=g),
        "weight": 0.6 * torch.randn(vocabulary, HIDDEN, generator=g),
        "teacher_hidden": torch.randn(tokens, TEACHER_HIDDEN, generator=g),
        "teacher_weight": 0.4 * torch.randn(vocabulary, TEACHER_HIDDEN, generator=g),
        "ids": torch.stack([torch.randperm(vocabulary, generator=g)[:K] for _ in range(tokens)]),
        "grad": torch.randn(tokens, generator=g),
        "grads": torch.randn(tokens, K + 1, generator=g),
    }


def others(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of all tokens but these together."""
    return logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1)


def plain(p: dict[str, Tensor], temperature: float, divergence: str | None) -> dict[str, Tensor]:
    """The divergence, or without one the log-probs of `ids` and of all others, and gradients, in float64."""
    hidden, weight = (p[name].double().requires_grad_() for name in ("hidden", "weight"))
    policy = (hidden @ weight.T / temperature).log_softmax(-1)
    if divergence is None:
        found = torch.cat([policy.gather(1, p["ids"]), others(policy, p["ids"])[:, None]], -1)
        found.backward(p["grads"].double())
    else:
        teacher = (p["teacher_hidden"].double() @ p["teacher_weight"].double().T / temperature).log_softmax(-1)
        found = DIVERGENCES[divergence](policy, teacher)[0].sum(-1)
        found.backward(p["grad"].double())
    assert hidden.grad is not None and weight.grad is not None
    return {"found": found.detach(), "hidden": hidden.grad, "weight": weight.grad}


def ours(
    p: dict[str, Tensor],
    temperature: float,
    divergence: str | None,
    chunk: int,
    first: int = 0,
    stop: int = VOCABULARY,
) -> dict[str, Tensor]:
    """The same from the vocabulary's rows `first` to `stop`; the hidden gradient summed over the ranks."""
    from megarl.models.distillation.divergence import vocab_parallel_divergence, vocab_parallel_k_logprobs

    group = dist.group.WORLD if dist.is_initialized() else None
    hidden, weight = p["hidden"].clone().requires_grad_(), p["weight"][first:stop].clone().requires_grad_()
    settings: Any = dict(group=group, temperature=temperature, chunk_tokens=chunk)
    if divergence is None:
        of_ids, of_others = vocab_parallel_k_logprobs(hidden, weight, p["ids"], first_token_id=first, **settings)
        found = torch.cat([of_ids, of_others[:, None]], -1)
        found.backward(p["grads"])
    else:
        teacher = p["teacher_hidden"], p["teacher_weight"][first:stop]
        found = vocab_parallel_divergence(hidden, weight, *teacher, DIVERGENCES[divergence], **settings)
        found.backward(p["grad"])
    assert hidden.grad is not None and weight.grad is not None
    if group is not None:
        dist.all_reduce(hidden.grad)
    return {"found": found.detach(), "hidden": hidden.grad, "weight": weight.grad}


def top_k(p: dict[str, Tensor], temperature: float, chunk: int, first: int = 0, stop: int = VOCABULARY) -> Any:
    from megarl.models.distillation.divergence import vocab_parallel_top_k

    group = dist.group.WORLD if dist.is_initialized() else None
    weight = p["weight"][first:stop]
    return vocab_parallel_top_k(
        p["hidden"], weight, K, first_token_id=first, group=group, temperature=temperature, chunk_tokens=chunk
    )


def on_ranks(p: dict[str, Tensor], divergence: str | None, cuts: list[int]) -> Any:
    part = cuts[dist.get_rank() : dist.get_rank() + 2]
    return ours(p, 0.6, divergence, 4, *part), top_k(p, 0.6, 4, *part)


WHAT = pytest.mark.parametrize("divergence", [*DIVERGENCES, pytest.param(None, id="several tokens")])


@WHAT
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_whole_vocabulary(divergence: str | None, chunk: int, temperature: float) -> None:
    p = problem()
    assert largest_difference(ours(p, temperature, divergence, chunk), plain(p, temperature, divergence)) <= 1e-5


@WHAT
@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param([0, 15, VOCABULARY], id="uneven halves"),
        pytest.param([0, VOCABULARY, VOCABULARY], id="second rank without rows"),
    ],
)
def test_split_vocabulary(ranks: RankPool, divergence: str | None, cuts: list[int]) -> None:
    p = problem()
    (first, best), (second, other) = ranks.run(on_ranks, p, divergence, cuts, world_size=2)
    for name in ("found", "hidden"):
        assert torch.equal(first[name], second[name]), name
    joined = first | {"weight": torch.cat([first["weight"], second["weight"]])}
    assert largest_difference(joined, plain(p, 0.6, divergence)) <= 1e-5
    assert all(map(torch.equal, best, other)) and torch.equal(best[0], top_k(p, 0.6, 100)[0])


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_the_most_likely_tokens(chunk: int) -> None:
    p = problem()
    token_ids, logprobs, of_others = top_k(p, 0.6, chunk)
    whole = (p["hidden"].double() @ p["weight"].double().T / 0.6).log_softmax(-1)
    expected = whole.topk(K)
    assert torch.equal(token_ids, expected.indices)
    torch.testing.assert_close(logprobs.double(), expected.values, rtol=0, atol=1e-5)
    torch.testing.assert_close(of_others.double(), others(whole, token_ids), rtol=0, atol=1e-5)


def test_all_other_tokens_of_a_sharp_distribution() -> None:
    p = problem()
    p["hidden"] *= 20
    p["ids"], _, of_others = top_k(p, 1.0, 4)
    # The gradient of all others' log-prob alone, which is next to nothing of the whole.
    p["grads"] = torch.zeros_like(p["grads"]).index_fill(1, torch.tensor([K]), 1.0)
    got, expected = ours(p, 1.0, None, 4), plain(p, 1.0, None)
    assert (expected["found"][:, -1] < math.log(1e-7)).any()
    for found in (of_others, got["found"][:, -1]):
        torch.testing.assert_close(found.double(), expected["found"][:, -1], rtol=1e-5, atol=1e-4)
    for name in ("hidden", "weight"):
        torch.testing.assert_close(got[name].double(), expected[name], rtol=1e-3, atol=1e-3)


def test_there_are_no_other_tokens() -> None:
    p = problem(vocabulary=K)
    p["grads"][:, K] = 0.0
    got = ours(p, 1.0, None, 4, stop=K)
    assert (got["found"][:, K] == -torch.inf).all() and (top_k(p, 1.0, 4)[2] == -torch.inf).all()
    expected = torch.zeros(TOKENS, K).scatter_add(1, p["ids"], p["grads"][:, :K])
    probabilities = (p["hidden"] @ p["weight"].T).softmax(-1)
    expected -= probabilities * expected.sum(-1, keepdim=True)
    torch.testing.assert_close(got["hidden"], expected @ p["weight"], rtol=0, atol=1e-5)


@WHAT
def test_no_tokens_have_no_gradient(divergence: str | None) -> None:
    got = ours({name: value if "weight" in name else value[:0] for name, value in problem().items()}, 1, divergence, 4)
    assert len(got["found"]) == 0 and not got["weight"].any()


@WHAT
def test_frozen_parts_get_no_gradient(divergence: str | None) -> None:
    from megarl.models.distillation.divergence import vocab_parallel_divergence, vocab_parallel_k_logprobs

    p = problem()
    hidden = p["hidden"].clone().requires_grad_()
    settings: Any = dict(group=None, temperature=1.0, chunk_tokens=4)
    if divergence is None:
        of_ids, of_others = vocab_parallel_k_logprobs(hidden, p["weight"], p["ids"], first_token_id=0, **settings)
        torch.cat([of_ids, of_others[:, None]], -1).backward(p["grads"])
    else:
        teacher = p["teacher_hidden"].requires_grad_(), p["teacher_weight"].requires_grad_()
        vocab_parallel_divergence(hidden, p["weight"], *teacher, DIVERGENCES[divergence], **settings).backward(
            p["grad"]
        )
        assert all(tensor.grad is None for tensor in teacher)
    assert hidden.grad is not None and p["weight"].grad is None
    torch.testing.assert_close(hidden.grad.double(), plain(problem(), 1.0, divergence)["hidden"], rtol=0, atol=1e-5)


@WHAT
def test_logits_of_one_chunk_are_alive_at_most(divergence: str | None) -> None:
    p = problem(tokens=64, vocabulary=400)
    assert peak(lambda: plain(p, 1.0, divergence)) == 64 * 400
    # A hundred columns fit, of which 64 are taken; of a divergence a third as many.
    chunk = 16 if divergence is None else 48
    assert peak(lambda: ours(p, 1.0, divergence, chunk, stop=400)) == 64 * 64
    assert peak(lambda: top_k(p, 1.0, 16, stop=400)) == 64 * 64
