"""The trial call of a user's policy loss: faults are named, and a usable loss has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.trial import policy_loss_fault


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
