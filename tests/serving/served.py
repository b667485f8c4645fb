"""An endpoint before a real engine, as its tests use it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.config.parallel import ParallelConfig
from megarl.rollout.pool import EnginePool
from megarl.serving.endpoint import Endpoint
from megarl.serving.session import Session
from megarl.serving.session_sampler import Limits
from megarl.serving.sessions import Sessions
from megarl.types import SamplingSettings
from tests.rollout.engines import CONTEXT_TOKENS

ONE = ParallelConfig(1, 1, 1, 1)
SAMPLING = SamplingSettings(240, temperature=1.0)


class Served:
    """An endpoint, its sessions, clients of it, and the engines behind it."""

    def __init__(
        self, endpoint: Endpoint, sessions: Sessions, pool: EnginePool, group: WorkerGroup, notices: list[str]
    ) -> None:
        self.endpoint, self.sessions, self.pool, self.group, self.notices = endpoint, sessions, pool, group, notices

    def open(self, seed: str = "s", **limits: Any) -> Session:
        known = {"context_tokens": CONTEXT_TOKENS, "max_calls": 40, "idle_seconds": 60.0}
        return self.sessions.open("t", seed, SAMPLING, Limits(**(known | limits)), self.pool)

    @asynccontextmanager
    async def client(self, session: Session, **settings: Any) -> AsyncIterator[AsyncOpenAI]:
        given = {"base_url": self.endpoint.url_of(session), "api_key": "unused", "max_retries": 0} | settings
        async with AsyncOpenAI(**given) as client:
            yield client

    async def requests(self) -> list[tuple[str, list[int], int]]:
        [seen] = await self.group.call("seen")
        return seen
