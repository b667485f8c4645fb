"""The trial call of a user's policy loss or advantage estimator: faults are named, and a usable one has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.sequence_masks import drop_off_policy
from megarl.algorithms.trial import TRAINING_METRICS, advantage_fault, policy_loss_fault
from megarl.tracking.metric_table import rows


def plain(policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Any:
    return -advantages * policy_logprobs, {"ratio": (policy_logprobs - old_logprobs).exp().detach()}


def detached(policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Any:
    return (-advantages * policy_logprobs).detach(), {}


def unrelated(policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Any:
    return torch.ones_like(policy_logprobs, requires_grad=True), {}


def loss_alone(policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Any:
    return -advantages * policy_logprobs


def three_results(policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Any:
    return -advantages * policy_logprobs, {}, {}


def steep(policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Any:
    # At a ratio of 1 the root is 0, and its slope is infinite.
    return (policy_logprobs - old_logprobs).abs().sqrt(), {}


def named(name: str) -> Callable[..., Any]:
    def policy_loss(policy_logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Any:
        return -advantages * policy_logprobs, {name: torch.zeros_like(policy_logprobs)}

    return policy_loss


def test_the_trainer_s_metrics_are_those_of_the_table() -> None:
    names = {row.name.removeprefix("train/") for row in rows() if row.name.startswith("train/")}
    of_losses = {"clip_fraction", "dual_clip_fraction", "ratio", "sequence_weight", "off_policy_fraction"}
    assert names - of_losses == TRAINING_METRICS


@pytest.mark.parametrize("name", sorted(TRAINING_METRICS))
def test_a_metric_of_the_trainer_is_not_replaced(name: str) -> None:
    assert f"train/{name} is measured by the trainer" in (policy_loss_fault(named(name), {}, {}) or "")


def test_a_loss_may_name_metrics_of_other_losses() -> None:
    assert policy_loss_fault(named("clip_fraction"), {}, {}) is None
    filtered = drop_off_policy(named("off_policy_fraction"), limit=0.1)
    assert "'off_policy_fraction'" in (policy_loss_fault(filtered, {}, {}) or "")
    assert policy_loss_fault(drop_off_policy(named("clip_fraction"), limit=0.1), {}, {}) is None


def test_a_usable_loss_has_no_fault() -> None:
    assert policy_loss_fault(plain, {}, {}) is None
    assert policy_loss_fault(plain, {}, {"ratio": "the report"}) is None


@pytest.mark.parametrize(
    ("policy_loss", "needed_metrics", "fault"),
    [
        (detached, {}, "a loss without gradient"),
        (unrelated, {}, "a loss without gradient"),
        (loss_alone, {}, "return (loss, metrics)"),
        (three_results, {}, "return (loss, metrics)"),
        (steep, {}, "whose gradient is not finite"),
        (plain, {"clipped": "the report"}, "no metric 'clipped'"),
    ],
)
def test_faults_are_named(policy_loss: Callable[..., Any], needed_metrics: dict[str, str], fault: str) -> None:
    assert fault in (policy_loss_fault(policy_loss, {}, needed_metrics) or "")


def centred(rewards: Tensor, groups: Tensor) -> Tensor:
    return rewards - torch.stack([rewards[groups == group].mean() for group in groups])


def deviations(rewards: Tensor, groups: Tensor) -> Tensor:
    # 0 / 0 where the rewards of a group are equal.
    spread = torch.stack([rewards[groups == group].std(correction=0) for group in groups])
    return centred(rewards, groups) / spread


def of_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    return rewards[: len(groups.unique())]


def by_length(rewards: Tensor, groups: Tensor, lengths: Tensor, passes: Tensor) -> Tensor:
    # Two groups of 3: rewards 0, 1, 0 and 1, 1, 1; lengths 5 to 10.
    assert lengths.tolist() == [5, 6, 7, 8, 9, 10]
    assert passes.tolist() == [False, True, False, True, True, True]
    return rewards / lengths


def in_single_precision(rewards: Tensor, groups: Tensor) -> Tensor:
    return torch.zeros(len(groups)).index_add(0, groups, rewards)


@pytest.mark.parametrize("advantage", [centred, by_length])
def test_a_usable_estimator_has_no_fault(advantage: Callable[..., Tensor]) -> None:
    assert advantage_fault(advantage, {}, samples_per_group=3) is None


@pytest.mark.parametrize(
    ("advantage", "settings", "fault"),
    [
        (deviations, {}, "must be finite"),
        (of_groups, {}, "return a float tensor [samples]"),
        (in_single_precision, {}, "the function raised RuntimeError"),
        (centred, {"scale": 2.0}, "the function raised TypeError"),
    ],
)
def test_an_estimator_s_fault_is_named(advantage: Callable[..., Tensor], settings: dict[str, Any], fault: str) -> None:
    assert fault in (advantage_fault(advantage, settings, samples_per_group=3) or "")
