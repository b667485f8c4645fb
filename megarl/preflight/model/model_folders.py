"""Checks of the folders of policy, critic, reward model and teachers, and whether the models fit each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from megarl.checkpoint.stored import tensor_faults
from megarl.config import Recipe
from megarl.families.shape import ModelShape, read_model_shape
from megarl.files.model_folder import TOKENIZER, check_model_folder, largest_token, vocabulary_of
from megarl.planner import model_sizes as model_rules
from megarl.planner import sizes
from megarl.preflight.algorithm.self_distillation import check_teacher_length
from megarl.preflight.model import model_sizes
from megarl.preflight.registry import Fault, checks
from megarl.types import DataError


@checks("distillation", training_only=True)
def check_teachers(recipe: Recipe) -> Iterator[str]:
    """Yield errors if a source of the mixture lacks a teacher, or the teachers' parallel sizes do not fit the ranks."""
    if recipe.loop != "distillation" or not recipe.train.steps:
        return
    # Teachers with their own sizes repeat the trainer's checks. Drop errors already reported for the trainer.
    if recipe.distillation.sizes:
        teacher_recipe = recipe.for_teachers
        reported_faults = {*sizes.find_rank_faults(recipe), *sizes.find_length_faults(recipe)}
        faults = (*sizes.find_rank_faults(teacher_recipe), *sizes.find_length_faults(teacher_recipe))
        yield from (_name_teachers_sizes(text) for text in faults if text not in reported_faults)
    if recipe.distillation.teacher is None:
        yield (
            "distillation.teacher: missing; give the folder of the teacher, or in a mixture "
            "mixture.NAME.distillation.teacher of each source"
        )
    if recipe.trains_rewards and recipe.algorithm.advantage == "gae":
        yield (
            "algorithm.advantage = gae: a distillation has no critic; choose another estimator, or set "
            "distillation.use_task_rewards=false"
        )


def find_teacher_size_faults(recipe: Recipe, teacher: ModelShape) -> Iterator[str]:
    """Yield errors if a teacher's sizes are not divisible by its parallel sizes (default: the trainer's)."""
    teacher_recipe = recipe.for_teachers
    # Only the policy replays experts, so a teacher skips the checks of router_replay.
    teacher_recipe = teacher_recipe.model_copy(
        update={"trainer": teacher_recipe.trainer.model_copy(update={"router_replay": False})}
    )
    for text in (
        *model_rules.find_size_faults(teacher_recipe, teacher, is_sampled=False),
        *model_sizes.check_experts(teacher_recipe, teacher),
    ):
        if recipe.distillation.sizes:
            yield _name_teachers_sizes(text)
        else:
            yield f"{text}, or give the teachers parallel sizes of their own: distillation.tp"


def _name_teachers_sizes(text: str) -> str:
    """Replace the trainer's parallel sizes in an error line by the teachers': trainer.tp by distillation.tp."""
    return re.sub(r"\btrainer\.(tp|pp|cp|ep|etp)\b", r"distillation.\1", text)


def find_teacher_faults(recipe: Recipe, field: str, teacher: ModelShape, policy: ModelShape) -> Iterator[str]:
    """Yield errors if a teacher has no language head, or fewer than `distillation.top_k` tokens in common with the
    policy.
    """
    folder, config = recipe.further_models[field], recipe.distillation
    if teacher.has_value_head:
        yield f"{field} = {folder}: is a reward model without a language head; give a language model"
    num_common = min(teacher.vocab_size, policy.vocab_size)
    if config.loss == "top_k" and config.top_k > num_common:
        yield (
            f"distillation.top_k = {config.top_k}: exceeds the {num_common} tokens that {field} {folder} and the "
            "policy have in common; lower it, or set distillation.loss=full_vocabulary"
        )


@checks("model")
def check_stored_tensors(recipe: Recipe, shape: ModelShape, has_model: bool) -> Iterator[DataError]:
    """Yield errors of the policy's files: missing tensors, tensors of another shape, tokens without an embedding."""
    folder = recipe.model.folder
    if has_model:
        # Draft layers that the trainer cannot train are an error of the recipe, not of the folder.
        is_trained = recipe.trainer.trains_draft_layers and shape.draft_layers_problem is None
        yield from map(DataError, tensor_faults(folder, shape.with_draft_layers(is_trained)))
    yield from map(DataError, _find_vocabulary_faults(folder, shape))


@checks("model", training_only=True)
def check_further_models(recipe: Recipe, shape: ModelShape) -> Iterator[Fault]:
    """Yield errors of critic, reward model and teachers: DataErrors about files, else texts."""
    for field, folder in recipe.further_models.items():
        if problems := check_model_folder(folder):
            yield from (DataError(f"{field}: {problem}") for problem in problems)
            continue
        try:
            further_shape = read_model_shape(folder, recipe.override_of(folder))
            yield from (DataError(f"{field}: {fault}") for fault in tensor_faults(folder, further_shape))
        except DataError as error:
            yield error
            continue
        is_teacher = field.endswith("distillation.teacher")
        size_faults = _find_further_size_faults(recipe, further_shape, is_teacher=is_teacher)
        yield from (f"{field} = {folder}: {text}" for text in size_faults)
        try:
            if vocabulary_of(folder) != vocabulary_of(recipe.model.folder):
                yield f"{field} = {folder}: its tokenizer is not the policy's; use a model of the same family"
        except DataError as error:
            yield error
        if bool(further_shape.num_experts) != bool(shape.num_experts) and not is_teacher:
            yield f"{field} = {folder}: the policy and this model must both have experts, or neither; use another model"
        if field == "reward.model" and not further_shape.has_value_head:
            yield f"{field} = {folder}: is a language model; give a model trained with loop: reward_model"
        if field == "critic.path":
            try:
                further_shape.with_value_head()
            except DataError as error:
                yield f"{field} = {folder}: {error}"
        if is_teacher:
            yield from find_teacher_faults(recipe, field, further_shape, shape)
            yield from (DataError(f"{field}: {fault}") for fault in _find_vocabulary_faults(folder, further_shape))


def _find_further_size_faults(recipe: Recipe, shape: ModelShape, *, is_teacher: bool) -> Iterator[str]:
    """Yield errors of a further model's sizes and positions. A teacher has its own parallel sizes."""
    if is_teacher:
        yield from find_teacher_size_faults(recipe, shape)
        # A teacher scores samples of training only, so lengths of evaluations do not matter.
        yield from model_sizes.check_positions(recipe, shape, is_evaluated=False)
        yield from check_teacher_length(recipe, shape)
    else:
        yield from model_rules.find_size_faults(recipe, shape, is_sampled=False)
        yield from model_sizes.check_positions(recipe, shape)
    yield from model_rules.find_fp8_faults(recipe.for_teachers if is_teacher else recipe, shape)


def _find_vocabulary_faults(folder: str, shape: ModelShape) -> Iterator[str]:
    """Yield an error if the tokenizer has token ids without an embedding in the model."""
    if not (Path(folder) / TOKENIZER[0]).is_file():
        return  # Reported by check_model_folder.
    token, token_id = largest_token(folder)
    if token_id >= shape.vocab_size:
        yield (
            f"{Path(folder) / TOKENIZER[0]}: the token {token!r} has the id {token_id}, but vocab_size in config.json "
            f"is {shape.vocab_size}; use the model's own tokenizer, or enlarge its embedding"
        )
