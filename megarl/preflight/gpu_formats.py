"""Whether a run's GPUs and libraries have a recipe's number formats: FP8 of trainer, engine and KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.config import Recipe
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.platform.gpu_needs import NAMED_GPUS, library_versions, needs, unmet
from megarl.platform.visible_gpus import Gpu, installed_gpus
from megarl.preflight.memory import uses_this_machine


def format_faults(recipe: Recipe) -> Iterator[str]:
    """Needs that the GPUs do not meet, which the recipe names or this machine has, or this environment's libraries."""
    if asked := needs(recipe):
        yield from unmet(asked, _gpus(recipe), {} if runs_on_cpu() else library_versions())


def _gpus(recipe: Recipe) -> Sequence[Gpu]:
    if uses_this_machine(recipe) and (found := installed_gpus()):
        return found
    named = recipe.cluster.gpu_memory_gib
    return [Gpu(f"cluster.gpu_memory_gib = {named}", NAMED_GPUS[named])] if isinstance(named, str) else []
