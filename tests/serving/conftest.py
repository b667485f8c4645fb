"""An endpoint before one real engine, for all tests of this folder together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.cluster.worker_group import WorkerGroup
from tests.rollout.engines import engines
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
def group(tool_model: Path, runner: asyncio.Runner) -> Iterator[WorkerGroup]:
    context = engines(str(tool_model), 1)
    group = runner.run(context.__aenter__())
    yield group
    runner.run(context.__aexit__(None, None, None))
