"""From trajectories to what is trained on: advantages, token weights, the updates of a step; and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megarl.algorithms.advantages import ADVANTAGES, gae, whiten
from megarl.algorithms.importance import gap_metrics, importance_weights
from megarl.algorithms.keywords import supported_kwargs
from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.length_penalty import soft_overlong
from megarl.algorithms.log_ratio import log_ratio
from megarl.algorithms.reduction import token_weights
from megarl.algorithms.sequences import at_ends, on_tokens, sequence_sums
from megarl.config import AlgorithmConfig, Recipe
from megarl.files.python_function import function_of
from megarl.tracking.metrics import Metric, merge, values
from megarl.types import PER_TOKEN, Reward, Segment, TrainingSequence, Trajectory


def to_sequences(trajectories: Sequence[Trajectory], recipe: Recipe, weight_version: int) -> list[TrainingSequence]:
    """One sequence per segment: all its tokens, of which the sampled ones are trained.

    `old_logprobs` are the segments' own, with algorithm.old_logprobs rollout the engine's; those of segments without
    are NaN, and None where no segment has any. `weight_version` is that of the trainer's weights before the update.
    """
    segments = [segment for t in trajectories for segment in t.segments]
    mask_truncated = recipe.algorithm.mask_truncated
    sequences = [_to_sequence(t, segment, mask_truncated) for t in trajectories for segment in t.segments]
    if recipe.algorithm.old_logprobs == "rollout":
        return [_from_rollout(s, weight_version, segment) for s, segment in zip(sequences, segments, strict=True)]
    if all(segment.old_logprobs is None for segment in segments):
        return sequences
    return [
        replace(s, old_logprobs=_unknown(segment) if segment.old_logprobs is None else segment.old_logprobs)
        for s, segment in zip(sequences, segments, strict=True)
    ]


def _from_rollout(sequence: TrainingSequence, weight_version: int, segment: Segment) -> TrainingSequence:
    """The ratio starts from the engine's log-probs, whatever its weights; compared are only those of equal weights."""
    engine = segment.rollout_logprobs
    is_stale = segment.weight_versions[segment.loss_mask].min() < weight_version
    return replace(sequence, old_logprobs=engine, rollout_logprobs=np.full_like(engine, np.nan) if is_stale else engine)


def _unknown(segment: Segment) -> np.ndarray:
    """NaN where sampled, else 0; float32 [tokens]."""
    return np.where(segment.loss_mask, np.float32(np.nan), np.float32(0))


def _to_sequence(trajectory: Trajectory, segment: Segment, mask_truncated: bool) -> TrainingSequence:
    trained = segment.loss_mask
    if mask_truncated and trajectory.ended == "length":
        trained = np.zeros_like(trained)
    return TrainingSequence(
        token_ids=segment.token_ids,
        loss_mask=trained,
        rollout_logprobs=segment.rollout_logprobs,
        routed_experts=segment.routed_experts,
    )


def _rewards(trajectories: Sequence[Trajectory]) -> list[Reward]:
    rewards = [t.reward for t in trajectories if t.reward is not None]
    assert len(rewards) == len(trajectories)
    return rewards


def add_advantages(
    sequences: Sequence[TrainingSequence], trajectories: Sequence[Trajectory], recipe: Recipe, kl_coefficient: float
) -> tuple[list[TrainingSequence], dict[str, float]]:
    """The sequences with their tokens' advantages, and with a critic their returns.

    Metrics: `kl/reference`, the mean over tokens, where the KL is in them, and with algorithm.k3_max
    `kl/capped`, the share of tokens whose estimate is held there; with a critic `critic/value`, `/return`, the
    means over tokens, and `/explained`, the share of the returns' variance that the values foresaw.
    """
    algorithm = recipe.algorithm
    scores = _scores(trajectories, recipe)
    flat = _Flat(sequences)
    metrics: dict[str, float] = {}
    divergence = torch.zeros(len(flat.mask))
    if algorithm.kl_coefficient and algorithm.kl_placement != "loss":
        estimate: Callable[..., torch.Tensor] = KL_ESTIMATORS[algorithm.kl_estimator]
        settings = supported_kwargs(estimate, {"k3_max": algorithm.k3_max})
        divergence = estimate(flat.of("old_logprobs"), flat.of("reference_logprobs"), **settings)
        divergence = torch.where(flat.mask, divergence, 0.0)
        if algorithm.k3_max is not None:
            metrics["kl/capped"] = float((divergence[flat.mask] >= algorithm.k3_max).float().mean())
        metrics["kl/reference"] = float(divergence[flat.mask].mean())
        divergence = kl_coefficient * divergence
    arrays: dict[str, torch.Tensor] = {}
    if algorithm.advantage == "gae":
        rewards = at_ends(scores, flat.cu_seqlens, flat.mask)
        if algorithm.kl_placement == "reward":
            rewards = rewards - divergence
        expected, settings = flat.of("values"), {"gamma": algorithm.gamma, "gae_lambda": algorithm.gae_lambda}
        of_tokens, arrays["returns"] = gae(rewards, expected, flat.cu_seqlens, mask=flat.mask, **settings)
        metrics |= _value_metrics(expected[flat.mask], arrays["returns"][flat.mask])
    else:
        if algorithm.kl_placement == "reward":
            scores = scores - sequence_sums(divergence, flat.cu_seqlens, flat.mask)
        of_tokens = on_tokens(_of_samples(scores, trajectories, algorithm), flat.cu_seqlens, len(flat.mask))
    if algorithm.kl_placement == "return":
        divergence, _ = gae(
            divergence, torch.zeros_like(divergence), flat.cu_seqlens, gamma=1.0, gae_lambda=1.0, mask=flat.mask
        )
    if algorithm.kl_placement in ("return", "advantage"):
        of_tokens = of_tokens - divergence
    if algorithm.whiten_advantages:
        of_tokens = whiten(of_tokens, flat.mask)
    return flat.with_arrays(advantages=torch.where(flat.mask, of_tokens, 0.0), **arrays), metrics


def _scores(trajectories: Sequence[Trajectory], recipe: Recipe) -> torch.Tensor:
    """Rewards [samples], with the punishment of length."""
    scores = torch.tensor([r.score for r in _rewards(trajectories)])
    if not (buffer := recipe.algorithm.overlong_buffer):
        return scores
    longest = recipe.rollout.sampling.max_new_tokens
    lengths = torch.tensor([t.num_sampled for t in trajectories])
    punishment = soft_overlong(lengths, longest=longest, buffer=buffer)
    return scores + recipe.reward.correct_score * punishment


def _of_samples(scores: torch.Tensor, trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig) -> torch.Tensor:
    """Advantages [samples] by the estimator that the recipe names."""
    advantage = function_of(algorithm.advantage, ADVANTAGES, "algorithm.advantage")
    offered: dict[str, Any] = {
        "lengths": torch.tensor([t.num_sampled for t in trajectories]),
        "normalize_by_std": algorithm.normalize_by_std,
        "lone_sample": algorithm.lone_sample,
        "k": algorithm.pass_k,
        "passes": torch.tensor([r.answer_correct for r in _rewards(trajectories)]),
    }
    settings = supported_kwargs(advantage, offered) | algorithm.advantage_kwargs
    return advantage(scores, torch.tensor([t.group for t in trajectories]), **settings)


def _value_metrics(values: torch.Tensor, returns: torch.Tensor) -> dict[str, float]:
    unforeseen = (returns - values).var(unbiased=False) / returns.var(unbiased=False).clamp(min=1e-12)
    return {
        "critic/value": float(values.mean()),
        "critic/return": float(returns.mean()),
        "critic/explained": 1 - float(unforeseen),
    }


def add_corrections(
    sequences: Sequence[TrainingSequence], algorithm: AlgorithmConfig
) -> tuple[list[TrainingSequence], dict[str, float]]:
    """The sequences with what their tokens count for the gap between trainer and engine.

    Metrics: `importance/mean`, the tokens' mean weight; `importance/rejected`, the share of tokens that count nothing;
    `importance/cut`, the share of tokens whose weight is not their own ratio.
    """
    assert algorithm.importance_sampling is not None
    flat = _Flat(sequences)
    old, rollout = flat.of("old_logprobs"), flat.of("rollout_logprobs")
    weights = importance_weights(
        algorithm.importance_sampling, old, rollout, flat.cu_seqlens, flat.mask,
        low=algorithm.importance_sampling_low, high=algorithm.importance_sampling_high,
        **algorithm.importance_sampling_kwargs,
    )  # fmt: skip
    kept = weights[flat.mask]
    own = log_ratio(old, rollout).exp()[flat.mask]
    metrics = {
        "importance/mean": float(kept.mean()),
        "importance/rejected": float((kept == 0).float().mean()),
        "importance/cut": float((kept != own).float().mean()),
    }
    return flat.with_arrays(importance_weights=weights), metrics


class _Flat:
    """Sequences one after the other: their arrays as tensors [tokens], and back."""

    def __init__(self, sequences: Sequence[TrainingSequence]) -> None:
        self._sequences = sequences
        self._ends = np.cumsum([len(sequence) for sequence in sequences])
        self.cu_seqlens = torch.from_numpy(np.concatenate([[0], self._ends]))
        self.mask = self.of("loss_mask")

    def of(self, name: str) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([getattr(sequence, name) for sequence in self._sequences]))

    def with_arrays(self, **arrays: torch.Tensor) -> list[TrainingSequence]:
        sequences = self._sequences
        for name, array in arrays.items():
            parts = np.split(array.numpy().astype(np.float32), self._ends[:-1])
            sequences = [replace(sequence, **{name: part}) for sequence, part in zip(sequences, parts, strict=True)]
        return list(sequences)


def split(
    sequences: Sequence[TrainingSequence],
    recipe: Recipe,
    step: int,
    conversations: Sequence[TrainingSequence] = (),
) -> list[list[TrainingSequence]]:
    """The sequences of each update of a step, with the token weights of that update.

    Each of `train.epochs_per_step` passes visits all sequences in `train.updates_per_step` updates: the first in the
    given order, each later one in an order drawn from the seed, the step and the pass. `conversations` are dealt out to
    the updates of a pass and learnt beside (`algorithm.ptx_coefficient`).
    """
    updates, longest = recipe.train.updates_per_step, recipe.rollout.sampling.max_new_tokens
    batches: list[list[TrainingSequence]] = []
    for number in range(recipe.train.epochs_per_step):
        ordered = [sequences[index] for index in _order(len(sequences), recipe.seed, step, number)]
        parts = [assign_token_weights(part, recipe.algorithm, longest) for part in _parts(ordered, updates)]
        if conversations:
            share = recipe.algorithm.ptx_coefficient
            parts = [_mixed(part, conversations[i::updates], share) for i, part in enumerate(parts)]
        batches += parts
    if recipe.algorithm.old_logprobs == "rollout":
        # From the second update on, the weights are not those that sampled.
        batches[1:] = [[_not_compared(sequence) for sequence in batch] for batch in batches[1:]]
    return batches


def _order(count: int, seed: int, step: int, number: int) -> Sequence[int]:
    """Indices in the order of a step's pass, counted from 0."""
    if number == 0:
        return range(count)
    return np.random.default_rng([seed, step, number]).permutation(count).tolist()


def _not_compared(sequence: TrainingSequence) -> TrainingSequence:
    assert sequence.rollout_logprobs is not None
    return replace(sequence, rollout_logprobs=np.full_like(sequence.rollout_logprobs, np.nan))


def _parts(sequences: Sequence[TrainingSequence], count: int) -> list[Sequence[TrainingSequence]]:
    size = len(sequences) // count
    return [sequences[start : start + size] for start in range(0, len(sequences), size)]


def _mixed(
    batch: Sequence[TrainingSequence], conversations: Sequence[TrainingSequence], share: float
) -> list[TrainingSequence]:
    """A policy's batch and conversations learnt by likelihood, which make so large a share of the loss."""
    policy = _Flat(batch)
    flat = _Flat(conversations)
    weights = share * token_weights(flat.cu_seqlens, flat.mask, "token_mean")
    nothing = torch.zeros(len(flat.mask))
    # Sequences of one batch carry the same arrays.
    known = {name: nothing for name in PER_TOKEN if getattr(batch[0], name) is not None}
    return [
        *policy.with_arrays(
            token_weights=(1 - share) * policy.of("token_weights"), supervised=torch.zeros(len(policy.mask))
        ),
        *flat.with_arrays(**known | {"token_weights": weights, "supervised": torch.ones(len(flat.mask))}),
    ]


def critic_batches(sequences: Sequence[TrainingSequence], recipe: Recipe) -> list[list[TrainingSequence]]:
    """What each of the critic's updates in a step is trained on: the mean over its tokens."""
    algorithm = recipe.algorithm.model_copy(update={"aggregation": "token_mean"})
    known = [TrainingSequence(s.token_ids, s.loss_mask, values=s.values, returns=s.returns) for s in sequences]
    return [assign_token_weights(part, algorithm) for part in _parts(known, recipe.critic.updates_per_step)]


def assign_token_weights(
    sequences: Sequence[TrainingSequence], algorithm: AlgorithmConfig, constant_length: int | None = None
) -> list[TrainingSequence]:
    """The sequences of one update with their token weights: what each token's loss counts in the whole batch."""
    flat = _Flat(sequences)
    weights = token_weights(
        flat.cu_seqlens,
        flat.mask,
        algorithm.aggregation,
        constant_length=constant_length,
        count_masked_sequences=algorithm.count_masked_sequences,
    )
    return flat.with_arrays(token_weights=weights)


def update_metrics(updates: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """The metrics of a step's updates together; `logprob_gap/` is the gap between trainer and engine.

    Both log-probs of a token are those of the weights that sampled it: in a later update, and for trajectories that
    waited since an earlier step, the trainer's are `old_logprobs`. `logprob_gap/max` and `/mean` are of
    |trainer - engine|, in nats, over the trained tokens; `/measured` is the share of them with both at hand: 1, but
    with algorithm.old_logprobs rollout that of the first update's tokens which did not wait. The others are those of
    `algorithms.importance.gap_metrics`.
    """
    found = values(merge(updates))
    gap = {
        name.removeprefix("logprob_gap/"): found.pop(name) for name in list(found) if name.startswith("logprob_gap/")
    }
    if "mean" in gap:
        found |= {f"logprob_gap/{name}": value for name, value in gap_metrics(gap).items()}
    return found | {f"logprob_gap/{name}": gap[name] for name in ("max", "measured") if name in gap}


def staleness_metrics(trajectories: Sequence[Trajectory], weight_version: int) -> dict[str, float]:
    """`staleness/mean`, `/max`: weight versions from a trajectory's oldest token to the weights that it updates."""
    staleness = [weight_version - t.oldest_version for t in trajectories]
    return {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(max(staleness))}


def reward_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What a step's completions were like.

    `reward/mean`, `/std`, `/accuracy`, `/format_valid`; `reward/zero_variance_groups`: share of groups whose rewards
    are all equal and teach nothing; `rollout/completion_tokens/mean`, `/max`; `rollout/truncated`: share that hit the
    limit.
    """
    scores = np.array([r.score for r in _rewards(trajectories)])
    lengths = np.array([t.num_sampled for t in trajectories])
    groups = np.array([t.group for t in trajectories])
    flat = [np.ptp(scores[groups == group]) == 0 for group in np.unique(groups)]
    return {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std()),
        "reward/accuracy": float(np.mean([r.answer_correct for r in _rewards(trajectories)])),
        "reward/format_valid": float(np.mean([r.format_valid for r in _rewards(trajectories)])),
        "reward/zero_variance_groups": float(np.mean(flat)),
        "rollout/completion_tokens/mean": float(lengths.mean()),
        "rollout/completion_tokens/max": float(lengths.max()),
        "rollout/truncated": float(np.mean([t.ended == "length" for t in trajectories])),
    }
