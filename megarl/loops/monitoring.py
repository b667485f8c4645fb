"""Observation of a run by other programs (section `monitor`): metrics and health over HTTP, spans of attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from megarl.config import Recipe
from megarl.rollout.attempt import Task
from megarl.rollout.engine_requests import Generates
from megarl.rollout.pool import EnginePool, PoolLoad
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker

if TYPE_CHECKING:
    from megarl.rollout.attempt_spans import AttemptSpan

BeginSpan = Callable[[Task, Generates], "AttemptSpan"]
"""Function (attempt, engines) that begins the OpenTelemetry span of an attempt."""


class RunMonitor:
    """Engines that the monitor of a run observes, once they are started."""

    def __init__(self) -> None:
        self.pool: EnginePool | None = None

    def load(self) -> PoolLoad | None:
        """Return the load of the engines; None before their start."""
        return None if self.pool is None else self.pool.load()


async def start_monitor(recipe: Recipe, folder: RunFolder, tracker: Tracker, stack: AsyncExitStack) -> RunMonitor:
    """Start the driver's HTTP server if the recipe has monitor.port; `stack` closes it.

    Raises ConfigError if the port is in use.
    """
    observed = RunMonitor()
    if recipe.monitor.port is None:
        return observed
    # Imported here: aiohttp takes a while to import, and few runs need it.
    from megarl.serving.monitor import EngineLoad, Monitor, registry_of
    from megarl.tracking.prometheus import RunMetrics

    metrics = RunMetrics(recipe.name, recipe.train.steps, lambda: folder.status)
    monitor = Monitor(recipe.monitor, registry_of(metrics, EngineLoad(observed.load)), metrics.health)
    await monitor.start()
    stack.push_async_callback(monitor.close)
    tracker.attach("monitor.port", metrics)
    tracker.info(f"metrics at {monitor.base_url}/metrics, health at {monitor.base_url}/health")
    return observed


def span_factory(recipe: Recipe, stack: AsyncExitStack, notice: Callable[[str], object]) -> BeginSpan | None:
    """Start the export of spans if the recipe has monitor.otlp_url; `stack` ends it. None: attempts have no spans.

    `notice` is called with a warning if the collector fails.
    """
    url = recipe.monitor.otlp_url
    if url is None or not recipe.has_engine:
        return None
    # Imported here: OpenTelemetry's libraries are optional.
    from megarl.rollout.attempt_spans import AttemptSpan
    from megarl.tracking.opentelemetry import SpanExport

    export = SpanExport(url, recipe.name, notice)
    # In a thread: sending the last spans may take seconds, and signals must be answered meanwhile.
    stack.push_async_callback(asyncio.to_thread, export.close)
    return lambda task, pool: AttemptSpan(export.tracer, task, pool)
