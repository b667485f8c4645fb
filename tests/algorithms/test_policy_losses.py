import math

import pytest
import torch

from megarl.algorithms.log_ratio import log_ratio
from megarl.algorithms.policy_losses import cispo, clip, clipped, gmpo, gspo, policy_gradient, ratio, sapo


def loss_at(ratio_value: float, advantage: float, dual_clip: float | None = None):
    """Loss, gradient with respect to the log-prob, and metrics of one token whose ratio is given."""
    old = torch.tensor([-1.25], dtype=torch.float64)
    policy = (old + math.log(ratio_value)).requires_grad_()
    loss, metrics = clipped(
        policy, old, torch.tensor([advantage], dtype=torch.float64), clip_low=0.2, clip_high=0.28, dual_clip=dual_clip
    )
    loss.sum().backward()
    assert policy.grad is not None
    return loss.item(), policy.grad.item(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("ratio_value", "advantage", "dual_clip", "loss", "gradient", "is_clipped"),
    [
        pytest.param(1.0, 2.0, None, -2.0, -2.0, 0, id="on_policy_is_policy_gradient"),
        pytest.param(1.2, 2.0, None, -2.4, -2.4, 0, id="within_the_high_bound"),
        pytest.param(1.5, 2.0, None, -2.56, 0.0, 1, id="above_good_advantage_clipped_high"),
        pytest.param(1.5, -2.0, None, 3.0, 3.0, 0, id="above_bad_advantage_not_clipped"),
        pytest.param(0.5, -2.0, None, 1.6, 0.0, 1, id="below_bad_advantage_clipped_low"),
        pytest.param(0.5, 2.0, None, -1.0, -1.0, 0, id="below_good_advantage_not_clipped"),
        pytest.param(5.0, -2.0, 3.0, 6.0, 0.0, 0, id="dual_clip_bounds_the_loss"),
        pytest.param(2.0, -2.0, 3.0, 4.0, 4.0, 0, id="dual_clip_out_of_reach"),
        pytest.param(0.5, -2.0, 3.0, 1.6, 0.0, 1, id="dual_clip_leaves_the_low_clip"),
        pytest.param(5.0, 2.0, 3.0, -2.56, 0.0, 1, id="dual_clip_spares_good_advantages"),
        pytest.param(3.0, 0.0, None, 0.0, 0.0, 0, id="no_advantage"),
    ],
)
def test_clipped_closed_forms(ratio_value, advantage, dual_clip, loss, gradient, is_clipped):
    found_loss, found_gradient, metrics = loss_at(ratio_value, advantage, dual_clip)
    assert found_loss == pytest.approx(loss)
    assert found_gradient == pytest.approx(gradient)
    assert metrics["ratio"] == pytest.approx(ratio_value)
    assert metrics["clip_fraction"] == is_clipped
    assert ("dual_clip_fraction" in metrics) == (dual_clip is not None)
    assert metrics.get("dual_clip_fraction", 0) == float(loss == 6.0)


def branch_by_branch(policy, old, advantages, low, high, dual_clip):
    """The same loss written as the published case distinction, one token at a time."""
    losses = []
    for new, before, advantage in zip(policy, old, advantages, strict=True):
        r = (new - before).exp()
        if advantage >= 0:
            losses.append(-advantage * (r if r < 1 + high else torch.full_like(r, 1 + high)))
        elif dual_clip is not None and r > dual_clip:
            losses.append(-advantage * torch.full_like(r, dual_clip))
        else:
            losses.append(-advantage * (r if r > 1 - low else torch.full_like(r, 1 - low)))
    return torch.stack(losses)


@pytest.mark.parametrize("dual_clip", [None, 1.5], ids=["plain", "dual"])
def test_clipped_and_its_gradient_against_autograd_in_float64(dual_clip):
    generator = torch.Generator().manual_seed(11)
    old = torch.randn(64, generator=generator, dtype=torch.float64)
    policy = old + 0.6 * torch.randn(64, generator=generator, dtype=torch.float64)
    advantages = torch.randn(64, generator=generator, dtype=torch.float64)
    weights = torch.rand(64, generator=generator, dtype=torch.float64)
    gradients, losses = [], []
    for compute in (
        lambda logprobs: clipped(logprobs, old, advantages, clip_low=0.1, clip_high=0.3, dual_clip=dual_clip)[0],
        lambda logprobs: branch_by_branch(logprobs, old, advantages, 0.1, 0.3, dual_clip),
    ):
        logprobs = policy.clone().requires_grad_()
        loss = compute(logprobs)
        (weights * loss).sum().backward()
        gradients.append(logprobs.grad)
        losses.append(loss.detach())
    torch.testing.assert_close(*losses, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-14)
    assert 0 < (gradients[0] == 0).sum() < 64


@pytest.mark.parametrize("dual_clip", [None, 1.5], ids=["plain", "dual"])
def test_gradcheck(dual_clip):
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.7], dtype=torch.float64)
    policy = (old + torch.tensor([0.05, 0.9, -0.9, 0.9, -0.9], dtype=torch.float64)).requires_grad_()
    advantages = torch.tensor([1.0, 2.0, 3.0, -5.0, -7.0], dtype=torch.float64)
    settings = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual_clip}
    assert torch.autograd.gradcheck(lambda logprobs: clipped(logprobs, old, advantages, **settings)[0], (policy,))


def test_gradient_flows_through_policy_logprobs_alone_and_metrics_are_detached_per_token():
    tensors = [torch.randn(5, requires_grad=True) for _ in range(3)]
    loss, metrics = clipped(*tensors, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    loss.sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == [True, False, False]
    assert loss.shape == (5,)
    assert set(metrics) == {"ratio", "clip_fraction", "dual_clip_fraction"}
    assert all(value.shape == (5,) and not value.requires_grad for value in metrics.values())


def test_placeholder_logprobs_stay_finite_in_float32():
    policy = torch.tensor([-1.0, -300.0], requires_grad=True)
    loss, _ = clipped(policy, torch.tensor([-300.0, 0.0]), torch.tensor([-1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    (torch.zeros(2) * loss).sum().backward()
    assert policy.grad is not None and policy.grad.tolist() == [0.0, 0.0]
    assert loss[0].item() == pytest.approx(math.exp(20.0), rel=1e-6)


def test_parts():
    assert log_ratio(torch.tensor([-1.0, 50.0, -50.0]), torch.tensor([-3.0, 0.0, 0.0])).tolist() == [2.0, 20.0, -20.0]
    assert ratio(torch.tensor([-1.0]), torch.tensor([-1.0])).tolist() == [1.0]
    held = clip(torch.tensor([0.1, 0.8, 1.1, 9.0]), clip_low=0.25, clip_high=0.5)
    torch.testing.assert_close(held, torch.tensor([0.75, 0.8, 1.1, 1.5]))


CU_SEQLENS = torch.tensor([0, 4, 6, 11])
MASK = torch.tensor([0, 1, 1, 1, 0, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
LENGTHS = [4, 2, 5]


def packed(spread=0.3):
    """Policy and old log-probs and advantages of three sequences; each has one advantage."""
    g = torch.Generator().manual_seed(2)
    old = torch.randn(11, generator=g, dtype=torch.float64) - 2
    policy = old + spread * torch.randn(11, generator=g, dtype=torch.float64)
    return policy, old, torch.tensor([1.5, -0.5, -2.0], dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS))


def sequence_mean(values):
    """The mean over sequences of the means over their masked tokens."""
    parts = zip(values.split(LENGTHS), MASK.split(LENGTHS), strict=True)
    return torch.stack([value[mask].mean() for value, mask in parts]).mean()


def gspo_written_out(policy, old, advantages):
    losses = []
    for p, o, a, m in zip(*(x.split(LENGTHS) for x in (policy, old, advantages, MASK)), strict=True):
        s = (p - o)[m].mean().exp()
        losses.append(-torch.minimum(s * a[0], s.clamp(1 - 0.05, 1 + 0.1) * a[0]))
    return torch.stack(losses).mean()


def gmpo_written_out(policy, old, advantages):
    losses = []
    for p, o, a, m in zip(*(x.split(LENGTHS) for x in (policy, old, advantages, MASK)), strict=True):
        sign = torch.sign(a[0])
        r = (p - o)[m].exp()
        held = torch.minimum(r**sign, r.clamp(math.exp(-0.05), math.exp(0.1)) ** sign) ** sign
        losses.append(-a[0] * held.prod() ** (1 / int(m.sum())))
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("loss", "written_out"), [pytest.param(gspo, gspo_written_out), pytest.param(gmpo, gmpo_written_out)]
)
@pytest.mark.parametrize("spread", [0.02, 0.3], ids=["near", "far"])
def test_losses_of_sequences_and_their_gradients_in_float64(loss, written_out, spread):
    policy, old, advantages = packed(spread)
    ours, theirs = (policy.clone().requires_grad_() for _ in range(2))
    of_tokens, metrics = loss(ours, old, advantages, CU_SEQLENS, MASK, clip_low=0.05, clip_high=0.1)
    found, expected = sequence_mean(of_tokens), written_out(theirs, old, advantages)
    found.backward()
    expected.backward()
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)
    assert metrics["ratio"].shape == metrics["clip_fraction"].shape == (11,)
    assert bool(metrics["clip_fraction"].any()) == (spread > 0.1)


@pytest.mark.parametrize(
    ("loss", "settings", "ratio_value", "advantage", "value", "gradient"),
    [
        pytest.param(policy_gradient, {}, 3.0, 2.0, -2 * (math.log(3) - 1.25), -2.0, id="policy_gradient"),
        pytest.param(cispo, {"clip_low": 0.5, "clip_high": 1.0}, 3.0, 2.0, -4 * (math.log(3) - 1.25), -4.0, id="high"),
        pytest.param(cispo, {"clip_low": 0.5, "clip_high": 1.0}, 0.1, -2.0, math.log(0.1) - 1.25, 1.0, id="low"),
        # sigmoid(ln 3) = 3/4: gate 3 at temperature 1, slope 4 * 3/4 * 1/4 times the ratio.
        pytest.param(sapo, {}, 1 + math.log(3), 2.0, -6.0, -2 * 0.75 * (1 + math.log(3)), id="sapo, good"),
        pytest.param(
            sapo, {"temperature_negative": 2.0}, 1 + math.log(3) / 2, -1.0, 1.5, 0.75 * (1 + math.log(3) / 2),
            id="sapo, bad",
        ),
        pytest.param(
            clipped,
            {"clip_low": 0.2, "clip_high": 0.2, "max_ratio": 4.0},
            9.0,
            -1.0,
            4.0,
            0.0,
            id="held ratio",
        ),
    ],
)  # fmt: skip
def test_other_losses_of_tokens(loss, settings, ratio_value, advantage, value, gradient):
    old = torch.tensor([-1.25], dtype=torch.float64)
    policy = (old + math.log(ratio_value)).requires_grad_()
    found, metrics = loss(policy, old, torch.tensor([advantage], dtype=torch.float64), **settings)
    found.sum().backward()
    assert found.item() == pytest.approx(value) and policy.grad.item() == pytest.approx(gradient)
    assert all(not metric.requires_grad and metric.shape == (1,) for metric in metrics.values())


def test_held_ratios_are_measured_as_they_were():
    old = torch.zeros(2)
    policy = torch.log(torch.tensor([33.0, 1.0]))
    _, metrics = clipped(policy, old, -torch.ones(2), clip_low=0.2, clip_high=0.2, max_ratio=10.0)
    assert metrics["ratio"].tolist() == pytest.approx([33.0, 1.0]) and metrics["clip_fraction"].tolist() == [1.0, 0.0]


def test_on_policy_all_losses_have_the_policy_gradient():
    policy, _, advantages = packed()
    for loss in (policy_gradient, clipped, cispo, sapo, gspo, gmpo):
        logprobs = policy.clone().requires_grad_()
        sequences = (CU_SEQLENS, MASK) if loss in (gspo, gmpo) else ()
        clips = {} if loss in (policy_gradient, sapo) else {"clip_low": 0.1, "clip_high": 0.1}
        sequence_mean(loss(logprobs, policy, advantages, *sequences, **clips)[0]).backward()
        expected = policy.clone().requires_grad_()
        sequence_mean(-advantages * expected).backward()
        torch.testing.assert_close(logprobs.grad, expected.grad, rtol=1e-12, atol=1e-15)
