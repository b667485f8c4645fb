"""Checks if an engine's FP8 weights can be written in place: number type, family, kernels, machine."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.config.formulas import either
from megarl.families import FAMILIES
from megarl.families.shape import ModelShape
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.preflight.registry import checks

EXPERT_BACKENDS = ("auto", "triton", "batched_triton", "deep_gemm")
"""Values of vLLM's `moe_backend` that may select a backend of `layouts.vllm_quantised.EXPERT_BACKENDS`."""
LINEAR_BACKENDS = ("auto", "triton", "cutlass", "deep_gemm", "flashinfer_cutlass", "torch")
"""Values of vLLM's `linear_backend` that may select a kernel of `layouts.vllm_quantised.LINEAR_KERNELS`.

The kernel selected by `auto` is checked before an engine gets its first weights.
"""


@checks("rollout")
def quantisation(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield faults of a recipe with FP8 weights in its engines."""
    rollout = recipe.rollout
    if not recipe.has_engine or rollout.quantization == "none":
        return
    field = f"rollout.quantization = {rollout.quantization}"
    if recipe.model.dtype != "bfloat16":
        yield (
            f"{field}: FP8 kernels take activations of bfloat16, model.dtype is {recipe.model.dtype}; set "
            "model.dtype=bfloat16"
        )
    if not FAMILIES[shape.family].is_quantisable:
        known = sorted(name for name, family in FAMILIES.items() if family.is_quantisable)
        yield (
            f"{field}: writing the FP8 weights of a {shape.family} model in place is not supported by megarl, as it "
            f"is of {', '.join(known)}; set rollout.quantization=none"
        )
    # vLLM would quantise a second time from its own settings.
    for name in ("quantization", "quantization_config"):
        if rollout.vllm.get(name) is not None:
            yield f"{field}: rollout.vllm.{name} = {rollout.vllm[name]!r} would quantise too; leave one out"
    if rollout.vllm.get("enable_lora"):
        yield f"{field}: adapters inside vLLM (rollout.vllm.enable_lora) keep weights of their own; leave one out"
    yield from _backend(recipe, field, "linear_backend", LINEAR_BACKENDS)
    if shape.num_experts:
        yield from _backend(recipe, field, "moe_backend", EXPERT_BACKENDS)
        if rollout.quantization == "fp8_per_channel" and runs_on_cpu():
            yield f"{field}: vLLM has no such experts on a CPU; set rollout.quantization=fp8, or take GPUs"


def _backend(recipe: Recipe, field: str, name: str, known: tuple[str, ...]) -> Iterator[str]:
    given = recipe.rollout.vllm.get(name, "auto")
    # A backend may be spelled with - or _.
    if str(given).lower().replace("-", "_") not in known:
        yield (
            f"rollout.vllm.{name} = {given!r}: its kernels store FP8 weights in their own format, and a reshard "
            f"cannot write it ({field}); set it to {either(known)}"
        )
