"""Observation of a run by other programs (section `monitor`): metrics and health over HTTP."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

from megarl.config import Recipe
from megarl.rollout.pool import EnginePool, PoolLoad
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker

if TYPE_CHECKING:
    from megarl.tracking.live.prometheus import RunMetrics


class RunMonitor:
    """HTTP server of the driver (monitor.port), from the run's first start of ranks to its end.

    It keeps its port while ranks start again. Otherwise another program could take the port and end the recovering run.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder) -> None:
        self.pool: EnginePool | None = None
        """Engines of the present ranks; None before their start."""
        self._recipe, self._folder = recipe, folder
        self._metrics: RunMetrics | None = None
        self._address = ""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def begin_start(self, tracker: Tracker) -> None:
        """Show the metrics of `tracker`. The first call starts the server.

        Raises ConfigError if the port is in use.
        """
        self.pool = None
        if self._recipe.monitor.port is None:
            return
        if self._metrics is None:
            self._metrics = await self._start_monitor()
        tracker.attach("monitor.port", self._metrics)
        tracker.info(f"metrics at {self._address}/metrics, health at {self._address}/health")

    async def _start_monitor(self) -> RunMetrics:
        # Imported here: aiohttp takes a while to import, and few runs need it.
        from megarl.serving.monitor import EngineLoad, Monitor, make_registry
        from megarl.tracking.live.prometheus import RunMetrics

        metrics = RunMetrics(self._recipe.name, self._recipe.train.steps, lambda: self._folder.status)
        monitor = Monitor(self._recipe.monitor, make_registry(metrics, EngineLoad(self._engine_load)), metrics.health)
        await monitor.start()
        self._stack.push_async_callback(monitor.close)
        self._address = monitor.base_url
        return metrics

    def _engine_load(self) -> PoolLoad | None:
        return None if self.pool is None else self.pool.load()
