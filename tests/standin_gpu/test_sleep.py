"""vLLM's allocator: memory asleep is free for others, unusable for kernels and graphs, and keeps its address."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from megarl.platform.memory import engine_pools

pytestmark = pytest.mark.standin_gpu
COUNT = 1 << 22
"""float32 values of each tensor, 16 MiB."""


@pytest.fixture(scope="module")
def allocator() -> Iterator[Any]:
    cumem = pytest.importorskip("vllm.device_allocator.cumem")
    yield cumem.CuMemAllocator.get_instance()


def test_memory_sleeps_and_wakes(allocator: Any) -> None:
    with allocator.use_memory_pool(tag="weights"):
        weights = torch.arange(COUNT, dtype=torch.float32, device="cuda")
    with allocator.use_memory_pool(tag="kv_cache"):
        cache = torch.full((COUNT,), 3.0, device="cuda")
    # A sleep empties the cache of torch's own allocator, too.
    torch.cuda.empty_cache()
    address, awake = weights.data_ptr(), torch.cuda.mem_get_info(0)[0]

    torch.cuda.synchronize()
    allocator.sleep(offload_tags=("weights",))
    assert torch.cuda.mem_get_info(0)[0] - awake >= weights.nbytes + cache.nbytes
    with pytest.raises(RuntimeError, match=r"aten::add.*freed or asleep"):
        weights + 1
    with pytest.raises(RuntimeError, match=r"copy from .*freed or asleep"):
        cache.cpu()

    allocator.wake_up()
    assert weights.data_ptr() == address
    assert torch.cuda.mem_get_info(0)[0] == awake
    assert weights[-3:].tolist() == [COUNT - 3, COUNT - 2, COUNT - 1]
    cache.fill_(5)
    assert cache.sum().item() == 5 * COUNT


def test_a_modules_constant_survives_a_sleep(allocator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is imported while vLLM builds a model makes its constants in the engine's pool."""
    engine_pools.allow_free_while_asleep()
    module = ModuleType("made_with_a_model")
    with allocator.use_memory_pool(tag="weights"):
        vars(module)["TABLE"] = torch.arange(4, device="cuda")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    engine_pools.move_constants()
    torch.cuda.synchronize()
    allocator.sleep(offload_tags=())
    assert vars(module)["TABLE"].tolist() == [0, 1, 2, 3]
    # The sleeping pool is freed, and the next test allocates from a new one.
    allocator.release_pools()
    torch.cuda.empty_cache()
    assert allocator.get_current_usage() == 0


def test_a_graph_over_sleeping_memory_is_an_error(allocator: Any) -> None:
    with allocator.use_memory_pool(tag="weights"):
        weights = torch.ones(COUNT, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = weights * 2
    graph.replay()
    assert doubled.sum().item() == 2 * COUNT
    torch.cuda.synchronize()
    allocator.sleep(offload_tags=("weights",))
    with pytest.raises(RuntimeError, match=r"aten::mul.*freed or asleep"):
        graph.replay()
    allocator.wake_up()
    graph.replay()
    assert doubled.sum().item() == 2 * COUNT
