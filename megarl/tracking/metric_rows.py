"""Rows of `METRICS`, in which a module declares its metrics.

`tracking.metric_table` collects the rows of all modules. It parses the modules without importing them, so a row's
values must be literals or constants of this module.
"""

from __future__ import annotations

from dataclasses import dataclass

PER_ATTEMPT = "mean over attempts"
PER_SAMPLE = "mean over samples"
PER_TOKEN = "mean over tokens"
ALL_RANKS = "sum over ranks"
SLOWEST_RANK = "on the slowest rank"
SINCE_RUN_BEGAN = "since the run began"

STATISTICS = {"mean": "mean", "std": "standard deviation", "min": "smallest", "max": "largest"}
"""Names of statistics in words, by the last part of a metric's name."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A metric, or all metrics whose names match a pattern."""

    name: str
    """Name of the metric. Words in capitals are placeholders, as in `val/SET/accuracy`. `turns/{mean,max}` means two
    metrics.
    """
    unit: str
    meaning: str
    over: str = ""
    """Statistic of the value, unless the meaning says it: one of this module's constants."""
    condition: str = ""
    """Recipe setting that the metric needs: `weights.overlap` or `rollout.placement=separate`."""
