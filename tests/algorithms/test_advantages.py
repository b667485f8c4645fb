from functools import partial
from itertools import combinations
from statistics import mean, pstdev

import pytest
import torch

from megarl.algorithms.advantages import (
    ADVANTAGES,
    gae,
    global_baseline,
    grpo,
    maxrl,
    opo,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    rloo,
    whiten,
)

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


REWARDS = torch.tensor([2.0, 10.0, 4.0, 30.0, 6.0, 20.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 3, 7, 3, 7, 3])


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        pytest.param(rloo, [-3.0, -15.0, 0.0, 15.0, 3.0, 0.0], id="rloo"),
        # Baselines (2 + 2*4 + 5*6) / 8 = 5 and (10 + 30 + 2*20) / 4 = 20.
        pytest.param(partial(opo, lengths=torch.tensor([1, 1, 2, 1, 5, 2])), [-3, -10, -1, 10, 1, 0], id="opo"),
        pytest.param(global_baseline, [-10, -2, -8, 18, -6, 8], id="global baseline"),
        # Squares of the differences to 12 add up to 592.
        pytest.param(
            partial(reinforce_plus_plus, epsilon=0.0),
            [value / (592 / 5) ** 0.5 for value in (-10, -2, -8, 18, -6, 8)],
            id="rf++",
        ),
        # Differences to the groups' means, whose squares add up to 208.
        pytest.param(
            partial(reinforce_plus_plus_baseline, epsilon=0.0),
            [value / (208 / 5) ** 0.5 for value in (-2, -10, 0, 10, 2, 0)],
            id="rf++ baseline",
        ),
    ],
)
def test_baselines(compute, expected):
    advantages = compute(REWARDS, GROUPS)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name != "pass_at_k"])
def test_equal_rewards_teach_nothing(name):
    rewards, groups = torch.full((6,), 0.1), torch.tensor([0, 0, 0, 1, 1, 1])
    lengths = {"lengths": torch.tensor([3, 1, 4, 1, 5, 9])} if name == "opo" else {}
    assert ADVANTAGES[name](rewards, groups, **lengths).tolist() == [0.0] * 6
    assert ADVANTAGES[name](rewards[:0], groups[:0], **({"lengths": groups[:0]} if lengths else {})).shape == (0,)


@pytest.mark.parametrize("passes", [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 1, 0], [1, 1, 1, 1, 0], [0] * 5])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_what_all_sets_of_k_say(passes, k):
    """Each sample's mean over the sets that hold it, less the mean over all sets, over their deviation."""
    sets = list(combinations(range(5), k))
    reward = {chosen: float(any(passes[i] for i in chosen)) for chosen in sets}
    deviation = pstdev(reward.values())
    expected = [
        (mean(reward[c] for c in sets if i in c) - mean(reward.values())) / deviation if deviation else 0.0
        for i in range(5)
    ]
    found = pass_at_k(torch.tensor(passes, dtype=torch.float64), torch.zeros(5, dtype=torch.int64), k=k)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def test_pass_at_k_of_a_group_smaller_than_k_is_zero():
    found = pass_at_k(torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1, 1]), k=3)
    assert found[:2].tolist() == [0.0, 0.0]
    alone = pass_at_k(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1, 1, 1]), k=2)
    assert pass_at_k(torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([0, 1, 1, 1]), k=2)[1:].tolist() == alone.tolist()
    assert alone.abs().sum() > 0


def test_gae_by_hand_and_over_masked_tokens():
    # One sequence of two tokens, one of three; between its last two a tool's answer may stand.
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0], dtype=torch.float64)
    values = torch.tensor([0.5, 0.25, 1.0, 0.5, 0.25], dtype=torch.float64)
    # Deltas with gamma 1/2: -0.375, 0.75; -0.75, -0.375, 1.75. Their sums decay by 1/4.
    expected = torch.tensor([-0.1875, 0.75, -0.734375, 0.0625, 1.75], dtype=torch.float64)
    advantages, returns = gae(rewards, values, torch.tensor([0, 2, 5]), gamma=0.5, gae_lambda=0.5)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(returns, expected + values, rtol=0, atol=1e-15)

    spread = torch.full((9,), 99.0, dtype=torch.float64)
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
    advantages, returns = gae(
        spread.masked_scatter(mask, rewards), spread.masked_scatter(mask, values), torch.tensor([0, 3, 9]),
        gamma=0.5, gae_lambda=0.5, mask=mask,
    )  # fmt: skip
    torch.testing.assert_close(advantages[mask], expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(returns[mask], expected + values, rtol=0, atol=1e-15)
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_gae_with_lambda_one_is_the_discounted_sum_less_the_value():
    g = torch.Generator().manual_seed(5)
    rewards, values = torch.randn(2, 12, generator=g, dtype=torch.float64)
    advantages, returns = gae(rewards, values, torch.tensor([0, 12]), gamma=0.9, gae_lambda=1.0)
    sums = torch.stack([sum(0.9**i * r for i, r in enumerate(rewards[t:])) for t in range(12)])
    torch.testing.assert_close(returns, sums)
    torch.testing.assert_close(advantages, sums - values)


def test_whitened_values_have_mean_0_and_variance_1_where_the_mask_is():
    values = torch.tensor([100.0, 1.0, 2.0, 3.0, -100.0], dtype=torch.float64)
    mask = torch.tensor([0, 1, 1, 1, 0], dtype=torch.bool)
    torch.testing.assert_close(
        whiten(values, mask, epsilon=0.0), torch.tensor([0.0, -1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    )
    assert whiten(torch.full((3,), 0.1), torch.ones(3, dtype=torch.bool)).tolist() == [0.0] * 3
    assert whiten(values, mask & False).tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("advantages", "lone"),
    [
        pytest.param(lambda r, g, **lone: grpo(r, g, **lone), [3 / 1.000001, -ROOT_HALF, ROOT_HALF], id="grpo"),
        pytest.param(lambda r, g, **lone: grpo(r, g, normalize_by_std=False, **lone), [3, -1, 1], id="dr_grpo"),
        pytest.param(rloo, [3, -2, 2], id="rloo"),
        pytest.param(
            lambda r, g, **lone: opo(r, g, lengths=torch.tensor([4, 1, 3]), **lone),
            [3, -1.5, 0.5],
            id="opo: baseline 6.5",
        ),
        pytest.param(
            # Centred: 3, -1, 1, whose mean is 1 and whose deviation from zero is sqrt(11 / 2).
            reinforce_plus_plus_baseline,
            [3 / 5.5**0.5, -1 / 5.5**0.5, 1 / 5.5**0.5],
            id="reinforce_plus_plus_baseline",
        ),
    ],
)
def test_a_lone_sample_keeps_its_reward_where_asked(advantages, lone):
    rewards, groups = torch.tensor([3.0, 5.0, 7.0]), torch.tensor([1, 0, 0])
    found = advantages(rewards, groups, lone_sample="reward")
    torch.testing.assert_close(found, torch.tensor(lone, dtype=torch.float32), rtol=3e-6, atol=0)
    assert advantages(rewards, groups)[0] == 0


def test_verls_reinforce_plus_plus_baseline_is_whitened_over_tokens():
    # Groups {1, 0} and {4, 2, 0}: centred 0.5, -0.5, 2, 0, -2, on 1, 2, 1, 1, 2 tokens: their mean
    # is -2.5 / 7, their unbiased variance (12.75 - 2.5^2 / 7) / 6 = 1.9761905.
    centred = reinforce_plus_plus_baseline(
        torch.tensor([1.0, 0.0, 4.0, 2.0, 0.0]), torch.tensor([0, 0, 1, 1, 1]), normalize_by_std=False
    )
    assert centred.tolist() == [0.5, -0.5, 2.0, 0.0, -2.0]
    tokens = torch.repeat_interleave(centred, torch.tensor([1, 2, 1, 1, 2]))
    found = whiten(tokens, torch.ones(7, dtype=torch.bool))
    expected = [0.6097317, -0.1016220, -0.1016220, 1.6767623, 0.2540549, -1.1686525, -1.1686525]
    assert found.tolist() == pytest.approx(expected, abs=2e-7)


def test_maxrl_of_groups_in_any_order() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.5, -1.0, 0.5], dtype=torch.float64)
    groups = torch.tensor([3, 3, 7, 7, 3, 1, 9, 8, 8])
    expected = [2.0, -1.0, -1.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0]
    assert maxrl(rewards, groups).tolist() == pytest.approx(expected)
    alone = maxrl(rewards, groups, lone_sample="reward").tolist()
    assert alone == pytest.approx([*expected[:6], 0.5, 0.0, 0.0])


def test_maxrl_is_its_definition_in_random_groups() -> None:
    for case in range(50):
        random = torch.Generator().manual_seed(case)
        rewards = torch.rand(12, generator=random, dtype=torch.float64) - 0.2 * (case % 3)
        groups = torch.randint(0, 4, (12,), generator=random)
        expected = []
        for reward, group in zip(rewards.tolist(), groups.tolist(), strict=True):
            members = rewards[groups == group].tolist()
            mean = sum(members) / len(members)
            expected.append((reward - mean) / mean if mean > 0 else 0.0)
        assert maxrl(rewards, groups).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("num_samples", [2, 3, 5])
def test_maxrl_is_the_log_of_the_pass_rate_truncated_at_one_less_than_the_samples(num_samples: int) -> None:
    """By enumeration: one token of six, of which two are right. The mean of rewards / mean alone has one order more."""
    scores = torch.tensor([0.3, -0.4, 0.1, 0.9, -1.0, 0.2], dtype=torch.float64, requires_grad=True)
    is_right = torch.tensor([1, 0, 0, 1, 0, 0], dtype=torch.float64)
    logprobs = scores.log_softmax(0)
    draws = torch.cartesian_prod(*[torch.arange(6)] * num_samples)
    chances = logprobs.detach()[draws].sum(1).exp()
    rewards = is_right[draws]
    groups = torch.arange(len(draws))[:, None].expand_as(draws)
    centred = maxrl(rewards.flatten(), groups.flatten()).view_as(rewards)
    means = rewards.mean(1, keepdim=True)
    plain = torch.where(means > 0, rewards / means, 0.0)
    for advantages, order in ((centred, num_samples - 1), (plain, num_samples)):
        expectation = (chances[:, None] * advantages / num_samples * logprobs[draws]).sum()
        failing = 1 - (logprobs.exp() * is_right).sum()
        truncated = -sum(failing**k / k for k in range(1, order + 1))
        gradient, expected = (
            torch.autograd.grad(value, scores, retain_graph=True)[0] for value in (expectation, truncated)
        )
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)
