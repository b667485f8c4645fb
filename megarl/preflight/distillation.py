"""Checks of distillation teachers: a teacher is given, fits its ranks, and matches the policy."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megarl.config import Recipe
from megarl.families.shape import ModelShape
from megarl.preflight import sizes


def teachers(recipe: Recipe) -> Iterator[str]:
    """Yield faults if a source of a training run has no teacher, or if the teachers' parallel sizes do not fit the
    ranks."""
    if recipe.loop != "distillation" or not recipe.train.steps:
        return
    # Teachers with sizes of their own repeat the trainer's checks. Drop faults already reported for the trainer.
    if recipe.distillation.sizes:
        own = recipe.for_teachers
        told = {*sizes.ranks(recipe), *sizes.lengths(recipe)}
        faults = (*sizes.ranks(own), *sizes.lengths(own))
        yield from (_of_teachers(text) for text in faults if text not in told)
    if recipe.distillation.teacher is None:
        yield (
            "distillation.teacher: missing; give the folder of the teacher, or in a mixture "
            "mixture.NAME.distillation.teacher of each source"
        )


def layout_fit(recipe: Recipe, teacher: ModelShape) -> Iterator[str]:
    """Yield faults if a teacher does not divide by its parallel sizes (its own, else the trainer's)."""
    own = recipe.for_teachers
    # Only the policy replays expert choices, so checks of router_replay do not apply to a teacher.
    own = own.model_copy(update={"trainer": own.trainer.model_copy(update={"router_replay": False})})
    for text in (*sizes.model_fit(own, teacher, is_sampled=False), *sizes.expert_fit(own, teacher)):
        if recipe.distillation.sizes:
            yield _of_teachers(text)
        else:
            yield f"{text}, or give the teachers parallel sizes of their own: distillation.tp"


def _of_teachers(text: str) -> str:
    """Rename the trainer's parallel sizes in a fault to the teachers'."""
    return re.sub(r"\btrainer\.(tp|pp|cp|ep|etp)\b", r"distillation.\1", text)


def teacher_fit(recipe: Recipe, field: str, teacher: ModelShape, policy: ModelShape) -> Iterator[str]:
    """Yield faults if a teacher has no language head, or shares fewer than `distillation.top_k` tokens."""
    folder, config = recipe.further_models[field], recipe.distillation
    if teacher.has_value_head:
        yield f"{field} = {folder}: is a reward model without a language head; give a language model"
    num_common = min(teacher.vocab_size, policy.vocab_size)
    if config.loss == "top_k" and config.top_k > num_common:
        yield (
            f"distillation.top_k = {config.top_k}: exceeds the {num_common} tokens that {field} {folder} and the "
            "policy have in common; lower it, or set distillation.loss=full_vocabulary"
        )
