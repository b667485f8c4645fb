"""Computed layouts of vLLM's parameters against those recorded from vLLM's own loader, on live engines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.families.shape import read_model_shape
from megarl.reshard.layouts.packed import checkpoint_tensors, unpack_layout
from megarl.reshard.layouts.vllm_computed import VllmLayouts
from megarl.types import ConfigError
from tests.rank_pool import RankPool
from tools.make_tiny_model import FAMILIES, WITH_DELTA_NETS

KV_BELOW_TP = {"num_kv_heads": 1, "vocab_size": 431, "tie_word_embeddings": False}


def compare(path: str, tp: int, ep: bool) -> tuple[list[str], int]:
    """Pieces that only one side has, and how many both have."""
    import torch.distributed as dist

    from megarl.config import RolloutConfig
    from megarl.engine.engine import RolloutEngine
    from megarl.reshard.layouts.vllm import record_layout

    config = RolloutConfig(tp=tp, kv_cache_gib=0.01, max_concurrent_requests=4, vllm={"enable_expert_parallel": ep})
    engine = RolloutEngine(path, config, max_model_len=64, dtype="float32", seed=0)
    model = read_model_shape(path)
    tensors = {name: (shape, torch.float32) for name, shape in checkpoint_tensors(model).items()}
    recorded = unpack_layout(record_layout(engine.model, tensors), model)
    computed = VllmLayouts(model, tp, dist.get_world_size(), ep)[dist.get_rank()]
    engine.close()
    assert len(set(recorded)) == len(recorded) and len(set(computed)) == len(computed)
    return sorted(map(str, set(recorded) ^ set(computed))), len(recorded)


@pytest.mark.parametrize(
    ("family", "world", "tp", "ep", "sizes"),
    [
        *(pytest.param(family, 2, 2, False, {}, id=f"{family} tp2") for family in FAMILIES),
        pytest.param("qwen2_moe", 2, 1, False, KV_BELOW_TP, id="qwen2_moe two replicas"),
        pytest.param("qwen3_moe", 2, 2, True, {"num_experts": 7}, id="qwen3_moe tp2 ep2, odd experts"),
        pytest.param("qwen3_moe", 4, 4, True, KV_BELOW_TP, id="qwen3_moe tp4 ep4"),
        pytest.param("qwen2", 4, 4, False, {"num_kv_heads": 2, "vocab_size": 449}, id="qwen2 tp4, kv heads twice"),
        pytest.param("llama", 4, 2, False, KV_BELOW_TP, id="llama tp2, two replicas"),
    ],
)
def test_computed_is_what_vllm_does(
    family: str,
    world: int,
    tp: int,
    ep: bool,
    sizes: dict[str, Any],
    tiny_model: Callable[..., Path],
    ranks: RankPool,
) -> None:
    path = tiny_model(family=family, num_layers=4 if family in WITH_DELTA_NETS else 2, **sizes)
    for different, common in ranks.run(compare, str(path), tp, ep, world_size=world):
        assert different == [] and common >= 20


def test_sizes_that_do_not_divide(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.tp=3 does not divide"):
        VllmLayouts(read_model_shape(tiny_model(family="qwen3_moe", num_layers=2)), 3, 3)[0]
