"""Metrics of a step's tokens by the age of the weights that sampled them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megarl.rollout.step.rl_batch import RLBatch
from megarl.rollout.step.step_metrics import metrics_by_version
from megarl.types import Problem, Reward, Segment, Trajectory


def batch_of(versions: list[int], old: list[float] | None, rollout: list[float]) -> RLBatch:
    """One trajectory whose first token is a prompt."""
    ages = np.array([-1, *versions], np.int32)
    segment = Segment(
        np.arange(len(ages)),
        ages >= 0,
        np.array([0.0, *rollout], np.float32),
        ages,
        np.where(ages >= 0, 0, -1).astype(np.int16),
        None if old is None else np.array([0.0, *old], np.float32),
    )
    trajectory = Trajectory("e", Problem(0, (), (0,), "7"), 0, 0, (segment,), Reward(1.0, True, True))
    return RLBatch.from_groups([[trajectory]])


def test_ratios_and_mismatches_are_those_of_each_age_and_old_ages_are_one() -> None:
    old, rollout = [-1.0, -2.0, -1.0, -1.5, -3.0], [-1.0, -1.0, -2.0, -1.0, -1.0]
    found = metrics_by_version(batch_of([20, 19, 19, 12, 3], old, rollout), weight_version=20)
    assert {name.rpartition("_")[2] for name in found} == {"0", "1", "8"}
    assert [found[f"staleness/tokens/age_{age}"] for age in (0, 1, 8)] == pytest.approx([0.2, 0.4, 0.4])
    down, up = math.exp(-1.0), math.exp(1.0)
    assert found["importance/ratio/age_1"] == pytest.approx((down + up) / 2)
    assert found["importance/ess/age_1"] == pytest.approx((down + up) ** 2 / 2 / (down**2 + up**2))
    assert found["logprob_gap/mean/age_1"] == pytest.approx(1.0)
    assert found["logprob_gap/k3/age_1"] == pytest.approx((down + 1.0 - 1 + up - 1.0 - 1) / 2)
    assert found["logprob_gap/mean/age_8"] == pytest.approx(1.25)
    assert [found[f"{name}/age_0"] for name in ("logprob_gap/k3", "importance/ess")] == [0.0, 1.0]


def test_without_the_trainers_log_probs_the_shares_alone_are_known() -> None:
    batch = batch_of([2, 1], None, [-1.0, -1.0])
    assert metrics_by_version(batch, 2) == {"staleness/tokens/age_0": 0.5, "staleness/tokens/age_1": 0.5}
    batch.loss_mask[:] = False
    assert metrics_by_version(batch, 2) == {}
