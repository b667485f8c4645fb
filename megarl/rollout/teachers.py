"""The driver's side of teachers: each one scores the samples of its sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.algorithms.advantages import gae
from megarl.cluster.batching import RankModel
from megarl.config import DistillationConfig, Recipe
from megarl.data.batch import TokenBatch
from megarl.rollout.batch import RLBatch

METRICS = {
    "distillation/reverse_kl": (
        "nats",
        "log-prob of a sampled token by the policy less that by its teacher, mean",
    ),
    "distillation/unknown": (
        "share",
        "sampled tokens that are not trained because the teacher's vocabulary lacks them",
    ),
    "distillation/clipped": ("share", "tokens whose log-ratio distillation.max_log_ratio holds"),
}
"""Names, units and meanings, for `tracking.table`."""


class Teachers:
    """The teachers of a run; which one a sample has, its source says."""

    def __init__(self, recipe: Recipe, models: Mapping[str, RankModel]) -> None:
        self._of_source = recipe.teacher_of_source
        self._models = [models[name] for name in recipe.teachers]

    def assign(self, batch: RLBatch) -> None:
        """Set the batch's `taught`: the number of each sequence's teacher, and of the sequence in the step."""
        of_sample = np.array([self._of_source[name] for name in batch.environments], np.int64)
        numbers = np.arange(batch.num_sequences)
        # Samples are numbered from 0, in order.
        batch.taught = np.column_stack([of_sample[batch.samples], numbers])

    def leave_out_unknown(self, batch: RLBatch) -> dict[str, float]:
        """Do not train tokens that their teacher's vocabulary lacks: padding of the policy's, which it may sample.

        Metric: `distillation/unknown`.
        """
        num_trained = batch.loss_mask.sum()
        for model, sequences in self._parts(batch):
            places = batch.tokens_of(sequences)
            batch.loss_mask[places] &= batch.token_ids[places] < _num_tokens(model)
        return {"distillation/unknown": float(1 - batch.loss_mask.sum() / max(num_trained, 1))}

    async def score(self, batch: TokenBatch) -> NDArray[np.float32]:
        """The teachers' log-probs of a batch's tokens, float32 [tokens], zero on the sequences' first tokens."""
        logprobs = np.zeros(len(batch.token_ids), np.float32)
        for model, sequences in self._parts(batch):
            logprobs[batch.tokens_of(sequences)] = await model.forward(_known(batch.select(sequences), model))
        return logprobs

    async def teach(self, minibatch: TokenBatch) -> None:
        """Have the teachers write the lessons that the policy's update on this minibatch reads."""
        for model, sequences in self._parts(minibatch):
            await model.teach(_known(minibatch.select(sequences), model))

    def _parts(self, batch: TokenBatch) -> Iterator[tuple[RankModel, NDArray[np.int64]]]:
        """Each teacher that has sequences in a batch, with their places."""
        assert batch.taught is not None
        for number, model in enumerate(self._models):
            sequences = np.flatnonzero(batch.taught[:, 0] == number)
            if len(sequences):
                yield model, sequences


def _num_tokens(model: RankModel) -> int:
    assert model.shape is not None
    return model.shape.vocab_size


def _known(batch: TokenBatch, model: RankModel) -> TokenBatch:
    """The batch, which it overwrites, with any token in place of those that a teacher has no embedding of."""
    batch.token_ids = np.where(batch.token_ids < _num_tokens(model), batch.token_ids, 0)
    return batch


def compute_teacher_advantages(
    batch: RLBatch, teacher_logprobs: NDArray[np.float32], config: DistillationConfig
) -> dict[str, float]:
    """Set the batch's `advantages`: the log-ratio of teacher to policy at each sampled token, in nats.

    `teacher_logprobs` are [tokens]; the policy's are `old_logprobs`. With `gamma` a token's advantage has those of the
    later tokens of its sample too, discounted. Metrics: `distillation/reverse_kl`, the mean over trained tokens of
    policy minus teacher log-prob, nats, an estimate of KL(policy || teacher); with `max_log_ratio`
    `distillation/clipped`, the share of tokens whose log-ratio is held.
    """
    mask = torch.from_numpy(batch.loss_mask)
    log_ratios = torch.from_numpy(teacher_logprobs - batch.per_token["old_logprobs"])
    log_ratios = torch.where(mask, log_ratios, 0.0)
    metrics = {"distillation/reverse_kl": -float(log_ratios[mask].double().mean())}
    if (bound := config.max_log_ratio) is not None:
        metrics["distillation/clipped"] = float((log_ratios[mask].abs() > bound).double().mean())
        log_ratios = log_ratios.clamp(-bound, bound)
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
