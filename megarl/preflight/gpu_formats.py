"""Checks if GPUs and libraries support a recipe's number formats: FP8 of trainer, engine and KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.config import Recipe
from megarl.platform import transformer_engine
from megarl.platform.chosen_device import device_fault
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.platform.gpu_needs import NAMED_GPUS, library_versions, needs, unmet_needs
from megarl.platform.visible_gpus import Gpu, installed_gpus
from megarl.preflight.memory_fit import uses_this_machine
from megarl.preflight.registry import checks


@checks("trainer", is_of_run=True)
def format_faults(recipe: Recipe, *, is_start: bool, is_trained: bool = True) -> Iterator[str]:
    """Yield needs of a recipe not met by its GPUs or by this environment's libraries.

    A start (`is_start`) checks this machine's GPUs, otherwise the GPUs named in the recipe count.
    """
    # `sizes.fp8_fit` reports a missing Transformer Engine with the other needs of trainer.fp8.
    has_libraries = not runs_on_cpu() and transformer_engine.is_installed()
    versions = library_versions() if has_libraries else None
    asked, engines = needs(recipe, is_trained=is_trained), recipe.cluster.groups.engines
    of_engines = {field: need for field, need in asked.items() if field.startswith("rollout.")}
    # Engines on another kind of GPU are checked against that kind; all other needs against the trainer's GPUs.
    if engines is not None and engines.gpu_memory_gib is not None and of_engines:
        named = _named("cluster.groups.engines.gpu_memory_gib", engines.gpu_memory_gib)
        yield from unmet_needs(of_engines, named, versions)
        asked = {field: need for field, need in asked.items() if field not in of_engines}
    if asked:
        yield from unmet_needs(asked, _gpus(recipe, is_start), versions)


@checks("cluster", is_of_run=True)
def device_faults(recipe: Recipe, *, is_start: bool) -> Iterator[str]:
    """Yield a fault if this machine lacks the chosen device. Only local starts are checked."""
    chosen = recipe.cluster.device
    if not is_start or recipe.cluster.launcher != "local":
        return
    # vLLM is built either for CPUs or for GPUs. One environment cannot serve both.
    if chosen == "cpu" and recipe.has_engine and not runs_on_cpu():
        yield (
            "cluster.device = cpu: the installed vLLM is the build for GPUs; use an environment of "
            "VENV=DIR launch/setup.sh cpu"
        )
    elif chosen == "cuda" and runs_on_cpu():
        yield (
            "cluster.device = cuda: the installed vLLM is the build for CPUs; use an environment of "
            "VENV=DIR launch/setup.sh gpu"
        )
    elif (fault := device_fault(chosen)) is not None:
        yield fault.removesuffix(".")


def _gpus(recipe: Recipe, is_start: bool) -> Sequence[Gpu]:
    named = _named("cluster.gpu_memory_gib", recipe.cluster.gpu_memory_gib)
    if named and not is_start:
        return named
    # At a start the installed GPUs decide, because the name in the recipe may be wrong.
    return (uses_this_machine(recipe) and installed_gpus()) or named


def _named(field: str, given: float | str | None) -> list[Gpu]:
    """Return the GPU named by a field, or an empty list."""
    return [Gpu(f"{field} = {given}", NAMED_GPUS[given])] if isinstance(given, str) else []
