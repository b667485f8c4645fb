"""Log-probs and entropies, with their gradients, against a plain float64 softmax over the whole vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.rank_pool import RankPool

TOKENS, HIDDEN, VOCABULARY = 13, 6, 29


def problem(tokens: int = TOKENS, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Hidden states, head, targets (first and last id among them) and the gradients that come back."""
    g = torch.Generator().manual_seed(3)
    targets = torch.randint(vocabulary, (tokens,), generator=g)
    targets[0], targets[-1] = 0, vocabulary - 1
    return {
        "hidden": torch.randn(tokens, HIDDEN, generator=g),
        "weight": torch.randn(vocabulary, HIDDEN, generator=g),
        "targets": targets,
        "grad_logprob": torch.randn(tokens, generator=g),
        "grad_entropy": torch.randn(tokens, generator=g),
    }


def truncated(p: dict[str, Tensor]) -> dict[str, Tensor]:
    """The problem with the sets that top-k or top-p could have kept of each token: the target and 0 to 9 others.

    Token 0 keeps nothing but its target, an id of one end of the vocabulary; token 1 has the whole vocabulary.
    """
    g = torch.Generator().manual_seed(7)
    sets = []
    for number, target in enumerate(p["targets"].tolist()):
        others = torch.randperm(VOCABULARY, generator=g)[: 0 if number == 0 else number % 10]
        sets.append(torch.tensor([], dtype=torch.int64) if number == 1 else torch.cat([others, torch.tensor([target])]))
        sets[-1] = sets[-1].unique()
    return p | {
        "kept_ids": torch.cat(sets).to(torch.int32),
        "kept_counts": torch.tensor([len(kept) for kept in sets], dtype=torch.int32),
    }


def plain(p: dict[str, Tensor], temperature: float | Tensor) -> dict[str, Tensor]:
    """Log-probs, entropies and gradients in float64."""
    hidden, weight = (p[name].double().requires_grad_() for name in ("hidden", "weight"))
    logits = hidden @ weight.T / (temperature.double()[:, None] if isinstance(temperature, Tensor) else temperature)
    if "kept_ids" in p:
        counts = p["kept_counts"].tolist()
        for number, kept in enumerate(p["kept_ids"].long().split(counts)):
            if counts[number]:
                outside = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, kept, False)
                logits = logits.masked_fill(outside & (torch.arange(len(logits)) == number)[:, None], -1e300)
    logprobs = logits.log_softmax(-1)
    logprob = logprobs.gather(1, p["targets"][:, None]).squeeze(1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    torch.autograd.backward([logprob, entropy], [p["grad_logprob"].double(), p["grad_entropy"].double()])
    assert hidden.grad is not None and weight.grad is not None
    return {"logprob": logprob, "entropy": entropy, "hidden": hidden.grad, "weight": weight.grad}


def ours(
    p: dict[str, Tensor],
    temperature: float | Tensor,
    chunk: int,
    first: int = 0,
    stop: int = VOCABULARY,
    *,
    keeps_logits: bool = False,
    num_backward: int = 1,
) -> dict:
    """The same from the vocabulary's rows `first` to `stop`; the hidden gradient summed over the ranks."""
    from megarl.models.logprobs import Support, vocab_parallel_logprobs

    support = Support(p["kept_ids"], p["kept_counts"]) if "kept_ids" in p else None
    group = dist.group.WORLD if dist.is_initialized() else None
    hidden, weight = p["hidden"].clone().requires_grad_(), p["weight"][first:stop].clone().requires_grad_()
    logprob, entropy = vocab_parallel_logprobs(
        hidden,
        weight,
        p["targets"],
        first_token_id=first,
        group=group,
        temperature=temperature,
        chunk_tokens=chunk,
        support=support,
        keeps_logits=keeps_logits,
    )
    for _ in range(num_backward):
        hidden.grad = weight.grad = None
        torch.autograd.backward([logprob, entropy], [p["grad_logprob"], p["grad_entropy"]], retain_graph=True)
    assert hidden.grad is not None and weight.grad is not None
    if group is not None:
        dist.all_reduce(hidden.grad)
    return {"logprob": logprob.detach(), "entropy": entropy.detach(), "hidden": hidden.grad, "weight": weight.grad}


def ours_on_ranks(p: dict[str, Tensor], temperature: float, chunk: int, cuts: list[int]) -> dict:
    rank = dist.get_rank()
    return ours(p, temperature, chunk, cuts[rank], cuts[rank + 1])


def largest_difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max((got[name].double() - expected[name]).abs().max().item() for name in expected)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, TOKENS, 100])
def test_whole_vocabulary(chunk: int, temperature: float) -> None:
    p = problem()
    assert largest_difference(ours(p, temperature, chunk), plain(p, temperature)) <= 1e-5


@pytest.mark.parametrize("is_truncated", [False, True], ids=["all tokens", "kept tokens"])
def test_a_temperature_of_its_own_for_every_token(is_truncated: bool) -> None:
    p = truncated(problem()) if is_truncated else problem()
    temperatures = torch.linspace(0.5, 2.0, TOKENS)
    got = ours(p, temperatures, 4)
    assert largest_difference(got, plain(p, temperatures)) <= 1e-5
    equal = ours(p, torch.full((TOKENS,), 0.6), 4)
    assert largest_difference(equal, plain(p, 0.6)) <= 1e-5
    assert (got["logprob"] - equal["logprob"]).abs().max() > 0.5


@pytest.mark.parametrize("temperature", [1.5, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_a_truncated_distribution(chunk: int, temperature: float) -> None:
    p = truncated(problem())
    got, expected = ours(p, temperature, chunk), plain(p, temperature)
    assert largest_difference(got, expected) <= 1e-5
    full = ours(problem(), temperature, chunk)
    assert torch.equal(got["logprob"][1], full["logprob"][1]) and torch.equal(got["entropy"][1], full["entropy"][1])
    assert (got["logprob"] - full["logprob"]).abs().max() > 0.5


def test_the_only_token_that_was_kept_is_certain_and_learns_nothing() -> None:
    p = truncated(problem())
    p["grad_logprob"][1:], p["grad_entropy"][1:] = 0, 0
    got = ours(p, 0.6, 4)
    assert got["logprob"][0] == 0 and got["entropy"][0] == 0
    assert not got["hidden"].any() and not got["weight"].any()


def test_no_gradient_where_none_is_asked_for() -> None:
    from megarl.models.logprobs import vocab_parallel_logprobs

    p = problem()
    expected = plain(p | {"grad_entropy": torch.zeros(TOKENS)}, 0.6)
    for frozen in ("hidden", "weight"):
        given = {name: p[name].clone().requires_grad_(name != frozen) for name in ("hidden", "weight")}
        logprob, entropy = vocab_parallel_logprobs(
            *given.values(), p["targets"], first_token_id=0, group=None, temperature=0.6, chunk_tokens=4
        )
        torch.stack([logprob, entropy.detach()]).backward(torch.stack([p["grad_logprob"], p["grad_entropy"]]))
        assert given.pop(frozen).grad is None
        got = {name: tensor.grad for name, tensor in given.items()} | {"logprob": logprob, "entropy": entropy}
        assert largest_difference(got, {name: expected[name] for name in got}) <= 1e-5


def test_bfloat16_is_as_exact_as_its_logits() -> None:
    p = problem()
    rounded = p | {name: p[name].bfloat16() for name in ("hidden", "weight")}
    got, expected = ours(rounded, 1.0, 4), plain(rounded, 1.0)
    for name in ("logprob", "entropy"):
        torch.testing.assert_close(got[name].double(), expected[name], rtol=0, atol=0.05)
    for name in ("hidden", "weight"):
        assert got[name].dtype == torch.bfloat16
        near = 0.03 * expected[name].abs().max().item()
        torch.testing.assert_close(got[name].double(), expected[name], rtol=0.03, atol=near)


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param([0, 15, VOCABULARY], id="uneven halves"),
        pytest.param([0, VOCABULARY, VOCABULARY], id="second rank without rows"),
    ],
)
@pytest.mark.parametrize("is_truncated", [False, True], ids=["all tokens", "kept tokens"])
def test_split_vocabulary(ranks: RankPool, cuts: list[int], is_truncated: bool) -> None:
    p = truncated(problem()) if is_truncated else problem()
    first, second = ranks.run(ours_on_ranks, p, 0.6, 4, cuts, world_size=2)
    for name in ("logprob", "entropy", "hidden"):
        assert torch.equal(first[name], second[name]), name
    joined = first | {"weight": torch.cat([first["weight"], second["weight"]])}
    assert largest_difference(joined, plain(p, 0.6)) <= 1e-5


def test_large_logits_stay_finite() -> None:
    p = problem()
    p["hidden"] *= 300
    got, expected = ours(p, 1.0, 4), plain(p, 1.0)
    for name in expected:
        torch.testing.assert_close(got[name].double(), expected[name], rtol=1e-5, atol=1e-3)
    assert got["logprob"].min() < -1000 and (got["entropy"] >= 0).all()


class LargestOutput(TorchDispatchMode):
    """The most elements any operation has put out, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return out


def peak(work: Callable[[], object]) -> int:
    with LargestOutput() as largest:
        work()
    return largest.numel


def test_logits_of_one_chunk_are_alive_at_most() -> None:
    p = problem(tokens=64, vocabulary=400)
    assert peak(lambda: plain(p, 1.0)) == 64 * 400
    assert peak(lambda: ours(p, 1.0, 8, stop=400)) == 8 * 400


@pytest.mark.parametrize("num_backward", [1, 2], ids=["one backward pass", "two backward passes"])
@pytest.mark.parametrize("is_truncated", [False, True], ids=["all tokens", "kept tokens"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_kept_logits_give_the_same_bits(dtype: torch.dtype, is_truncated: bool, num_backward: int) -> None:
    """A second pass over one graph must not read the logits that the first overwrote."""
    p = truncated(problem()) if is_truncated else problem()
    p |= {name: p[name].to(dtype) for name in ("hidden", "weight")}
    if dtype == torch.float64:
        p |= {name: p[name].to(dtype) for name in ("grad_logprob", "grad_entropy")}
    for temperature in (0.6, torch.linspace(0.5, 2.0, TOKENS)):
        for chunk in (1, 4, 100):
            kept = ours(p, temperature, chunk, keeps_logits=True, num_backward=num_backward)
            expected = ours(p, temperature, chunk)
            assert all(torch.equal(kept[name], expected[name]) for name in expected)


class Products(TorchDispatchMode):
    """Multiplications in matrix products, in units of tokens * hidden size * vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            left, right = [value for value in args if isinstance(value, Tensor)][-2:]
            self.count += len(left) * left.size(1) * right.size(1) / (64 * HIDDEN * 400)
        return out


@pytest.mark.parametrize("chunk", [8, 100])
@pytest.mark.parametrize(("keeps_logits", "expected"), [(False, 4), (True, 3)], ids=["recomputed", "kept"])
def test_kept_logits_save_one_of_four_products(keeps_logits: bool, expected: int, chunk: int) -> None:
    """Forward, recomputation, gradient of the hidden states, gradient of the head."""
    p = problem(tokens=64, vocabulary=400)
    with Products() as products:
        ours(p, 1.0, chunk, stop=400, keeps_logits=keeps_logits)
    assert products.count == pytest.approx(expected)


def test_without_gradients_no_logits_are_kept() -> None:
    from megarl.models.logprobs import vocab_parallel_logprobs

    p = problem(tokens=64, vocabulary=400)
    weight = p["weight"].requires_grad_()

    def score() -> None:
        vocab_parallel_logprobs(
            p["hidden"],
            weight,
            p["targets"],
            first_token_id=0,
            group=None,
            temperature=1.0,
            chunk_tokens=8,
            keeps_logits=True,
        )

    with torch.no_grad():
        assert peak(score) == 8 * 400
    assert peak(score) == 64 * 400
