"""Checks of draft layers in the policy's checkpoint (multi-token prediction, MTP): their training and their drafts."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.families.shape import ModelShape
from megarl.preflight.registry import checks


@checks("trainer", training_only=True)
def check_draft_layers(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield the reasons why the model's draft layers (MTP) cannot be trained."""
    trainer = recipe.trainer
    field = trainer.draft_layers_setting
    if field is None:
        return
    if problem := shape.draft_layers_problem:
        yield f"{field}: {problem}; leave it out"
    if recipe.lora.rank:
        yield f"{field}: with lora.rank = {recipe.lora.rank} only adapters are trained; leave one of both out"
    if trainer.router_replay:
        yield f"{field}: the engine records no experts of MTP layers to replay; set trainer.router_replay=false"
    if trainer.fp8 != "none":
        yield f"{field}: not tested with trainer.fp8 = {trainer.fp8}; set trainer.fp8=none"
    # Megatron's router would add these losses to the draft layers too, but `models.experts` counts only the policy's.
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps"):
        if trainer.megatron.get(name):
            yield f"trainer.megatron.{name} = {trainer.megatron[name]}: not supported with MTP layers; leave one out"


def model_drafter_faults(recipe: Recipe, field: str) -> Iterator[str]:
    """Yield errors of drafting with the policy's draft layers. `field` is the setting of the drafter."""
    if not recipe.trainer.trains_draft_layers:
        yield f"{field}: a reshard writes only MTP layers that are trained; set trainer.mtp_loss_coefficient=0.1"
    if recipe.rollout.quantization != "none":
        yield (
            f"{field}: not tested with rollout.quantization = {recipe.rollout.quantization}; set rollout.quantization="
            "none, or take ngram"
        )
    if recipe.model.override_config:
        # vLLM 0.30 passes changed fields of config.json only to the policy's model.
        yield f"{field}: vLLM's drafter would ignore model.override_config; edit config.json instead, or take ngram"
