"""Metrics that carry their reduction over ranks and microbatches: mean, sum, maximum.

A mean is weighted by counts; a NaN in any part makes the whole NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of one rank or microbatch; the subclass is its reduction."""

    number: float

    def value(self) -> float:
        return self.number

    def merged(self, other: Metric) -> Metric:
        """The reduction of this and another metric of the same subclass."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Mean(Metric):
    """A mean over `count` items: tokens, sequences, steps. Over no items it is NaN, with weight zero."""

    count: float = 1.0

    def value(self) -> float:
        return self.number if self.count else math.nan

    def merged(self, other: Metric) -> Mean:
        assert isinstance(other, Mean)
        parts = [part for part in (self, other) if part.count]
        count = sum(part.count for part in parts)
        return Mean(sum(part.number * (part.count / count) for part in parts), count)


@dataclass(frozen=True, slots=True)
class Sum(Metric):
    """A sum."""

    def merged(self, other: Metric) -> Sum:
        return Sum(self.number + other.number)


@dataclass(frozen=True, slots=True)
class Max(Metric):
    """A maximum."""

    def merged(self, other: Metric) -> Metric:
        return self if math.isnan(self.number) or self.number >= other.number else other


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Reduce the metrics of several ranks or microbatches by name; some may lack a name.

    Raises TypeError for a name with two reductions.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            known = merged.get(name)
            if known is not None and type(known) is not type(metric):
                raise TypeError(f"metric {name} is a {type(known).__name__} here and a {type(metric).__name__} there")
            merged[name] = metric if known is None else known.merged(metric)
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The scalars to log."""
    return {name: metric.value() for name, metric in metrics.items()}
