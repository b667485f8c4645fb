"""Metrics of rows as device tensors, read once at the end of an update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megarl.tracking.metric_rows import MetricRow
from megarl.tracking.metrics import Max, Mean, Metric, Sum

METRICS = (
    MetricRow(
        "train/loss",
        "nats",
        "the minimised loss, summed with its token weights, mean over the step's updates; without train/moe_*; with a "
        "policy gradient it does not measure progress",
    ),
    MetricRow("train/tokens", "tokens", "trained tokens"),
    MetricRow(
        "kl/reference",
        "nats",
        "mean divergence per token of the policy from the reference, by algorithm.kl_estimator (kto: per answer)",
    ),
)


@dataclass(frozen=True, slots=True, eq=False)
class Signal:
    """A quantity of each row that decides whether an update is applied. It is logged as `metric`.

    Rows are looked up by the signal itself, so renaming the metric never changes what is trained.
    """

    metric: str
    is_loss: bool = False
    """Whether the update minimises this metric. If such a loss is not finite, the update is skipped."""


LOSS = Signal("train/loss", is_loss=True)
"""The minimised loss, a sum over the update's rows in nats."""
TOKENS = Signal("train/tokens")
RATIO = Signal("train/ratio")
"""Mean probability ratio of the policy's tokens, for algorithm.skip_ratio."""
MISMATCH = Signal("logprob_gap/mean")
"""Mean difference of trainer and engine log-probs, in nats, for train.max_logprob_gap."""
KL = Signal("kl/reference")
"""Mean divergence of the policy from the reference, in nats, for algorithm.kl_target."""

Key = TypeVar("Key", str, Signal, str | Signal)


@dataclass(frozen=True, slots=True)
class RowMetric:
    """A metric of one row, not yet read from the device. `number` and `count` are device tensors [].

    `count`: values in a mean or maximum. If it is 0, a metric with `needs_tokens` is left out.
    """

    kind: type[Mean | Sum | Max]
    number: Tensor
    count: Tensor
    needs_tokens: bool = False


def mean_of(values: Tensor, is_counted: Tensor, *, needs_tokens: bool = False) -> RowMetric:
    """Return the mean of the counted values; both tensors are [values]. Without counted values it is 0, with weight 0.

    Values are selected, not multiplied by 0, because uncounted values may be NaN.
    """
    return _mean(values, is_counted, is_counted.sum(), needs_tokens)


def means_of(metrics: Mapping[Key, Tensor], is_counted: Tensor, *, needs_tokens: bool = False) -> dict[Key, RowMetric]:
    """Return the mean of each metric's counted values, as in `mean_of`; all tensors are [values]."""
    count = is_counted.sum()
    return {name: _mean(values, is_counted, count, needs_tokens) for name, values in metrics.items()}


def _mean(values: Tensor, is_counted: Tensor, count: Tensor, needs_tokens: bool) -> RowMetric:
    total = torch.where(is_counted, values.detach(), 0.0).sum(dtype=torch.float64)
    return RowMetric(Mean, total / count.clamp(min=1), count, needs_tokens)


def mean_of_all(values: Tensor) -> RowMetric:
    return mean_of(values, torch.ones_like(values, dtype=torch.bool))


def sum_of(values: Tensor) -> RowMetric:
    total = values.detach().sum(dtype=torch.float64)
    return RowMetric(Sum, total, torch.ones_like(total))


def max_of(values: Tensor, is_counted: Tensor) -> RowMetric:
    """Return the largest counted value, at least 0; both tensors are [values]. Left out without counted values."""
    # A context-parallel rank may have no token of a row, and torch refuses the maximum of nothing.
    largest = F.pad(torch.where(is_counted, values.detach(), 0.0), (0, 1)).max()
    return RowMetric(Max, largest, is_counted.sum(), needs_tokens=True)


def read_metrics(rows: Sequence[Mapping[Key, RowMetric]]) -> list[dict[Key, Metric]]:
    """Read the metrics of all rows from the device, in one copy. The host waits for the rows' passes."""
    metrics_by_row: list[dict[Key, Metric]] = [{} for _ in rows]
    unread_metrics = [
        (row_metrics, name, metric)
        for row_metrics, row in zip(metrics_by_row, rows, strict=True)
        for name, metric in row.items()
    ]
    if not unread_metrics:
        return metrics_by_row
    # float64 holds counts of tokens exactly.
    numbers_and_counts = torch.stack(
        [number.double() for *_, metric in unread_metrics for number in (metric.number, metric.count)]
    )
    for (row_metrics, name, metric), (number, count) in zip(
        unread_metrics, numbers_and_counts.view(-1, 2).tolist(), strict=True
    ):
        if count or not metric.needs_tokens:
            row_metrics[name] = Mean(number, count) if metric.kind is Mean else metric.kind(number)
    return metrics_by_row


def losses_of(row: Mapping[str | Signal, Metric]) -> list[float]:
    return [metric.number for key, metric in row.items() if isinstance(key, Signal) and key.is_loss]


def select(rows: Iterable[Mapping[str | Signal, Metric]], signal: Signal) -> list[Metric]:
    return [row[signal] for row in rows if signal in row]


def name_metrics(row: Mapping[str | Signal, Metric]) -> dict[str, Metric]:
    return {key.metric if isinstance(key, Signal) else key: metric for key, metric in row.items()}
