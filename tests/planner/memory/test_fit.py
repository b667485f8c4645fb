"""A recipe that does not fit into its GPUs is refused, with changes that fit."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from megarl.config import Recipe
from megarl.planner import gpus_of_run
from megarl.planner.defaults import with_memory_defaults
from megarl.planner.judge import MemoryJudge
from megarl.planner.memory.devices import GPU, GPU_MEMORY_GIB, MARGIN_GIB, GpuMemory
from megarl.planner.memory.phases import memory_table
from megarl.planner.predictions import models_of
from megarl.planner.remedies import remedies
from megarl.planner.search import with_field_values
from megarl.planner.sizes import find_batch_faults, find_length_faults, parallel_of
from megarl.preflight.algorithm.learning import check_optimizers
from megarl.preflight.memory import memory_fit
from megarl.preflight.memory.memory_fit import memory_faults
from tests.planner.memory.conftest import RECIPES, WIDE_MARGIN_GIB

GIB = 2**30
LARGE = sorted(path.stem for path in RECIPES.glob("qwen3_*.yaml"))
FULL = [name for name in LARGE if not name.startswith(("qwen3_0", "qwen3_1_", "qwen3_4", "qwen3_8"))]
"""Recipes whose KV cache takes all but the margin. Small models need less than a GPU has."""


def faults(recipe: Recipe) -> list[str]:
    return list(memory_faults(recipe, parallel_of(recipe), is_start=False))


def refused(recipe: Recipe) -> list[str]:
    """Faults of memory, and states that are to be in host memory twice."""
    return [*faults(recipe), *check_optimizers(recipe)]


def peak(recipe: Recipe, gib: float | None = None) -> float:
    """GiB of the fullest phase."""
    return memory_table(recipe, models_of(recipe, parallel_of(recipe)), GPU, gpu_gib=gib).fullest.device_bytes / GIB


@pytest.mark.parametrize("name", LARGE)
def test_five_percent_over_is_refused_and_under_accepted(large: Callable[..., Recipe], name: str) -> None:
    taken = peak(large(name))
    assert faults(large(name, f"cluster.gpu_memory_gib={taken / 0.95}")) == []
    (text,) = faults(large(name, f"cluster.gpu_memory_gib={taken / 1.05}"))
    table = memory_table(large(name), models_of(large(name), parallel_of(large(name))), GPU)
    excess = taken - taken / 1.05
    assert re.search(
        rf"{table.fullest.name} takes {taken:.1f} GiB on rank {table.fullest.rank}, {excess:.1f} too", text
    )


@pytest.mark.parametrize("gib", [60.0, 79.1, 110.0])
@pytest.mark.parametrize("name", LARGE)
def test_each_change_that_is_named_fits(large: Callable[..., Recipe], name: str, gib: float) -> None:
    """And none of its fields could be left out."""
    recipe = large(name, f"cluster.gpu_memory_gib={gib}")
    if not (told := faults(recipe)):
        return
    (text,) = told
    offered = re.findall(r"(?:what fits: |, or |larger sizes that fit: )([a-z_.]+=[^;]*?)(?=, or |;|$)", text)
    assert bool(offered) != ("none of the changes tried fits" in text), text
    for overrides in (offer.split() for offer in offered):
        other = large(name, f"cluster.gpu_memory_gib={gib}", *overrides)
        assert (
            faults(other) == [] and [*find_length_faults(other), *find_batch_faults(other, parallel_of(other).dp)] == []
        ), overrides
        for override in overrides:
            rest = [o for o in overrides if o != override and not o.startswith("trainer.router_replay")]
            if not override.startswith("trainer.router_replay") and "what fits" in text:
                assert refused(large(name, f"cluster.gpu_memory_gib={gib}", *rest)), (overrides, override)


def test_a_cache_that_is_named_is_as_large_as_fits(large: Callable[..., Recipe]) -> None:
    recipe = large("qwen3_14b_four_way", "cluster.gpu_memory_gib=130")
    judge = MemoryJudge(models_of(recipe, parallel_of(recipe)), GpuMemory(trainer=130.0, engine=130.0))
    found = remedies(recipe, judge, max_remedies=9)
    (cache,) = [values for values in found if list(values) == ["rollout.kv_cache_gib"]]
    assert 129.8 < peak(with_field_values(recipe, cache)) <= 130.0


def test_an_optimizer_that_fits_nowhere_else_goes_to_the_host(large: Callable[..., Recipe]) -> None:
    """On a single GPU a model of 14B never fits otherwise; of 8B parameters weights and gradients do, just so."""
    sizes = ("cluster.ranks_per_node=1", "trainer.tp=1", "rollout.tp=1", "trainer.max_tokens_per_microbatch=24576")
    recipe = large("qwen3_14b_four_way", *sizes, "rollout.kv_cache_gib=8", "cluster.gpu_memory_gib=110")
    (text,) = faults(recipe)
    (overrides,) = re.findall(r"what fits: (.*?)(?:, or |$)", text)
    assert "trainer.optimizer_offload_fraction=1" in overrides and "optimizer," not in overrides
    other = large(
        "qwen3_14b_four_way", *sizes, "rollout.kv_cache_gib=8", "cluster.gpu_memory_gib=110", *overrides.split()
    )
    assert faults(other) == []
    table = memory_table(other, models_of(other, parallel_of(other)), GPU)
    (train,) = [phase for phase in table.phases if phase.name == "train"]
    assert train.use("main weights").device_bytes == train.use("moments").device_bytes == 0
    # Main weights, moments and gradients, in float32; these, and copies of the weights, in pinned powers of two.
    assert train.use("optimizer on the host").host_bytes > 16 * 14e9


def test_weights_in_fp8_are_counted(large: Callable[..., Recipe]) -> None:
    """Qwen3-14B at tp 4: 12.4e9 of its weights are of linear layers, two bytes more of each; none while it samples."""
    recipe = with_field_values(large("qwen3_14b_four_way"), {"trainer.fp8": "blockwise"})
    phases = {p.name: p for p in memory_table(recipe, models_of(recipe, parallel_of(recipe)), GPU).phases}
    layer = 5120 * (40 * 128 * 2 + 8 * 128 * 2) + 3 * 5120 * 17408
    for name in ("train", "logprobs"):
        found = phases[name].use("weights in FP8").device_bytes
        assert found == pytest.approx(2 * 40 * layer / 4 * (1 + 4 / 128**2), rel=1e-3)
    assert phases["rollout"].use("weights in FP8").device_bytes == 0


def test_a_share_of_the_gpu_is_lowered(large: Callable[..., Recipe]) -> None:
    recipe = large("qwen3_14b_four_way")
    shared = with_field_values(recipe, {"rollout.gpu_memory_utilization": 0.98})
    assert peak(shared, GPU_MEMORY_GIB["h200"]) > GPU_MEMORY_GIB["h200"]
    gpus = GpuMemory(trainer=GPU_MEMORY_GIB["h200"], engine=GPU_MEMORY_GIB["h200"])
    found = remedies(shared, MemoryJudge(models_of(shared, parallel_of(shared)), gpus))
    assert found and all(peak(with_field_values(shared, values), 139.8) <= 139.8 for values in found)
    assert any("rollout.gpu_memory_utilization" in values for values in found)


@pytest.mark.parametrize("name", FULL)
def test_every_choice_of_a_recipe_has_its_reason_in_the_table(large: Callable[..., Recipe], name: str) -> None:
    """Without any of what saves memory the margin would not stay; cache and rows could not be much larger."""
    recipe = with_memory_defaults(large(name))
    gib = GPU_MEMORY_GIB[str(recipe.cluster.gpu_memory_gib)] - WIDE_MARGIN_GIB.get(name, MARGIN_GIB)
    assert gib - 1.0 < peak(recipe) <= gib, "cache and rows take all but the margin"

    trainer, rollout = recipe.trainer, recipe.rollout
    for kind in trainer.offload:
        kept = tuple(other for other in trainer.offload if other != kind)
        assert peak(with_field_values(recipe, {"trainer.offload": kept})) > gib, kind
    if trainer.recompute != "none":
        assert peak(with_field_values(recipe, {"trainer.recompute": "none"})) > gib
    if trainer.cp > 1:
        assert peak(with_field_values(recipe, {"trainer.cp": 1})) > gib
    assert peak(with_field_values(recipe, {"rollout.kv_cache_gib": 1.1 * rollout.kv_cache_gib})) > gib
    rows = trainer.max_tokens_per_microbatch
    longer = with_field_values(recipe, {"trainer.max_tokens_per_microbatch": rows * 3 // 2})
    assert rows <= 1.25 * recipe.trained_tokens or peak(longer) > gib

    cache = memory_table(recipe, models_of(recipe, parallel_of(recipe)), GPU).cache
    assert cache is not None and cache.longest_requests >= cache.decoding_requests // 8
    assert [*find_length_faults(recipe), *find_batch_faults(recipe, parallel_of(recipe).dp)] == []


def test_a_list_of_recomputed_modules_is_made_longer(large: Callable[..., Recipe]) -> None:
    """Beside trainer.recompute=full it would do nothing, which is refused."""
    given = ("trainer.recompute=selective", "trainer.recompute_modules=[core_attn]")
    recipe = large("qwen3_14b_four_way", *given, "trainer.max_tokens_per_microbatch=65536")
    (text,) = faults(recipe)
    assert "trainer.recompute_modules=[core_attn,mlp]" in text and "trainer.recompute=" not in text


SEPARATE = ("rollout.placement=separate", "cluster.ranks_per_node=16", "rollout.ranks=8", "trainer.offload=[]")


def test_whichever_kind_of_ranks_does_not_fit_is_named(large: Callable[..., Recipe]) -> None:
    def separate(*overrides: str) -> Recipe:
        return large("qwen3_14b_four_way", *SEPARATE, *overrides)

    # Where nothing of the trainer is, the KV cache may be larger than in the recipe's own placement.
    assert faults(large("qwen3_14b_four_way", "rollout.kv_cache_gib=115")) != []
    assert faults(separate("rollout.kv_cache_gib=115")) == []

    (text,) = faults(separate("rollout.kv_cache_gib=140"))
    assert "rollout takes " in text and " on engine rank 8, " in text and " on trainer rank" not in text
    fitting = re.search(r"what fits: rollout.kv_cache_gib=([0-9.]+)$", text)
    assert fitting is not None and 115 < float(fitting[1]) < 139.8
    assert faults(separate(f"rollout.kv_cache_gib={fitting[1]}")) == []

    (text,) = faults(separate("trainer.max_tokens_per_microbatch=81920"))
    assert "train takes " in text and " on trainer rank 0, " in text and " on engine rank" not in text
    assert "trainer.offload" not in text and "rollout." not in text, "nothing of these is the trainer's"

    (text,) = faults(separate("cluster.gpu_memory_gib=30", "rollout.kv_cache_gib=1", "trainer.tp=8", "rollout.tp=1"))
    assert "rollout takes " in text and " on engine rank 8, " in text


def test_engines_on_gpus_of_another_kind_have_a_limit_of_their_own(large: Callable[..., Recipe]) -> None:
    """The trainer takes more than an H100 has, and engines may have a share of what one has."""

    def kinds(*overrides: str) -> Recipe:
        engines = "{nodes: 1, ranks_per_node: 4, gpu_memory_gib: h100}"
        return large(
            "qwen3_14b_four_way", SEPARATE[0], "trainer.offload=[]", f"cluster.groups.engines={engines}", *overrides
        )

    sound = kinds("rollout.kv_cache_gib=20")
    assert sound.separate_ranks == 4 and sound.trainer_ranks == 8 and faults(sound) == []
    assert peak(sound) > GPU_MEMORY_GIB["h100"]
    (text,) = faults(kinds("rollout.kv_cache_gib=75"))
    assert text.startswith(
        "cluster.gpu_memory_gib = h200, cluster.groups.engines.gpu_memory_gib = h100: start engine takes "
    )
    assert " on engine rank 8, " in text and " on trainer rank" not in text
    fitting = re.search(r"what fits: rollout.kv_cache_gib=([0-9.]+)$", text)
    assert fitting is not None and 50 < float(fitting[1]) < 75
    assert faults(kinds(f"rollout.kv_cache_gib={fitting[1]}")) == []
    assert faults(with_field_values(sound, {"rollout.gpu_memory_utilization": 0.9})) == []
    (text,) = faults(with_field_values(sound, {"rollout.gpu_memory_utilization": 1.1}))
    assert "rollout takes " in text and " on engine rank 8, " in text


def test_a_copy_of_the_weights_that_does_not_fit_is_left_out(large: Callable[..., Recipe]) -> None:
    recipe = large("qwen3_14b_four_way", *SEPARATE, "rollout.kv_cache_gib=4")
    fullest = memory_table(recipe, models_of(recipe, parallel_of(recipe)), GPU).fullest
    recipe = with_field_values(recipe, {"cluster.gpu_memory_gib": fullest.device_bytes / 2**30 + 1})
    assert faults(recipe) == [] and fullest.name == "train"
    (text,) = faults(with_field_values(recipe, {"weights.overlap": True}))
    assert "train takes " in text and "what fits: weights.overlap=false" in text


def test_a_gpu_that_nobody_names_refuses_nothing(large: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpus_of_run, memory_fit):
        monkeypatch.setattr(module, "installed_gpu_gib", lambda: None)
    assert faults(large("qwen3_14b_four_way", "cluster.gpu_memory_gib=null", "rollout.kv_cache_gib=500")) == []


def test_other_gpus_than_are_named(large: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpus_of_run, memory_fit):
        monkeypatch.setattr(module, "installed_gpu_gib", lambda: 79.6)
    for module in (gpus_of_run, memory_fit):
        monkeypatch.setattr(module, "runs_on_cpu", lambda: False)
    recipe = large("qwen3_14b_four_way", "cluster.launcher=local")
    (text,) = memory_faults(recipe, parallel_of(recipe), is_start=True)
    assert text == (
        "cluster.gpu_memory_gib = h200: this machine's GPUs have only 79.6 GiB; leave it out, or run on GPUs "
        "with this memory"
    )
    assert list(memory_faults(recipe, parallel_of(recipe), is_start=False)) == []
    for module in (gpus_of_run, memory_fit):
        monkeypatch.setattr(module, "runs_on_cpu", lambda: True)
    assert list(memory_faults(recipe, parallel_of(recipe), is_start=True)) == []
