"""vLLM's allocator: memory asleep is free for others, unusable for kernels and graphs, and keeps its address."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megarl.cluster import rank

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


@pytest.mark.parametrize("is_asleep", [False, True], ids=["awake", "asleep"])
def test_a_rank_that_stays_frees_an_engines_pools(allocator: Any, is_asleep: bool) -> None:
    """vLLM builds an engine only in a process whose pools have no memory."""
    with allocator.use_memory_pool(tag="weights"):
        weights = torch.ones(COUNT, device="cuda")
    assert allocator.get_current_usage() >= weights.nbytes
    if is_asleep:
        torch.cuda.synchronize()
        allocator.sleep(offload_tags=())
    del weights
    rank._free_memory()
    assert allocator.get_current_usage() == 0
    with allocator.use_memory_pool(tag="weights"):
        weights = torch.ones(COUNT, device="cuda")
    assert weights.sum().item() == COUNT
    del weights
    rank._free_memory()


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
