"""The optimizer's step of a trained model, or the reason why an update is skipped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megarl.tracking.metrics import Mean, Metric, Sum, merge
from megarl.tracking.outcomes import Update, UpdateOutcome, merge_measured
from megarl.tracking.spikes import UpdateLimits
from megarl.training.model import ModelShard
from megarl.training.optimizer import step_if_finite
from megarl.training.roles import Role
from megarl.training.rows.metrics import KL, LOSS, MISMATCH, RATIO, TOKENS, Signal, losses_of, name_metrics, select


class OptimizerStep:
    """Steps the optimizer of `model` and its learning-rate schedule, unless an update is not finite or exceeds a limit.

    `skipped_in_a_row` is the number of consecutive updates that were not finite.
    """

    def __init__(self, model: ModelShard, optimizer: ChainedOptimizer, schedule: OptimizerParamScheduler) -> None:
        self._model, self._optimizer, self._schedule = model, optimizer, schedule
        self.skipped_in_a_row = 0

    def step_or_skip(self, role: Role, rows: Sequence[Mapping[str | Signal, Metric]], limits: UpdateLimits) -> Update:
        """Step the schedule, and the optimizer unless the update is empty, not finite or above a limit. A collective.

        `rows` has each row's metrics.
        """
        # The schedule advances for skipped updates too, so it ends with the last update.
        self._schedule.step(increment=1)
        learning_rate = self._optimizer.param_groups[0]["lr"]
        losses = [loss for row in rows for loss in losses_of(row)]
        num_tokens = sum(tokens.number for tokens in select(rows, TOKENS))
        losses_are_finite = bool(np.isfinite(losses).all())
        is_finite_on_all_ranks, has_tokens = self._reduce_flags(
            losses_are_finite, num_tokens > 0, self._finite_flags_outside_norm()
        )
        is_mismatch_exceeded = self._is_mean_above(role.max_logprob_gap, rows, MISMATCH)
        exceeds_policy_limit = self._is_mean_above(role.skip_ratio, rows, RATIO) or is_mismatch_exceeded
        is_spike = self._is_sum_above(limits.loss, rows, LOSS)
        # Without a trained token, weight decay and momentum would still move the weights.
        grad_norm, is_applied = step_if_finite(
            self._optimizer,
            is_allowed=has_tokens and is_finite_on_all_ranks and not exceeds_policy_limit and not is_spike,
            max_norm=limits.grad_norm,
        )
        is_finite = not has_tokens or (is_finite_on_all_ranks and math.isfinite(grad_norm))
        # The norm is equal on all ranks, and so is this decision.
        is_spike |= limits.grad_norm is not None and grad_norm > limits.grad_norm
        is_spike &= is_finite and has_tokens
        # Updates skipped by a limit are intended. Only consecutive non-finite ones count.
        is_skipped_by_limit = not has_tokens or (is_finite_on_all_ranks and exceeds_policy_limit) or is_spike
        self.skipped_in_a_row = 0 if is_applied or is_skipped_by_limit else self.skipped_in_a_row + 1
        outcome = UpdateOutcome(
            applied=is_applied,
            grad_norm=grad_norm,
            learning_rate=float(learning_rate),
            is_empty=not has_tokens,
            not_finite=not is_finite,
            is_spike=is_spike,
            is_mismatch_exceeded=None if role.max_logprob_gap is None else is_mismatch_exceeded,
        )
        return _report_rows(outcome, rows) if self._model.returns_results else Update(outcome, {})

    def _finite_flags_outside_norm(self) -> list[Tensor]:
        """Return bool [] for each gradient on this rank that Megatron leaves out of the norm: whether it is finite.

        A fault in any other gradient shows in the norm. A fault in one of these would reach the weights unnoticed.
        """
        # Megatron leaves parameters marked `shared` out of the norm.
        parameters: Any = [
            p for p in self._model.parameters.values() if p.requires_grad and getattr(p, "shared", False)
        ]
        return [parameter.main_grad.isfinite().all() for parameter in parameters]

    def _reduce_flags(
        self, holds_here: bool, occurs_here: bool, device_flags: Sequence[Tensor] = ()
    ) -> tuple[bool, bool]:
        """Return whether `holds_here` and all `device_flags` (bool [] on the device) are True on all ranks.

        The second result: whether `occurs_here` is True on any rank. A collective over the world.
        """
        # One collective for all flags, because the host waits for it. Reading each device flag would be another wait.
        flags = torch.tensor([float(holds_here), -float(occurs_here)], device=self._model.device)
        for flag in device_flags:
            flags[0] *= flag
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN)
        holds_on_all, occurs_on_any = flags.tolist()
        return holds_on_all == 1, occurs_on_any == -1

    def _is_mean_above(
        self, limit: float | None, rows: Sequence[Mapping[str | Signal, Metric]], signal: Signal
    ) -> bool:
        """Return whether a signal's mean over the global batch exceeds a limit. Equal on all ranks."""
        if limit is None:
            return False
        means = select(rows, signal) if self._model.returns_results else []
        sums = [(mean.number * mean.count, mean.count) for mean in means if isinstance(mean, Mean)]
        total = torch.tensor(sums or [(0.0, 0.0)], dtype=torch.float32, device=self._model.device).sum(0)
        torch.distributed.all_reduce(total)
        # A limit of 0 requires equal log-probs. A log-prob of NaN then counts as a difference.
        return bool(total[0] > limit * total[1]) or (limit == 0 and bool(total[0].isnan()))

    def _is_sum_above(self, limit: float | None, rows: Sequence[Mapping[str | Signal, Metric]], signal: Signal) -> bool:
        """Return whether a signal's sum over the global batch exceeds a limit. Equal on all ranks."""
        if limit is None:
            return False
        numbers = [metric.number for metric in select(rows, signal)] if self._model.returns_results else []
        total = torch.tensor(sum(numbers), dtype=torch.float64, device=self._model.device)
        torch.distributed.all_reduce(total)
        return bool(total > limit)


def _report_rows(outcome: UpdateOutcome, rows: Sequence[Mapping[str | Signal, Metric]]) -> Update:
    """Add to an update's outcome what its rows measured: loss, mismatch and KL. Also return all metrics by name."""
    measured_outcome = replace(
        outcome,
        loss=merge_measured(loss for loss in select(rows, LOSS) if isinstance(loss, Sum)),
        mismatch=merge_measured(mismatch for mismatch in select(rows, MISMATCH) if isinstance(mismatch, Mean)),
        kl=merge_measured(kl for kl in select(rows, KL) if isinstance(kl, Mean)),
    )
    return Update(measured_outcome, merge([outcome.metrics(), *(name_metrics(row) for row in rows)]))
