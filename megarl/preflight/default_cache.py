"""The default of `rollout.kv_cache_gib`: the GPU memory left free during sampling, less a margin."""

from __future__ import annotations

from dataclasses import replace

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.memory_plan.models import Built, Models
from megarl.memory_plan.remedies import changed
from megarl.preflight import sizes
from megarl.preflight.memory_fit import gpu_memory, ranks_on_cpu
from megarl.preflight.planned_models import models_of
from megarl.preflight.vllm_limits import default_cache_gib, is_cache_given
from megarl.types import DataError


def with_cache(recipe: Recipe, *, is_start: bool = False, is_trained: bool = True) -> Recipe:
    """Return the recipe with a KV cache size, if it gives none and the memory of its GPUs is known.

    The size is at least enough for one longest sequence; a later check tests if that fits. A recipe is returned
    unchanged if it cannot be planned, or if it starts (`is_start`) on a CPU. `is_trained` False: only engines start, on
    all ranks.
    """
    if is_cache_given(recipe) or not recipe.has_engine or (is_start and ranks_on_cpu(recipe)):
        return recipe
    if (gpus := gpu_memory(recipe)) is None or any(sizes.ranks(recipe)):
        return recipe
    try:
        models = models_of(recipe, sizes.layout_of(recipe))
    except DataError:
        return recipe  # The checks of the model folder report it.
    if any(sizes.model_fit(recipe, models.policy.shape)):
        return recipe
    # An evaluation loads no trainer, so the cache may take the memory that training would use.
    if not is_trained:
        models = Models(_engines_alone(models.policy), None, {})
    return changed(recipe, {"rollout.kv_cache_gib": default_cache_gib(recipe, models, gpus)})


def _engines_alone(policy: Built) -> Built:
    """Return the policy with separate engines on all ranks of the run."""
    layout = policy.layout
    own = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=layout.rollout_tp, rollout_ep=layout.rollout_ep)
    return Built(policy.shape, replace(own, rollout_ranks=layout.num_ranks))
