"""Checks of the policy as its own teacher, and of prompts written for the teacher."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config import Recipe
from megarl.config.sections.data_sets import path_of
from megarl.config.sections.distillation import SELF_TEACHERS
from megarl.config.teacher_templates import RECORD, template_faults
from megarl.data.kinds.problems import num_made
from megarl.environments import is_agent
from megarl.families.shape import ModelShape
from megarl.preflight.registry import Cost, checks


@checks("distillation", training_only=True)
def check_own_teacher(recipe: Recipe) -> Iterator[str]:
    """Yield errors if a teacher with the policy's weights equals the policy, or has separate parallel sizes."""
    config = recipe.distillation
    if recipe.loop != "distillation" or config.teacher not in SELF_TEACHERS:
        return
    # Equal weights with equal prompts have equal distributions, so loss and gradient are zero.
    is_equal = config.teacher_prompt is None or config.teacher_prompt == "{prompt}"
    if is_equal and (config.teacher == "policy" or not recipe.trains_rewards):
        yield (
            f"distillation.teacher = {config.teacher}: reads the policy's own prompt, so it has nothing to teach; give "
            "distillation.teacher_prompt and distillation.context"
        )
    if config.sizes and not recipe.teachers:
        sizes = ", ".join(f"distillation.{name}" for name in config.sizes if getattr(config, name) is not None)
        yield (
            f"{sizes}: has no effect with distillation.teacher = {config.teacher}, which has the trainer's parallel "
            "sizes; leave it out"
        )


@checks("distillation", training_only=True)
def check_teacher_prompts(recipe: Recipe) -> Iterator[str]:
    """Yield the errors of the teacher's prompt: of its template, and of contexts that would always be empty."""
    config = recipe.distillation
    if recipe.loop != "distillation" or config.teacher_prompt is None:
        return
    yield from template_faults(config.teacher_prompt, config.context)
    if "success" in config.context:
        if recipe.train.samples_per_prompt < 2:
            yield (
                f"train.samples_per_prompt = {recipe.train.samples_per_prompt}: distillation.context success is "
                "another attempt of the group; use 2 or more"
            )
        if not recipe.reward.functions and recipe.rollout.environment == "single_turn":
            yield (
                "reward.functions is empty: distillation.context success needs to know which answers are correct; add "
                "a function"
            )
    if "feedback" in config.context and recipe.rollout.environment == "single_turn":
        yield (
            "rollout.environment = single_turn: writes no messages after a completion, so distillation.context "
            "feedback is always empty; choose an environment that does, or leave feedback out"
        )
    fields = [source for source in config.context if source.startswith(RECORD)]
    if fields and num_made(path_of(recipe.data.train)) is not None:
        yield (
            f"distillation.context = {fields[0]}: data.train = {path_of(recipe.data.train)} has no records; use "
            "feedback or success"
        )


@checks("distillation", Cost.FILES, training_only=True)
def check_teacher_prompts_of_agents(recipe: Recipe) -> Iterator[str]:
    """Yield an error for a teacher's prompt if an agent writes the prompts, which cannot be rewritten."""
    has_prompt = recipe.loop == "distillation" and recipe.distillation.teacher_prompt is not None
    if has_prompt and is_agent(recipe.rollout.environment):
        yield (
            f"rollout.environment = {recipe.rollout.environment}: an agent writes its own prompts, so "
            "distillation.teacher_prompt cannot rewrite them; choose another environment, or leave the field out"
        )


@checks("model", training_only=True)
def check_teacher_positions(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield an error if the longest sequence of the policy as its own teacher exceeds its positions."""
    if recipe.distillation.teacher in SELF_TEACHERS:
        yield from check_teacher_length(recipe, shape)


def check_teacher_length(recipe: Recipe, teacher: ModelShape) -> Iterator[str]:
    """Yield an error if the teacher's longest sequence exceeds its positions."""
    if recipe.teacher_tokens > teacher.max_position_embeddings:
        yield (
            f"distillation.max_teacher_tokens = {recipe.teacher_tokens}: exceeds the teacher's "
            f"{teacher.max_position_embeddings} positions; lower it"
        )
