"""Curricula: problems that are always or never solved are passed over most times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.config.curriculum import CurriculumConfig
from megarl.data.streamed import numbers_of, values_of
from megarl.types import Problem

METRICS = {
    "curriculum/known": ("share", "problems that were tried, alone or by another of their bucket"),
    "curriculum/below": ("share", "tried problems whose rate of solution is below the band"),
    "curriculum/in_band": ("share", "tried problems whose rate of solution is in the band"),
    "curriculum/above": ("share", "tried problems whose rate of solution is above the band"),
    "curriculum/solve_rate": ("share", "rate of solution of tried problems, mean"),
}
"""Names, units and meanings, for `tracking.table`."""

Rates = Mapping[str, float]
"""Measured solve rates by bucket; buckets that were never tried are missing."""


@dataclass(frozen=True, slots=True)
class Curriculum:
    """The buckets of a source's problems, each with a solve rate, and how likely a problem is drawn.

    `buckets` [problems]: a problem's own number, or the value of the record's field `config.by`; none without a band.
    """

    config: CurriculumConfig
    buckets: Sequence[str]

    @classmethod
    def of(cls, problems: Sequence[Problem], config: CurriculumConfig) -> Curriculum:
        """The curriculum of these problems, which have the record's field where the config names one."""
        if config.band is None:
            return cls(config, ())
        if config.by is None:
            return cls(config, [str(number) for number in numbers_of(problems)])
        return cls(config, [str(value) for value in values_of(problems, config.by)])

    def draws(self, place: int, rates: Rates, seed: Sequence[int]) -> bool:
        """Whether the problem at a place in the data is drawn now that it comes up; `seed` is that of this moment."""
        band = self.config.band
        rate = None if band is None else rates.get(self.buckets[place])
        if band is None or rate is None or band[0] <= rate <= band[1]:
            return True
        return bool(np.random.default_rng(seed).random() < self.config.outside)

    def observed(self, rates: Rates, place: int, solve_rate: float) -> Rates:
        """The rates after a group of attempts at the problem at a place, of which this share was right.

        The new rate of its bucket is memory * rate + (1 - memory) * solve_rate, the first one the group's.
        """
        bucket, memory = self.buckets[place], self.config.memory
        before = rates.get(bucket, solve_rate)
        return {**rates, bucket: memory * before + (1 - memory) * solve_rate}

    def metrics(self, rates: Rates) -> dict[str, float]:
        """Of the problems as they stand: METRICS, without `curriculum/`."""
        if self.config.band is None:
            return {}
        known = np.array([rates[bucket] for bucket in self.buckets if bucket in rates])
        low, high = self.config.band
        if not len(known):
            return {"known": 0.0}
        return {
            "known": len(known) / len(self.buckets),
            "below": float((known < low).mean()),
            "in_band": float(((known >= low) & (known <= high)).mean()),
            "above": float((known > high).mean()),
            "solve_rate": float(known.mean()),
        }
