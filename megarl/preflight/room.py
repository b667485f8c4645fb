"""Whether the machines have room for a recipe's ranks: doubts that are said, and keep nobody from starting."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families import hf_tensors
from megarl.families.shape import read_model_shape
from megarl.preflight.engine import runs_on_cpu
from megarl.sandbox.check import examine
from megarl.sandbox.layers import LAYERS

_RANKS_PER_CORE = 4
_RANK_BYTES = 500 << 20
"""Host memory of a rank's libraries, before any weight is loaded."""


def resource_warnings(recipe: Recipe, layout: ParallelConfig) -> Iterator[str]:
    """Warnings of a checked recipe on these machines, a line each."""
    yield from _weakened_sandbox(recipe)
    cluster = recipe.cluster
    if cluster.launcher != "local":
        return
    if cluster.nodes > 1:
        yield (
            f"cluster.nodes = {cluster.nodes}: cluster.launcher local has this machine only, and megarl train would "
            "refuse that; megarl slurm submit runs it as a Slurm job"
        )
        return
    ranks, cores = cluster.ranks_per_node, len(os.sched_getaffinity(0))
    if ranks > _RANKS_PER_CORE * cores:
        yield (
            f"cluster.ranks_per_node = {ranks}: this machine has {cores} cores, so that every rank waits for others; "
            f"use at most {_RANKS_PER_CORE * cores}"
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if runs_on_cpu() and (needed := _least_bytes(recipe, layout)) > memory:
        yield (
            f"cluster.ranks_per_node = {ranks}: the ranks need at least {needed / 2**30:.0f} GiB of memory, this "
            f"machine has {memory / 2**30:.0f}; use fewer, or a smaller model"
        )


def _weakened_sandbox(recipe: Recipe) -> Iterator[str]:
    """The layers that the recipe lets the sandbox do without, where this machine lacks them."""
    if set(LAYERS) <= set(recipe.sandbox.require) or recipe.sandbox.url is not None:
        return
    if notice := examine().layers.notice(recipe.sandbox.require):
        yield notice


def _least_bytes(recipe: Recipe, layout: ParallelConfig) -> float:
    """Host memory of all ranks on CPU, at least: libraries, trainer's weights and gradients, engines' weights."""
    shape = read_model_shape(recipe.model.folder, recipe.model.override_config)
    numbers = sum(prod(size) for size in hf_tensors(shape).values())
    item_bytes = 4 if recipe.model.dtype == "float32" else 2
    gradient_bytes = 4
    trained = numbers / (layout.tp * layout.pp * layout.ep * layout.etp) * (item_bytes + gradient_bytes)
    sampled = numbers / layout.rollout_tp * item_bytes if recipe.has_engine else 0.0
    num_engine_ranks = layout.rollout_ranks or layout.world_size
    return layout.num_ranks * _RANK_BYTES + layout.world_size * trained + num_engine_ranks * sampled
