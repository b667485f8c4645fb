"""The choice of tokens by covariance against loops over the tokens of a step, in float64."""

from __future__ import annotations

import pytest
import torch

from megarl.algorithms.covariance import covariances, drawn_covariance_mask, highest_covariance_mask


@pytest.mark.parametrize("share", [2e-4, 0.1, 1.0])
def test_tokens_are_those_of_the_definition(share: float) -> None:
    for case in range(50):
        random = torch.Generator().manual_seed(case)
        logprobs, advantages, draws = torch.rand(3, 60, generator=random, dtype=torch.float64)
        logprobs, advantages = logprobs.log(), 3 * advantages - 1
        mask = torch.rand(60, generator=random) < 0.6
        # Values of untrained tokens must not matter, not even those that are not numbers.
        logprobs[~mask] = float("nan")
        trained = mask.nonzero()[:, 0].tolist()
        mean_logprob, mean_advantage = (
            sum(values[token].item() for token in trained) / len(trained) for values in (logprobs, advantages)
        )
        expected = {
            token: (logprobs[token].item() - mean_logprob) * (advantages[token].item() - mean_advantage)
            for token in trained
        }
        parts = covariances(logprobs, advantages, mask)
        assert {token: parts[token].item() for token in trained} == pytest.approx(expected, rel=1e-10, abs=1e-12)
        assert not parts[~mask].any()
        count = max(1, int(share * len(trained)))
        highest = sorted(trained, key=lambda token: -expected[token])[:count]
        assert highest_covariance_mask(parts, mask, draws, share=share).nonzero()[:, 0].tolist() == sorted(highest)
        candidates = sorted((token for token in trained if 0.1 < expected[token] < 0.6), key=lambda token: draws[token])
        drawn = drawn_covariance_mask(parts, mask, draws, share=share, low=0.1, high=0.6)
        assert drawn.nonzero()[:, 0].tolist() == sorted(candidates[:count])


def test_of_equal_tokens_no_more_than_the_share_are_taken() -> None:
    """Certain tokens of right answers: log-prob 0 and one advantage."""
    random = torch.Generator().manual_seed(1)
    is_certain = torch.rand(1000, generator=random) < 0.4
    logprobs = torch.where(is_certain, 0.0, torch.rand(1000, generator=random).log() - 1)
    advantages = torch.where(torch.rand(1000, generator=random) < 0.5, 1.0, -1.0)
    mask, draws = torch.ones(1000, dtype=torch.bool), torch.rand(1000, generator=random, dtype=torch.float64)
    parts = covariances(logprobs, advantages, mask)
    for share in (2e-4, 0.01, 0.5):
        is_chosen = highest_covariance_mask(parts, mask, draws, share=share)
        assert int(is_chosen.sum()) == max(1, int(share * 1000))
        assert parts[is_chosen].min() >= parts[~is_chosen].max()
    equal = torch.zeros(1000, dtype=torch.float64)
    assert torch.equal(highest_covariance_mask(equal, mask, draws, share=0.1), draws <= draws.sort().values[99])


def test_a_step_without_trained_tokens_or_candidates_has_no_choice() -> None:
    values, mask = torch.arange(4.0), torch.zeros(4, dtype=torch.bool)
    assert not highest_covariance_mask(covariances(values, values, mask), mask, values, share=0.5).any()
    parts = covariances(values, values, ~mask)
    assert not drawn_covariance_mask(parts, ~mask, values, share=1.0, low=50.0, high=60.0).any()
