"""Checks of the training of the engines' EAGLE-3 drafter."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.families.eagle3 import read_drafter_shape
from megarl.families.shape import ModelShape
from megarl.files.model_folder import find_folder
from megarl.preflight.registry import checks
from megarl.types import DataError


@checks("trainer", training_only=True)
def check_trained_drafter(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield the reasons why the engines' drafter cannot be trained."""
    trainer = recipe.trainer
    if trainer.drafter_learning_rate is None:
        return
    field = f"trainer.drafter_learning_rate = {trainer.drafter_learning_rate:g}"
    if recipe.drafter is None:
        yield (
            f"{field}: the engines have no EAGLE-3 drafter; set rollout.vllm.speculative_config with method eagle3 and "
            "model, or leave it out"
        )
        return
    if recipe.lora.rank:
        yield f"{field}: with lora.rank = {recipe.lora.rank} only adapters are trained; leave one of both out"
    if recipe.optimizer.name == "muon":
        yield f"{field}: not tested with optimizer.name = muon; set optimizer.name=adam"
    if trainer.fp8 != "none":
        yield f"{field}: not tested with trainer.fp8 = {trainer.fp8}; set trainer.fp8=none"
    if trainer.optimizer_offload_fraction:
        yield (
            f"{field}: not tested with trainer.optimizer_offload_fraction = {trainer.optimizer_offload_fraction}; set "
            "it to 0"
        )
    # The drafter's own files say whether it can be trained.
    try:
        read_drafter_shape(find_folder(recipe.drafter), shape)
    except (DataError, OSError, KeyError) as error:
        yield f"{field}: {error} ({recipe.drafter}); give another drafter, or leave it out, so that it is frozen"
