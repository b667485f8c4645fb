"""The default of `rollout.kv_cache_gib`: what a GPU has left while the engine samples, less a margin."""

from __future__ import annotations

from dataclasses import replace

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.memory.changes import cache_within, changed
from megarl.memory.devices import GPU, MARGIN_GIB, GpuMemory
from megarl.memory.models import Built, Models
from megarl.memory.phases import memory_table
from megarl.preflight import sizes
from megarl.preflight.engine import least_cache_gib
from megarl.preflight.memory import gpu_memory, ranks_on_cpu
from megarl.preflight.planned_models import models_of
from megarl.types import DataError


def with_cache(recipe: Recipe, *, is_start: bool = False, is_trained: bool = True) -> Recipe:
    """The recipe with its KV cache, where it leaves the size out and the memory of its GPUs is known.

    It is at least what one longest sequence needs: whether that fits is checked later. A recipe that cannot be planned
    comes back as it is, and so does one that starts (`is_start`) on a CPU. Without `is_trained` engines alone are
    started, on all ranks.
    """
    rollout = recipe.rollout
    is_given = "kv_cache_gib" in rollout.model_fields_set or rollout.gpu_memory_utilization is not None
    if is_given or not recipe.has_engine or (is_start and ranks_on_cpu(recipe)):
        return recipe
    if (gpus := gpu_memory(recipe)) is None or any(sizes.ranks(recipe)):
        return recipe
    try:
        models = models_of(recipe, sizes.layout_of(recipe))
    except DataError:
        return recipe  # Reported by the checks of the model folder.
    if any(sizes.model_fit(recipe, models.policy.shape)):
        return recipe
    if not is_trained:
        models = Models(_engines_alone(models.policy), None, {})
    return changed(recipe, {"rollout.kv_cache_gib": _largest(recipe, models, gpus)})


def _largest(recipe: Recipe, models: Models, gpus: GpuMemory) -> float:
    """GiB of the cache that leaves the margin."""
    least = least_cache_gib(recipe, models.policy.shape)
    smallest = changed(recipe, {"rollout.kv_cache_gib": least})
    table = memory_table(smallest, models, GPU, gpu_gib=gpus.engine)
    return max(least, cache_within(table, gpus.engine - MARGIN_GIB))


def _engines_alone(policy: Built) -> Built:
    """The policy with engines on ranks of their own, as many as the run has."""
    layout = policy.layout
    own = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=layout.rollout_tp, rollout_ep=layout.rollout_ep)
    return Built(policy.shape, replace(own, rollout_ranks=layout.num_ranks))
