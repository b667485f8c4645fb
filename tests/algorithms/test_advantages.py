import pytest
import torch

from megarl.algorithms.advantages import grpo

ROOT_HALF = 0.5**0.5


@pytest.mark.parametrize(
    ("rewards", "groups", "normalize_by_std", "expected"),
    [
        pytest.param([1.0, 0.0], [0, 0], True, [ROOT_HALF, -ROOT_HALF], id="pair_std_is_root_half"),
        pytest.param([1.0, 2.0, 3.0], [4, 4, 4], True, [-1.0, 0.0, 1.0], id="three_std_is_one"),
        pytest.param([1.0, 2.0, 6.0], [4, 4, 4], False, [-2.0, -1.0, 3.0], id="dr_grpo_centers_only"),
        pytest.param(
            [2.0, 10.0, 4.0, 30.0, 6.0, 20.0], [7, 3, 7, 3, 7, 3], True, [-1, -1, 0, 1, 1, 0], id="interleaved_groups"
        ),
        pytest.param([0.1] * 3, [0, 0, 0], True, [0.0, 0.0, 0.0], id="equal_rewards_that_do_not_sum_exactly"),
        pytest.param([0.1] * 7, [0] * 7, False, [0.0] * 7, id="equal_rewards_without_std"),
        pytest.param([5.0, 1.0, 2.0, 3.0], [1, 0, 0, 0], True, [0.0, -1.0, 0.0, 1.0], id="group_of_one"),
    ],
)
def test_closed_forms(rewards, groups, normalize_by_std, expected):
    advantages = grpo(torch.tensor(rewards), torch.tensor(groups), normalize_by_std=normalize_by_std, epsilon=1e-12)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=1e-6)
    if len(set(rewards)) == 1:
        assert advantages.tolist() == expected


def test_epsilon_is_added_to_the_deviation():
    advantages = grpo(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 0]), epsilon=1.0)
    assert advantages.tolist() == [-0.5, 0.0, 0.5]


def test_agrees_with_torch_std_group_by_group():
    generator = torch.Generator().manual_seed(3)
    rewards = torch.randn(40, generator=generator, dtype=torch.float64)
    groups = torch.randint(0, 6, (40,), generator=generator)
    advantages = grpo(rewards, groups, epsilon=1e-4)
    assert advantages.dtype == torch.float64
    for group in groups.unique():
        members = rewards[groups == group]
        torch.testing.assert_close(advantages[groups == group], (members - members.mean()) / (members.std() + 1e-4))


def test_empty_batch():
    assert grpo(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
