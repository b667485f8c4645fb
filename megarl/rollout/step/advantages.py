"""Advantages and importance weights of a training step's batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES, gae, soft_overlong, token_rewards, turn_returns, whiten
from megarl.algorithms.importance import importance_weights, unbounded_weights, weight_metrics
from megarl.algorithms.keywords import supported_kwargs
from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.reduction import highest_entropy_mask
from megarl.algorithms.sequences import broadcast_to_tokens, sequence_sums
from megarl.algorithms.trial import ResultError, checked_advantages
from megarl.algorithms.value_losses import explained_variance
from megarl.config import AlgorithmConfig, Recipe, RewardConfig
from megarl.data.token_batch import TokenBatch
from megarl.files.import_path import function_of
from megarl.rewards import metric_name
from megarl.rollout.step.covariance_selection import select_by_covariance
from megarl.rollout.step.rl_batch import RLBatch
from megarl.rollout.step.role_advantages import role_advantages
from megarl.rollout.step.scoring import corrects_in_update
from megarl.rollout.step.state_advantages import weighted_state_advantages
from megarl.rollout.step.step_metrics import metrics_by_version
from megarl.tracking.metric_rows import PER_TOKEN, MetricRow
from megarl.types import ConfigError

METRICS = (
    MetricRow(
        "advantages/groups_below_k",
        "count",
        "groups without an advantage: fewer than algorithm.pass_k of their attempts were scored",
        condition="algorithm.advantage=pass_at_k",
    ),
    MetricRow(
        "advantages/baseline/ROLE",
        "score",
        "baseline of a role (in a mixture SOURCE.ROLE) after the step: moving mean of its rewards",
        condition="algorithm.advantage=rae",
    ),
    MetricRow("critic/value", "score", "the critic's values", PER_TOKEN),
    MetricRow("critic/return", "score", "training targets of the critic", PER_TOKEN),
    MetricRow("critic/explained", "share", "variance of the returns explained by the values"),
    MetricRow(
        "entropy/threshold",
        "nats",
        "lowest entropy of a token that has a policy loss",
        condition="algorithm.entropy_top_share",
    ),
    MetricRow(
        "entropy/trained_share",
        "share",
        "trained tokens that have a policy loss; ties at the threshold may exceed the share",
        condition="algorithm.entropy_top_share",
    ),
)


def weigh_batch(
    batch: RLBatch,
    recipe: Recipe,
    weight_version: int,
    kl_coefficient: float,
    role_baselines: dict[str, float] | None = None,
) -> dict[str, float]:
    """Set the batch's advantages and importance weights as the recipe says. Return their metrics.

    `weight_version` is the trainer's before the update. If groups may span several versions, the engine's log-probs of
    earlier versions become NaN at the end. `role_baselines` (algorithm.advantage = rae) are updated.
    """
    algorithm = recipe.algorithm
    metrics = compute_advantages(batch, recipe, kl_coefficient, role_baselines)
    if not corrects_in_update(recipe):
        metrics |= compute_importance_weights(batch, algorithm)
    # Only after the importance weights are set: this sets some of them to zero.
    metrics |= keep_highest_entropies(batch, algorithm)
    metrics |= select_by_covariance(batch, recipe, weight_version)
    if recipe.rollout.carries_groups:
        # Before stale log-probs are set to NaN, because the metrics compare them.
        metrics |= metrics_by_version(batch, weight_version, has_trainer_logprobs=algorithm.old_logprobs == "trainer")
        batch.forget_stale_logprobs(weight_version)
    return metrics


def compute_advantages(
    batch: RLBatch, recipe: Recipe, kl_coefficient: float, role_baselines: dict[str, float] | None = None
) -> dict[str, float]:
    """Compute the batch's `advantages` [tokens], and with a critic its `returns` [tokens]. Return the metrics.

    `role_baselines` (algorithm.advantage = rae) are updated.
    """
    algorithm = recipe.algorithm
    cu_samples, mask = torch.from_numpy(batch.cu_samples), torch.from_numpy(batch.loss_mask)
    scores = _compute_scores(batch, recipe)
    metrics: dict[str, float] = {}
    if algorithm.advantage == "pass_at_k":
        num_scored = np.bincount(batch.groups, weights=batch.is_scored)
        metrics["advantages/groups_below_k"] = float((num_scored < algorithm.pass_k).sum())
    kl_penalties, kl_metrics = _compute_kl_penalties(batch, recipe, kl_coefficient)
    if algorithm.advantage == "gae":
        advantages, estimator_metrics = _compute_critic_advantages(scores, kl_penalties, batch, algorithm)
    else:
        advantages, estimator_metrics = _compute_relative_advantages(
            scores, kl_penalties, batch, recipe, role_baselines
        )
    metrics |= kl_metrics | estimator_metrics
    # Subtract the KL penalty, unless it is already part of the reward.
    # With gamma = lambda = 1, this is the sum of the KL over the following tokens.
    if algorithm.kl_placement == "return":
        kl_penalties, _ = gae(
            kl_penalties, torch.zeros_like(kl_penalties), cu_samples, gamma=1.0, gae_lambda=1.0, mask=mask
        )
    if algorithm.kl_placement in ("return", "advantage"):
        advantages = advantages - kl_penalties
    if algorithm.whiten_advantages:
        advantages = whiten(advantages, mask)
    batch.per_token["advantages"] = torch.where(mask, advantages, 0.0).float().numpy()
    return metrics


def _compute_kl_penalties(batch: RLBatch, recipe: Recipe, kl_coefficient: float) -> tuple[Tensor, dict[str, float]]:
    """Return each token's KL penalty [tokens], and its metrics. It is 0 if the KL is in the loss, or unused."""
    algorithm, mask = recipe.algorithm, torch.from_numpy(batch.loss_mask)
    # In distillation a preset's KL penalty has no effect, because the teacher replaces the reference model.
    if not recipe.has_kl_penalty or algorithm.kl_placement == "loss":
        return torch.zeros(len(mask)), {}
    divergences = _estimate_divergence(batch, algorithm)
    metrics: dict[str, float] = {}
    if algorithm.k3_max is not None:
        metrics["kl/capped"] = float((divergences[mask] >= algorithm.k3_max).float().mean())
    # The metrics report the plain KL, without its coefficient.
    metrics["kl/reference"] = float(divergences[mask].mean())
    return kl_coefficient * divergences, metrics


def _compute_critic_advantages(
    scores: Tensor, kl_penalties: Tensor, batch: RLBatch, algorithm: AlgorithmConfig
) -> tuple[Tensor, dict[str, float]]:
    """Return advantages [tokens] by a critic's values (GAE), and metrics. Sets the batch's `returns` [tokens]."""
    cu_samples, mask = torch.from_numpy(batch.cu_samples), torch.from_numpy(batch.loss_mask)
    turn_rewards, turns = torch.from_numpy(batch.turn_rewards), torch.from_numpy(batch.turns)
    # float32, like the critic's values. Estimators without a critic compare float64 rewards.
    rewards = token_rewards(scores, turn_rewards, turns, cu_samples, mask).float()
    if algorithm.kl_placement == "reward":
        rewards = rewards - kl_penalties
    predicted_values = torch.from_numpy(batch.per_token["values"])
    advantages, returns = gae(
        rewards, predicted_values, cu_samples, gamma=algorithm.gamma, gae_lambda=algorithm.gae_lambda, mask=mask
    )
    batch.per_token["returns"] = returns.numpy()
    return advantages, _compute_value_metrics(predicted_values[mask], returns[mask])


def _compute_relative_advantages(
    scores: Tensor,
    kl_penalties: Tensor,
    batch: RLBatch,
    recipe: Recipe,
    role_baselines: dict[str, float] | None,
) -> tuple[Tensor, dict[str, float]]:
    """Return advantages [tokens] from comparing rewards of samples or turns, without a critic. Return metrics too."""
    algorithm = recipe.algorithm
    cu_samples, mask = torch.from_numpy(batch.cu_samples), torch.from_numpy(batch.loss_mask)
    metrics: dict[str, float] = {}
    if algorithm.kl_placement == "reward":
        scores = scores - sequence_sums(kl_penalties, cu_samples, mask)
    if algorithm.advantage == "rae":
        baselines = {} if role_baselines is None else role_baselines
        advantages = broadcast_to_tokens(role_advantages(scores, batch, recipe, baselines), cu_samples, len(mask))
        metrics |= {f"advantages/baseline/{name}": value for name, value in baselines.items()}
    elif algorithm.reward_order == "normalize_then_sum":
        advantages = broadcast_to_tokens(_compute_function_advantages(batch, recipe), cu_samples, len(mask))
    elif algorithm.turn_discount is None:
        advantages = broadcast_to_tokens(_compute_sample_advantages(scores, batch, algorithm), cu_samples, len(mask))
    else:
        advantages = _compute_turn_advantages(scores, batch, algorithm, algorithm.turn_discount)
    if algorithm.state_weight:
        advantages = advantages + weighted_state_advantages(_compute_rewards_by_turn(scores, batch), batch, algorithm)
    return advantages, metrics


def penalty_kl(batch: RLBatch, recipe: Recipe) -> float | None:
    """Return the mean KL of policy and reference, in nats per token; None: advantages have no KL penalty."""
    if not recipe.has_kl_penalty or recipe.algorithm.kl_placement == "loss":
        return None
    return float(_estimate_divergence(batch, recipe.algorithm)[torch.from_numpy(batch.loss_mask)].mean())


def compute_importance_weights(batch: TokenBatch, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Set the batch's `importance_weights` [tokens], if the recipe enables them. Return the metrics.

    The weights correct for the mismatch between trainer and engine log-probs.
    """
    if algorithm.importance_sampling is None:
        return {}
    weight_kind, mask = algorithm.importance_sampling, torch.from_numpy(batch.loss_mask)
    old_logprobs, rollout_logprobs = (
        torch.from_numpy(batch.per_token[name]) for name in ("old_logprobs", "rollout_logprobs")
    )
    token_arguments = old_logprobs, rollout_logprobs, torch.from_numpy(batch.cu_samples), mask
    weights = importance_weights(weight_kind, *token_arguments, **algorithm.correction_settings)
    batch.per_token["importance_weights"] = weights.numpy()
    metrics = weight_metrics(weights, unbounded_weights(weight_kind, *token_arguments))
    return {metric: float(values[mask].mean()) for metric, values in metrics.items()}


def keep_highest_entropies(batch: RLBatch, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Restrict the policy loss to the tokens of highest entropy, if algorithm.entropy_top_share is set.

    Sets the importance weights of all other tokens to zero, so call this after `compute_importance_weights`. Returns
    the metrics.
    """
    share, mask = algorithm.entropy_top_share, torch.from_numpy(batch.loss_mask)
    if share is None or not mask.any():
        return {}
    assert batch.entropies is not None
    is_selected, threshold = highest_entropy_mask(torch.from_numpy(batch.entropies), mask, share=share)
    weights = batch.per_token.get("importance_weights", batch.loss_mask.astype(np.float32))
    batch.per_token["importance_weights"] = np.where(is_selected.numpy(), weights, np.float32(0))
    return {"entropy/threshold": float(threshold), "entropy/trained_share": float(is_selected.sum() / mask.sum())}


def _compute_scores(batch: RLBatch, recipe: Recipe) -> Tensor:
    """Return the rewards minus length penalties, float64 [samples].

    The penalty grows linearly over the last algorithm.overlong_buffer tokens before a limit. The limit of a
    completion applies to the longest turn, the limit of an attempt to the sum of its turns. The larger penalty counts.
    """
    scores = torch.from_numpy(batch.rewards)
    lengths, longest_turns = torch.from_numpy(batch.num_sampled), torch.from_numpy(batch.longest_turns)
    for source in recipe.sources:
        if not (buffer := source.recipe.algorithm.overlong_buffer):
            continue
        rollout = source.recipe.rollout
        penalty = soft_overlong(longest_turns, longest=rollout.sampling.max_new_tokens, buffer=buffer)
        if rollout.turns_of_attempt > 1 and rollout.budget.sampled_tokens is not None:
            attempt_penalty = soft_overlong(lengths, longest=rollout.budget.sampled_tokens, buffer=buffer)
            # Penalties are negative or 0, so the minimum is the larger penalty.
            penalty = torch.minimum(penalty, attempt_penalty)
        penalty = source.recipe.algorithm.overlong_penalty * source.recipe.reward.correct_score * penalty
        scores = torch.where(_source_mask(source.name, batch, recipe), scores + penalty, scores)
    return scores


def _compute_function_advantages(batch: RLBatch, recipe: Recipe) -> Tensor:
    """Return advantages [samples] computed per reward function.

    Each function's scores are normalised within the group. Their weighted sum is whitened over the batch. Source: GDPO
    (arXiv 2601.05242, eqs. 4 to 6).
    """
    total = torch.zeros(len(batch.rewards), dtype=torch.float64)
    for scores, weight_in_source in _iterate_scorers(batch):
        weights = torch.zeros_like(total)
        for source in recipe.sources:
            weights[_source_mask(source.name, batch, recipe)] = weight_in_source(source.recipe.reward)
        is_judged = torch.from_numpy(~np.isnan(scores))
        # A NaN score would make the sum NaN even with weight 0, so replace it. `is_judged` excludes its sample.
        sample_advantages = _compute_sample_advantages(
            torch.from_numpy(np.nan_to_num(scores)), batch, recipe.algorithm, is_judged
        )
        total += weights * sample_advantages
    return whiten(total, torch.from_numpy(batch.is_scored))


def _iterate_scorers(batch: RLBatch) -> Iterator[tuple[NDArray[np.float64], Callable[[RewardConfig], float]]]:
    """Yield each scorer's scores [samples], with a function returning its weight in a source's reward settings.

    A scorer is a reward function, an environment or the reward model.
    """
    for name, scores in batch.scores.items():
        yield scores, partial(_function_weight, name)
    if batch.environment_scores is not None:
        yield batch.environment_scores, _environment_weight
    if batch.model_scores is not None:
        yield batch.model_scores, lambda reward: reward.model_weight


def _function_weight(name: str, reward: RewardConfig) -> float:
    weights = {metric_name(function.name): function.weight for function in reward.functions}
    return _environment_weight(reward) * weights.get(name, 0.0)


def _environment_weight(reward: RewardConfig) -> float:
    return 1.0 if reward.model is None else reward.function_weight


def _source_mask(name: str, batch: RLBatch, recipe: Recipe) -> Tensor:
    return torch.tensor([not recipe.mixture or environment == name for environment in batch.environments])


def _estimate_divergence(batch: RLBatch, algorithm: AlgorithmConfig) -> Tensor:
    """Return the estimated KL divergence of policy and reference, [tokens] in nats; zero on untrained tokens."""
    old_logprobs, reference_logprobs = (
        torch.from_numpy(batch.per_token[name]) for name in ("old_logprobs", "reference_logprobs")
    )
    estimator: Callable[..., Tensor] = KL_ESTIMATORS[algorithm.kl_estimator]
    settings = supported_kwargs(estimator, {"k3_max": algorithm.k3_max})
    return torch.where(torch.from_numpy(batch.loss_mask), estimator(old_logprobs, reference_logprobs, **settings), 0.0)


def _compute_turn_advantages(scores: Tensor, batch: RLBatch, algorithm: AlgorithmConfig, discount: float) -> Tensor:
    """Return advantages [tokens] of multi-turn trajectories, computed turn by turn.

    A turn's discounted return is compared with the same turn's return in the group's other samples. If a scored sample
    has fewer turns, the turn gets the advantage of its whole trajectory. `scores` [samples] minus all turn rewards
    counts at the last turn.
    """
    rewards = _compute_rewards_by_turn(scores, batch)
    num_turns = torch.from_numpy(batch.num_turns)
    has_turns = num_turns > 0
    returns = turn_returns(rewards, discount)
    cu_samples, turns = torch.from_numpy(batch.cu_samples), torch.from_numpy(batch.turns)
    turn_scores = torch.where(has_turns, returns[:, 0], scores)
    advantages = broadcast_to_tokens(_compute_sample_advantages(turn_scores, batch, algorithm), cu_samples, len(turns))
    # Turn 0 needs no comparison of its own: its return is the whole trajectory's return.
    for turn in range(1, rewards.shape[1]):
        is_comparable = _holds_for_whole_group(num_turns > turn, batch)
        turn_advantages = broadcast_to_tokens(
            _compute_sample_advantages(returns[:, turn], batch, algorithm, is_comparable), cu_samples, len(turns)
        )
        is_in_turn = (turns == turn) & broadcast_to_tokens(is_comparable, cu_samples, len(turns))
        advantages = torch.where(is_in_turn, turn_advantages, advantages)
    return advantages


def _compute_rewards_by_turn(scores: Tensor, batch: RLBatch) -> Tensor:
    """Return the rewards of turns, float64 [samples, turns].

    The part of `scores` [samples] without a turn counts at the last turn.
    """
    rewards, num_turns = torch.from_numpy(batch.turn_rewards).clone(), torch.from_numpy(batch.num_turns)
    has_turns = num_turns > 0
    rewards_without_turn = scores - rewards.sum(1)
    rewards[torch.arange(len(scores))[has_turns], num_turns[has_turns] - 1] += rewards_without_turn[has_turns]
    return rewards


def _holds_for_whole_group(condition: Tensor, batch: RLBatch) -> Tensor:
    """Return for each sample whether all scored samples of its group meet a condition. Both are bool [samples]."""
    groups = torch.from_numpy(batch.groups)
    is_violating = torch.from_numpy(batch.is_scored) & ~condition
    return ~torch.isin(groups, groups[is_violating])


def _compute_sample_advantages(
    scores: Tensor, batch: RLBatch, algorithm: AlgorithmConfig, is_comparable: Tensor | None = None
) -> Tensor:
    """Return advantages [samples] by the recipe's estimator; zero for unscored samples.

    `is_comparable`, bool [samples], restricts the computation to these samples.
    """
    is_included = torch.from_numpy(batch.is_scored)
    if is_comparable is not None:
        is_included = is_included & is_comparable
    advantage = function_of(algorithm.advantage, ADVANTAGES, "algorithm.advantage")
    # An estimator, also a user's own, takes any subset of these arguments. `supported_kwargs` selects them.
    available_kwargs: dict[str, Any] = {
        "lengths": torch.from_numpy(batch.num_sampled)[is_included],
        "normalize_by_std": algorithm.normalize_by_std,
        "lone_sample": algorithm.lone_sample,
        "k": algorithm.pass_k,
        "gamma": algorithm.gamma,
        "gae_lambda": algorithm.gae_lambda,
        "passes": torch.from_numpy(batch.is_correct)[is_included],
    }
    settings = supported_kwargs(advantage, available_kwargs) | algorithm.advantage_kwargs
    # An estimator need not handle empty input.
    if not is_included.any():
        return torch.zeros_like(scores)
    rewards = scores[is_included]
    estimates = advantage(rewards, torch.from_numpy(batch.groups)[is_included], **settings)
    try:
        advantages = checked_advantages(estimates, rewards)
    except ResultError as error:
        raise ConfigError(f"algorithm.advantage = {algorithm.advantage}: {error}") from error
    return torch.zeros_like(scores).masked_scatter(is_included, advantages)


def _compute_value_metrics(values: Tensor, returns: Tensor) -> dict[str, float]:
    return {
        "critic/value": float(values.mean()),
        "critic/return": float(returns.mean()),
        "critic/explained": explained_variance(values, returns),
    }
