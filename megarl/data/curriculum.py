"""Curricula: problems that are almost always or almost never solved are skipped in most draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megarl.config.sections.data_sets import CurriculumConfig
from megarl.data.streamed import numbers_of, values_of
from megarl.tracking.metric_rows import MetricRow
from megarl.types import Problem

METRICS = (
    MetricRow("curriculum/known", "share", "problems with a measured solve rate, their own or their bucket's"),
    MetricRow("curriculum/below", "share", "tried problems with a solve rate below the band"),
    MetricRow("curriculum/in_band", "share", "tried problems with a solve rate in the band"),
    MetricRow("curriculum/above", "share", "tried problems with a solve rate above the band"),
    MetricRow("curriculum/solve_rate", "share", "mean solve rate of tried problems"),
)

Rates = Mapping[str, float]
"""Measured solve rates, by bucket (a set of problems with one rate). A bucket without an attempt has none."""


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Curriculum of a data source: its problems in buckets with one solve rate each, and the rule for skipping.

    `buckets` [problems] has each problem's bucket: its number, or its record's field `config.by`. Without a band of
    solve rates, `buckets` is empty.
    """

    config: CurriculumConfig
    buckets: Sequence[str]

    @classmethod
    def of(cls, problems: Sequence[Problem], config: CurriculumConfig) -> Curriculum:
        """Return the curriculum for these problems. If `config.by` is set, each record must have this field."""
        if config.band is None:
            return cls(config, ())
        if config.by is None:
            return cls(config, [str(problem_number) for problem_number in numbers_of(problems)])
        return cls(config, [str(value) for value in values_of(problems, config.by)])

    def draws_problem(self, data_position: int, rates: Rates, seed: Sequence[int]) -> bool:
        """Return whether the problem at `data_position` in the data is drawn. False: it is skipped.

        `seed` must differ from draw to draw.
        """
        band = self.config.band
        rate = None if band is None else rates.get(self.buckets[data_position])
        # A bucket without a measured rate is always drawn: otherwise it would never be measured.
        if band is None or rate is None or band[0] <= rate <= band[1]:
            return True
        # Each draw has its own generator: a resumed run repeats it without replaying earlier draws.
        return bool(np.random.default_rng(seed).random() < self.config.outside)

    def update_rates(self, rates: Rates, data_position: int, solve_rate: float) -> Rates:
        """Return the solve rates after a group of attempts. `solve_rate` is the group's solved share.

        The bucket's new rate is memory * rate + (1 - memory) * solve_rate. Its first rate is `solve_rate`.
        """
        bucket, memory = self.buckets[data_position], self.config.memory
        old_rate = rates.get(bucket, solve_rate)
        return {**rates, bucket: memory * old_rate + (1 - memory) * solve_rate}

    def metrics(self, rates: Rates) -> dict[str, float]:
        """Return the metrics for these solve rates, without the prefix `curriculum/`."""
        if self.config.band is None:
            return {}
        known_rates = np.array([rates[bucket] for bucket in self.buckets if bucket in rates])
        low, high = self.config.band
        if not len(known_rates):
            return {"known": 0.0}
        return {
            "known": len(known_rates) / len(self.buckets),
            "below": float((known_rates < low).mean()),
            "in_band": float(((known_rates >= low) & (known_rates <= high)).mean()),
            "above": float((known_rates > high).mean()),
            "solve_rate": float(known_rates.mean()),
        }
