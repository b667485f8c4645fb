"""Observation of a run by other programs (section `monitor`): metrics and health over HTTP."""

from __future__ import annotations

from contextlib import AsyncExitStack

from megarl.config import Recipe
from megarl.rollout.pool import EnginePool, PoolLoad
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker


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
