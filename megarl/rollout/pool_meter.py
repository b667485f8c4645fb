"""Counts of an engine pool."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from megarl.tracking.metric_rows import MetricRow

METRICS = (
    MetricRow(
        "time/engines_idle",
        "share",
        "the engines' idle time: share of open time with nothing to sample. Pauses (for training, or asleep while "
        "rewards are computed, time/rollout_late_rewards_seconds) do not count",
    ),
    MetricRow("rollout/paused_seconds", "seconds", "how long the engines were paused while requests waited"),
    MetricRow(
        "perf/engines_open_seconds",
        "seconds",
        "how long the engines accepted requests, from one reshard to the next pause",
    ),
    MetricRow(
        "rollout/sampled_tokens",
        "tokens",
        "tokens sampled by the engines for the step, including requests interrupted by a reshard",
    ),
    MetricRow("rollout/evaluation_tokens", "tokens", "tokens sampled by the engines for the step's evaluation"),
    MetricRow(
        "rollout/tokens_during_evaluation",
        "tokens",
        "tokens sampled for training during an evaluation, where training continues; rollout/sampled_tokens, rates and "
        "idle shares exclude them, and the evaluation's time",
    ),
    MetricRow("rollout/prefix_hits", "share", "prompt tokens found in an engine's prefix cache"),
)


class PoolMeter:
    """Sampled tokens, prefix cache hits and paused time of an engine pool, since the last call of `metrics`."""

    def __init__(self) -> None:
        self.num_prompt_tokens = self.num_cached = 0
        """Tokens of the admitted prompts. `num_cached` of them were in a prefix cache."""
        self.total_sampled = 0
        """Tokens sampled since the start of the run."""
        self._num_sampled: Counter[str] = Counter()
        """Number of sampled tokens, by purpose: `training` or `evaluation`."""
        self._num_counted: dict[str, int] = {}
        """Tokens counted so far of requests that stay in their engine during a pause, by request id."""
        self._paused_at: float | None = None
        self._measured_at = time.monotonic()
        self._seconds_paused = self._paused_before = self._seconds_waited = 0.0

    @property
    def is_paused(self) -> bool:
        return self._paused_at is not None

    def begin_pause(self) -> None:
        if not self.is_paused:
            self._paused_at = time.monotonic()

    def end_pause(self, *, requests_wait: bool) -> None:
        self._count_pause(requests_wait=requests_wait)
        self._paused_at = None

    def _count_pause(self, *, requests_wait: bool) -> None:
        """Add the time since the pause began, or since the last call. It counts as waiting if `requests_wait`."""
        if self._paused_at is not None:
            now = time.monotonic()
            seconds, self._paused_at = now - self._paused_at, now
            self._seconds_paused += seconds
            self._seconds_waited += seconds if requests_wait else 0.0

    @property
    def seconds_paused(self) -> float:
        return self._seconds_paused + (0.0 if self._paused_at is None else time.monotonic() - self._paused_at)

    def count_tokens(self, request_id: str, num_tokens: int, purpose: str) -> int:
        """Count those tokens of a request that are not yet counted, and return their number."""
        num_new = num_tokens - self._num_counted.pop(request_id, 0)
        self._num_sampled[purpose] += num_new
        self.total_sampled += num_new
        return num_new

    def expect_again(self, counts: Mapping[str, int]) -> None:
        """Remember how many tokens of these requests are counted already, so that `count_tokens` skips them."""
        self._num_counted |= counts

    def num_counted(self, request_id: str) -> int:
        """Return how many tokens of a request are counted, of those sampled in its current engine."""
        return self._num_counted.get(request_id, 0)

    def forget(self, request_id: str) -> None:
        self._num_counted.pop(request_id, None)

    def metrics(self, *, num_live: int, busy_seconds: float, requests_wait: bool) -> dict[str, float]:
        """Return the metrics (METRICS) since the last call, and restart the counts.

        `busy_seconds` is the sampling time of all replicas. Hits of the prefix cache come from later samples of a group
        (same prompt), and from earlier turns of an attempt.
        """
        self._count_pause(requests_wait=requests_wait)
        now = time.monotonic()
        open_seconds = now - self._measured_at - (self._seconds_paused - self._paused_before)
        metrics = {
            # Busy time is measured around calls, so it can slightly exceed the open time. Clamp the share.
            "time/engines_idle": min(1.0, max(0.0, 1 - busy_seconds / max(open_seconds * num_live, 1e-9))),
            "rollout/paused_seconds": self._seconds_waited,
            "perf/engines_open_seconds": open_seconds,
            "rollout/prefix_hits": self.num_cached / max(self.num_prompt_tokens, 1),
            "rollout/sampled_tokens": float(self._num_sampled["training"]),
        }
        self.num_prompt_tokens = self.num_cached = 0
        self._num_sampled.clear()
        self._measured_at, self._paused_before, self._seconds_waited = now, self._seconds_paused, 0.0
        return metrics

    def evaluation_metrics(self) -> dict[str, float]:
        metrics = {"rollout/evaluation_tokens": float(self._num_sampled["evaluation"])}
        if num_training := self._num_sampled["training"]:
            metrics["rollout/tokens_during_evaluation"] = float(num_training)
        return metrics
