"""Engines with FP8 weights in the memory table: what they take, and what waits to be quantised."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest

from megarl.config import Recipe
from megarl.families.shape import ModelShape
from megarl.planner.memory.devices import GPU
from megarl.planner.memory.engine_bytes import engine_weight_bytes, unquantised_bytes
from megarl.planner.memory.phases import memory_table
from megarl.planner.predictions import models_of
from megarl.planner.sizes import parallel_of
from megarl.reshard.layouts.placed import make_reshard_layouts
from megarl.reshard.layouts.vllm_computed import VllmLayouts
from megarl.reshard.plan import make_plan
from megarl.reshard.quantised import assign_buffer_starts, find_bucket_spans


def test_weights_of_a_dense_model_take_half(large: Callable[..., Recipe]) -> None:
    """Qwen3-14B at tp 2: 40 layers of 5120 x (40 + 2 * 8 heads + 40) * 128 and 3 * 5120 * 17408, by hand."""
    recipe = large("qwen3_14b_four_way", "rollout.quantization=fp8", "rollout.kv_cache_dtype=fp8")
    projections = 40 * (5120 * (40 + 16 + 40) * 128 + 3 * 5120 * 17408) // 2
    scales = projections // 128**2
    norms, embeddings = 40 * (2 * 5120 + 2 * 128) + 5120, 2 * 151936 // 2 * 5120
    shape = models_of(recipe, parallel_of(recipe)).policy.shape
    layouts = VllmLayouts(shape, 2, 8)
    assert engine_weight_bytes(layouts, 0, itemsize=2, quantization="fp8") == projections + 4 * scales + 2 * (
        norms + embeddings + 40960 * 128
    )
    by_channel = 40 * ((40 + 16) * 128 // 2 + 5120 + 17408 + 5120)
    wanted = projections + 4 * by_channel + 2 * (norms + embeddings + 40960 * 128)
    assert engine_weight_bytes(layouts, 0, itemsize=2, quantization="fp8_per_channel") == wanted
    tables = [memory_table(r, models_of(r, parallel_of(r)), GPU) for r in (recipe, large("qwen3_14b_four_way"))]
    (quantised, plain), (room, usual) = (
        [next(p for p in table.phases if p.name == "reshard") for table in tables],
        [table.cache for table in tables],
    )
    assert quantised.use("engine weights").device_bytes < 0.6 * plain.use("engine weights").device_bytes
    assert quantised.use("unquantised weights").device_bytes > plain.use("unquantised weights").device_bytes == 0
    assert room and usual and room.tokens > 1.99 * usual.tokens


def test_experts_are_counted_in_whole_blocks(large: Callable[..., Recipe]) -> None:
    """768 channels of an expert at tp 4 are 192, rounded up to 256: 128 experts, 48 layers of 2048 x 3 * 256."""
    recipe = large("qwen3_30b_a3b_gspo")
    layouts = VllmLayouts(models_of(recipe, parallel_of(recipe)).policy.shape, 4, 4)
    experts = 48 * 128 * 3 * 2048 * 256
    dense = 48 * 2048 * (32 + 2 * 4 + 32) * 128 // 4
    plain = 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048 + 2 * 151936 // 4 * 2048
    wanted = experts + dense + 4 * (experts + dense) // 128**2 + 2 * (plain + 40960 * 128)
    # Scales of a last block that is not whole count as whole: 10 heads of 128 channels, 8 rows of blocks.
    assert engine_weight_bytes(layouts, 0, itemsize=2, quantization="fp8") == pytest.approx(wanted, rel=1e-6)


def modules_of(layouts: VllmLayouts, rank: int) -> dict[str, dict[str, int]]:
    """Elements of the weights of each module that vLLM quantises."""
    found: dict[str, dict[str, int]] = {}
    model: ModelShape = layouts.model
    for stack, shape, count in layouts.stacks_on(rank):
        if stack.stacks_experts or stack.storage.endswith("_proj.weight"):
            for layer in range(model.num_layers):
                name = stack.storage.format(layer=layer)
                module = name.rpartition(".")[0]
                found.setdefault(module, {})[name] = prod(shape) * count // model.num_layers
    return found


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # Each rank copies all from itself: nothing is sent, and still the plan has buckets.
        ("qwen3_14b_four_way", {"tp": 2, "rollout": 2}),
        ("qwen3_14b_four_way", {"tp": 2, "pp": 2, "rollout": 4}),
        ("qwen3_30b_a3b_gspo", {"tp": 2, "ep": 2, "rollout": 2}),
    ],
)
def test_few_layers_wait_at_a_time(name: str, sizes: dict[str, int], large: Callable[..., Recipe]) -> None:
    own = {axis: sizes.get(axis, 1) for axis in ("tp", "pp", "ep")}
    ranks = own["tp"] * own["pp"]
    changes = [f"trainer.{axis}={size}" for axis, size in own.items()]
    changes += [
        "trainer.cp=1",
        "trainer.etp=1",
        "trainer.dp=null",
        "cluster.nodes=1",
        f"cluster.ranks_per_node={ranks}",
    ]
    recipe = large(name, *changes, f"rollout.tp={sizes['rollout']}", "rollout.vllm={}")
    parallel = parallel_of(recipe)
    shape = models_of(recipe, parallel).policy.shape
    ends = make_reshard_layouts(shape, parallel, ranks)
    bucket = 256 << 20
    plan = make_plan(ends.sources, ends.destinations, itemsize=2, bucket_bytes=bucket, bounds_local=True)
    layouts = ends.destinations
    assert isinstance(layouts, VllmLayouts)
    modules = modules_of(layouts, 0)
    spans = find_bucket_spans(modules, plan, layouts[0])
    _, room = assign_buffer_starts([(*spans[module], sum(names.values())) for module, names in modules.items()])
    whole = sum(sum(names.values()) for names in modules.values())
    assert 2 * room < unquantised_bytes(layouts, 0, itemsize=2, bucket_bytes=bucket, stages=parallel.pp)
    assert room < whole / 5
    unbounded = make_plan(ends.sources, ends.destinations, itemsize=2, bucket_bytes=bucket)
    assert len(unbounded.exchanged) <= len(plan.exchanged)
    assert any(plan.exchanged) == any(unbounded.exchanged) == (sizes["tp"] != sizes["rollout"] or "ep" in sizes)
