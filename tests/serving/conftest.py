"""An endpoint before one real engine, for all tests of this folder together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.config.sections.rollout import EndpointConfig
from megarl.data.chat import load_tokenizer
from megarl.rollout.pool import EnginePool
from megarl.serving.codec import Codec
from megarl.serving.endpoint import Endpoint
from megarl.serving.sessions import Sessions
from tests.rollout.engines import CONTEXT_TOKENS, engines
from tests.serving.served import ONE, Served
from tests.serving.tool_model import make_tool_model


@pytest.fixture(scope="session")
def tool_model(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tiny_model(num_layers=1, tie_word_embeddings=False, vocab_size=512)
    return make_tool_model(source, tmp_path_factory.mktemp("tool_model") / "model")


@pytest.fixture(scope="session")
async def group(tool_model: Path, distributed_tier: None) -> AsyncIterator[WorkerGroup]:
    async with engines(str(tool_model), 1) as made:
        yield made


@pytest.fixture
def served(group: WorkerGroup, tool_model: Path) -> Callable[..., AbstractAsyncContextManager[Served]]:
    """`async with served(**config) as s:` starts an endpoint, and ends it when its requests have ended."""

    @asynccontextmanager
    async def start(**config: Any) -> AsyncIterator[Served]:
        await group.call("seen")
        notices: list[str] = []
        codec = Codec(load_tokenizer(tool_model), CONTEXT_TOKENS)
        pool = EnginePool(group, ONE, max_running=32, budget_seconds=0.05)
        sessions = Sessions(codec)
        endpoint = Endpoint(
            sessions,
            EndpointConfig(**config),
            model="policy",
            notice=notices.append,
            load=pool.load,
        )
        await endpoint.start()
        try:
            yield Served(endpoint, sessions, pool, group, notices)
        finally:
            await endpoint.close()
            codec.close()
            await pool.wait_until_drained()
        assert await group.call("unfinished") == [0]

    return start
