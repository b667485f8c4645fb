"""Distillation teachers on the driver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.algorithms.advantages import gae
from megarl.cluster.rank_model import RankModel
from megarl.cluster.teacher_model import TeacherRankModel
from megarl.config import DistillationConfig, Recipe
from megarl.data.token_batch import TokenBatch
from megarl.rollout.step.advantages import compute_advantages
from megarl.rollout.step.rl_batch import RLBatch
from megarl.rollout.step.teacher_prompts import Opening, TeacherPrompts, join_openings
from megarl.tracking.metric_rows import MetricRow
from megarl.types import Trajectory

METRICS = (
    MetricRow(
        "distillation/reverse_kl",
        "nats",
        "log-prob of a sampled token by the policy minus its log-prob by the teacher, mean",
    ),
    MetricRow("distillation/reverse_kl/first_64", "nats", "distillation/reverse_kl of a sample's first 64 tokens"),
    MetricRow("distillation/reverse_kl/from_64", "nats", "distillation/reverse_kl of a sample's tokens from 64 to 511"),
    MetricRow("distillation/reverse_kl/from_512", "nats", "distillation/reverse_kl of a sample's tokens from 512 on"),
    MetricRow(
        "distillation/unknown",
        "share",
        "sampled tokens excluded from training because the teacher's vocabulary lacks them",
    ),
    MetricRow("distillation/clipped", "share", "tokens with a log-ratio clipped to distillation.max_log_ratio"),
    MetricRow(
        "distillation/no_context",
        "share",
        "samples excluded from training because the teacher's prompt has no context",
        condition="distillation.teacher_prompt",
    ),
    MetricRow(
        "distillation/too_long",
        "share",
        "sequences excluded from training because the teacher's exceeds distillation.max_teacher_tokens",
        condition="distillation.teacher_prompt",
    ),
    MetricRow(
        "distillation/teacher_prompt_tokens",
        "tokens",
        "length of the teacher's prompt, mean",
        condition="distillation.teacher_prompt",
    ),
)

_BANDS = {"first_64": 0, "from_64": 64, "from_512": 512}
"""Bands of a sample's trained tokens: name, and index of the first token. Each band ends where the next one begins."""
_NO_PROMPTS: Mapping[str, TeacherPrompts] = MappingProxyType({})
_NO_OPENING = Opening(0, np.zeros(0, np.int64))


class Teachers:
    """The teacher models of a distillation run. A sample's source determines its teacher.

    `prompts` write the teacher's own prompts, by source. In other sources teachers read the policy's prompt.
    """

    def __init__(
        self, recipe: Recipe, models: Mapping[str, RankModel], prompts: Mapping[str, TeacherPrompts] = _NO_PROMPTS
    ) -> None:
        self._teacher_numbers, self._prompts = recipe.teacher_numbers, prompts
        self._max_tokens = recipe.teacher_tokens
        self._models = [cast(TeacherRankModel, models[name]) for name in recipe.teacher_models]
        self._openings: list[Opening] = []
        """The teacher's opening of each sequence of the step. If both prompts are equal, it replaces nothing."""

    def assign_teachers(self, batch: RLBatch) -> None:
        """Set the batch's `target_keys` [sequences, 2]: the number of the teacher, and of the sequence in the step."""
        teacher_numbers = np.array([self._teacher_numbers[name] for name in batch.environments], np.int64)
        sequence_numbers = np.arange(batch.num_sequences)
        # Samples are numbered from 0, in order.
        batch.target_keys = np.column_stack([teacher_numbers[batch.samples], sequence_numbers])
        self._openings = [_NO_OPENING] * batch.num_sequences

    def write_prompts(self, batch: RLBatch, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Write the teacher's prompts for a batch made of `groups`, after `assign_teachers`. Return metrics.

        Samples without context, and sequences too long for the teacher, are excluded from the loss.
        """
        if not self._prompts:
            return {}
        trajectories = [(trajectory, group) for group in groups for trajectory in group]
        num_samples = num_without_context = num_too_long = 0
        prompt_lengths: list[int] = []
        first_segments = np.cumsum(batch.num_segments) - batch.num_segments
        for (trajectory, group), first_sequence in zip(trajectories, first_segments, strict=True):
            if (prompts := self._prompts.get(trajectory.environment)) is None:
                continue
            num_samples += 1
            openings = prompts.make_openings(trajectory, group)
            num_without_context += openings is None
            for sequence, opening in enumerate(openings or [None] * len(trajectory.segments), first_sequence):
                first_token, end_token = batch.cu_seqlens[sequence : sequence + 2]
                is_too_long = opening is not None and opening.length_of(int(end_token - first_token)) > self._max_tokens
                num_too_long += is_too_long
                # With the policy's own prompt, the teacher would know no more than the policy.
                if opening is None or is_too_long:
                    batch.loss_mask[first_token:end_token] = False
                else:
                    self._openings[sequence] = opening
                    prompt_lengths.append(len(opening.token_ids))
        return {
            "distillation/no_context": num_without_context / max(num_samples, 1),
            "distillation/too_long": num_too_long / max(num_too_long + len(prompt_lengths), 1),
            "distillation/teacher_prompt_tokens": float(np.mean(prompt_lengths)) if prompt_lengths else 0.0,
        }

    def mask_unknown_tokens(self, batch: RLBatch) -> dict[str, float]:
        """Exclude tokens missing in their teacher's vocabulary, such as padding ids, from the loss.

        Returns the metric `distillation/unknown`, the share of excluded tokens.
        """
        num_trained = batch.loss_mask.sum()
        for model, sequences in self._split_by_teacher(batch):
            token_indices = batch.tokens_of(sequences)
            batch.loss_mask[token_indices] &= batch.token_ids[token_indices] < _num_tokens(model)
        return {"distillation/unknown": float(1 - batch.loss_mask.sum() / max(num_trained, 1))}

    async def score(self, batch: TokenBatch) -> NDArray[np.float32]:
        """Return the teachers' log-probs of the batch, float32 [tokens].

        They are zero before a sequence's first sampled token, on its first token, and in sequences without a trained
        token.
        """
        logprobs = np.zeros(len(batch.token_ids), np.float32)
        for model, sequences in self._split_by_teacher(batch):
            teacher_batch, policy_indices = self._with_openings(batch.select(sequences))
            teacher_logprobs = await model.forward(_replace_unknown_tokens(teacher_batch, model))
            logprobs[batch.tokens_of(sequences)[policy_indices[policy_indices >= 0]]] = teacher_logprobs[
                policy_indices >= 0
            ]
        return logprobs

    async def store_targets(self, minibatch: TokenBatch) -> None:
        """Let the teachers store their distributions over this minibatch. The policy's next update reads them."""
        for model, sequences in self._split_by_teacher(minibatch):
            teacher_batch, _ = self._with_openings(minibatch.select(sequences))
            await model.store_targets(_replace_unknown_tokens(teacher_batch, model))

    def _with_openings(self, batch: TokenBatch) -> tuple[TokenBatch, NDArray[np.int64]]:
        """Return the batch as the teachers read it, with each token's index in `batch`; -1 in openings."""
        assert batch.target_keys is not None
        return join_openings(batch, [self._openings[number] for number in batch.target_keys[:, 1]])

    def _split_by_teacher(self, batch: TokenBatch) -> Iterator[tuple[TeacherRankModel, NDArray[np.int64]]]:
        """Yield each teacher with the indices of its sequences in the batch [sequences of the teacher].

        Sequences without a trained token are left out.
        """
        assert batch.target_keys is not None
        is_trained = np.logical_or.reduceat(batch.loss_mask, batch.cu_seqlens[:-1])
        for teacher_number, model in enumerate(self._models):
            sequences = np.flatnonzero(is_trained & (batch.target_keys[:, 0] == teacher_number))
            if len(sequences):
                yield model, sequences


def _num_tokens(model: RankModel) -> int:
    assert model.shape is not None
    return model.shape.vocab_size


def _replace_unknown_tokens(batch: TokenBatch, model: RankModel) -> TokenBatch:
    # The teacher has no embedding for these ids. `mask_unknown_tokens` masked them, so their log-probs are not used.
    batch.token_ids = np.where(batch.token_ids < _num_tokens(model), batch.token_ids, 0)
    return batch


def compute_teacher_advantages(
    batch: RLBatch, teacher_logprobs: NDArray[np.float32], config: DistillationConfig
) -> dict[str, float]:
    """Set the batch's `advantages` [tokens] to the teacher's minus the policy's log-prob, in nats.

    `teacher_logprobs` are [tokens], the policy's log-probs the batch's `old_logprobs`. With `gamma` above 0, an
    advantage includes the discounted differences of the sample's later tokens. Returns metrics (METRICS).
    """
    mask = torch.from_numpy(batch.loss_mask)
    # A mean over no tokens would be NaN.
    if not mask.any():
        batch.per_token["advantages"] = np.zeros(len(mask), np.float32)
        return {}
    log_ratios = torch.from_numpy(teacher_logprobs - batch.per_token["old_logprobs"])
    log_ratios = torch.where(mask, log_ratios, 0.0)
    # Measure before clipping, so the metric is an unbiased estimate of the KL.
    metrics = {"distillation/reverse_kl": -float(log_ratios[mask].double().mean())}
    metrics |= _compute_band_metrics(batch, log_ratios)
    if (bound := config.max_log_ratio) is not None:
        metrics["distillation/clipped"] = float((log_ratios[mask].abs() > bound).double().mean())
        log_ratios = log_ratios.clamp(-bound, bound)
    # With zero values and lambda 1, GAE is the discounted sum of the later log-ratios.
    advantages, _ = gae(
        log_ratios,
        torch.zeros_like(log_ratios),
        torch.from_numpy(batch.cu_samples),
        gamma=config.gamma,
        gae_lambda=1.0,
        mask=mask,
    )
    batch.per_token["advantages"] = torch.where(mask, advantages, 0.0).numpy()
    return metrics


def _compute_band_metrics(batch: RLBatch, log_ratios: torch.Tensor) -> dict[str, float]:
    """Return the policy's mean log-prob minus the teacher's in each band of token indices. Empty bands are omitted.

    `log_ratios` [tokens] are the teacher's log-probs minus the policy's.
    """
    num_trained = np.cumsum(batch.loss_mask)
    # Subtract the trained tokens of earlier samples, so that indices start at 0 in each sample.
    num_earlier = np.concatenate([[0], num_trained])[batch.cu_samples[:-1]]
    token_indices = num_trained - 1 - np.repeat(num_earlier, np.diff(batch.cu_samples))
    metrics = {}
    for (name, first_index), end_index in zip(_BANDS.items(), [*list(_BANDS.values())[1:], np.inf], strict=True):
        is_in_band = torch.from_numpy(batch.loss_mask & (token_indices >= first_index) & (token_indices < end_index))
        if is_in_band.any():
            metrics[f"distillation/reverse_kl/{name}"] = -float(log_ratios[is_in_band].double().mean())
    return metrics


def add_reward_advantages(batch: RLBatch, recipe: Recipe) -> dict[str, float]:
    """Add advantages from rewards to the batch's `advantages` [tokens] from teachers. Return the estimator's metrics.

    The sum is A + distillation.kl_coefficient * (log-ratio of teacher to policy), with the advantage A from rewards.
    Policy gradients are linear in advantages, so the sum maximises both objectives.
    """
    teacher_advantages = batch.per_token["advantages"]
    metrics = compute_advantages(batch, recipe, 0.0)
    total_advantages = batch.per_token["advantages"] + recipe.distillation.kl_coefficient * teacher_advantages
    batch.per_token["advantages"] = total_advantages.astype(np.float32)
    return metrics
