"""Size of a rank's host memory for tensors moved off the device, computed before any model is built."""

from __future__ import annotations

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import planned_shape
from megarl.models.configuration import uses_transformer_engine
from megarl.planner.memory.devices import Platform
from megarl.planner.memory.models import read_models
from megarl.planner.memory.rank_memory import RankMemory
from megarl.platform import device
from megarl.training.host.host_arena import ALIGNMENT, HostArena


def start_arena(
    recipe: Recipe, parallel: ParallelConfig, rank: int, frozen_parallel: ParallelConfig | None = None
) -> HostArena:
    """Return the host memory of a trainer's rank, as large as the memory plan predicts for its host copies.

    It is page-locked in the background from now on. Raises ConfigError if the machine has too little memory.
    """
    shape = planned_shape(recipe.model.folder, recipe.model.override_config)
    models = read_models(recipe, shape, parallel, frozen_parallel)
    is_gpu = device.current().type == "cuda"
    platform = Platform(is_gpu=is_gpu, has_transformer_engine=uses_transformer_engine())
    memory = RankMemory(recipe, models, platform, rank)
    if not (num_bytes := memory.host_copy_bytes):
        return HostArena(0)
    # Each copy begins at a cache line.
    return HostArena(num_bytes + memory.max_host_copies * ALIGNMENT)
