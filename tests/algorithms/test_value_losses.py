import pytest
import torch

from megarl.algorithms.value_losses import clipped_value_loss

OLD = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
VALUES = torch.tensor([0.5, 0.5, 1.1, 0.0], dtype=torch.float64)
RETURNS = torch.tensor([1.0, 0.0, 2.0, 2.0], dtype=torch.float64)


def test_the_worse_of_a_value_and_the_held_one_counts():
    loss, metrics = clipped_value_loss(VALUES, OLD, RETURNS, clip=0.2)
    # Held values: 0.2, 0.2, 1.1, 0.8. Held back from a good move; not where the move was bad; within; away from 2.
    assert loss.tolist() == pytest.approx([0.8**2 / 2, 0.5**2 / 2, 0.9**2 / 2, 2.0])
    assert metrics["clipped"].tolist() == [1, 0, 0, 0]


def test_without_a_clip_it_is_half_the_square():
    loss, metrics = clipped_value_loss(VALUES, OLD, RETURNS, clip=None)
    assert loss.tolist() == pytest.approx([0.125, 0.125, 0.405, 2.0]) and metrics["clipped"].sum() == 0


@pytest.mark.parametrize("clip", [0.2, None])
def test_gradients(clip):
    values = VALUES.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v: clipped_value_loss(v, OLD, RETURNS, clip=clip)[0], (values,))
    loss, _ = clipped_value_loss(values, OLD, RETURNS, clip=clip)
    loss.sum().backward()
    expected = [0.0 if clip else -0.5, 0.5, -0.9, -2.0]
    assert values.grad.tolist() == pytest.approx(expected)
