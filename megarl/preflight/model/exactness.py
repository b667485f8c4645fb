"""Checks of trainer.exact: models, layouts and settings for which trainer and engine have different results."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.families.parts import Latent
from megarl.families.shape import ModelShape
from megarl.platform.cuda_extensions import runs_on_cpu
from megarl.preflight.model.exactness_on_gpus import gpu_faults
from megarl.preflight.registry import checks

ENGINE_OPTIONS = (
    "max_num_batched_tokens", "enable_prefix_caching", "disable_custom_all_reduce", "enable_expert_parallel",
)  # fmt: skip
"""Fields of rollout.vllm without influence on the arithmetic on a CPU."""


@checks("trainer", training_only=True)
def exactness_faults(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield a reason for each model part, layout and setting with which trainer and engine round differently."""
    if not recipe.exact_blocks:
        return
    reasons = (
        *(() if runs_on_cpu() else gpu_faults(recipe, shape)),
        *_find_dtype_faults(recipe),
        *_find_model_faults(shape),
        *_find_layout_faults(recipe),
        *_find_experts_faults(recipe, shape),
        *_find_sampling_faults(recipe),
    )
    for reason in reasons:
        yield f"trainer.exact = True: {reason}, or set trainer.exact=false"


def _find_dtype_faults(recipe: Recipe) -> Iterator[str]:
    """Yield an error for a dtype or Megatron setting with another arithmetic than the engine's."""
    if recipe.model.dtype != "bfloat16":
        yield (
            f"model.dtype is {recipe.model.dtype}, in which results of the engine's matrix products depend on the "
            "number of tokens in a batch; set model.dtype=bfloat16"
        )
    if recipe.trainer.megatron:
        yield "trainer.megatron may change Megatron's arithmetic; remove it"


def _find_model_faults(shape: ModelShape) -> Iterator[str]:
    """Yield each part of the model for which equal arithmetic of trainer and engine was not shown."""
    is_in_model = {
        "latent attention": isinstance(shape.attention, Latent),
        "linear attention": shape.linear_attention is not None,
        "zero-centred norms": shape.has_zero_centered_norms,
        "attention windows": bool(shape.windows),
        "a gate on the output of attention": getattr(shape.attention, "has_output_gate", False),
        "biases in attention": getattr(shape.attention, "qkv_bias", False),
        f"rotary scaling of type {shape.rotary.scaling}": shape.rotary.scaling not in ("default", "llama3"),
    }
    if (router := shape.router) is not None:
        is_in_model |= {
            "shared experts": router.shared_intermediate_size > 0,
            f"a router with {router.score} scores": router.score != "softmax",
            "a router with biases": router.has_bias,
            "a router with groups of experts": router.num_groups > 1,
            f"routing weights scaled by {router.scale:g}": router.scale != 1.0,
        }
    for part, has_part in is_in_model.items():
        if has_part:
            yield f"the model has {part}, for which equality was not shown; choose another model"


def _find_layout_faults(recipe: Recipe) -> Iterator[str]:
    """Yield each parallel size or setting of the trainer with which sums have another order than in the engine."""
    trainer = recipe.trainer
    if not _adds_alike(trainer.tp, recipe.rollout.tp):
        yield (
            f"with trainer.tp = {trainer.tp} and rollout.tp = {recipe.rollout.tp}, trainer and engine cannot add the "
            "ranks' products in the same order; set one of them to 1, both to the same size, or one to 2, 4, 8, ... "
            "times the other"
        )
    if trainer.share_prefixes != "off":
        yield "trees of prefixes have another attention kernel; set trainer.share_prefixes=off"
    if setting := trainer.draft_layers_setting:
        yield f"draft layers were not measured; leave out {setting}"
    if trainer.drafter_learning_rate is not None:
        yield "a trained drafter was not measured; leave out trainer.drafter_learning_rate"


def _adds_alike(tp: int, other_tp: int) -> bool:
    """Return whether tensor-parallel groups of both sizes can add products in the same order."""
    small, large = sorted((tp, other_tp))
    # Each rank of the smaller group adds its blocks in pairs. The larger group adds in the same order only if the ratio
    # of sizes is a power of two.
    return small == 1 or (large % small == 0 and (large // small).bit_count() == 1)


def _find_experts_faults(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield the reasons why trainer and engine add an expert's products in different orders."""
    if shape.router is None:
        return
    trainer, num_blocks = recipe.trainer, recipe.exact_blocks
    sizes_text = f"trainer.tp = {trainer.tp}, trainer.etp = {trainer.etp} and rollout.tp = {recipe.rollout.tp}"
    if not (_adds_alike(trainer.etp, trainer.tp) and _adds_alike(trainer.etp, recipe.rollout.tp)):
        yield (
            f"with {sizes_text}, trainer and engine cannot add the products of an expert's "
            "ranks in the same order; set trainer.etp=1"
        )
    if shape.moe_intermediate_size % num_blocks:
        yield (
            f"with {sizes_text}, the products of an expert need {num_blocks} equal blocks, and its "
            f"{shape.moe_intermediate_size} channels cannot be divided so; lower the largest size"
        )
    if trainer.router_replay:
        yield "the trainer chooses the engine's experts without replay; set trainer.router_replay=false"


def _find_sampling_faults(recipe: Recipe) -> Iterator[str]:
    """Yield each setting of the engine with which it rounds otherwise than the trainer."""
    rollout = recipe.rollout
    if recipe.sends_adapter:
        yield "an engine with separate adapters rounds otherwise than with merged ones; set lora.sync=merged"
    if recipe.lora.rank and recipe.lora.dropout:
        yield "the engine's adapters have no dropout; set lora.dropout=0"
    if rollout.quantization != "none":
        yield "the engine's weights are quantised; set rollout.quantization=none"
    if rollout.kv_cache_dtype != "auto":
        yield "keys and values in the engine's cache are rounded; set rollout.kv_cache_dtype=auto"
    for name in sorted(rollout.vllm.keys() - set(ENGINE_OPTIONS)):
        yield f"rollout.vllm.{name} may change the engine's arithmetic; remove it"
    if not rollout.recompute_kv:
        yield "keys and values of earlier weights stay in the engine's cache; set rollout.recompute_kv=true"
    if recipe.train.max_logprob_gap is not None:
        yield f"it sets the limit 0, and train.max_logprob_gap is {recipe.train.max_logprob_gap:g}; leave that out"
