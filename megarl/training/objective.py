"""Objectives: per-token losses of a microbatch, from the formulas of `algorithms`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.keywords import supported_kwargs
from megarl.algorithms.kl import KL_ESTIMATORS
from megarl.algorithms.policy_losses import POLICY_LOSSES, LossAndMetrics
from megarl.algorithms.preference_losses import PREFERENCE_LOSSES, bradley_terry, kto
from megarl.algorithms.sequences import sequence_of_tokens, sequence_sums
from megarl.algorithms.value_losses import clipped as clipped_values
from megarl.config import AlgorithmConfig, CriticConfig, PreferenceConfig
from megarl.files.import_path import function_of
from megarl.training.batch import Microbatch, whole_row
from megarl.types import ConfigError


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Numbers of a loss that change from update to update."""

    kl_coefficient: float
    """Weight of the KL to the reference (RL)."""
    kto_kl: float | None = None
    """The policy's KL from the reference in nats an answer, not negative, that KTO compares answers with."""


Objective = Callable[[Tensor, Microbatch, StepNumbers], LossAndMetrics]
"""(model's output, microbatch, numbers of the update) -> (loss, metrics), per token.

A policy's output is log-probs and entropies [2, tokens], a critic's or reward model's values [1, tokens].
"""


def supervised(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> LossAndMetrics:
    """Negative log-likelihood of the trained tokens."""
    policy_logprobs, entropies = output
    return -policy_logprobs, {"train/entropy": entropies}


def policy_objective(config: AlgorithmConfig) -> Objective:
    """The policy loss a recipe names, corrected, with its KL to the reference and its entropy bonus where it has them.

    Metrics: `train/` those of the policy loss and `entropy`; `kl/reference` where the KL is in the loss, with
    algorithm.k3_max `kl/capped`, 1 on tokens whose estimate is held there.
    """
    policy_loss: Callable[..., LossAndMetrics] = function_of(config.policy_loss, POLICY_LOSSES, "algorithm.policy_loss")
    settings = supported_kwargs(
        policy_loss, config.model_dump(include={"clip_low", "clip_high", "dual_clip", "max_ratio"})
    )
    settings |= config.policy_loss_kwargs
    is_of_sequences = "cu_seqlens" in signature(policy_loss).parameters
    estimate: Callable[..., Tensor] = KL_ESTIMATORS[config.kl_estimator]
    estimate_settings = supported_kwargs(estimate, {"k3_max": config.k3_max})

    def objective(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> LossAndMetrics:
        policy_logprobs, entropies = output
        given = batch.per_token
        arguments = policy_logprobs, old_logprobs_of(policy_logprobs, batch), given["advantages"]
        if is_of_sequences:
            loss, metrics = _on_whole_row(policy_loss, arguments, batch, settings)
        else:
            loss, metrics = policy_loss(*arguments, **settings)
        if loss.shape != policy_logprobs.shape:
            raise ConfigError(
                f"algorithm.policy_loss = {config.policy_loss}: returned a loss of shape {tuple(loss.shape)}; return "
                "one for each token, as policy_logprobs has them"
            )
        if (weights := given.get("importance_weights")) is not None:
            loss = loss * weights
        metrics = {f"train/{name}": value for name, value in metrics.items()} | {"train/entropy": entropies.detach()}
        if config.kl_placement == "loss" and config.kl_coefficient:
            divergence = estimate(policy_logprobs, given["reference_logprobs"], **estimate_settings)
            loss = loss + numbers.kl_coefficient * divergence
            metrics["kl/reference"] = divergence
            if config.k3_max is not None:
                metrics["kl/capped"] = (divergence >= config.k3_max).float()
        if config.entropy_coefficient:
            loss = loss - config.entropy_coefficient * entropies
        if (is_supervised := given.get("supervised")) is not None:
            loss = torch.where(is_supervised > 0, -policy_logprobs, loss)
        return loss, metrics

    return objective


def old_logprobs_of(policy_logprobs: Tensor, batch: Microbatch) -> Tensor:
    """The log-probs that the ratio starts from, [tokens], without gradient.

    The batch's `old_logprobs`; where they are NaN, or absent, those of this forward pass.
    """
    own = policy_logprobs.detach()
    given = batch.per_token.get("old_logprobs")
    return own if given is None else torch.where(given.isnan(), own, given)


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

    def objective(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> LossAndMetrics:
        given = batch.per_token
        loss, metrics = clipped_values(output[0], given["values"], given["returns"], clip=config.clip)
        return loss, {f"train/{name}": value for name, value in metrics.items()}

    return objective


def _of_answers(preference_loss: Callable[..., tuple[Tensor, Tensor]], config: PreferenceConfig) -> Objective:
    settings = supported_kwargs(preference_loss, config.model_dump(exclude={"loss", "loss_kwargs"}))
    settings |= config.loss_kwargs

    def objective(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> LossAndMetrics:
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
        return loss, metrics | ({"train/entropy": output[1].detach()} if len(output) > 1 else {})

    return objective


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
    """A loss of whole sequences, on this context-parallel rank's tokens of them."""
    row, own = batch.row, batch.row.local
    assert own is not None
    policy_logprobs, *others = (whole_row(tensor.detach(), row) for tensor in arguments)
    # Of the whole row this rank's tokens carry gradient: no token's reaches another's log-prob.
    policy_logprobs = policy_logprobs.index_copy(0, own, arguments[0])
    mask = whole_row(batch.mask.float(), row) > 0
    cu_seqlens = torch.tensor([0, *batch.padded.tolist()], device=own.device).cumsum(0)
    loss, metrics = policy_loss(policy_logprobs, *others, cu_seqlens, mask, **settings)
    return loss[own], {name: value[own] for name, value in metrics.items()}
