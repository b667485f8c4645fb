"""Advantages: for samples from their rewards, and for tokens from rewards and values; shaping of rewards.

A sample function has this form, in this module or in the user's file (`algorithm.advantage: path/to/file.py:name`):

    def name(rewards, groups, *, ...) -> Tensor

It takes `rewards` float64 [samples] and `groups` int [samples]. Samples with equal numbers form a group, in any order
and of any size. It returns advantages, float [samples]. Optional keywords are `lengths` int [samples] (completion
tokens) and `passes` bool [samples] (correct answers). Further keywords are fields of the recipe, or of
`algorithm.advantage_kwargs`. `trial` checks the result.

If the group is the baseline, a group with equal rewards has advantages of exactly zero. The only sample of a group has
advantage zero with `lone_sample` zero. With `lone_sample` reward, its advantage is its reward: baseline 0, standard
deviation 1 (verl).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.sequences import place_at_last_tokens, sequence_of_tokens, sequence_sums


def grpo(
    rewards: Tensor,
    groups: Tensor,
    *,
    normalize_by_std: bool = True,
    lone_sample: str = "zero",
    epsilon: float = 1e-6,
) -> Tensor:
    """Return (reward - group mean) / (unbiased group standard deviation + `epsilon`): [samples].

    Source: DeepSeekMath (arXiv 2402.03300, section 4.1.2); without the deviation, Dr. GRPO (arXiv 2503.20783).
    """
    group, sizes = _index_groups(groups, rewards)
    centered = _center(rewards, group, sizes)
    deviation = torch.ones_like(sizes)
    if normalize_by_std:
        variance = _group_sums(centered.square(), group, sizes) / (sizes - 1).clamp(min=1)
        deviation = torch.where(sizes > 1, variance.sqrt(), 1.0) + epsilon
    return _replace_lone_samples(centered, rewards, sizes[group], lone_sample) / deviation[group]


def rloo(rewards: Tensor, groups: Tensor, *, lone_sample: str = "zero") -> Tensor:
    """Return each reward minus the mean of its group's remaining rewards: [samples]. Source: arXiv 2402.14740."""
    group, sizes = _index_groups(groups, rewards)
    # Reward minus the mean of the others equals n / (n - 1) times reward minus the mean of all n.
    advantages = _center(rewards, group, sizes) * (sizes / (sizes - 1).clamp(min=1))[group]
    return _replace_lone_samples(advantages, rewards, sizes[group], lone_sample)


def maxrl(rewards: Tensor, groups: Tensor, *, lone_sample: str = "zero") -> Tensor:
    """Return (reward - group mean) / group mean, [samples]; zero in groups with a mean of zero or below.

    Meant for rewards of zero or more. Hard prompts weigh more. For rewards 0 and 1 the gradient approximates the
    gradient of log(pass rate). With N samples of a prompt it is exact for this logarithm's expansion truncated at order
    N - 1: the sum of pass@k / k for k from 1 to N - 1. (Without subtracting the mean, the order would be N.) Source:
    Maximum likelihood RL (arXiv 2602.02710).
    """
    group, sizes = _index_groups(groups, rewards)
    means = (_group_sums(rewards, group, sizes) / sizes)[group]
    advantages = torch.where(means > 0, _center(rewards, group, sizes) / means, 0.0)
    return _replace_lone_samples(advantages, rewards, sizes[group], lone_sample)


def opo(rewards: Tensor, groups: Tensor, *, lengths: Tensor, lone_sample: str = "zero") -> Tensor:
    """Return each reward minus its group's mean weighted by `lengths` [samples], the completion tokens: [samples].

    Source: On-Policy RL with Optimal reward baseline (arXiv 2505.23585).
    """
    group, sizes = _index_groups(groups, rewards)
    weights = lengths.to(rewards.dtype)
    # Centring first gives exact zeros for equal rewards.
    centered = _center(rewards, group, sizes)
    baseline = _group_sums(centered * weights, group, sizes) / _group_sums(weights, group, sizes).clamp(min=1)
    return _replace_lone_samples(centered - baseline[group], rewards, sizes[group], lone_sample)


def reinforce_plus_plus(
    rewards: Tensor, groups: Tensor, *, normalize_by_std: bool = True, epsilon: float = 1e-6
) -> Tensor:
    """Return (reward - batch mean) / (batch standard deviation + `epsilon`): [samples]. Source: arXiv 2501.03262."""
    return grpo(rewards, torch.zeros_like(groups), normalize_by_std=normalize_by_std, epsilon=epsilon)


def reinforce_plus_plus_baseline(
    rewards: Tensor,
    groups: Tensor,
    *,
    normalize_by_std: bool = True,
    lone_sample: str = "zero",
    epsilon: float = 1e-6,
) -> Tensor:
    """Return (reward - group mean) / (batch standard deviation of these differences + `epsilon`): [samples]. verl
    instead whitens over the batch's tokens, like the recipe's preset of this name. Source: REINFORCE++ with baseline
    (arXiv 2501.03262).
    """
    centered = grpo(rewards, groups, normalize_by_std=False, lone_sample=lone_sample)
    if not normalize_by_std:
        return centered
    return centered / (_standard_deviation(centered) + epsilon)


def global_baseline(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return each reward minus the batch's mean: [samples]. For prompts with one sample each."""
    return grpo(rewards, torch.zeros_like(groups), normalize_by_std=False)


def pass_at_k(rewards: Tensor, groups: Tensor, *, k: int = 4, passes: Tensor | None = None) -> Tensor:
    """Return each sample's advantage for the goal that one of `k` samples of its group passes: [samples].

    `passes` is bool [samples]; by default a sample passes if its reward is positive. A set of `k` samples has the
    reward 1 if one of them passes, else 0. A sample's advantage is (mean reward of all sets with the sample - mean of
    all sets) / (standard deviation of all sets), in closed form. It is zero if all sets of the group have equal
    rewards, and in groups smaller than `k`. Source: Pass@k training (arXiv 2508.10751).
    """
    group, sizes = _index_groups(groups, rewards)
    passes = (rewards > 0 if passes is None else passes).to(torch.float64)
    sizes = sizes.to(torch.float64)
    failures = sizes - _group_sums(passes, group, sizes)
    rate_of_failing_sets = _binomials(failures, k) / _binomials(sizes, k)
    mean, deviation = 1 - rate_of_failing_sets, (rate_of_failing_sets * (1 - rate_of_failing_sets)).sqrt()
    pass_rate_with_failed_sample = 1 - _binomials(failures - 1, k - 1) / _binomials(sizes - 1, k - 1)
    differences_from_mean = torch.where(passes > 0, 1.0, pass_rate_with_failed_sample[group]) - mean[group]
    has_advantage = (deviation > 0) & (sizes >= k)
    advantages = differences_from_mean / deviation.clamp(min=1e-12)[group]
    return torch.where(has_advantage[group], advantages, 0.0).to(rewards.dtype)


def gae(
    rewards: Tensor, values: Tensor, cu_seqlens: Tensor, *, gamma: float, gae_lambda: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return generalised advantage estimates and returns of packed tokens: both [tokens].

    `rewards` and `values` are float [tokens], `cu_seqlens` int [sequences + 1]. The value after a sequence's last token
    is zero. Tokens with `mask` (bool [tokens]) False, like prompts and tool results, get zeros and are skipped: the
    tokens before and after them are neighbours. Source: arXiv 1506.02438, eqs. 11 and 16.
    """
    trained_tokens = torch.arange(len(rewards), device=rewards.device) if mask is None else mask.nonzero().squeeze(1)
    sequence = sequence_of_tokens(cu_seqlens, len(rewards))[trained_tokens]
    counts = torch.bincount(sequence, minlength=len(cu_seqlens) - 1)
    position = torch.arange(len(trained_tokens), device=trained_tokens.device) - (counts.cumsum(0) - counts)[sequence]
    max_length = int(counts.max()) if len(trained_tokens) else 0
    # Time runs along dimension 0, so that one loop over time steps serves all sequences at once.
    padded = rewards.new_zeros(2, max_length + 1, len(counts))
    padded[:, position, sequence] = torch.stack([rewards, values])[:, trained_tokens]
    padded_rewards, padded_values = padded
    deltas = padded_rewards[:-1] + gamma * padded_values[1:] - padded_values[:-1]
    padded_advantages = torch.zeros_like(padded_values)
    for t in range(max_length - 1, -1, -1):
        padded_advantages[t] = deltas[t] + gamma * gae_lambda * padded_advantages[t + 1]
    # Columns hold zeros beyond the end of a shorter sequence, so nothing flows back from there.
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    advantages[trained_tokens] = padded_advantages[position, sequence]
    returns[trained_tokens] = advantages[trained_tokens] + values[trained_tokens]
    return advantages, returns


def rae(rewards: Tensor, roles: Tensor, baselines: Tensor, *, role_decay: float) -> tuple[Tensor, Tensor]:
    """Return each reward minus the baseline of its role, [samples], and the roles' new baselines, [roles].

    `roles` int [samples] are indices into `baselines` [roles]. After each sample, in order, its role's baseline becomes
    `role_decay` * baseline + (1 - `role_decay`) * reward. Source: SPIRAL (arXiv 2506.24119, section 3.3).
    """
    advantages, baselines = torch.zeros_like(rewards), baselines.clone()
    for sample, role in enumerate(roles.tolist()):
        advantages[sample] = rewards[sample] - baselines[role]
        baselines[role] = role_decay * baselines[role] + (1 - role_decay) * rewards[sample]
    return advantages, baselines


def token_rewards(scores: Tensor, turn_rewards: Tensor, turns: Tensor, cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    """Return the rewards of packed tokens for `gae`: [tokens]. They sum up to the score of each sequence.

    `scores` is [sequences]; `turn_rewards` [sequences, turns] are parts of the scores. `turns` int [tokens] is each
    token's turn; `mask` bool [tokens] marks trained tokens. A turn's reward is at its last trained token. A turn
    without trained tokens gives its reward to the turn before. The rest of the score is at a sequence's last trained
    token.
    """
    rewards = torch.zeros(len(mask), dtype=scores.dtype, device=scores.device)
    reward_of_later_turns = torch.zeros_like(scores)
    # From the last turn to the first, so that a turn without trained tokens can pass its reward on.
    for turn in range(turn_rewards.shape[1] - 1, -1, -1):
        turn_reward = turn_rewards[:, turn] + reward_of_later_turns
        if not turn_reward.any():
            reward_of_later_turns = torch.zeros_like(scores)
            continue
        turn_mask = mask & (turns == turn)
        has_tokens = sequence_sums(turn_mask.to(scores.dtype), cu_seqlens, turn_mask) > 0
        rewards += place_at_last_tokens(turn_reward, cu_seqlens, turn_mask)
        reward_of_later_turns = torch.where(has_tokens, 0.0, turn_reward)
    return rewards + place_at_last_tokens(scores - turn_rewards.sum(1) + reward_of_later_turns, cu_seqlens, mask)


def whiten(values: Tensor, mask: Tensor, *, epsilon: float = 1e-8) -> Tensor:
    """Return values [tokens] with mean 0 and unbiased variance 1 over the batch's masked tokens; zero elsewhere.

    `mask` is bool [tokens]. Fewer than two masked tokens, or equal values, give zeros.
    """
    masked = values[mask]
    if len(masked) < 2:
        return torch.zeros_like(values)
    centered = masked - masked.mean()
    centered = (
        torch.zeros_like(masked)
        if masked.min() == masked.max()
        else centered / (_standard_deviation(centered) + epsilon)
    )
    return torch.zeros_like(values).masked_scatter(mask, centered)


def state_advantages(returns: Tensor, state_groups: Tensor) -> Tensor:
    """Return each turn's return minus the mean of its state group: [samples, turns], like `returns`.

    `state_groups` int [samples, turns]: turns in the same state of the same prompt have equal numbers. The result is
    zero for a turn alone in its group, or with the number -1. Source: GiGPO (arXiv 2505.10978, section 4.2), without
    the deviation.
    """
    has_group = state_groups >= 0
    advantages = torch.zeros_like(returns)
    if has_group.any():
        advantages[has_group] = grpo(returns[has_group], state_groups[has_group], normalize_by_std=False)
    return advantages


def _index_groups(groups: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Return the group index of each sample, int [samples], and the group sizes, float [groups]."""
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    return group, sizes.to(rewards.dtype)


def _group_sums(values: Tensor, group: Tensor, sizes: Tensor) -> Tensor:
    return torch.zeros_like(sizes).index_add(0, group, values)


def _center(rewards: Tensor, group: Tensor, sizes: Tensor) -> Tensor:
    """Return each reward minus its group's mean, [samples]; exactly zero in a group with equal rewards."""
    centered = rewards - (_group_sums(rewards, group, sizes) / sizes)[group]
    # The rounded mean of equal rewards may differ from them. A tiny deviation would then turn this error into
    # advantages of size 1.
    lowest = torch.zeros_like(sizes).scatter_reduce(0, group, rewards, "amin", include_self=False)
    highest = torch.zeros_like(sizes).scatter_reduce(0, group, rewards, "amax", include_self=False)
    return centered.masked_fill((lowest == highest)[group], 0.0)


def _replace_lone_samples(advantages: Tensor, rewards: Tensor, group_sizes: Tensor, lone_sample: str) -> Tensor:
    if lone_sample == "zero":
        return advantages
    return torch.where(group_sizes == 1, rewards, advantages)


def _standard_deviation(centered: Tensor) -> Tensor:
    return (centered.square().sum() / max(len(centered) - 1, 1)).sqrt()


def _binomials(n: Tensor, k: int) -> Tensor:
    """Return the binomial coefficients of `n` [groups] over `k`, zero where n < k."""
    # n over k is the product of (n - i) / (i + 1) for i from 0 to k - 1.
    terms = torch.arange(k, dtype=n.dtype, device=n.device)
    return ((n[:, None] - terms).clamp(min=0) / (terms + 1)).prod(1)


ADVANTAGES = {
    "grpo": grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "opo": opo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "global_baseline": global_baseline,
    "pass_at_k": pass_at_k,
}


def soft_overlong(lengths: Tensor, *, longest: int, buffer: int) -> Tensor:
    """Return 0 up to `longest` - `buffer` tokens, then a linear decrease to -1 at `longest`: float [samples].

    `lengths` int [samples] counts completion tokens. Source: DAPO (arXiv 2503.14476, eq. 13).
    """
    return ((longest - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def turn_returns(rewards: Tensor, discount: float) -> Tensor:
    """Return each turn's reward plus `discount` times the next turn's return: [samples, turns], like `rewards`.

    A sample with fewer turns has zeros after its last turn.
    """
    returns = torch.zeros_like(rewards)
    next_return = rewards.new_zeros(len(rewards))
    for turn in reversed(range(rewards.shape[1])):
        next_return = rewards[:, turn] + discount * next_return
        returns[:, turn] = next_return
    return returns
