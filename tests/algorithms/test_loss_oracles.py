"""Policy losses for samples of another policy against plain float64 loops over their definitions.

Each case has random samples of several segments, masks, advantages and log-probs of the past, in several minibatches.
Gradients of the loops are autograd's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.policy_losses import POLICY_LOSSES, is_sequence_loss, ratio
from megarl.algorithms.reduction import AGGREGATIONS, token_weights
from megarl.algorithms.sequence_masks import drop_off_policy

NUM_CASES = 50


class Tokens(NamedTuple):
    """A minibatch of samples, each with all its segments: float64 [tokens], and the ends of samples."""

    policy: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    cu_samples: Tensor
    weights: Tensor


def minibatches(case: int) -> Iterator[Tokens]:
    """Yield one to three random minibatches. Some samples have no trained token, and some log-probs are far apart."""
    random = torch.Generator().manual_seed(case)
    aggregation = AGGREGATIONS[case % len(AGGREGATIONS)]
    for _ in range(1 + case % 3):
        # A sample's segments lie one after the other: a mask with untrained parts between its turns.
        lengths = torch.randint(2, 12, (3,), generator=random)
        total = int(lengths.sum())
        mask = torch.rand(total, generator=random) < 0.7
        if case % 4 == 0:
            mask[: int(lengths[0])] = False
        old = torch.rand(total, generator=random, dtype=torch.float64).log() * (0.1 if case % 5 == 0 else 1.0)
        moved = torch.randn(total, generator=random, dtype=torch.float64) * (0.05, 0.4, 2.0)[case % 3]
        advantages = torch.randn(3, generator=random, dtype=torch.float64)
        advantages[0 if case % 7 == 0 else 1] *= case % 2
        cu_samples = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        weights = token_weights(cu_samples, mask, aggregation, constant_length=9)
        yield Tokens(
            (old + moved).clamp(max=-1e-9),
            old,
            advantages.repeat_interleave(lengths),
            mask,
            cu_samples,
            weights.double(),
        )


def unclipped(p: Tensor, o: float, advantage: float, settings: dict[str, float]) -> Tensor:
    return -(p - o).exp() * advantage


def dppo_tv(p: Tensor, o: float, advantage: float, settings: dict[str, float]) -> Tensor:
    change = math.exp(p.item()) - math.exp(o)
    is_beyond = change > settings["clip_high"] if advantage > 0 else -change > settings["clip_low"]
    penalty = settings.get("log_ratio_penalty", 0.0) * (p - o) ** 2
    return penalty if is_beyond else unclipped(p, o, advantage, settings) + penalty


def dppo_kl(p: Tensor, o: float, advantage: float, settings: dict[str, float]) -> Tensor:
    new, old = math.exp(p.item()), math.exp(o)
    divergence = old * (o - p.item()) + (1 - old) * math.log((1 - old + 1e-8) / (1 - new + 1e-8))
    rises = new > old
    is_beyond = (
        rises and divergence > settings["clip_high"]
        if advantage > 0
        else (new < old and divergence > settings["clip_low"])
    )
    penalty = settings.get("log_ratio_penalty", 0.0) * (p - o) ** 2
    return penalty if is_beyond else unclipped(p, o, advantage, settings) + penalty


def dro(p: Tensor, o: float, advantage: float, settings: dict[str, float]) -> Tensor:
    return -(advantage * p - settings["beta"] / 2 * (p - o) ** 2)


def vespo(p: Tensor, advantage: float, product: float, settings: dict[str, float]) -> Tensor:
    power, decay = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    return -math.exp(decay) * product**power * math.exp(-decay * product) * advantage * p


def luspo(logprobs: Tensor, old: Tensor, advantage: float, settings: dict[str, float]) -> Tensor:
    """Return the loss of each token from those of its sequence, [tokens] each, without an average over tokens."""
    product = (logprobs - old).mean().exp()
    bounded = product.clamp(1 - settings["clip_low"], 1 + settings["clip_high"])
    return -torch.minimum(product * advantage, bounded * advantage).expand(len(logprobs))


def written_out(name: str, logprobs: Tensor, tokens: Tokens, settings: dict[str, float]) -> Tensor:
    """Return the weighted sum over trained tokens, one at a time."""
    total = logprobs.new_zeros(())
    for start, end in zip(tokens.cu_samples.tolist(), tokens.cu_samples.tolist()[1:], strict=False):
        trained = [token for token in range(start, end) if tokens.mask[token]]
        summed = sum((logprobs[token] - tokens.old[token]).item() for token in trained)
        product = math.exp(min(max(summed, math.log(1e-8)), 20.0))
        if name == "gspo" and trained:
            advantage = tokens.advantages[start].item()
            losses = luspo(logprobs[trained], tokens.old[trained], advantage, settings)
            total = total + (tokens.weights[trained] * losses).sum()
            continue
        for token in trained:
            advantage, old = tokens.advantages[token].item(), tokens.old[token].item()
            loss = (
                vespo(logprobs[token], advantage, product, settings)
                if name == "vespo"
                else TOKEN_LOSSES[name](logprobs[token], old, advantage, settings)
            )
            total = total + tokens.weights[token] * loss
    return total


TOKEN_LOSSES: dict[str, Callable[..., Tensor]] = {
    "unclipped": unclipped, "dppo_tv": dppo_tv, "dppo_kl": dppo_kl, "dro": dro,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("unclipped", {}),
        ("dppo_tv", {"clip_low": 0.1, "clip_high": 0.2}),
        ("dppo_tv", {"clip_low": 0.2, "clip_high": 0.1, "log_ratio_penalty": 0.3}),
        ("dppo_kl", {"clip_low": 0.02, "clip_high": 0.05}),
        ("dppo_kl", {"clip_low": 0.05, "clip_high": 0.01, "log_ratio_penalty": 0.3}),
        ("dro", {"beta": 0.4}),
        ("vespo", {}),
        ("gspo", {"clip_low": 2e-3, "clip_high": 2.5e-3}),
    ],
)
def test_a_loss_and_its_gradient_are_those_of_its_definition(name: str, settings: dict[str, Any]) -> None:
    loss = POLICY_LOSSES[name]
    num_masked = 0
    for case in range(NUM_CASES):
        for tokens in minibatches(case):
            ours, theirs = (tokens.policy.clone().requires_grad_() for _ in range(2))
            of_sequences = (tokens.cu_samples, tokens.mask) if is_sequence_loss(loss) else ()
            of_tokens, metrics = loss(ours, tokens.old, tokens.advantages, *of_sequences, **settings)
            total = (tokens.weights * of_tokens).sum()
            expected = written_out(name, theirs, tokens, settings)
            gradients = [torch.autograd.grad(value, leaf)[0] for value, leaf in ((total, ours), (expected, theirs))]
            torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)
            assert all(value.shape == ours.shape and not value.requires_grad for value in metrics.values())
            num_masked += int(metrics["clip_fraction"].sum()) if "clip_fraction" in metrics else 0
    assert (num_masked > 100) == name.startswith(("dppo", "gspo"))


@pytest.mark.parametrize(
    ("name", "old", "new", "advantage", "is_masked"),
    [
        pytest.param("dppo_tv", 0.01, 0.05, 1.0, False, id="a ratio of 5 of a rare token"),
        pytest.param("dppo_tv", 0.7, 0.95, 1.0, True, id="a ratio of 1.36 of a frequent token"),
        pytest.param("dppo_tv", 0.7, 0.95, -1.0, False, id="it moved against the advantage"),
        pytest.param("dppo_tv", 0.95, 0.7, -1.0, True, id="it fell too far"),
        pytest.param("dppo_kl", 0.01, 0.05, 1.0, False, id="KL 0.024"),
        pytest.param("dppo_kl", 0.7, 0.95, 1.0, True, id="KL 0.32"),
        pytest.param("dppo_kl", 0.7, 0.95, -1.0, False, id="KL against the advantage"),
        pytest.param("dppo_kl", 1.0, 1.0, 1.0, False, id="both certain"),
    ],
)
def test_dppo_compares_probabilities(name: str, old: float, new: float, advantage: float, is_masked: bool) -> None:
    logprobs = torch.tensor([new]).log().requires_grad_()
    bound = 0.2 if name == "dppo_tv" else 0.05
    loss, metrics = POLICY_LOSSES[name](
        logprobs, torch.tensor([old]).log(), torch.tensor([advantage]), clip_low=bound, clip_high=bound
    )
    loss.sum().backward()
    assert bool(metrics["clip_fraction"]) == is_masked
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(-new / old * advantage * (not is_masked))


def test_kl_is_finite_at_probability_one() -> None:
    """A float32 log-prob may be rounded to slightly above 0."""
    policy = torch.tensor([1e-7, 0.0, -1e-9, -30.0], requires_grad=True)
    loss, metrics = POLICY_LOSSES["dppo_kl"](
        policy, torch.tensor([0.0, 1e-7, -40.0, 0.0]), torch.ones(4), clip_low=0.05, clip_high=0.05
    )
    loss.sum().backward()
    assert policy.grad is not None and bool(policy.grad.isfinite().all()) and bool(loss.isfinite().all())
    assert metrics["clip_fraction"].tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("bound", [1.0])
def test_with_bounds_of_one_dppo_is_unclipped(bound: float) -> None:
    for tokens in minibatches(2):
        expected = POLICY_LOSSES["unclipped"](tokens.policy, tokens.old, tokens.advantages)[0]
        loss = POLICY_LOSSES["dppo_tv"](tokens.policy, tokens.old, tokens.advantages, clip_low=bound, clip_high=bound)[
            0
        ]
        assert torch.equal(loss, expected)


def test_the_weight_of_vespo_is_one_on_policy_and_largest_at_power_over_decay() -> None:
    cu_seqlens, mask = torch.tensor([0, 1]), torch.tensor([True])

    def weight(product: float, advantage: float) -> float:
        logprobs = torch.tensor([product], dtype=torch.float64).log()
        metrics = POLICY_LOSSES["vespo"](logprobs, torch.zeros(1), torch.tensor([advantage]), cu_seqlens, mask)[1]
        return metrics["sequence_weight"].item()

    for advantage, peak in ((1.0, 2 / 3), (-1.0, 3 / 2)):
        assert weight(1.0, advantage) == pytest.approx(1.0)
        assert weight(peak, advantage) > max(weight(peak * 1.01, advantage), weight(peak * 0.99, advantage))
    assert weight(1e30, 1.0) == 0.0


@pytest.mark.parametrize("name", ["clipped", "gspo", "policy_gradient"])
def test_dropped_sequences_have_no_loss_and_stay_in_the_denominator(name: str) -> None:
    """Sequences of several segments, from a loop over their trained tokens."""
    loss, limit = POLICY_LOSSES[name], 0.3
    settings = {} if name == "policy_gradient" else {"clip_low": 0.2, "clip_high": 0.3}
    masked_loss = drop_off_policy(loss, limit=limit)
    num_dropped = 0
    for case in range(NUM_CASES):
        for tokens in minibatches(case):
            ours, theirs = (tokens.policy.clone().requires_grad_() for _ in range(2))
            of_tokens, metrics = masked_loss(
                ours, tokens.old, tokens.advantages, tokens.cu_samples, tokens.mask, **settings
            )
            total = (tokens.weights * of_tokens).sum()
            of_sequences = (tokens.cu_samples, tokens.mask) if name == "gspo" else ()
            plain, _ = loss(theirs, tokens.old, tokens.advantages, *of_sequences, **settings)
            factors = []
            for start, end in zip(tokens.cu_samples.tolist(), tokens.cu_samples.tolist()[1:], strict=False):
                differences = [
                    (tokens.old[token] - theirs[token]).item() for token in range(start, end) if tokens.mask[token]
                ]
                left_by = sum(differences) / max(len(differences), 1)
                factors += [float(tokens.advantages[start].item() >= 0 or left_by <= limit)] * (end - start)
            factor = torch.tensor(factors, dtype=torch.float64)
            expected = (tokens.weights * factor * plain).sum()
            gradients = [torch.autograd.grad(value, leaf)[0] for value, leaf in ((total, ours), (expected, theirs))]
            torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)
            assert metrics["off_policy_fraction"].tolist() == (1 - factor).tolist()
            num_dropped += int((1 - factor).sum())
    assert num_dropped > 100


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_a_kl_with_the_ratio_has_the_gradient_of_the_divergence(name: str) -> None:
    """By enumeration of six tokens drawn from an older policy; without the ratio's gradient it is another."""
    scores, old_scores, reference_scores = torch.randn(3, 6, generator=torch.Generator().manual_seed(4)).double()
    scores.requires_grad_()
    policy, old, reference = (values.log_softmax(0) for values in (scores, old_scores, reference_scores))
    divergence = KL_ESTIMATORS[name](policy, reference)

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, scores, retain_graph=True)[0]

    expected = gradient((policy.exp() * (policy - reference)).sum())
    exact = gradient((old.exp() * ratio(policy, old) * divergence).sum())
    torch.testing.assert_close(exact, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(
        gradient((old.exp() * ratio(policy, old).detach() * divergence).sum()), expected, rtol=0.05
    )
