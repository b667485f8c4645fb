"""Training objectives: a microbatch's part of the global loss, by the formulas of `algorithms`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.importance import importance_weights, mismatch_moments, unbounded_weights, weight_metrics
from megarl.algorithms.keywords import supported_kwargs
from megarl.algorithms.kl import KL_ESTIMATORS, k3
from megarl.algorithms.log_ratio import log_ratio
from megarl.algorithms.policy_losses import POLICY_LOSSES, LossAndMetrics, is_sequence_loss, ratio
from megarl.algorithms.preference_losses import PREFERENCE_LOSSES, bradley_terry, kto
from megarl.algorithms.sequence_masks import drop_off_policy
from megarl.algorithms.sequences import sequence_of_tokens, sequence_sums
from megarl.algorithms.trial import ResultError, checked_policy_loss, refuse_missing_metrics
from megarl.algorithms.value_losses import clipped_value_loss
from megarl.config import AlgorithmConfig, CriticConfig, PreferenceConfig
from megarl.files.import_path import function_of
from megarl.tracking.metric_rows import MetricRow
from megarl.training.rows.metrics import (
    KL,
    LOSS,
    MISMATCH,
    RATIO,
    TOKENS,
    RowMetric,
    Signal,
    max_of,
    mean_of,
    mean_of_all,
    means_of,
    sum_of,
)
from megarl.training.rows.microbatch import Microbatch, whole_row
from megarl.types import ConfigError

METRICS = (
    MetricRow("train/entropy", "nats", "mean entropy of the policy's distribution over trained tokens"),
    MetricRow("train/ptx_loss", "nats", "mean loss per token of the conversations of data.ptx"),
    MetricRow(
        "kl/update",
        "nats",
        "mean divergence per token of the policy before each update from the policy before the step's first update, k3 "
        "estimate; if a step has several updates and algorithm.old_logprobs is trainer",
    ),
    MetricRow("kl/capped", "share", "fraction of tokens with an estimate limited by algorithm.k3_max"),
    MetricRow("logprob_gap/max", "nats", "largest difference between trainer and engine log-probs of one token"),
    MetricRow(
        "logprob_gap/bit_equal",
        "share",
        "fraction of compared tokens with equal log-probs in trainer and engine, bit by bit",
    ),
    MetricRow("logprob_gap/measured", "share", "fraction of trained tokens with log-probs of both trainer and engine"),
    MetricRow(
        "preference/accuracy",
        "share",
        "fraction of pairs won by the chosen answer (kto: answers on their correct side of the KL)",
    ),
    MetricRow("preference/margin", "score", "mean reward difference of chosen and rejected answers"),
    MetricRow("preference/chosen", "score", "mean reward of chosen, or desirable, answers"),
    MetricRow("preference/rejected", "score", "mean reward of rejected, or undesirable, answers"),
)


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """Numbers in a loss that change between updates."""

    kl_coefficient: float
    """Weight of the KL to the reference model (RL)."""
    kto_kl: float | None = None
    """KTO's reference point: the policy's KL from the reference in nats per answer, at least 0."""


RowLoss = tuple[Tensor, Tensor, dict[str | Signal, RowMetric]]
"""A microbatch's part of the global loss [], a token count [] that Megatron requires, and metrics.

A metric that decides about an update has a `Signal` as key, any other metric its name.
"""


class Objective(Protocol):
    """Function from a model's output to a microbatch's part of the global loss.

    Output of a policy: log-probs and entropies [2, tokens]. Output of a critic or reward model: values [1, tokens].
    """

    def __call__(self, output: Tensor, batch: Microbatch, numbers: StepNumbers) -> RowLoss: ...


def supervised_loss(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> RowLoss:
    """Return the negative log-likelihood of the trained tokens, for `output` [2, tokens]. Metric: `train/entropy`."""
    policy_logprobs, entropies = output
    return weighted_loss(-policy_logprobs, {"train/entropy": entropies}, batch, batch.mask)


def policy_objective(config: AlgorithmConfig) -> Objective:
    """Return the recipe's policy loss, with its importance weights, KL to the reference and entropy bonus.

    Metrics over the policy's tokens: the policy loss's and `entropy`, as `train/`; `logprob_gap/`; `kl/reference` if
    the KL is part of the loss; `kl/capped` with algorithm.k3_max; `train/ptx_loss` if conversations are trained too;
    `importance/` if this function computes the importance weights.
    """
    policy_loss: Callable[..., LossAndMetrics] = function_of(config.policy_loss, POLICY_LOSSES, "algorithm.policy_loss")
    settings = supported_kwargs(
        policy_loss, config.model_dump(include={"clip_low", "clip_high", "dual_clip", "max_ratio", "log_ratio_penalty"})
    )
    settings |= config.policy_loss_kwargs
    if config.off_policy_limit is not None:
        policy_loss = drop_off_policy(policy_loss, limit=config.off_policy_limit)
    return _PolicyObjective(config, policy_loss, settings, takes_whole_row=is_sequence_loss(policy_loss))


@dataclass(frozen=True, slots=True)
class _PolicyObjective:
    """The objective of `policy_objective`, from an `algorithm` section."""

    config: AlgorithmConfig
    policy_loss: Callable[..., LossAndMetrics]
    settings: Mapping[str, Any]
    """Keyword arguments of the policy loss."""
    _: KW_ONLY
    takes_whole_row: bool

    def __call__(self, output: Tensor, batch: Microbatch, numbers: StepNumbers) -> RowLoss:
        """Return a row's loss and metrics. `output` [2, tokens]: log-probs and entropies."""
        config, per_token = self.config, batch.per_token
        # Conversations of data.ptx share the row: their tokens get the supervised loss and none of the policy terms.
        is_supervised = per_token.get("supervised")
        is_of_policy = batch.mask if is_supervised is None else batch.mask & (is_supervised == 0)
        policy_logprobs, entropies = _select_gradient(is_of_policy, output)
        old_logprobs = old_or_current_logprobs(policy_logprobs, batch)
        weights, metrics_of_weights = self._importance_weights(old_logprobs, batch)
        # A token with weight 0 has no policy loss, so an infinite one must not reach its gradient.
        loss_logprobs = policy_logprobs if weights is None else _select_gradient(weights != 0, policy_logprobs)
        # Copies, because a user's loss may write into them, and the other terms read the originals.
        arguments = loss_logprobs, old_logprobs.clone(), batch.per_token["advantages"].clone()
        try:
            if self.takes_whole_row:
                loss, loss_metrics = compute_sequence_loss(self.policy_loss, arguments, batch, self.settings)
            else:
                result = self.policy_loss(*arguments, **self.settings)
                loss, loss_metrics = checked_policy_loss(result, policy_logprobs)
            refuse_missing_metrics(loss_metrics, config.needed_loss_metrics)
        except ResultError as error:
            raise ConfigError(f"algorithm.policy_loss = {config.policy_loss}: {error}") from error
        ratios = loss_metrics.pop("ratio", None)
        token_metrics: dict[str | Signal, Tensor] = {f"train/{name}": value for name, value in loss_metrics.items()}
        if ratios is not None:
            token_metrics[RATIO] = ratios
        token_metrics["train/entropy"] = entropies.detach()
        if (penalties := batch.per_token.get("log_ratio_penalties")) is not None:
            loss = loss + penalties * log_ratio(policy_logprobs, old_logprobs).abs()
        if weights is not None:
            loss = torch.where(weights == 0, 0.0, loss * weights)
        token_metrics |= metrics_of_weights
        if config.old_logprobs == "trainer":
            token_metrics["kl/update"] = k3(old_logprobs, policy_logprobs.detach())
        if config.kl_placement == "loss" and config.kl_coefficient:
            kl_loss, kl_metrics = self._kl_loss(policy_logprobs, old_logprobs, batch, numbers.kl_coefficient)
            loss = loss + kl_loss
            token_metrics |= kl_metrics
        if config.entropy_coefficient:
            loss = loss - config.entropy_coefficient * entropies
        logged: dict[str | Signal, RowMetric] = {}
        if is_supervised is not None:
            loss = torch.where(is_supervised > 0, -output[0], loss)
            logged["train/ptx_loss"] = mean_of(-output[0], batch.mask & (is_supervised > 0))
        logged |= self._measure_mismatch(policy_logprobs, old_logprobs, batch, is_of_policy)
        total, count, means = weighted_loss(loss, token_metrics, batch, is_of_policy)
        return total, count, means | logged

    def _measure_mismatch(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, batch: Microbatch, is_of_policy: Tensor
    ) -> dict[str | Signal, RowMetric]:
        if (rollout_logprobs := batch.per_token.get("rollout_logprobs")) is None:
            return {}
        # With old_logprobs = rollout, no earlier pass computed the trainer's log-probs, so take this pass's.
        trainer_logprobs = policy_logprobs.detach() if self.config.old_logprobs == "rollout" else old_logprobs
        return mismatch_metrics(trainer_logprobs, rollout_logprobs, is_of_policy)

    def _importance_weights(
        self, old_logprobs: Tensor, batch: Microbatch
    ) -> tuple[Tensor | None, Mapping[str | Signal, Tensor]]:
        """Return the factors of the policy loss [tokens] (None: all 1), and metrics of weights that this function
        computed.
        """
        weights = batch.per_token.get("importance_weights")
        if weights is not None or self.config.importance_sampling is None:
            return weights, {}
        weights, unbounded = _compute_importance_weights(self.config, old_logprobs, batch)
        return weights, {**weight_metrics(weights, unbounded)}

    def _kl_loss(
        self, policy_logprobs: Tensor, old_logprobs: Tensor, batch: Microbatch, coefficient: float
    ) -> tuple[Tensor, Mapping[str | Signal, Tensor]]:
        """Return the loss of the KL to the reference, and its metrics, [tokens] each."""
        config = self.config
        estimate: Callable[..., Tensor] = KL_ESTIMATORS[config.kl_estimator]
        estimate_settings = supported_kwargs(estimate, {"k3_max": config.k3_max})
        divergence = estimate(policy_logprobs, batch.per_token["reference_logprobs"], **estimate_settings)
        metrics: dict[str | Signal, Tensor] = {KL: divergence}
        if config.k3_max is not None:
            metrics["kl/capped"] = (divergence >= config.k3_max).float()
        weight = ratio(policy_logprobs, old_logprobs) if config.kl_unbiased else 1.0
        return coefficient * weight * divergence, metrics


def old_or_current_logprobs(policy_logprobs: Tensor, batch: Microbatch) -> Tensor:
    """Return the log-probs [tokens] in the ratio's denominator, without gradient; `policy_logprobs` is [tokens].

    They are the batch's `old_logprobs`, or this pass's where these are NaN or missing.
    """
    current_logprobs = policy_logprobs.detach()
    old_logprobs = batch.per_token.get("old_logprobs")
    return (
        current_logprobs if old_logprobs is None else torch.where(old_logprobs.isnan(), current_logprobs, old_logprobs)
    )


def _compute_importance_weights(
    config: AlgorithmConfig, old_logprobs: Tensor, batch: Microbatch
) -> tuple[Tensor, Tensor]:
    """Return the weights of algorithm.importance_sampling with and without bounds, [tokens] each.

    `old_logprobs` is [tokens]. Corrections of whole samples need each sample within one row.
    """
    correction, row, local = config.importance_sampling, batch.row, batch.row.local
    assert correction is not None
    assert local is not None
    old_row, rollout_row, mask_row = (
        whole_row(values, row) for values in (old_logprobs, batch.per_token["rollout_logprobs"], batch.mask.float())
    )
    token_arguments = old_row, rollout_row, _sample_borders(batch), mask_row > 0
    weights = importance_weights(correction, *token_arguments, **config.correction_settings)
    return weights[local], unbounded_weights(correction, *token_arguments)[local]


def preference_objective(config: PreferenceConfig) -> Objective:
    """Return the recipe's preference loss. A row holds whole pairs, the chosen answer before the rejected one.

    Metrics: `preference/accuracy`, `preference/margin`, `preference/chosen`, `preference/rejected`.
    """
    return _make_answer_objective(PREFERENCE_LOSSES[config.loss], config)


def reward_objective(config: PreferenceConfig) -> Objective:
    """Return the Bradley-Terry loss of a reward model. Metrics as in `preference_objective`, from the model's
    scores.
    """
    return _make_answer_objective(bradley_terry, config)


def critic_objective(config: CriticConfig) -> Objective:
    """Return the loss of a critic. Metric: `train/clipped`, the fraction of tokens with a clipped value."""

    def objective(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> RowLoss:
        per_token, [predicted_values] = batch.per_token, _select_gradient(batch.mask, output)
        loss, metrics = clipped_value_loss(
            predicted_values, per_token["values"], per_token["returns"], clip=config.clip
        )
        return weighted_loss(loss, {f"train/{name}": value for name, value in metrics.items()}, batch, batch.mask)

    return objective


def _make_answer_objective(
    preference_loss: Callable[..., tuple[Tensor, Tensor]], config: PreferenceConfig
) -> Objective:
    """Return the objective for a loss of whole answers, such as DPO's."""
    settings = supported_kwargs(preference_loss, config.model_dump(exclude={"loss", "loss_kwargs"}))
    settings |= config.loss_kwargs

    def objective(output: Tensor, batch: Microbatch, numbers: StepNumbers) -> RowLoss:
        """Return a row's loss and metrics. `output[0]` [own tokens] has log-probs, or a reward model's scores."""
        token_values = output[0]
        row, local_positions = batch.row, batch.row.local
        assert local_positions is not None
        cu_seqlens = torch.tensor([0, *batch.padded_lengths.tolist()], device=local_positions.device).cumsum(0)
        mask = whole_row(batch.mask.float(), row) > 0
        reference_logprobs = batch.per_token.get("reference_logprobs", torch.zeros_like(token_values))
        sums, reference_sums, lengths = (
            sequence_sums(whole_row(values.detach(), row), cu_seqlens, mask)
            for values in (token_values, reference_logprobs, torch.ones_like(token_values))
        )
        # An answer's tokens may be on several context-parallel ranks. First the loss is differentiated by the answers'
        # sums. Then each rank applies these slopes to its own tokens.
        sums.requires_grad_()
        if preference_loss is kto:
            assert numbers.kto_kl is not None
            is_desirable = sequence_sums(whole_row(batch.per_token["desirable"], row), cu_seqlens, mask) > 0
            losses, rewards = preference_loss(sums, reference_sums, is_desirable, kl=numbers.kto_kl, **settings)
            token_loss = losses.detach() / lengths
            answer_metrics = _kto_metrics(rewards, is_desirable, config.beta * numbers.kto_kl)
        else:
            pairs = (values.view(-1, 2) for values in (sums, reference_sums, lengths))
            losses, rewards = preference_loss(*pairs, **settings)
            # Token weights divide by the number of sequences, two per pair: factor 2.
            losses = 2 * losses
            token_loss = (losses.detach() / lengths.view(-1, 2).sum(1)).repeat_interleave(2)
            answer_metrics = _pair_metrics(rewards)
        [slopes] = torch.autograd.grad(losses.sum(), sums)
        # Each token gets an equal share of its answer's loss as value, and the slope of its answer's sum as gradient.
        sequence = sequence_of_tokens(cu_seqlens, len(mask))[local_positions]
        loss = token_loss[sequence] + slopes[sequence] * (token_values - token_values.detach())
        token_metrics = {"train/entropy": output[1]} if len(output) > 1 else {}
        total, count, logged = weighted_loss(loss, token_metrics, batch, batch.mask)
        return total, count, logged | answer_metrics

    return objective


def weighted_loss(
    loss: Tensor, metrics: Mapping[str, Tensor] | Mapping[str | Signal, Tensor], batch: Microbatch, is_counted: Tensor
) -> RowLoss:
    """Return the sum of weight * loss, and the means of metrics over the counted tokens. All tensors are [tokens]."""
    # Select instead of multiplying: an untrained token's loss, even inf, must not reach the sum.
    total = (torch.where(batch.mask, loss, 0.0) * batch.per_token["token_weights"]).sum()
    logged: dict[str | Signal, RowMetric] = {LOSS: sum_of(total), TOKENS: sum_of(batch.mask)}
    logged |= means_of(metrics, is_counted)
    # Megatron's schedules require a token count. It has no effect: the token weights are already normalised.
    return total, torch.ones((), dtype=torch.int, device=total.device), logged


def _select_gradient(is_trained: Tensor, output: Tensor) -> Tensor:
    """Return a model's output [rows, tokens] with gradient on the trained tokens only.

    Selecting the loss alone is not enough: a gradient of zero times an infinite slope is NaN.
    """
    return torch.where(is_trained, output, output.detach())


def mismatch_metrics(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, is_counted: Tensor
) -> dict[str | Signal, RowMetric]:
    """Return `logprob_gap/`: the mismatch of trainer and engine over the counted tokens.

    All tensors are [tokens]. Tokens with a `rollout_logprobs` of NaN are left out.
    """
    is_sampled = rollout_logprobs.isnan().logical_not()
    is_measured = is_counted & is_sampled
    trainer, engine = trainer_logprobs.double(), rollout_logprobs.double()
    logged: dict[str | Signal, RowMetric] = {
        "logprob_gap/measured": mean_of(is_sampled.double(), is_counted),
        "logprob_gap/bit_equal": mean_of((trainer == engine).double(), is_measured, needs_tokens=True),
        "logprob_gap/max": max_of((trainer - engine).abs(), is_measured),
    }
    moments = mismatch_moments(trainer, engine)
    token_metrics: dict[str | Signal, Tensor] = {MISMATCH: moments.pop("mean")}
    token_metrics |= {f"logprob_gap/{name}": values for name, values in moments.items()}
    return logged | means_of(token_metrics, is_measured, needs_tokens=True)


def _pair_metrics(rewards: Tensor) -> dict[str, RowMetric]:
    """Return metrics of pairs of answers, from their rewards [pairs, 2]: chosen, rejected."""
    chosen_rewards, rejected_rewards = rewards.unbind(1)
    return {
        "preference/accuracy": mean_of_all((chosen_rewards > rejected_rewards).float()),
        "preference/margin": mean_of_all(chosen_rewards - rejected_rewards),
        "preference/chosen": mean_of_all(chosen_rewards),
        "preference/rejected": mean_of_all(rejected_rewards),
    }


def _kto_metrics(rewards: Tensor, is_desirable: Tensor, threshold: float) -> dict[str, RowMetric]:
    """Return KTO's metrics, from `rewards` and `is_desirable` [answers]. An answer wins on its side of `threshold`."""
    margins = torch.where(is_desirable, rewards - threshold, threshold - rewards)
    return {
        "preference/accuracy": mean_of_all((margins > 0).float()),
        "preference/margin": mean_of_all(margins),
        "preference/chosen": mean_of(rewards, is_desirable),
        "preference/rejected": mean_of(rewards, ~is_desirable),
    }


def compute_sequence_loss(
    policy_loss: Callable[..., LossAndMetrics],
    arguments: tuple[Tensor, ...],
    batch: Microbatch,
    settings: Mapping[str, Any],
) -> LossAndMetrics:
    """Return the loss and metrics of this context-parallel rank's tokens, [tokens] each.

    `policy_loss` needs whole samples (`is_sequence_loss`), so it is called with the whole row. `arguments` are this
    rank's [tokens], the policy's log-probs first.
    """
    row, local_positions = batch.row, batch.row.local
    assert local_positions is not None
    policy_logprobs, *other_arguments = (whole_row(tensor.detach(), row) for tensor in arguments)
    # Other ranks' log-probs are constants here, so a token's loss may have a gradient for its own log-prob only.
    policy_logprobs = policy_logprobs.index_copy(0, local_positions, arguments[0])
    mask = whole_row(batch.mask.float(), row) > 0
    result = policy_loss(policy_logprobs, *other_arguments, _sample_borders(batch), mask, **settings)
    loss, metrics = checked_policy_loss(result, policy_logprobs)
    return loss[local_positions], {name: value[local_positions] for name, value in metrics.items()}


def _sample_borders(batch: Microbatch) -> Tensor:
    """Return the ends of samples in the padded row, int64 [samples + 1], starting with 0."""
    is_last = np.diff(batch.samples, append=-1) != 0
    return torch.tensor([0, *batch.padded_lengths.cumsum()[is_last].tolist()], device=batch.mask.device)
