"""Checks that run before any process starts: recipe fields, model folders, data files and rewards.

One error page lists all faults of a recipe and of its files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.checkpoint.stored import tensor_faults
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.config.recipe import error_page, read
from megarl.families.shape import ModelShape, planned_shape, read_model_shape
from megarl.files.model_folder import TOKENIZER, check_model_folder, largest_token, read_object
from megarl.preflight import distillation, learning, sizes
from megarl.preflight.default_cache import with_cache
from megarl.preflight.environments import environment
from megarl.preflight.files import (
    Dropped,
    Kept,
    collect_for,
    count_records,
    data_files,
    made_sources,
    read_conversations,
    read_preferences,
    read_problems,
    runs_folder,
    told_formats,
    with_steps,
)
from megarl.preflight.gpu_formats import device_faults, format_faults
from megarl.preflight.keyword_arguments import keywords
from megarl.preflight.learning import kept_kv, shortened_warmups, uncorrected, uncorrected_fp8
from megarl.preflight.library_fields import megatron_fields, vllm_fields
from megarl.preflight.memory_fit import (
    gpu_kind,
    memory_faults,
    planned_host_bytes,
    predicted_memory,
    table_of,
    verdict_of,
)
from megarl.preflight.overview import overview
from megarl.preflight.planned_models import not_downloaded
from megarl.preflight.quantisation import quantisation
from megarl.preflight.rewards import check_rewards
from megarl.preflight.room import resource_warnings, small_cache
from megarl.preflight.sizes import aligned, layout_of, row_multiple
from megarl.preflight.vllm_limits import engine_fit
from megarl.types import ConfigError, DataError

__all__ = [
    "Dropped",
    "Kept",
    "aligned",
    "check",
    "check_plan",
    "check_rewards",
    "collect_for",
    "count_records",
    "gpu_kind",
    "kept_kv",
    "layout_of",
    "load",
    "not_downloaded",
    "overview",
    "planned_host_bytes",
    "predicted_memory",
    "read_conversations",
    "read_preferences",
    "read_problems",
    "resource_warnings",
    "row_multiple",
    "shortened_warmups",
    "small_cache",
    "table_of",
    "told_formats",
    "uncorrected",
    "uncorrected_fp8",
    "verdict_of",
    "with_cache",
    "with_steps",
]


def check(recipe: Recipe, *, is_start: bool = True, is_trained: bool = True) -> ParallelConfig:
    """Return the parallel layout of a recipe that can run, or raise an error.

    `is_start` False: check a job for other machines. `is_trained` False: only engines start, so the folders of further
    models may be absent. One error lists all faults: ConfigError if any is in the recipe, else DataError (files only).
    """
    found = _faults(recipe, is_start=is_start, is_trained=is_trained)
    if found.recipe:
        raise ConfigError(error_page(f"recipe {recipe.name}", [*found.recipe, *found.files]))
    if found.files:
        raise DataError(error_page(f"files of recipe {recipe.name}", found.files))
    return found.layout


def load(path: str | Path, overrides: Sequence[str] = (), *, is_start: bool = True, is_of_run: bool = False) -> Recipe:
    """Load the recipe of a file like `config.recipe.load`. `is_of_run` is explained at `config.recipe.read`.

    Raises one ConfigError if a recipe cannot be read in full. Its page also lists the faults found by `check`, except
    those depending on unreadable fields.
    """
    draft = read(path, overrides, is_of_run=is_of_run)
    if not draft.problems:
        return draft.recipe
    found = _faults(draft.recipe, is_start=is_start)
    unread = set(draft.unread)
    # The data-parallel size is derived from these fields, so a fault that mentions it is not reliable either.
    if unread & {"cluster.nodes", "cluster.ranks_per_node", "trainer.tp", "trainer.pp", "trainer.cp"}:
        unread.add("trainer.dp")
    # Most checks depend on the loop. Without it their faults would mislead.
    further = [*([] if "loop" in unread else found.recipe), *found.files]
    # Drop each fault that names an unread field. The pattern (?!) matches nothing: then no fault is dropped.
    depends = re.compile("|".join(rf"(?<![\w.]){re.escape(field)}(?!\w)" for field in sorted(unread)) or r"(?!)")
    further = [text for text in further if not depends.search(text)]
    raise draft.error(further)


@dataclass(frozen=True, slots=True)
class _Faults:
    """Faults of a recipe and of its files, one line each. The layout is valid only if both lists are empty."""

    recipe: list[str]
    files: list[str]
    layout: ParallelConfig


def _faults(recipe: Recipe, *, is_start: bool, is_trained: bool = True) -> _Faults:
    """Return the faults of every source of a mixture. A fault common to all sources is listed once."""
    found = {
        source.name: _faults_of_source(source.recipe, is_start=is_start, is_trained=is_trained)
        for source in recipe.sources
    }
    of_all = [*learning.best(recipe), *device_faults(recipe, is_start=is_start)]
    of_all += [*format_faults(recipe, is_start=is_start, is_trained=is_trained)]
    # The memory table needs valid sizes and readable models, so it is computed only without other faults.
    sound = next(iter(found.values())) if not any(faults.recipe or faults.files for faults in found.values()) else None
    if sound is not None and is_trained:
        of_all += memory_faults(recipe, sound.layout, is_start=is_start)
    if not recipe.mixture:
        only = found[recipe.rollout.environment]
        return replace(only, recipe=[*only.recipe, *of_all])
    wrong = _told_once({name: faults.recipe for name, faults in found.items()})
    broken = _told_once({name: faults.files for name, faults in found.items()})
    return _Faults([*wrong, *of_all], broken, next(iter(found.values())).layout)


def _told_once(faults: Mapping[str, Sequence[str]]) -> list[str]:
    """Merge lines by source: first lines common to all sources, then the others with their source's name."""
    first, *others = faults.values()
    shared = [text for text in first if all(text in other for other in others)]
    return shared + [
        f"mixture.{name}: {text}" for name, lines in faults.items() for text in lines if text not in shared
    ]


def _faults_of_source(recipe: Recipe, *, is_start: bool, is_trained: bool) -> _Faults:
    layout = sizes.layout_of(recipe)
    wrong = [*sizes.machines(recipe, is_start=is_start), *runs_folder(recipe), *vllm_fields(recipe)]
    wrong += [*sizes.ranks(recipe), *sizes.batches(recipe, layout.dp), *sizes.lengths(recipe)]
    wrong += [*learning.optimizers(recipe), *learning.rewards(recipe), *learning.algorithm(recipe)]
    wrong += [*learning.sampling(recipe), *learning.evaluation_only(recipe), *learning.profiles(recipe)]
    wrong += [*learning.evaluation(recipe), *learning.verdicts(recipe), *keywords(recipe)]
    wrong += made_sources(recipe)
    wrong += [*learning.stragglers(recipe), *learning.staleness(recipe)]
    wrong += learning.trackers(recipe, is_start=is_start, is_trained=is_trained)
    wrong += distillation.teachers(recipe) if is_trained else ()
    incomplete = check_model_folder(recipe.model.folder)
    broken = [*incomplete, *data_files(recipe)]
    # Building the environment with a model needs the tokenizer, so an incomplete folder skips those checks.
    wrong += environment(recipe, has_model=not incomplete)
    if Path(recipe.model.folder).is_dir():
        try:
            shape = read_model_shape(recipe.model.folder, recipe.model.override_config)
            wrong += [*sizes.model_fit(recipe, shape), *sizes.positions(recipe, shape)]
            wrong += [
                *sizes.expert_fit(recipe, shape),
                *(sizes.fp8_fit(recipe, shape, is_start=is_start) if is_trained else ()),
                *megatron_fields(recipe, shape),
                *engine_fit(recipe, shape),
                *quantisation(recipe, shape),
                *learning.head(recipe, shape),
                *learning.adapters(recipe, shape),
            ]
            broken += [] if incomplete else tensor_faults(recipe.model.folder, shape)
            further = [*_further_models(recipe, shape)] if is_trained else []
            wrong += [text for text in further if not isinstance(text, DataError)]
            broken += [str(error) for error in further if isinstance(error, DataError)]
            broken += _tokens_beyond(recipe.model.folder, shape)
            # Aligning ranks to the reshard takes long and needs sizes that divide, so skip it if the recipe has faults.
            layout = layout if wrong else sizes.aligned(recipe, shape, layout)
        except DataError as error:
            broken.insert(0, str(error))
    return _Faults(wrong, broken, layout)


def check_plan(recipe: Recipe) -> tuple[ModelShape, ParallelConfig]:
    """Return shape and layout of a recipe for a plan. config.json is the only file needed.

    The ranks are not aligned yet, because that takes longer (see `aligned`). Raises DataError for an invalid
    config.json, or one ConfigError listing all sizes that do not fit.
    """
    shape = planned_shape(recipe.model.folder, recipe.model.override_config)
    if wrong := [*sizes.ranks(recipe), *sizes.model_fit(recipe, shape)]:
        raise ConfigError(error_page(f"recipe {recipe.name}", wrong))
    return shape, sizes.layout_of(recipe)


def _further_models(recipe: Recipe, policy: ModelShape) -> Iterator[str | DataError]:
    """Yield faults in folders of critic, reward model and teacher: text for the recipe's, DataError for the files'."""
    for field, folder in recipe.further_models.items():
        if problems := check_model_folder(folder):
            yield from (DataError(f"{field}: {problem}") for problem in problems)
            continue
        try:
            shape = read_model_shape(folder, recipe.override_of(folder))
            yield from (DataError(f"{field}: {fault}") for fault in tensor_faults(folder, shape))
        except DataError as error:
            yield error
            continue
        is_teacher = field.endswith("distillation.teacher")
        fit = (*sizes.model_fit(recipe, shape, is_sampled=False), *sizes.positions(recipe, shape))
        if is_teacher:
            # A teacher scores the policy's samples but never samples itself, so lengths of evaluations do not matter to
            # it.
            fit = (*distillation.layout_fit(recipe, shape), *sizes.positions(recipe, shape, is_evaluated=False))
        fit += tuple(sizes.fp8_channels(recipe.for_teachers if is_teacher else recipe, shape))
        yield from (f"{field} = {folder}: {text}" for text in fit)
        try:
            if _tokens(folder) != _tokens(recipe.model.folder):
                yield f"{field} = {folder}: its tokenizer is not the policy's; take a model of the same family"
        except DataError as error:
            yield error
        if bool(shape.num_experts) != bool(policy.num_experts) and not is_teacher:
            yield f"{field} = {folder}: the policy and this must both have experts, or neither; take another"
        if field == "reward.model" and not shape.has_value_head:
            yield f"{field} = {folder}: is a language model; give a model trained with loop: reward_model"
        if is_teacher:
            yield from distillation.teacher_fit(recipe, field, shape, policy)
            yield from (DataError(f"{field}: {fault}") for fault in _tokens_beyond(folder, shape))


def _tokens_beyond(folder: str, shape: ModelShape) -> Iterator[str]:
    """Yield a fault if the tokenizer makes ids without an embedding in the model."""
    if not (Path(folder) / TOKENIZER[0]).is_file():
        return  # Reported by check_model_folder.
    token, number = largest_token(folder)
    if number >= shape.vocab_size:
        yield (
            f"{Path(folder) / TOKENIZER[0]}: the token {token!r} has the id {number}, but config.json's vocab_size "
            f"{shape.vocab_size} ends before it; take the model's own tokenizer, or enlarge its embedding"
        )


def _tokens(folder: str) -> tuple[object, object]:
    """Return vocabulary and added tokens of a folder's tokenizer.

    The size of the embedding does not show that two tokenizers are equal, because models pad it differently.
    """
    tokenizer = read_object(Path(folder) / "tokenizer.json")
    return tokenizer.get("model", {}).get("vocab"), [(t["content"], t["id"]) for t in tokenizer.get("added_tokens", ())]
