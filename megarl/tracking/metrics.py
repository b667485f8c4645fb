"""Metrics, combined over ranks and micro-batches as mean, sum or maximum.

Counts weight the mean. A NaN in any part makes the result NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A number measured on one rank or micro-batch. A subclass defines how to combine numbers."""

    number: float

    def value(self) -> float:
        return self.number

    def merge_with(self, metric: Metric) -> Metric:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Mean(Metric):
    """Mean over `count` items: tokens, sequences, steps. Without items it is NaN, with weight 0."""

    count: float = 1.0

    def value(self) -> float:
        return self.number if self.count else math.nan

    def merge_with(self, metric: Metric) -> Mean:
        assert isinstance(metric, Mean)
        # Skip empty parts: NaN times weight 0 is NaN.
        parts = [part for part in (self, metric) if part.count]
        count = sum(part.count for part in parts)
        return Mean(sum(part.number * (part.count / count) for part in parts), count)


@dataclass(frozen=True, slots=True)
class Sum(Metric):
    def merge_with(self, metric: Metric) -> Sum:
        return Sum(self.number + metric.number)


@dataclass(frozen=True, slots=True)
class Max(Metric):
    def merge_with(self, metric: Metric) -> Metric:
        # Comparisons with NaN are false, so test for NaN explicitly.
        return self if math.isnan(self.number) or self.number >= metric.number else metric


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combine the metrics of several ranks or microbatches by name. Some may lack a name.

    Raises TypeError for a name with metrics of two subclasses.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            earlier_metric = merged.get(name)
            if earlier_metric is not None and type(earlier_metric) is not type(metric):
                raise TypeError(
                    f"the metric {name} is a {type(earlier_metric).__name__} from one rank or microbatch and a "
                    f"{type(metric).__name__} from another"
                )
            merged[name] = metric if earlier_metric is None else earlier_metric.merge_with(metric)
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {name: metric.value() for name, metric in metrics.items()}
