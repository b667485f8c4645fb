"""Check whether a recipe's predicted memory fits into its GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.planner.gpus_of_run import gpu_gib, gpu_memory, uses_this_machine
from megarl.planner.judge import MemoryJudge
from megarl.planner.predictions import models_of
from megarl.planner.verdict import format_refusal
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.platform.visible_gpus import installed_gpu_gib
from megarl.types import DataError

_SAME_GPU = 0.95
"""Minimum memory of an installed GPU, as a fraction of cluster.gpu_memory_gib."""


def memory_faults(recipe: Recipe, parallel: ParallelConfig, *, is_start: bool) -> Iterator[str]:
    """Yield an error if phases need more than a GPU's memory, with the cheapest changes that fit."""
    if recipe.rollout.gpu_memory_utilization is not None and recipe.has_engine:
        yield from _find_utilization_faults(recipe)
    yield from _find_gpu_faults(recipe, is_start)
    if (gpus := gpu_memory(recipe)) is None:
        return
    try:
        models = models_of(recipe, parallel)
    except DataError:
        return  # The checks of the model folder report it.
    judge = MemoryJudge(models, gpus)
    table = judge.predict(recipe)
    if overfull := judge.overfull_phases(table):
        yield format_refusal(recipe, judge, overfull)
    # With gpu_memory_utilization, the cache gets the rest of the GPU, possibly too little.
    elif table.cache is not None and not table.cache.longest_requests:
        yield (
            f"rollout.gpu_memory_utilization = {recipe.rollout.gpu_memory_utilization}: leaves a KV cache of "
            f"{table.cache.tokens} tokens, but one request has up to {table.cache.longest}; raise it"
        )


def _find_utilization_faults(recipe: Recipe) -> Iterator[str]:
    if gpu_gib(recipe) is None and runs_on_cpu():
        yield (
            f"rollout.gpu_memory_utilization = {recipe.rollout.gpu_memory_utilization}: the ranks run on CPUs, which "
            "have no GPU memory; set rollout.kv_cache_gib instead"
        )


def _find_gpu_faults(recipe: Recipe, is_start: bool) -> Iterator[str]:
    """Yield an error if this machine's GPUs have less memory than the recipe says."""
    if not is_start or recipe.cluster.launcher != "local" or not uses_this_machine(recipe):
        return
    expected_gib, installed_gib = gpu_gib(recipe), installed_gpu_gib()
    if expected_gib is not None and installed_gib is not None and installed_gib < _SAME_GPU * expected_gib:
        yield (
            f"cluster.gpu_memory_gib = {recipe.cluster.gpu_memory_gib}: this machine's GPUs have only "
            f"{installed_gib:.1f} GiB; leave it out, or run on GPUs with this memory"
        )
