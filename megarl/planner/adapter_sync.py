"""Chooses what a LoRA run sends to its engines after each update: the adapters alone, or merged weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megarl.config import Recipe
from megarl.families.registry import FAMILIES
from megarl.families.shape import ModelShape, planned_shape
from megarl.planner.gpus_of_run import ranks_on_cpu
from megarl.planner.search import with_field_values
from megarl.reshard.layouts.vllm_adapters import SLOT_RANKS
from megarl.types import DataError

_SYNC = "lora.sync"


class Objection(NamedTuple):
    """A reason why engines cannot receive adapters. `remedy`: a change that removes the reason; "": none."""

    reason: str
    remedy: str = ""


def find_objections(recipe: Recipe, shape: ModelShape) -> Iterator[Objection]:
    """Yield each reason why a recipe's engines cannot receive LoRA adapters. `shape` is the policy's."""
    lora, rollout = recipe.lora, recipe.rollout
    if not FAMILIES[shape.family].has_adapter_slots:
        families = sorted(name for name, family in FAMILIES.items() if family.has_adapter_slots)
        yield Objection(
            f"megarl cannot write adapters of a {shape.family} model into vLLM, only of {', '.join(families)}"
        )
    # Only adapters of experts cannot be sent. A dense MLP has projections of the same names.
    experts = sorted({"gate_up_proj", "down_proj"} & set(lora.targets)) if shape.num_experts else []
    if experts:
        yield Objection(
            f"{' and '.join(experts)} in lora.targets are experts in this model, and megarl cannot send adapters of "
            "experts to vLLM",
            "set lora.targets=[qkv_proj,o_proj]",
        )
    # vLLM 0.30 has slots for a few ranks only. It pads adapters of other ranks with zeros.
    if lora.rank > SLOT_RANKS[-1]:
        yield Objection(f"lora.rank = {lora.rank} exceeds vLLM's limit for adapters, {SLOT_RANKS[-1]}")
    if recipe.model.dtype == "float32" and not ranks_on_cpu(recipe):
        yield Objection(
            "vLLM's kernels for adapters on GPUs need 16-bit weights, but model.dtype is float32",
            "set model.dtype=bfloat16",
        )
    if rollout.quantization != "none":
        yield Objection(f"rollout.quantization = {rollout.quantization} would quantise the weights next to the adapter")
    if recipe.rollout.drafts_with_model_layers:
        yield Objection("rollout.vllm.speculative_config drafts with layers that have no adapter", "leave it out")
    if recipe.drafter is not None:
        yield Objection(
            "rollout.vllm.speculative_config drafts with a model of its own, not proved next to an adapter",
            "set its method to ngram",
        )
    if recipe.weights.overlap:
        yield Objection("an adapter is sent too fast to overlap with training", "set weights.overlap=false")


def with_chosen_sync(recipe: Recipe, *, is_trained: bool = True) -> Recipe:
    """Return the recipe with `lora.sync: auto` replaced: by `adapter` if engines can receive one, else by `merged`.

    Unchanged: a recipe without adapters, or with an unreadable model (other checks report it). `is_trained` False: only
    engines start. They load an exported model, so `merged` is chosen.
    """
    if recipe.lora.sync != "auto" or not recipe.lora.rank or not recipe.has_engine:
        return recipe
    if not is_trained:
        return with_field_values(recipe, {_SYNC: "merged"})
    try:
        shape = planned_shape(recipe.model.folder, recipe.model.override_config)
    except DataError:
        return recipe
    return with_field_values(recipe, {_SYNC: "merged" if _first_reason(recipe, shape) else "adapter"})


def explain_sync(written: Recipe, completed: Recipe) -> Iterator[str]:
    if written.lora.sync == "auto" and completed.lora.sync == "merged":
        shape = planned_shape(completed.model.folder, completed.model.override_config)
        if reason := _first_reason(completed, shape):
            yield f"{_SYNC} = merged by default: {reason}"


def _first_reason(recipe: Recipe, shape: ModelShape) -> str:
    if recipe.exact_blocks:
        return "under trainer.exact, an engine with separate adapters would round otherwise than the trainer"
    return next((objection.reason for objection in find_objections(recipe, shape)), "")
