"""Metrics of a run for Prometheus: the newest value of each step metric, the step and the run's state."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric, StateSetMetricFamily

from megarl.tracking.live.run_status import State
from megarl.tracking.metric_table import find_row

PREFIX = "megarl_"
_STATES: Sequence[State] = ("starting", "running", "done", "failed", "interrupted", "stopped")
_OTHER_CHARACTERS = re.compile(r"[^a-zA-Z0-9_]+")


class RunMetrics:
    """Tracker that holds the newest metrics of a run for Prometheus. Any thread may collect them."""

    def __init__(self, run: str, steps: int | None, status: Callable[[], Mapping[str, Any]]) -> None:
        """Begin without metrics. `steps` is the planned number of steps. `status` returns the fields of status.json."""
        self._run, self._steps, self._status = run, steps, status
        self._newest: dict[str, float] = {}
        self._step: int | None = None
        self._logged_at = 0.0
        self._began = time.time()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        # Replace the mapping as a whole, so that a scrape meanwhile sees the metrics of one step. Missing metrics keep
        # their last value.
        self._newest = {**self._newest, **scalars}
        self._step, self._logged_at = step, time.time()

    def samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Ignore samples: Prometheus has numbers only."""

    def sync(self) -> None:
        """Do nothing: the metrics are in memory only."""

    def close(self) -> None:
        """Do nothing: the server closes by itself."""

    def health(self) -> dict[str, Any]:
        """Return state, step, planned steps and seconds since the last step as JSON values."""
        status = self._status()
        return {
            "run": self._run,
            "state": status.get("state"),
            "step": self._step if self._step is not None else status.get("step"),
            "steps": self._steps,
            "seconds_since_step": round(time.time() - self._logged_at, 3) if self._logged_at else None,
            "warnings": [finding.get("rule") for finding in status.get("health", ())],
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as metric families of prometheus_client."""
        status = self._status()
        yield InfoMetricFamily(f"{PREFIX}run", "name of the run", {"name": self._run})
        yield StateSetMetricFamily(
            f"{PREFIX}run_state", "state of the run", {state: state == status.get("state") for state in _STATES}
        )
        yield GaugeMetricFamily(f"{PREFIX}run_start_time_seconds", "start of the driver, in Unix time", self._began)
        step = self._step if self._step is not None else status.get("step", 0)
        yield GaugeMetricFamily(f"{PREFIX}step", "number of the last logged step", step)
        if self._steps is not None:
            yield GaugeMetricFamily(f"{PREFIX}steps", "planned number of steps", self._steps)
        if self._logged_at:
            name = f"{PREFIX}step_logged_time_seconds"
            yield GaugeMetricFamily(name, "time of the last logged step, in Unix time", self._logged_at)
        yield from step_families(self._newest)


def step_families(newest: Mapping[str, float]) -> Iterator[GaugeMetricFamily]:
    """Yield a gauge per metric: its name in Prometheus, with its name in megarl as the label `metric`.

    If two names become one (`a/b_c` and `a_b/c`), the labels still differ.
    """
    families: dict[str, GaugeMetricFamily] = {}
    for metric, value in sorted(newest.items()):
        name = prometheus_name(metric)
        if name not in families:
            row = find_row(metric)
            text = f"{metric}: a metric of the user's own" if row is None else f"{row.meaning} ({row.unit})"
            families[name] = GaugeMetricFamily(name, text, labels=["metric"])
        families[name].add_metric([metric], value if math.isfinite(value) else math.nan)
    yield from families.values()


def prometheus_name(metric: str) -> str:
    """Return the name of a metric in Prometheus: `reward/mean` becomes `megarl_reward_mean`."""
    return PREFIX + _OTHER_CHARACTERS.sub("_", metric).strip("_")
