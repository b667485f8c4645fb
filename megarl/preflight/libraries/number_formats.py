"""Checks of number formats: whether GPUs, libraries and kernels support FP8 in trainer, engine and KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.config import Recipe
from megarl.config.formulas import either
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape
from megarl.planner.gpus_of_run import uses_this_machine
from megarl.planner.sizes import has_whole_experts
from megarl.platform import transformer_engine
from megarl.platform.chosen_device import device_fault
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.platform.gpu_needs import NAMED_GPUS, library_versions, needs, unmet_needs
from megarl.platform.visible_gpus import Gpu, installed_gpus
from megarl.preflight.registry import checks


@checks("trainer", per_run=True)
def format_faults(recipe: Recipe, *, is_start: bool, is_trained: bool = True) -> Iterator[str]:
    """Yield errors if GPUs or installed libraries lack a number format needed by the recipe.

    With `is_start`, this machine's GPUs are checked, else the GPUs named in the recipe.
    """
    # `model_sizes.check_fp8` reports a missing Transformer Engine, with the other needs of trainer.fp8.
    has_libraries = not runs_on_cpu() and transformer_engine.is_installed()
    versions = library_versions() if has_libraries else None
    needed_formats, engines = needs(recipe, is_trained=is_trained), recipe.cluster.groups.engines
    engine_needs = {field: need for field, need in needed_formats.items() if field.startswith("rollout.")}
    # Engines may have another kind of GPU. All other needs concern the trainer's GPUs.
    if engines is not None and engines.gpu_memory_gib is not None and engine_needs:
        engine_gpus = _list_named_gpus("cluster.groups.engines.gpu_memory_gib", engines.gpu_memory_gib)
        yield from unmet_needs(engine_needs, engine_gpus, versions)
        needed_formats = {field: need for field, need in needed_formats.items() if field not in engine_needs}
    if needed_formats:
        yield from unmet_needs(needed_formats, _list_gpus(recipe, is_start), versions)


@checks("cluster", per_run=True)
def device_faults(recipe: Recipe, *, is_start: bool) -> Iterator[str]:
    """Yield an error if this machine lacks the device of cluster.device. Other machines are not checked."""
    device = recipe.cluster.device
    if not is_start or recipe.cluster.launcher != "local":
        return
    # vLLM is built either for CPUs or for GPUs, so one environment cannot serve both.
    if device == "cpu" and recipe.has_engine and not runs_on_cpu():
        yield (
            "cluster.device = cpu: the installed vLLM is the build for GPUs; use an environment made by VENV=DIR "
            "launch/setup.sh cpu"
        )
    elif device == "cuda" and runs_on_cpu():
        yield (
            "cluster.device = cuda: the installed vLLM is the build for CPUs; use an environment made by VENV=DIR "
            "launch/setup.sh gpu"
        )
    elif (fault := device_fault(device)) is not None:
        yield fault.removesuffix(".")


def _list_gpus(recipe: Recipe, is_start: bool) -> Sequence[Gpu]:
    """Return the GPUs to check: this machine's, or those that `cluster.gpu_memory_gib` names ("h200").

    At a start, this machine's come first if the run uses them. Before a start, the named ones come first.
    """
    named_gpus = _list_named_gpus("cluster.gpu_memory_gib", recipe.cluster.gpu_memory_gib)
    if named_gpus and not is_start:
        return named_gpus
    # At a start, trust the installed GPUs, because the recipe may name the wrong one.
    return (uses_this_machine(recipe) and installed_gpus()) or named_gpus


def _list_named_gpus(field: str, memory: float | str | None) -> list[Gpu]:
    return [Gpu(f"{field} = {memory}", NAMED_GPUS[memory])] if isinstance(memory, str) else []


EXPERT_BACKENDS = ("auto", "triton", "batched_triton", "deep_gemm")
"""Values of vLLM's `moe_backend` that can select an FP8 backend whose weights megarl can write
(`layouts.vllm_quantised.EXPERT_BACKENDS`).
"""
LINEAR_BACKENDS = ("auto", "triton", "cutlass", "deep_gemm", "flashinfer_cutlass", "torch")
"""Values of vLLM's `linear_backend` that can select an FP8 kernel whose weights megarl can write
(`layouts.vllm_quantised.LINEAR_KERNELS`). The choice of `auto` is checked before an engine gets its first weights.
"""


@checks("rollout")
def check_quantisation(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield the reasons why engines cannot sample with FP8 weights of this model."""
    rollout = recipe.rollout
    if not recipe.has_engine or rollout.quantization == "none":
        return
    field = f"rollout.quantization = {rollout.quantization}"
    if recipe.model.dtype != "bfloat16":
        yield (
            f"{field}: FP8 kernels need activations in bfloat16, but model.dtype is {recipe.model.dtype}; set "
            "model.dtype=bfloat16"
        )
    if not FAMILIES[shape.family].is_quantisable:
        families = sorted(name for name, family in FAMILIES.items() if family.is_quantisable)
        yield (
            f"{field}: megarl cannot write FP8 weights of a {shape.family} model into vLLM, only of "
            f"{', '.join(families)}; set rollout.quantization=none"
        )
    if rollout.quantization == "fp8" and not runs_on_cpu():
        yield from _find_group_faults(recipe, shape, field)
    yield from _find_backend_faults(recipe, field, "linear_backend", LINEAR_BACKENDS)
    if shape.num_experts:
        yield from _find_backend_faults(recipe, field, "moe_backend", EXPERT_BACKENDS)
        if rollout.quantization == "fp8_per_channel" and runs_on_cpu():
            yield f"{field}: vLLM has no such experts on a CPU; set rollout.quantization=fp8, or use GPUs"


GROUP_COLUMNS = 128
"""Columns of an activation with a common FP8 scale. On GPUs, vLLM 0.30 asserts whole groups
(fp8_utils.per_token_group_quant_fp8) when the engine measures its memory.
"""


def _find_group_faults(recipe: Recipe, shape: ModelShape, field: str) -> Iterator[str]:
    """Yield an error for each layer whose input on one engine rank is not a multiple of GROUP_COLUMNS channels."""
    tp = recipe.rollout.tp
    attention, router = shape.attention, shape.router
    inputs_by_field = {
        "hidden_size": (shape.hidden_size, 1),
        "num_attention_heads * head_dim": (attention.num_heads * attention.head_dim, tp),
    }
    if shape.has_dense_layers:
        inputs_by_field["intermediate_size"] = (shape.intermediate_size, tp)
    if router is not None:
        # With expert parallelism, each rank has whole experts.
        num_ranks = 1 if has_whole_experts(recipe) else tp
        inputs_by_field["moe_intermediate_size"] = (router.moe_intermediate_size, num_ranks)
        if router.shared_intermediate_size:
            inputs_by_field["shared_expert_intermediate_size"] = (router.shared_intermediate_size, tp)
    for name, (columns, num_ranks) in inputs_by_field.items():
        if columns % (num_ranks * GROUP_COLUMNS):
            fitting_sizes = [str(size) for size in range(1, num_ranks) if columns % (size * GROUP_COLUMNS) == 0]
            yield (
                f"{field}: vLLM quantises activations in groups of {GROUP_COLUMNS} columns. The model's {name} = "
                f"{columns} over {num_ranks} ranks gives {columns / num_ranks:g} columns a rank, not a multiple of "
                f"{GROUP_COLUMNS}; set rollout.quantization=fp8_per_channel"
                + (f", or rollout.tp to {either(fitting_sizes)}" if fitting_sizes else "")
            )


def _find_backend_faults(recipe: Recipe, field: str, name: str, backends: tuple[str, ...]) -> Iterator[str]:
    """Yield an error for an FP8 backend of vLLM whose weights a reshard cannot write."""
    backend = recipe.rollout.vllm.get(name, "auto")
    # A backend may be spelled with - or _.
    if str(backend).lower().replace("-", "_") not in backends:
        yield (
            f"rollout.vllm.{name} = {backend!r}: its kernels store FP8 weights in a format of their own, which a "
            f"reshard cannot write ({field}); set it to {either(backends)}"
        )
