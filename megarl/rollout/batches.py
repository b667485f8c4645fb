"""From answers to what is trained on: advantages, token weights, the updates of a step; and what answers tell."""

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
from megarl.rollout.evaluate import Answered
from megarl.tracking.metrics import Metric, merge, values
from megarl.types import PER_TOKEN, TrainingSequence


def to_sequences(answered: Sequence[Answered], recipe: Recipe, weight_version: int) -> list[TrainingSequence]:
    """One sequence per completion: prompt and completion tokens, of which the completion's are trained.

    `old_logprobs` are the answers' own, with algorithm.old_logprobs rollout the engine's; those of answers without are
    NaN, and None where no answer has any. `weight_version` is that of the trainer's weights before the update.
    """
    sequences = [_to_sequence(a, recipe.algorithm.mask_truncated) for a in answered]
    if recipe.algorithm.old_logprobs == "rollout":
        return [_from_rollout(s, a, weight_version) for s, a in zip(sequences, answered, strict=True)]
    if all(a.old_logprobs is None for a in answered):
        return sequences
    return [
        replace(s, old_logprobs=_after_prompt(a, np.float32(np.nan) if a.old_logprobs is None else a.old_logprobs))
        for s, a in zip(sequences, answered, strict=True)
    ]


def _from_rollout(sequence: TrainingSequence, answered: Answered, weight_version: int) -> TrainingSequence:
    """The ratio starts from the engine's log-probs, whatever its weights; compared are only those of equal weights."""
    engine = sequence.rollout_logprobs
    assert engine is not None
    is_stale = answered.completion.weight_version < weight_version
    return replace(sequence, old_logprobs=engine, rollout_logprobs=np.full_like(engine, np.nan) if is_stale else engine)


def _after_prompt(answered: Answered, of_completion: np.ndarray | np.float32) -> np.ndarray:
    """Values of a completion's tokens, float32 [tokens], zero on the prompt."""
    length = len(answered.problem.prompt_token_ids)
    whole = np.zeros(length + len(answered.completion.token_ids), np.float32)
    whole[length:] = of_completion
    return whole


def _to_sequence(answered: Answered, mask_truncated: bool) -> TrainingSequence:
    prompt, completion = answered.problem.prompt_token_ids, answered.completion
    trained = np.arange(len(prompt) + len(completion.token_ids)) >= len(prompt)
    if mask_truncated and completion.finish_reason == "length":
        trained[:] = False
    routed = completion.routed_experts
    if routed is not None:
        # The last token was sampled but never read; nothing follows it, so any experts do.
        routed = np.concatenate([routed, routed[-1:]])
    return TrainingSequence(
        token_ids=np.concatenate([np.array(prompt, np.int64), completion.token_ids]),
        loss_mask=trained,
        rollout_logprobs=_after_prompt(answered, completion.rollout_logprobs),
        routed_experts=routed,
    )


def add_advantages(
    sequences: Sequence[TrainingSequence], answered: Sequence[Answered], recipe: Recipe, kl_coefficient: float
) -> tuple[list[TrainingSequence], dict[str, float]]:
    """The sequences with their tokens' advantages, and with a critic their returns.

    Metrics: `kl/reference`, the mean over tokens, where the KL is in them, and with algorithm.k3_max
    `kl/capped`, the share of tokens whose estimate is held there; with a critic `critic/value`, `/return`, the
    means over tokens, and `/explained`, the share of the returns' variance that the values foresaw.
    """
    algorithm = recipe.algorithm
    scores = _scores(answered, recipe)
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
        of_tokens = on_tokens(_of_samples(scores, answered, algorithm), flat.cu_seqlens, len(flat.mask))
    if algorithm.kl_placement == "return":
        divergence, _ = gae(
            divergence, torch.zeros_like(divergence), flat.cu_seqlens, gamma=1.0, gae_lambda=1.0, mask=flat.mask
        )
    if algorithm.kl_placement in ("return", "advantage"):
        of_tokens = of_tokens - divergence
    if algorithm.whiten_advantages:
        of_tokens = whiten(of_tokens, flat.mask)
    return flat.with_arrays(advantages=torch.where(flat.mask, of_tokens, 0.0), **arrays), metrics


def _scores(answered: Sequence[Answered], recipe: Recipe) -> torch.Tensor:
    """Rewards [samples], with the punishment of length."""
    scores = torch.tensor([a.reward.score for a in answered])
    if not (buffer := recipe.algorithm.overlong_buffer):
        return scores
    longest = recipe.rollout.sampling.max_new_tokens
    lengths = torch.tensor([len(a.completion.token_ids) for a in answered])
    punishment = soft_overlong(lengths, longest=longest, buffer=buffer)
    return scores + recipe.reward.correct_score * punishment


def _of_samples(scores: torch.Tensor, answered: Sequence[Answered], algorithm: AlgorithmConfig) -> torch.Tensor:
    """Advantages [samples] by the estimator that the recipe names."""
    advantage = function_of(algorithm.advantage, ADVANTAGES, "algorithm.advantage")
    offered: dict[str, Any] = {
        "lengths": torch.tensor([len(a.completion.token_ids) for a in answered]),
        "normalize_by_std": algorithm.normalize_by_std,
        "lone_sample": algorithm.lone_sample,
        "k": algorithm.pass_k,
        "passes": torch.tensor([a.reward.answer_correct for a in answered]),
    }
    settings = supported_kwargs(advantage, offered) | algorithm.advantage_kwargs
    return advantage(scores, torch.tensor([a.group for a in answered]), **settings)


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

    Both log-probs of a token are those of the weights that sampled it: in a later update, and for answers that waited
    since an earlier step, the trainer's are `old_logprobs`. `logprob_gap/max` and `/mean` are of |trainer - engine|, in
    nats, over the trained tokens; `/measured` is the share of them with both at hand: 1, but with
    algorithm.old_logprobs rollout that of the first update's tokens which did not wait. The others are those of
    `algorithms.importance.gap_metrics`.
    """
    found = values(merge(updates))
    gap = {
        name.removeprefix("logprob_gap/"): found.pop(name) for name in list(found) if name.startswith("logprob_gap/")
    }
    if "mean" in gap:
        found |= {f"logprob_gap/{name}": value for name, value in gap_metrics(gap).items()}
    return found | {f"logprob_gap/{name}": gap[name] for name in ("max", "measured") if name in gap}


def staleness_metrics(answered: Sequence[Answered], weight_version: int) -> dict[str, float]:
    """`staleness/mean`, `/max`: weight versions between those that sampled an answer and those that it updates."""
    staleness = [weight_version - a.completion.weight_version for a in answered]
    return {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(max(staleness))}


def reward_metrics(answered: Sequence[Answered]) -> dict[str, float]:
    """What a step's completions were like.

    `reward/mean`, `/std`, `/accuracy`, `/format_valid`; `reward/zero_variance_groups`: share of groups whose rewards
    are all equal and teach nothing; `rollout/completion_tokens/mean`, `/max`; `rollout/truncated`: share that hit the
    limit.
    """
    scores = np.array([a.reward.score for a in answered])
    lengths = np.array([len(a.completion.token_ids) for a in answered])
    groups = np.array([a.group for a in answered])
    flat = [np.ptp(scores[groups == group]) == 0 for group in np.unique(groups)]
    return {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std()),
        "reward/accuracy": float(np.mean([a.reward.answer_correct for a in answered])),
        "reward/format_valid": float(np.mean([a.reward.format_valid for a in answered])),
        "reward/zero_variance_groups": float(np.mean(flat)),
        "rollout/completion_tokens/mean": float(lengths.mean()),
        "rollout/completion_tokens/max": float(lengths.max()),
        "rollout/truncated": float(np.mean([a.completion.finish_reason == "length" for a in answered])),
    }
