"""Rows of `METRICS`, in which a module declares its metrics.

`tracking.metric_table` parses the modules without importing them. So a row's values must be literals or constants of
this module.
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
"""Statistics in words, by the last part of a metric's name."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A metric, or all metrics whose names match a pattern."""

    name: str
    """Words in capitals are placeholders, as in `val/SET/accuracy`. `turns/{mean,max}` means two metrics."""
    unit: str
    meaning: str
    over: str = ""
    """Statistic of the value, one of this module's constants. Empty: the meaning says it."""
    condition: str = ""
    """Recipe setting that the metric needs: `weights.overlap` or `rollout.placement=separate`."""
