import math

import numpy as np
import pytest
import torch

from megarl.algorithms.importance import (
    IMPORTANCE_SAMPLING,
    importance_weights,
    mismatch_metrics,
    mismatch_moments,
    unbounded_weights,
    weight_metrics,
)

CU_SEQLENS = torch.tensor([0, 3, 5])
MASK = torch.tensor([0, 1, 1, 1, 1], dtype=torch.bool)
# Ratios 2 and 1/8 in the first sequence, 3/2 and 2/3 in the second; the first token is a prompt's.
OLD = torch.tensor([100.0, math.log(2), math.log(1 / 8), math.log(3 / 2), math.log(2 / 3)], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "low", "high", "expected"),
    [
        pytest.param("tis", 0.0, 1.25, [0, 1.25, 1 / 8, 1.25, 2 / 3], id="tis"),
        pytest.param("icepop", 0.5, 1.75, [0, 0, 0, 3 / 2, 2 / 3], id="icepop"),
        pytest.param("sequence_tis", 0.0, 0.75, [0, 1 / 4, 1 / 4, 0.75, 0.75], id="sequence_tis"),
        pytest.param("sequence_rejection", 0.3, 1.1, [0, 0, 0, 1, 1], id="sequence_rejection"),
        pytest.param("sequence_rejection", 0.2, 0.9, [0, 1, 1, 0, 0], id="other sequence"),
        pytest.param("sequence_mask", 0.3, 1.1, [0, 0, 0, 1, 1], id="sequence_mask: one is above, one below"),
        pytest.param("sequence_mask", 0.0, 0.75, [0, 1 / 4, 1 / 4, 0, 0], id="sequence_mask keeps the ratio"),
        pytest.param("geometric_rejection", 0.4, 1.1, [0, 1, 1, 1, 1], id="geometric: root of 1/4 is within"),
        pytest.param("geometric_rejection", 0.6, 1.1, [0, 0, 0, 1, 1], id="geometric_rejection"),
    ],
)
def test_corrections(name, low, high, expected):
    rollout = torch.zeros(5, dtype=torch.float64)
    found = importance_weights(name, OLD, rollout, CU_SEQLENS, MASK, low=low, high=high)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def shares_cut(name, old, rollout, cu_seqlens, mask, **bounds):
    weights = importance_weights(name, old, rollout, cu_seqlens, mask, **bounds)
    metrics = weight_metrics(weights, unbounded_weights(name, old, rollout, cu_seqlens, mask))
    return {metric: float(values[mask].mean()) for metric, values in metrics.items()}


@pytest.mark.parametrize(
    ("name", "high"),
    # A rejection at its bound is no rounding.
    [*((name, 2.0) for name in IMPORTANCE_SAMPLING), ("tis", 1.0), ("sequence_tis", 1.0)],
)
def test_rounding_cuts_no_weight(name, high):
    """float32 log-probs of one model from two kernels; a bound of 1 is as near as rounding can make it."""
    g = torch.Generator().manual_seed(7)
    cu_seqlens = torch.tensor([0, 300, 310, 1000])
    rollout = -5 * torch.rand(1000, generator=g)
    old = rollout + 1e-6 * torch.randn(1000, generator=g)
    mask = torch.rand(1000, generator=g) < 0.7
    found = shares_cut(name, old, rollout, cu_seqlens, mask, low=0.5, high=high)
    assert found == pytest.approx(
        {"importance/mean": 1, "importance/rejected": 0, "importance/clipped_share": 0}, abs=1e-3
    )
    assert found["importance/clipped_share"] == 0


@pytest.mark.parametrize(
    ("name", "low", "high", "expected"),
    [
        ("tis", 0.0, 1.25, 2 / 4),
        ("tis", 0.0, 2.5, 0),
        ("icepop", 0.5, 1.75, 2 / 4),
        ("sequence_tis", 0.0, 0.75, 2 / 4),
        ("sequence_tis", 0.0, 1.5, 0),
        ("sequence_rejection", 0.3, 1.1, 2 / 4),
        ("sequence_rejection", 0.2, 1.1, 0),
        ("sequence_mask", 0.0, 0.2, 1),
        ("geometric_rejection", 0.6, 1.1, 2 / 4),
    ],
)
def test_share_of_cut_weights(name, low, high, expected):
    rollout = torch.zeros(5, dtype=torch.float64)
    assert shares_cut(name, OLD, rollout, CU_SEQLENS, MASK, low=low, high=high)["importance/clipped_share"] == expected


def test_a_ratio_beyond_all_numbers_is_cut():
    old = torch.full((60,), 20.0)
    every, mask = torch.tensor([0, 60]), torch.ones(60, dtype=torch.bool)
    assert shares_cut("sequence_tis", old, -old, every, mask, high=2.0)["importance/clipped_share"] == 1


def test_gap_of_equal_logprobs_is_none():
    logprobs = -torch.rand(50, dtype=torch.float64)
    means = {name: float(values.mean()) for name, values in mismatch_moments(logprobs, logprobs).items()}
    expected = dict(mean=0, k1=0, k3=0, ess=1, chi2=0, perplexity_ratio=1, correlation=1)
    assert mismatch_metrics(means) == pytest.approx(expected, abs=1e-12)


def test_gap_metrics_are_those_of_numpy():
    g = torch.Generator().manual_seed(1)
    rollout = -torch.rand(1000, generator=g, dtype=torch.float64) * 3
    policy = rollout + 0.1 * torch.randn(1000, generator=g, dtype=torch.float64)
    found = mismatch_metrics({name: float(values.mean()) for name, values in mismatch_moments(policy, rollout).items()})
    p, r = policy.numpy(), rollout.numpy()
    w = np.exp(p - r)
    assert found == pytest.approx(
        {
            "mean": np.abs(p - r).mean(),
            "k1": (r - p).mean(),
            "k3": (w - 1 - (p - r)).mean(),
            "ess": w.sum() ** 2 / (w**2).sum() / 1000,
            "chi2": (w**2).mean() - 1,
            "perplexity_ratio": np.exp(-p.mean()) / np.exp(-r.mean()),
            "correlation": np.corrcoef(p, r)[0, 1],
        }
    )


def test_truncated_weights_make_a_stale_engines_gradient_the_trainers():
    """E over the engine's samples of weight * advantage * score is the trainer's policy gradient, exactly."""
    g = torch.Generator().manual_seed(4)
    logits, stale = torch.randn(2, 6, generator=g, dtype=torch.float64) * 0.5
    advantages = torch.randn(6, generator=g, dtype=torch.float64)
    trainer, engine = logits.log_softmax(0), stale.log_softmax(0)
    every, ones = torch.arange(7), torch.ones(6, dtype=torch.bool)
    weights = importance_weights("tis", trainer, engine, every, ones, low=0.0, high=100.0)
    score = torch.eye(6, dtype=torch.float64) - trainer.exp()

    def gradient(samples: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (samples * weights * advantages) @ score

    right = gradient(trainer.exp(), torch.ones_like(weights))
    torch.testing.assert_close(gradient(engine.exp(), weights), right, rtol=1e-12, atol=1e-14)
    assert (gradient(engine.exp(), torch.ones_like(weights)) - right).norm() > 0.2 * right.norm()
