"""The driver's pages for monitoring, behind their token, and a port that is in use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from megarl.config.sections.monitor import MonitorConfig
from megarl.rollout.pool import PoolLoad
from megarl.serving.monitor import EngineLoad, Monitor, make_registry
from megarl.tracking.live.prometheus import RunMetrics
from megarl.types import ConfigError

TOKEN = "0123456789abcdef"
LOAD = PoolLoad(3, 5, 2, 1, 700, is_paused=False, failure=None)


@asynccontextmanager
async def monitor(**config: Any) -> AsyncIterator[tuple[Monitor, RunMetrics, dict[str, Any]]]:
    status: dict[str, Any] = {"state": "running", "step": 0}
    metrics = RunMetrics("small", 8, lambda: status)
    made = Monitor(MonitorConfig(port=0, **config), make_registry(metrics, EngineLoad(lambda: LOAD)), metrics.health)
    await made.start()
    try:
        yield made, metrics, status
    finally:
        await made.close()


async def get(url: str, token: str | None = None) -> tuple[int, str]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession() as client, client.get(url, headers=headers) as response:
        return response.status, await response.text()


async def test_metrics_of_run_and_engines_are_scraped_with_the_token() -> None:
    async with monitor(token=TOKEN) as (made, metrics, _):
        metrics.log(1, {"reward/mean": 0.25})
        for page in ("/metrics", "/health"):
            for token in (None, "another", TOKEN + "x"):
                status, text = await get(made.base_url + page, token)
                assert status == 401 and "monitor.token" in text and "reward" not in text
        status, text = await get(f"{made.base_url}/metrics", TOKEN)
        assert status == 200
        values = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert values[("megarl_reward_mean", "reward/mean")] == 0.25
        assert values[("megarl_engine_requests", "running")] == 3
        assert values[("megarl_engine_requests", "waiting")] == 5
        assert values[("megarl_engine_replicas", "lost")] == 1
        assert values[("megarl_engine_sampled_tokens_total",)] == 700 and values[("megarl_engine_paused",)] == 0


async def test_health_has_a_status_for_programs() -> None:
    async with monitor() as (made, _, status):
        code, text = await get(f"{made.base_url}/health")
        assert code == 200 and '"state": "running"' in text
        status["state"] = "failed"
        code, text = await get(f"{made.base_url}/health")
        assert code == 503 and '"state": "failed"' in text


async def test_a_port_in_use_is_named() -> None:
    async with monitor() as (made, *_):
        port = int(made.base_url.rpartition(":")[2])
        other = Monitor(MonitorConfig(port=port), make_registry(), dict)
        with pytest.raises(
            ConfigError, match=rf"^monitor\.port = {port}: cannot listen on 127\.0\.0\.1, .*0 takes any"
        ):
            await other.start()
