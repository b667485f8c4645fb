"""Layouts of a LoRA adapter in vLLM's slots, computed without an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from megarl.config import LoraConfig
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import read_model_shape
from megarl.reshard.forecast.cost_model import forecast, measure_traffic, reshard_plan
from megarl.reshard.layouts.placed import make_reshard_layouts
from megarl.reshard.layouts.vllm_adapters import SLOT_RANKS, VllmAdapterLayouts, slot_rank
from megarl.reshard.layouts.vllm_computed import VllmLayouts

LORA = LoraConfig(rank=4)


def test_ranks_of_slots_are_vllm_s() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == SLOT_RANKS


@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (2, 8), (8, 8), (9, 16), (257, 320), (512, 512)])
def test_the_smallest_slot_is_taken(rank: int, slot: int) -> None:
    assert slot_rank(rank) == slot


def test_a_rank_above_all_slots_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"LoRA rank 513 exceeds the largest of vLLM's slots, 512"):
        slot_rank(513)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_pieces_fill_the_wanted_parts_of_the_slots_once(tp: int, tiny_model: Callable[..., Path]) -> None:
    model = read_model_shape(tiny_model(family="qwen3", num_layers=2, num_kv_heads=2))
    layouts = VllmAdapterLayouts(VllmLayouts(model, tp, 4), LORA.targets, LORA.rank)
    for rank in range(4):
        filled: dict[str, set[int]] = {}
        for piece in layouts[rank]:
            indices = np.add.outer(*(np.arange(n) * s for n, s in zip(piece.box.shape, piece.strides, strict=True)))
            own = set((indices + piece.offset).ravel().tolist())
            assert len(own) == piece.box.numel and not own & filled.get(piece.storage, set())
            filled.setdefault(piece.storage, set()).update(own)
        # Two layers with an A and Bs for qkv (3), o, gate_up (2) and down.
        assert len(filled) == 2 * (4 + 7)
        assert 4 * sum(map(len, filled.values())) == layouts.adapter_bytes_on(rank, 4)
        # Slots have rank 8, the adapter has rank 4.
        assert layouts.bytes_on(rank, 4) == 2 * layouts.adapter_bytes_on(rank, 4)


LAYOUTS = [
    ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1),
    ParallelConfig(tp=1, pp=2, dp=2, rollout_tp=2),
    ParallelConfig(tp=2, pp=2, dp=1, rollout_tp=4, vpp=2),
    ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=2, rollout_ranks=4),
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_a_plan_moves_each_matrix_once_to_each_rank(parallel: ParallelConfig, tiny_model: Callable[..., Path]) -> None:
    model = read_model_shape(tiny_model(family="qwen3", num_layers=4, num_kv_heads=2))
    plan = reshard_plan(model, parallel, ranks_per_node=8, itemsize=4, bucket_bytes=1 << 14, adapter=LORA)
    traffic = measure_traffic(plan)
    ends = make_reshard_layouts(model, parallel, parallel.num_ranks, adapter=LORA)
    engines = VllmAdapterLayouts(
        VllmLayouts(model, parallel.rollout_tp, parallel.num_ranks - ends.first_engine), LORA.targets, LORA.rank
    )
    floor = [engines.adapter_bytes_on(rank, 4) for rank in range(len(engines))]
    assert traffic.received.sum(0).tolist() == [0] * ends.first_engine + floor
    assert traffic.ratio == 1.0


def test_a_forecast_counts_the_adapter_alone(tiny_model: Callable[..., Path]) -> None:
    model = read_model_shape(tiny_model(family="qwen3", num_layers=2, num_kv_heads=2))
    sizes = dict(ranks_per_node=2, itemsize=4, bucket_bytes=1 << 20)
    parallel = ParallelConfig(tp=2, pp=1, dp=1, rollout_tp=1)
    whole, adapter = (forecast(model, parallel, **sizes, adapter=lora) for lora in (None, LORA))
    assert (
        adapter["model_bytes"]
        == adapter["reshard"]["received_bytes"]["local"]["max"]
        + (adapter["reshard"]["received_bytes"]["same_node"]["max"])
    )
    assert adapter["model_bytes"] < whole["model_bytes"] / 2
    assert adapter["reshard"]["ratio_to_lower_bound"] == 1.0
