"""Warnings about a valid recipe: too few cores, too little memory, or a slow or untried choice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

from megarl.config import Recipe
from megarl.config.annotations import UntriedOnGpu
from megarl.config.effects import unmet
from megarl.config.parallel import ParallelConfig
from megarl.config.reading.override_text import short_override
from megarl.config.schema import all_fields, annotated_with, value_at
from megarl.families.parts import Latent
from megarl.families.shape import ModelShape, planned_shape
from megarl.planner.cache import default_cache_gib, sets_cache_size
from megarl.planner.gpus_of_run import NAME_THE_GPU, gpu_memory, ranks_on_cpu
from megarl.planner.judge import MemoryJudge
from megarl.planner.memory.devices import CPU
from megarl.planner.memory.memory_table import MemoryTable
from megarl.planner.memory.phases import memory_table
from megarl.planner.predictions import models_of, planned_models, table_of
from megarl.planner.search import with_field_values
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.platform.memory.host_memory import machine_bytes
from megarl.sandbox.check import examine
from megarl.sandbox.layers import LAYERS

_TRANSFORMERS_LATENT_EPSILON = 1e-6

# With more ranks per core, ranks on CPUs mostly wait for each other.
_RANKS_PER_CORE = 4


def list_resource_warnings(recipe: Recipe, parallel: ParallelConfig) -> Iterator[str]:
    """Yield warnings about a valid recipe on these machines, one line each."""
    yield from _list_sandbox_notices(recipe)
    if not ranks_on_cpu(recipe):
        yield from warn_of_untried_fields(recipe)
    shape = planned_shape(recipe.model.folder, recipe.model.override_config)
    yield from warn_of_latent_norms(recipe, shape)
    if not runs_on_cpu():
        yield from warn_of_slow_linear_attention(recipe, shape)
    yield from warn_of_small_cache(recipe, parallel, table_of(recipe, parallel))
    # Cores and memory are known only for this machine.
    cluster = recipe.cluster
    if cluster.launcher != "local":
        return
    if cluster.nodes > 1:
        yield (
            f"cluster.nodes = {cluster.nodes}: cluster.launcher local uses this machine only, so megarl train would "
            "refuse it; megarl slurm submit runs it as a Slurm job"
        )
        return
    ranks_per_node, num_cores = cluster.ranks_per_node, len(os.sched_getaffinity(0))
    if ranks_per_node > _RANKS_PER_CORE * num_cores:
        yield (
            f"cluster.ranks_per_node = {ranks_per_node}: this machine has only {num_cores} cores, so ranks would wait "
            f"for each other; use at most {_RANKS_PER_CORE * num_cores}"
        )
    machine_memory_bytes = machine_bytes()
    # On GPUs the GPU memory is the limit, and the plan covers it.
    if not runs_on_cpu():
        return
    table = memory_table(recipe, models_of(recipe, parallel), CPU)
    if (
        needed_bytes := table.host_bytes(num_trainers=parallel.world_size, num_engines=parallel.rollout_ranks)
    ) > machine_memory_bytes:
        phases = " and ".join(phase.name for phase in table.fullest_host)
        yield (
            f"cluster.ranks_per_node = {ranks_per_node}: the ranks need {needed_bytes / 2**30:.1f} GiB of memory in "
            "the phase "
            f"{phases}, but this machine has {machine_memory_bytes / 2**30:.1f}; use fewer ranks, or a smaller model "
            "(megarl plan prints what takes it)"
        )
    else:
        yield from warn_of_slower_layout(recipe)


def warn_of_untried_fields(recipe: Recipe) -> Iterator[str]:
    """Yield a warning for each field with a changed value that has not been run on a GPU."""
    for name, field in all_fields().items():
        marks = annotated_with(name, UntriedOnGpu)
        if not marks or unmet(recipe, name) is not None:
            continue
        value, default = value_at(recipe, name), field.get_default(call_default_factory=True)
        tried_value = default if marks[0].tried is None else marks[0].tried
        if value not in (default, tried_value):
            set_value = short_override(name, value).partition("=")[2]
            tried_override = short_override(name, tried_value)
            yield f"{name} = {set_value}: untried on a GPU; compare the first steps with {tried_override}"


def warn_of_slower_layout(recipe: Recipe) -> Iterator[str]:
    """Yield a warning if ranks on this machine's CPU split a model although each could hold it whole."""
    if not runs_on_cpu() or recipe.cluster.launcher != "local":
        return
    sizes_of_recipe = {"trainer.tp": recipe.trainer.tp} | (
        {"rollout.tp": recipe.rollout.tp} if recipe.has_engine else {}
    )
    split_sizes = {name: size for name, size in sizes_of_recipe.items() if size > 1}
    unsplit_recipe = with_field_values(recipe, dict.fromkeys(split_sizes, 1))
    if not split_sizes or (models := planned_models(unsplit_recipe)) is None:
        return
    # Experts were measured only in their own layout.
    if models.policy.shape.num_experts:
        return
    parallel = models.policy.parallel
    if (
        memory_table(unsplit_recipe, models, CPU).host_bytes(
            num_trainers=parallel.world_size, num_engines=parallel.rollout_ranks
        )
        > machine_bytes()
    ):
        return
    faster_overrides = " ".join(f"{name}=1" for name in split_sizes)
    # Measured with two ranks on two cores and 0.64 million parameters: tp 1 halves the step time.
    yield (
        f"{' and '.join(f'{name} = {size}' for name, size in split_sizes.items())}: slow on a CPU, because "
        "tensor-parallel "
        "ranks wait for each other in every layer. The whole model fits in each rank's memory: set "
        f"{faster_overrides} (run `megarl plan` with these to see the memory)"
    )


def warn_of_latent_norms(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield a warning if transformers would normalise the model's latent vectors with another constant."""
    if isinstance(shape.attention, Latent) and shape.norm_epsilon != _TRANSFORMERS_LATENT_EPSILON:
        yield (
            f"model.path = {recipe.model.path}: norms of latent vectors use rms_norm_eps = {shape.norm_epsilon:g}, as "
            f"in vLLM. transformers always uses {_TRANSFORMERS_LATENT_EPSILON:g} there; its log-probs differ by about "
            "3e-5 nats"
        )


def warn_of_slow_linear_attention(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield warnings about linear attention on GPUs: missing kernels, and prompts computed without a prefix cache."""
    linear = shape.linear_attention
    if linear is None:
        return
    module, package = linear.kernels
    if recipe.train.steps and find_spec(module) is None:
        yield (
            f"model.path = {recipe.model.path}: the trainer computes {linear.plural} in torch, correctly but slowly, "
            f"because the kernels of {package} are not installed; pip install {package}"
        )
    if recipe.has_engine and "enable_prefix_caching" not in recipe.rollout.vllm:
        yield (
            f"model.path = {recipe.model.path}: engines compute the prompt of each sample anew, because vLLM 0.30's "
            f"prefix cache for {linear.plural} is not proved with reshards; set rollout.vllm.enable_prefix_caching to "
            "choose"
        )


def warn_of_small_cache(recipe: Recipe, parallel: ParallelConfig, table: MemoryTable) -> Iterator[str]:
    """Yield a warning if GPUs get the KV cache size of CPUs, or if the cache holds few of the concurrent requests."""
    if table.cache is None:
        return
    # A Slurm job computes the default on its own node, where the GPUs are known.
    is_unknown = table.is_gpu and gpu_memory(recipe) is None and recipe.cluster.launcher != "slurm"
    if is_unknown and not sets_cache_size(recipe):
        yield (
            f"rollout.kv_cache_gib = {recipe.rollout.kv_cache_gib:g}: the default for CPUs, because the memory of the "
            f"run's GPUs is unknown; {NAME_THE_GPU}, or set rollout.kv_cache_gib"
        )
    elif table.cache.warning is not None:
        yield f"{table.cache.warning}; {_suggest_larger_cache(recipe, parallel)}"


def _suggest_larger_cache(recipe: Recipe, parallel: ParallelConfig) -> str:
    """Return, in words, the changes that enlarge a small KV cache. The default is named only if it is larger."""
    alternatives = "or rollout.tp, or offload more (trainer.offload)"
    if recipe.rollout.gpu_memory_utilization is not None:
        return f"raise rollout.gpu_memory_utilization {alternatives}"
    if (gpus := gpu_memory(recipe)) is not None:
        default = default_cache_gib(recipe, MemoryJudge(models_of(recipe, parallel), gpus))
        if default > recipe.rollout.kv_cache_gib:
            return f"raise rollout.kv_cache_gib (left out: {default:g} GiB, the rest of a GPU's memory) {alternatives}"
    return f"raise rollout.kv_cache_gib {alternatives}"


def _list_sandbox_notices(recipe: Recipe) -> Iterator[str]:
    if set(LAYERS) <= set(recipe.sandbox.require) or recipe.sandbox.url is not None:
        return
    if notice := examine().layers.notice(recipe.sandbox.require):
        yield notice
