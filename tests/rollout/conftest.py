"""Engines of vLLM on ranks of their own, for the tests of a module together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.cluster.calls.worker_group import WorkerGroup
from megarl.data.chat import load_tokenizer
from tests.rollout.engines import engines


@pytest.fixture(scope="module")
def model_path(tiny_model: Callable[..., Path]) -> str:
    """A dense model with almost equal chances for all tokens. Some modules have another one in its place."""
    return str(tiny_model(num_layers=2, tie_word_embeddings=False, initializer_range=0.002))


@pytest.fixture(scope="module")
def tokenizer(model_path: str) -> Any:
    return load_tokenizer(model_path)


@pytest.fixture(scope="module")
async def group(model_path: str, distributed_tier: None) -> AsyncIterator[WorkerGroup]:
    """Two engines with the module's `model_path`, for all tests that leave them as they were."""
    async with engines(model_path, 2) as made:
        yield made
