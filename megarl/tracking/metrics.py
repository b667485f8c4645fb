"""Numbers that carry their own reduction, so that no reader has to guess it from a name.

A mean weighs its parts by their counts; a NaN in any part is a NaN of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of one rank or microbatch. The subclass says how two become one."""

    number: float

    def value(self) -> float:
        return self.number

    def merged(self, other: Metric) -> Metric:
        """This and another of the same subclass as one."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Mean(Metric):
    """A mean over `count` items: tokens, sequences, steps. Over no items it is NaN, and weighs nothing."""

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
    """A total."""

    def merged(self, other: Metric) -> Sum:
        return Sum(self.number + other.number)


@dataclass(frozen=True, slots=True)
class Max(Metric):
    """The largest."""

    def merged(self, other: Metric) -> Metric:
        return self if math.isnan(self.number) or self.number >= other.number else other


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """The metrics of several ranks or microbatches as one; a name may be absent from some.

    Raises TypeError where a name has two reductions.
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
