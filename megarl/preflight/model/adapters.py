"""Checks of recipes whose engines receive LoRA adapters instead of merged weights."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.preflight.registry import checks
from megarl.reshard.layouts.vllm_adapters import SLOT_RANKS


@checks("lora")
def adapter_slots(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield errors of a recipe whose engines receive LoRA adapters instead of merged weights."""
    if not recipe.sends_adapter:
        return
    lora, rollout, setting = recipe.lora, recipe.rollout, "lora.sync = adapter"
    merged = "set lora.sync=merged"
    if not FAMILIES[shape.family].has_adapter_slots:
        families = sorted(name for name, family in FAMILIES.items() if family.has_adapter_slots)
        yield (
            f"{setting}: megarl cannot write adapters of a {shape.family} model into vLLM, only of "
            f"{', '.join(families)}; {merged}"
        )
    experts = sorted({"gate_up_proj", "down_proj"} & set(lora.targets)) if shape.num_experts else []
    if experts:
        yield (
            f"{setting}: {' and '.join(experts)} in lora.targets are experts in this model, and megarl cannot send "
            f"adapters of experts to vLLM; set lora.targets=[qkv_proj,o_proj], or {merged}"
        )
    if lora.rank > SLOT_RANKS[-1]:
        yield f"{setting}: lora.rank = {lora.rank} exceeds vLLM's limit for adapters, {SLOT_RANKS[-1]}; {merged}"
    if recipe.model.dtype == "float32" and not runs_on_cpu():
        yield (
            f"{setting}: vLLM's kernels for adapters on GPUs need 16-bit weights, but model.dtype is float32; set "
            f"model.dtype=bfloat16, or {merged}"
        )
    if rollout.quantization != "none":
        yield (
            f"{setting}: rollout.quantization = {rollout.quantization} would quantise the weights next to the adapter; "
            f"{merged}"
        )
    if recipe.drafts_with_mtp:
        yield (
            f"{setting}: rollout.vllm.speculative_config drafts with layers that have no adapter; leave it out, or "
            f"{merged}"
        )
    if recipe.weights.overlap:
        yield f"{setting}: an adapter is sent too fast to overlap with training; set weights.overlap=false"
