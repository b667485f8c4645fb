"""An endpoint before one real engine, for all tests of this folder together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
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
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="session")
def group(tool_model: Path, runner: asyncio.Runner, distributed_tier: None) -> Iterator[WorkerGroup]:
    context = engines(str(tool_model), 1)
    group = runner.run(context.__aenter__())
    yield group
    runner.run(context.__aexit__(None, None, None))


@pytest.fixture
def served(
    group: WorkerGroup, runner: asyncio.Runner, tool_model: Path
) -> Callable[[Callable[[Served], Coroutine[Any, Any, None]]], None]:
    """`served(test, **config)` runs a test against an endpoint of its own."""

    def run(test: Callable[[Served], Coroutine[Any, Any, None]], **config: Any) -> None:
        async def drive() -> None:
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
                await test(Served(endpoint, sessions, pool, group, notices))
            finally:
                await endpoint.close()
                codec.close()
                await pool.wait_until_drained()
            assert await group.call("unfinished") == [0]

        runner.run(drive())

    return run
