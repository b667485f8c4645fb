import math

import pytest
import torch

from megarl.algorithms.kl import KL_ESTIMATORS, absolute, adapted_coefficient, k1, k2, k3

LOG_2 = math.log(2.0)


@pytest.mark.parametrize(
    ("estimator", "difference", "value", "gradient"),
    [
        # difference = policy - reference; the gradient is with respect to the policy's log-prob.
        pytest.param(k1, LOG_2, LOG_2, 1.0, id="k1_policy_twice_as_likely"),
        pytest.param(k1, -LOG_2, -LOG_2, 1.0, id="k1_policy_half_as_likely"),
        pytest.param(k2, 3.0, 4.5, 3.0, id="k2"),
        pytest.param(k2, -3.0, 4.5, -3.0, id="k2_other_sign"),
        pytest.param(k3, LOG_2, LOG_2 - 0.5, 0.5, id="k3_policy_twice_as_likely"),
        pytest.param(k3, -LOG_2, 1.0 - LOG_2, -1.0, id="k3_policy_half_as_likely"),
        pytest.param(k3, 0.0, 0.0, 0.0, id="k3_equal"),
        pytest.param(absolute, -2.0, 2.0, -1.0, id="absolute"),
    ],
)
def test_closed_forms(estimator, difference, value, gradient):
    reference = torch.tensor([-1.5], dtype=torch.float64)
    policy = (reference + difference).requires_grad_()
    estimate = estimator(policy, reference)
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(value, abs=1e-15)
    assert policy.grad is not None
    assert policy.grad.item() == pytest.approx(gradient, abs=1e-15)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_exact_divergence(name):
    policy = torch.log_softmax(torch.tensor([0.3, -1.0, 2.0, 0.7], dtype=torch.float64), 0)
    reference = torch.log_softmax(torch.tensor([1.1, 0.2, 0.4, -0.5], dtype=torch.float64), 0)
    exact = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum")
    torch.testing.assert_close((policy.exp() * KL_ESTIMATORS[name](policy, reference)).sum(), exact)


def test_k3_of_nearby_logprobs_keeps_its_digits_in_float32():
    estimate = k3(torch.tensor([0.0]), torch.tensor([1e-3]))
    assert estimate.item() == pytest.approx(5.0e-7, rel=1e-3)


def test_placeholder_reference_stays_finite_in_float32():
    policy = torch.tensor([-300.0], requires_grad=True)
    (0.0 * k3(policy, torch.tensor([0.0]))).sum().backward()
    assert policy.grad is not None and policy.grad.item() == 0.0


@pytest.mark.parametrize(
    ("divergence", "after"),
    [(0.2, 0.1), (0.3, 0.12), (0.22, 0.11), (9.0, 0.12), (0.0, 0.08)],
    ids=["on target", "far above", "above", "no more than a fifth", "below"],
)
def test_the_coefficient_follows_the_divergence(divergence, after):
    assert adapted_coefficient(0.1, divergence, target=0.2, horizon=512, num_samples=512) == pytest.approx(after)
    assert adapted_coefficient(0.1, divergence, target=0.2, horizon=1024, num_samples=512) == pytest.approx(
        (after + 0.1) / 2
    )
    assert adapted_coefficient(0.1, divergence, target=0.2, horizon=1, num_samples=512) == pytest.approx(after)


def test_k3_is_held_at_its_bound():
    policy = torch.tensor([0.0, 0.0, -30.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([math.log(2), -11.0, 0.0], dtype=torch.float64)
    # 2 - 1 - log 2; exp(-11) - 1 + 11; exp(20) - 1 - 20, the log-ratio being held at 20.
    found = k3(policy, reference, k3_max=10.0)
    assert found.tolist() == pytest.approx([0.30685281944, 10.0, 10.0], rel=1e-9)
    found.sum().backward()
    assert policy.grad is not None and policy.grad.tolist() == pytest.approx([-1.0, 0.0, 0.0])
    assert k3(policy, reference)[1].item() == pytest.approx(10.0000167017, rel=1e-9)
