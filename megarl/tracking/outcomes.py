"""Outcomes of an update and of a step. The run's next action depends on these typed values.

No decision reads a metric, so renaming a metric never changes the training. The driver imports this module, so it needs
no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar, cast

from megarl.tracking.metric_rows import MetricRow
from megarl.tracking.metrics import Max, Mean, Metric, Sum, merge

METRICS = (
    MetricRow("train/grad_norm", "1", "gradient norm before clipping, largest of the step's updates"),
    MetricRow("train/learning_rate", "1", "learning rate, largest of the step's updates"),
    MetricRow("train/update_skipped", "0 or 1", "whether an update changed no parameter"),
    MetricRow(
        "train/not_finite", "0 or 1", "whether an update was skipped because its loss or gradient was not finite"
    ),
    MetricRow("train/empty_update", "0 or 1", "1 if an update was skipped because none of its tokens is trained"),
    MetricRow(
        "train/gap_exceeded",
        "0 or 1",
        "whether updates were skipped because the mismatch is too large",
        condition="train.max_logprob_gap",
    ),
)

Kind = TypeVar("Kind", bound=Metric)


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """Outcome of one optimizer step. Its decisions and norms are equal on all ranks.

    `loss`, `mismatch` and `kl` cover the tokens of all merged ranks. None: not measured.
    """

    applied: bool
    """Whether parameters changed."""
    grad_norm: float
    """Gradient norm before clipping."""
    learning_rate: float
    is_empty: bool = False
    """Skipped, because it has no trained token."""
    not_finite: bool = False
    """Skipped, because its loss or gradient is not finite."""
    is_spike: bool = False
    """Dropped, because it exceeds a limit of train.on_spike."""
    is_mismatch_exceeded: bool | None = None
    """Skipped because of train.max_logprob_gap; None: there is no limit."""
    loss: Sum | None = None
    """The minimised loss, in nats."""
    mismatch: Mean | None = None
    """Mean difference of trainer and engine log-probs, in nats per token."""
    kl: Mean | None = None
    """Mean divergence of the policy from the reference, in nats per token."""

    def metrics(self) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {
            "train/grad_norm": Max(self.grad_norm),
            "train/learning_rate": Max(self.learning_rate),
            "train/update_skipped": Max(float(not self.applied)),
            "train/not_finite": Max(float(self.not_finite)),
        }
        if self.is_empty:
            metrics["train/empty_update"] = Max(1.0)
        if self.is_mismatch_exceeded is not None:
            metrics["train/gap_exceeded"] = Max(float(self.is_mismatch_exceeded))
        return metrics


class Update(NamedTuple):
    """The result of an update: its outcome, and its metrics (empty on ranks without a report)."""

    outcome: UpdateOutcome
    metrics: dict[str, Metric]


def merge_ranks(updates: Sequence[Update]) -> Update:
    """Return one update from the results of its reporting ranks."""
    outcomes = [update.outcome for update in updates]
    return Update(
        replace(
            outcomes[0],
            loss=merge_measured(outcome.loss for outcome in outcomes),
            mismatch=merge_measured(outcome.mismatch for outcome in outcomes),
            kl=merge_measured(outcome.kl for outcome in outcomes),
        ),
        merge(update.metrics for update in updates),
    )


@dataclass(slots=True)
class StepOutcome:
    not_finite: tuple[str, ...] = ()
    """Models (policy, critic) with an update skipped because its loss or gradient is not finite."""
    has_empty_update: bool = False
    """Whether an update without a trained token was skipped."""
    excess_mismatch: float | None = None
    """Mean difference of trainer and engine log-probs (nats) if updates were skipped because of it, else None."""
    kl: float | None = None
    """Mean divergence of the policy from the reference, in nats per token. None: not measured."""

    def add(self, model: str, outcomes: Sequence[UpdateOutcome]) -> None:
        """Add the updates of a model. `model` is its name on the ranks."""
        if any(outcome.not_finite for outcome in outcomes):
            self.not_finite = (*self.not_finite, model)
        self.has_empty_update |= any(outcome.is_empty for outcome in outcomes)
        if any(outcome.is_mismatch_exceeded for outcome in outcomes):
            mismatch = merge_measured(outcome.mismatch for outcome in outcomes)
            assert mismatch is not None
            self.excess_mismatch = mismatch.value()
        if (kl := merge_measured(outcome.kl for outcome in outcomes)) is not None:
            self.kl = kl.value()


def merge_measured(parts: Iterable[Kind | None]) -> Kind | None:
    """Merge the measured parts. None: no part was measured."""
    merged = merge({"": part} for part in parts if part is not None)
    return cast(Kind, merged[""]) if merged else None
