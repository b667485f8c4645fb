"""Objectives: a microbatch's part of the global loss, by the formulas of `algorithms`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.importance import gap_moments
from megarl.algorithms.keywords import supported_kwargs
from megarl.algorithms.kl import KL_ESTIMATORS, k3
from megarl.algorithms.policy_losses import POLICY_LOSSES, LossAndMetrics, is_of_sequences
from megarl.algorithms.preference_losses import PREFERENCE_LOSSES, bradley_terry, kto
from megarl.algorithms.sequences import sequence_of_tokens, sequence_sums
from megarl.algorithms.trial import ResultError, checked_policy_loss
from megarl.algorithms.value_losses import clipped as clipped_values
from megarl.config import AlgorithmConfig, CriticConfig, PreferenceConfig
from megarl.files.import_path import function_of
from megarl.tracking.metrics import Max, Mean, Metric, Sum
from megarl.training.batch import Microbatch, whole_row
from megarl.types import ConfigError

METRICS = {
    "train/loss": (
        "nats",
        "the loss as it is minimised, summed with its token weights, mean over the step's updates; without "
        "train/moe_*; of the policy gradient no measure of progress",
    ),
    "train/tokens": ("tokens", "trained tokens"),
    "train/entropy": ("nats", "entropy of the policy's distribution, mean over trained tokens"),
    "train/ptx_loss": ("nats", "loss of the conversations of data.ptx, mean over tokens"),
    "distillation/divergence": (
        "nats",
        "divergence of the policy from its teacher by distillation.divergence, mean over tokens",
    ),
    "kl/reference": (
        "nats",
        "divergence of the policy from the reference by algorithm.kl_estimator, mean over tokens (kto: of an answer)",
    ),
    "kl/update": (
        "nats",
        "divergence of the policy, before each update, from that of before the step's first, estimated by k3, mean "
        "over tokens; where a step has several updates and algorithm.old_logprobs is trainer",
    ),
    "kl/capped": ("share", "tokens whose estimate algorithm.k3_max holds"),
    "logprob_gap/max": ("nats", "the largest distance of the trainer's log-prob of a token from the engine's"),
    "logprob_gap/measured": ("share", "trained tokens of which both log-probs are at hand"),
    "preference/accuracy": ("share", "pairs whose chosen answer wins (kto: answers on their right side of the KL)"),
    "preference/margin": ("score", "by how much chosen answers win, mean"),
    "preference/chosen": ("score", "reward of chosen, or desirable, answers, mean"),
    "preference/rejected": ("score", "reward of rejected, or undesirable, answers, mean"),
}
"""Names, units and meanings, for `tracking.table`."""


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Numbers of a loss that change from update to update."""

    kl_coefficient: float
    """Weight of the KL to the reference (RL)."""
    kto_kl: float | None = None
    """The policy's KL from the reference in nats an answer, not negative, that KTO compares answers with."""


RowLoss = tuple[Tensor, Tensor, dict[str, Metric]]
"""A microbatch's part of the global loss, a count of tokens that Megatron asks for, and the microbatch's metrics."""


class Objective(Protocol):
    """A microbatch's part of the global loss, from the model's output.

    A policy's output is log-probs and entropies [2, tokens], a critic's or reward model's values [1, tokens].
    """

    def __call__(self, output: Tensor, batch: Microbatch, numbers: StepNumbers) -> RowLoss: ...


def supervised(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> RowLoss:
    """Negative log-likelihood of the trained tokens. Metric: `train/entropy`."""
    policy_logprobs, entropies = output
    return _weighted(-policy_logprobs, {"train/entropy": entropies}, batch, batch.mask)


def policy_objective(config: AlgorithmConfig) -> Objective:
    """The policy loss a recipe names, corrected, with its KL to the reference and its entropy bonus where it has them.

    Metrics: `train/` those of the policy loss and `entropy`; `kl/reference` where the KL is in the loss, with
    algorithm.k3_max `kl/capped`, 1 on tokens whose estimate is held there; `train/ptx_loss` where conversations are
    learnt beside; `logprob_gap/` as in `rollout.metrics.update_metrics`. All but the loss are the policy's tokens'.
    """
    policy_loss: Callable[..., LossAndMetrics] = function_of(config.policy_loss, POLICY_LOSSES, "algorithm.policy_loss")
    settings = supported_kwargs(
        policy_loss, config.model_dump(include={"clip_low", "clip_high", "dual_clip", "max_ratio"})
    )
    settings |= config.policy_loss_kwargs
    is_of_trajectories = is_of_sequences(policy_loss)
    estimate: Callable[..., Tensor] = KL_ESTIMATORS[config.kl_estimator]
    estimate_settings = supported_kwargs(estimate, {"k3_max": config.k3_max})

    def objective(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> RowLoss:
        policy_logprobs, entropies = output
        given = batch.per_token
        old_logprobs = old_logprobs_of(policy_logprobs, batch)
        arguments = policy_logprobs, old_logprobs, given["advantages"]
        try:
            if is_of_trajectories:
                loss, metrics = _on_whole_row(policy_loss, arguments, batch, settings)
            else:
                loss, metrics = checked_policy_loss(policy_loss(*arguments, **settings), policy_logprobs)
        except ResultError as error:
            raise ConfigError(f"algorithm.policy_loss = {config.policy_loss}: {error}") from error
        if (weights := given.get("importance_weights")) is not None:
            loss = loss * weights
        metrics = {f"train/{name}": value for name, value in metrics.items()} | {
            "train/entropy": entropies.detach(),
        }
        if config.old_logprobs == "trainer":
            metrics["kl/update"] = k3(old_logprobs, policy_logprobs.detach())
        if config.kl_placement == "loss" and config.kl_coefficient:
            divergence = estimate(policy_logprobs, given["reference_logprobs"], **estimate_settings)
            loss = loss + numbers.kl_coefficient * divergence
            metrics["kl/reference"] = divergence
            if config.k3_max is not None:
                metrics["kl/capped"] = (divergence >= config.k3_max).float()
        if config.entropy_coefficient:
            loss = loss - config.entropy_coefficient * entropies
        is_of_policy = batch.mask
        logged: dict[str, Metric] = {}
        if (is_supervised := given.get("supervised")) is not None:
            loss = torch.where(is_supervised > 0, -policy_logprobs, loss)
            is_of_policy = batch.mask & (is_supervised == 0)
            logged["train/ptx_loss"] = _mean(-policy_logprobs.detach()[batch.mask & (is_supervised > 0)])
        if (rollout_logprobs := given.get("rollout_logprobs")) is not None:
            # Where the ratio starts from the engine, this pass has the trainer's log-probs.
            trainer_logprobs = policy_logprobs.detach() if config.old_logprobs == "rollout" else old_logprobs
            logged |= _gap(trainer_logprobs[is_of_policy], rollout_logprobs[is_of_policy])
        total, count, of_tokens = _weighted(loss, metrics, batch, is_of_policy)
        return total, count, of_tokens | logged

    return objective


def old_logprobs_of(policy_logprobs: Tensor, batch: Microbatch) -> Tensor:
    """The log-probs that the ratio starts from, [tokens], without gradient.

    The batch's `old_logprobs`; where they are NaN, or absent, those of this forward pass.
    """
    own = policy_logprobs.detach()
    given = batch.per_token.get("old_logprobs")
    return own if given is None else torch.where(given.isnan(), own, given)


def divergence_objective(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> RowLoss:
    """The divergence of policy and teacher, from the output [3, tokens] of a `models.distillation.StudentModel`.

    Metrics: `distillation/divergence`, nats a token, `train/entropy`, `logprob_gap/` as of `policy_objective`.
    """
    policy_logprobs, entropies, divergences = output
    metrics = {"distillation/divergence": divergences, "train/entropy": entropies}
    total, count, logged = _weighted(divergences, metrics, batch, batch.mask)
    if (rollout_logprobs := batch.per_token.get("rollout_logprobs")) is not None:
        logged |= _gap(policy_logprobs.detach()[batch.mask], rollout_logprobs[batch.mask])
    return total, count, logged


def preference_objective(config: PreferenceConfig) -> Objective:
    """The loss of answers that a recipe names; of pairs a row holds whole ones, the chosen answer before the rejected.

    Metrics: `preference/accuracy`, the share of pairs that are won (kto: of answers on their right side of the KL);
    `preference/margin`, by how much; `preference/chosen` and `preference/rejected`, the answers' rewards.
    """
    return _of_answers(PREFERENCE_LOSSES[config.loss], config)


def reward_objective(config: PreferenceConfig) -> Objective:
    """The loss of a reward model: metrics as of preferences, `chosen` and `rejected` being its scores."""
    return _of_answers(bradley_terry, config)


def critic_objective(config: CriticConfig) -> Objective:
    """The loss of a critic. Metrics: `train/clipped`, the share of tokens whose value is held back."""

    def objective(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> RowLoss:
        given = batch.per_token
        loss, metrics = clipped_values(output[0], given["values"], given["returns"], clip=config.clip)
        return _weighted(loss, {f"train/{name}": value for name, value in metrics.items()}, batch, batch.mask)

    return objective


def _of_answers(preference_loss: Callable[..., tuple[Tensor, Tensor]], config: PreferenceConfig) -> Objective:
    settings = supported_kwargs(preference_loss, config.model_dump(exclude={"loss", "loss_kwargs"}))
    settings |= config.loss_kwargs

    def objective(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> RowLoss:
        per_token = output[0]
        row, own = batch.row, batch.row.local
        assert own is not None
        cu_seqlens = torch.tensor([0, *batch.padded.tolist()], device=own.device).cumsum(0)
        mask = whole_row(batch.mask.float(), row) > 0
        reference = batch.per_token.get("reference_logprobs", torch.zeros_like(per_token))
        sums, held, lengths = (
            sequence_sums(whole_row(values.detach(), row), cu_seqlens, mask)
            for values in (per_token, reference, torch.ones_like(per_token))
        )
        sums.requires_grad_()
        if preference_loss is kto:
            assert numbers.kto_kl is not None
            desirable = sequence_sums(whole_row(batch.per_token["desirable"], row), cu_seqlens, mask) > 0
            losses, rewards = preference_loss(sums, held, desirable, kl=numbers.kto_kl, **settings)
            share = losses.detach() / lengths
            metrics = _judged(rewards, desirable, config.beta * numbers.kto_kl)
        else:
            pairs = (values.view(-1, 2) for values in (sums, held, lengths))
            losses, rewards = preference_loss(*pairs, **settings)
            # The weights count two sequences a pair.
            losses = 2 * losses
            share, metrics = (losses.detach() / lengths.view(-1, 2).sum(1)).repeat_interleave(2), _won(rewards)
        [slopes] = torch.autograd.grad(losses.sum(), sums)
        # A loss spread over its tokens; each token's slope is its sum's.
        sequence = sequence_of_tokens(cu_seqlens, len(mask))[own]
        loss = share[sequence] + slopes[sequence] * (per_token - per_token.detach())
        if len(output) > 1:
            metrics["train/entropy"] = output[1].detach()
        return _weighted(loss, metrics, batch, batch.mask)

    return objective


def _weighted(loss: Tensor, metrics: Mapping[str, Tensor], batch: Microbatch, is_counted: Tensor) -> RowLoss:
    """The sum of weight * loss, and the means of metrics over the tokens that are counted.

    `loss` and `is_counted` are [tokens]; a metric is [tokens], or one value a sequence or pair: then all count.
    """
    # Selecting instead of multiplying: what an untrained token's loss is, even inf, must not reach the sum.
    total = (torch.where(batch.mask, loss, 0.0) * batch.per_token["token_weights"]).sum()
    logged: dict[str, Metric] = {"train/loss": Sum(total.item()), "train/tokens": Sum(float(batch.mask.sum()))}
    for name, values in metrics.items():
        logged[name] = _mean(values.detach()[is_counted] if len(values) == len(is_counted) else values.detach())
    return total, torch.ones((), dtype=torch.int, device=total.device), logged


def _mean(values: Tensor) -> Mean:
    return Mean(values.mean().item() if len(values) else 0.0, len(values))


def _gap(trainer_logprobs: Tensor, rollout_logprobs: Tensor) -> dict[str, Metric]:
    """`logprob_gap/`: of the tokens [tokens] whose two log-probs are of the same weights; the others' second is NaN."""
    is_measured = ~rollout_logprobs.isnan()
    logged: dict[str, Metric] = {"logprob_gap/measured": _mean(is_measured.double())}
    if is_measured.any():
        trainer, engine = trainer_logprobs[is_measured].double(), rollout_logprobs[is_measured].double()
        logged["logprob_gap/max"] = Max((trainer - engine).abs().max().item())
        logged |= {f"logprob_gap/{name}": _mean(part) for name, part in gap_moments(trainer, engine).items()}
    return logged


def _won(rewards: Tensor) -> dict[str, Tensor]:
    chosen, rejected = rewards.unbind(1)
    return {
        "preference/accuracy": (chosen > rejected).float(),
        "preference/margin": chosen - rejected,
        "preference/chosen": chosen,
        "preference/rejected": rejected,
    }


def _judged(rewards: Tensor, desirable: Tensor, threshold: float) -> dict[str, Tensor]:
    margin = torch.where(desirable, rewards - threshold, threshold - rewards)
    return {
        "preference/accuracy": (margin > 0).float(),
        "preference/margin": margin,
        "preference/chosen": rewards[desirable],
        "preference/rejected": rewards[~desirable],
    }


def _on_whole_row(
    policy_loss: Callable[..., LossAndMetrics],
    arguments: tuple[Tensor, ...],
    batch: Microbatch,
    settings: dict[str, Any],
) -> LossAndMetrics:
    """A loss of whole trajectories, all segments of each together, on this context-parallel rank's tokens of them."""
    row, own = batch.row, batch.row.local
    assert own is not None
    policy_logprobs, *others = (whole_row(tensor.detach(), row) for tensor in arguments)
    # Of the whole row this rank's tokens carry gradient: no token's reaches another's log-prob.
    policy_logprobs = policy_logprobs.index_copy(0, own, arguments[0])
    mask = whole_row(batch.mask.float(), row) > 0
    is_last = np.diff(batch.samples, append=-1) != 0
    cu_samples = torch.tensor([0, *batch.padded.cumsum()[is_last].tolist()], device=own.device)
    result = policy_loss(policy_logprobs, *others, cu_samples, mask, **settings)
    loss, metrics = checked_policy_loss(result, policy_logprobs)
    return loss[own], {name: value[own] for name, value in metrics.items()}
