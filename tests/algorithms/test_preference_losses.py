import math

import pytest
import torch

from megarl.algorithms.preference_losses import PREFERENCE_LOSSES, bradley_terry, dpo, ipo, kto, orpo, simpo

# Log-ratios: 1 and -1; 0.5 and 2.5.
POLICY = torch.tensor([[-3.0, -5.0], [-2.5, -1.5]], dtype=torch.float64)
REFERENCE = torch.tensor([[-4.0, -4.0], [-3.0, -4.0]], dtype=torch.float64)
LENGTHS = torch.tensor([[2.0, 4.0], [5.0, 1.0]], dtype=torch.float64)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


@pytest.mark.parametrize(
    ("loss", "settings", "expected", "rewards"),
    [
        pytest.param(dpo, {"beta": 0.5}, [softplus(-1), softplus(1)], [[0.5, -0.5], [0.25, 1.25]], id="dpo"),
        pytest.param(
            dpo, {"beta": 0.5, "margin": 1.0}, [softplus(0), softplus(2)], [[0.5, -0.5], [0.25, 1.25]], id="dpo, margin"
        ),
        pytest.param(
            dpo, {"beta": 0.5, "label_smoothing": 0.25},
            [0.75 * softplus(-1) + 0.25 * softplus(1), 0.75 * softplus(1) + 0.25 * softplus(-1)],
            [[0.5, -0.5], [0.25, 1.25]], id="dpo, smoothed",
        ),
        pytest.param(
            dpo, {"beta": 1.0, "normalize_by_length": True}, [softplus(-0.75), softplus(2.4)],
            [[0.5, -0.25], [0.1, 2.5]], id="dpo by length",
        ),
        pytest.param(ipo, {"beta": 0.25}, [0.0, 16.0], [[0.25, -0.25], [0.125, 0.625]], id="ipo"),
        pytest.param(
            simpo, {"beta": 2.0, "margin": 0.5}, [softplus(1.0), softplus(-1.5)], [[-3, -2.5], [-1, -3]], id="simpo"
        ),
    ],
)  # fmt: skip
def test_closed_forms(loss, settings, expected, rewards):
    lost, worth = loss(POLICY, REFERENCE, LENGTHS, **settings)
    torch.testing.assert_close(lost, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(worth, torch.tensor(rewards, dtype=torch.float64))


def test_orpo_is_the_likelihood_and_the_odds():
    # Means of log-probs: those of probabilities 1/2 and 1/4, odds 1 and 1/3.
    policy = torch.log(torch.tensor([[0.5, 0.25]], dtype=torch.float64)) * torch.tensor([[3.0, 2.0]])
    lost, worth = orpo(policy, policy * 0, torch.tensor([[3.0, 2.0]], dtype=torch.float64), beta=0.1)
    assert lost.item() == pytest.approx(math.log(2) + 0.1 * math.log(1 + 1 / 3))
    assert worth[0].exp().tolist() == pytest.approx([0.5, 0.25])


def test_kto_weighs_answers_by_their_side_of_the_kl():
    policy, reference = torch.tensor([[-3.0, -1.0, -2.0], [-4.0, -3.0, -2.0]], dtype=torch.float64)
    desirable = torch.tensor([True, False, True])
    # Log-ratios 1, 2 and 0 beside a KL of 1/2: sides 1/2, -3/2 and -1/2, times beta.
    lost, worth = kto(policy, reference, desirable, beta=2.0, kl=0.5, undesirable_weight=3.0)
    expected = [1 / (1 + math.exp(1)), 3 / (1 + math.exp(-3)), 1 / (1 + math.exp(-1))]
    torch.testing.assert_close(lost, torch.tensor(expected, dtype=torch.float64))
    assert worth.tolist() == [2.0, 4.0, 0.0]
    policy.requires_grad_()
    assert torch.autograd.gradcheck(lambda p: kto(p, reference, desirable, beta=0.3, kl=0.2)[0], (policy,))


@pytest.mark.parametrize("name", [name for name in PREFERENCE_LOSSES if name != "kto"])
def test_gradients(name):
    policy = POLICY.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda p: PREFERENCE_LOSSES[name](p, REFERENCE, LENGTHS, beta=0.3)[0], (policy,))
    assert not PREFERENCE_LOSSES[name](policy, REFERENCE, LENGTHS, beta=0.3)[1].requires_grad


def test_bradley_terry_compares_scores():
    lost, worth = bradley_terry(POLICY, REFERENCE, LENGTHS, margin=0.5)
    assert lost.tolist() == pytest.approx([softplus(-1.5), softplus(1.5)]) and worth.tolist() == POLICY.tolist()
    policy = POLICY.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda p: bradley_terry(p, REFERENCE, LENGTHS)[0], (policy,))


def test_a_certain_answer_has_finite_odds():
    policy = torch.tensor([[0.0, -1e-9]], requires_grad=True)
    lost, _ = orpo(policy, torch.zeros(1, 2), torch.ones(1, 2), beta=0.1)
    lost.sum().backward()
    assert torch.isfinite(lost).all() and torch.isfinite(policy.grad).all()
