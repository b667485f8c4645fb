"""Check of the free space on the disk of a run's folder."""

from __future__ import annotations

from pathlib import Path

from megarl.config import Recipe
from megarl.files.atomic import LEAST_FREE_BYTES, check_space
from megarl.planner.gpus_of_run import platform_here
from megarl.planner.memory.rank_memory import ITEM_BYTES, RankMemory
from megarl.planner.predictions import planned_models
from megarl.planner.seconds.work import model_work
from megarl.tracking.run_folder import run_path


def check_disk(recipe: Recipe) -> None:
    """Raise DiskFullError if the disk of the run's folder lacks space for its files and its largest save."""
    check_space(run_path(recipe), LEAST_FREE_BYTES + _predict_largest_save(recipe))


def _predict_largest_save(recipe: Recipe) -> int:
    """Return the bytes of a checkpoint or of the exported model, whichever is larger.

    0: unknown, because the model is not downloaded, the run is on other machines, or other checks report errors.
    """
    is_here = recipe.cluster.launcher == "local" and Path(recipe.model.folder).is_dir()
    if not is_here or not recipe.train.steps or (models := planned_models(recipe)) is None:
        return 0
    exported_bytes = ITEM_BYTES[recipe.model.dtype] * model_work(models.policy.shape).weights
    if not recipe.checkpoint.every_steps:
        return exported_bytes
    parallel = models.policy.parallel
    # All ranks of a pipeline stage save equal parts.
    stage_memories = [
        RankMemory(recipe, models, platform_here(recipe), parallel.rank(tp=0, dp=0, pp=stage))
        for stage in range(parallel.pp)
    ]
    saved_bytes = sum(memory.policy_states.saved + memory.critic_states.saved for memory in stage_memories)
    return max(exported_bytes, saved_bytes * parallel.world_size // parallel.pp)
