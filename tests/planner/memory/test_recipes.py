"""Every recipe of launch/recipes is planned: what its fullest phase takes, and what its machine has."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megarl.config import Recipe
from megarl.planner.defaults import with_memory_defaults
from megarl.planner.memory.devices import MARGIN_GIB
from megarl.planner.memory.node_bytes import NodeRanks, fullest_node_bytes
from megarl.planner.predictions import planned_host_bytes, table_of
from megarl.planner.sizes import find_batch_faults, find_length_faults
from megarl.planner.verdict import verdict_of
from megarl.preflight import check_plan
from tests.planner.memory.conftest import RECIPES, WIDE_MARGIN_GIB

GIB = 2**30
PLANNED = {
    "qwen3_0_6b_gsm8k": ("h100", 41.3),
    "qwen3_1_7b_gsm8k": ("h100", 68.4),
    "qwen3_4b_gsm8k": ("h200", 127.9),
    "qwen3_8b_gsm8k": ("h200", 126.4),
    "qwen3_8b_lora": ("h100", 69.2),
    "qwen3_8b_tools": ("h100", 70.6),
    "qwen3_8b_distillation": ("h100", 69.3),
    "qwen3_8b_sft": ("h100", 62.0),
    "qwen3_8b_dpo": ("h100", 62.0),
    "qwen3_14b_agent": ("h100", 71.1),
    "qwen3_14b_dapo": ("h100", 71.1),
    "qwen3_14b_dapo_h200": ("h200", 119.3),
    "qwen3_14b_distillation": ("h100", 71.1),
    "qwen3_30b_a3b_gspo": ("h200", 131.8),
    "qwen3_32b_grpo": ("h200", 131.8),
    "qwen3_235b_a22b_gspo": ("h200", 131.8),
}
"""Recipe: its kind of GPU, and GiB that its fullest phase takes of one."""
RESIDENT = ("qwen3_0_6b_gsm8k", "qwen3_1_7b_gsm8k", "qwen3_4b_gsm8k", "qwen3_8b_lora", "qwen3_32b_grpo")
"""Recipes of GPUs that hold everything."""
LIMITS = {"h100": 79.1, "h200": 139.8}
"""GiB of a GPU by kind, as typed from data sheets, less what the driver keeps."""
ON_CPUS = sorted({path.stem for path in RECIPES.glob("*.yaml")} - PLANNED.keys())


@pytest.mark.parametrize("name", PLANNED)
def test_a_recipe_for_gpus_leaves_a_margin(large: Callable[..., Recipe], name: str) -> None:
    kind, peak_gib = PLANNED[name]
    written = large(name)
    # The planner chooses, so a recipe does not repeat or contradict it.
    assert {"offload", "recompute"}.isdisjoint(written.trainer.model_fields_set)
    recipe = with_memory_defaults(written)
    is_resident = not recipe.trainer.offload and recipe.trainer.recompute == "none"
    assert is_resident or name not in RESIDENT
    assert recipe.cluster.gpu_memory_gib == kind
    parallel = check_plan(recipe)[1]
    table = table_of(recipe, parallel)
    found = verdict_of(recipe, parallel, table)
    assert found.fits and set(found.limits.values()) == {int(LIMITS[kind] * GIB)}
    taken = max(phase.device_bytes for phase in table.phases) / GIB
    assert peak_gib - 0.2 < taken <= peak_gib
    assert taken <= LIMITS[kind] - WIDE_MARGIN_GIB.get(name, MARGIN_GIB)
    assert MARGIN_GIB == 8.0
    assert [*find_length_faults(recipe), *find_batch_faults(recipe, parallel.dp)] == []


@pytest.mark.parametrize("name", [name for name in PLANNED if "14b" in name and name != "qwen3_14b_dapo_h200"])
def test_14b_trains_on_eight_gpus_of_80_gb(large: Callable[..., Recipe], name: str) -> None:
    """Less than 80 GB (80e9 bytes) are taken in any phase, and no layer is recomputed as a whole."""
    recipe = with_memory_defaults(large(name))
    table = table_of(recipe, check_plan(recipe)[1])
    assert recipe.cluster.world_size == 8
    assert max(phase.device_bytes for phase in table.phases) < 80e9 - 3e9
    assert recipe.trainer.recompute != "full"


def test_the_host_memory_of_a_node_is_planned(large: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks of 14B: 1.85e9 parameters each have 14 bytes of staged checkpoint and 12 of offloaded copies."""
    monkeypatch.setattr("megarl.planner.gpus_of_run.runs_on_cpu", lambda: False)
    recipe = with_memory_defaults(large("qwen3_14b_dapo_h200", "trainer.offload=[optimizer,gradients]"))
    planned = planned_host_bytes(recipe)
    assert planned is not None and planned.engine == 0
    table = table_of(recipe, check_plan(recipe)[1])
    assert planned.of_node(NodeRanks(trainers=8)) == fullest_node_bytes(recipe, table)
    assert 350 < planned.of_node(NodeRanks(trainers=8)) / GIB < 380

    apart = large("qwen3_14b_dapo_h200", "rollout.placement=separate", "rollout.ranks=4", "trainer.offload=[]")
    planned = planned_host_bytes(apart)
    assert planned is not None and 0 < planned.engine < planned.trainer
    monkeypatch.setattr("megarl.planner.gpus_of_run.runs_on_cpu", lambda: True)
    assert planned_host_bytes(recipe) is None


@pytest.mark.parametrize("name", ON_CPUS)
def test_a_recipe_for_cpus_fits_into_16_gib(
    large: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """All its ranks together, with a model of the size that its maker script writes."""
    monkeypatch.setattr("megarl.planner.gpus_of_run.runs_on_cpu", lambda: True)
    monkeypatch.setattr("megarl.planner.verdict.machine_bytes", lambda: 16 * GIB)
    model = "models/tiny_experts" if name == "tiny_moe" else "models/tiny"
    recipe = large(name, f"model.path={model}", *OWN.get(name, ()))
    parallel = check_plan(recipe)[1]
    table = table_of(recipe, parallel)
    found = verdict_of(recipe, parallel, table)
    assert found.fits, found.text
    assert 0.5 < fullest_node_bytes(recipe, table) / GIB < 16


OWN = {"tiny_distillation": ("distillation.teacher=models/tiny",)}
"""Further models that a recipe names."""


@pytest.mark.parametrize(("top_p", "itemsize"), [("1", 2), ("0.9", 2 + 2 * 4)])
@pytest.mark.parametrize("chunk", [512, 1024])
def test_truncated_sampling_needs_float32_copies_of_the_logits(
    large: Callable[..., Recipe], top_p: str, itemsize: int, chunk: int
) -> None:
    """Kernels read logits over the whole vocabulary as they are; over retained tokens torch makes two copies."""
    recipe = large("qwen3_1_7b_gsm8k", f"rollout.sampling.top_p={top_p}", f"trainer.logprob_chunk_tokens={chunk}")
    table = table_of(recipe, check_plan(recipe)[1])
    found = {use.device_bytes for phase in table.phases for use in phase.uses if use.kind == "logits"}
    assert found == {chunk * 151936 * itemsize}
