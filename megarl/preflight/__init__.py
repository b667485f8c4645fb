"""Checks before any process starts: of several fields together, of the model folder, of data files and rewards.

All faults of a recipe and of the files that it names come on one page.
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
from megarl.preflight.engine import engine_fit
from megarl.preflight.environment import environment
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
from megarl.preflight.keywords import keywords
from megarl.preflight.learning import kept_kv, shortened_warmups, uncorrected, uncorrected_fp8
from megarl.preflight.library_fields import megatron_fields, vllm_fields
from megarl.preflight.memory import gpu_kind, memory_faults, planned_host_bytes, predicted_memory, table_of, verdict_of
from megarl.preflight.overview import overview
from megarl.preflight.planned_models import not_downloaded
from megarl.preflight.quantisation import quantisation
from megarl.preflight.rewards import check_rewards
from megarl.preflight.room import resource_warnings, small_cache
from megarl.preflight.sizes import aligned, layout_of, row_multiple
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
    """The layout of a recipe that can run: from here, or without `is_start` as a job on other machines.

    Without `is_trained` engines alone are started, and models beside the policy need not be there. Raises one error
    that lists all faults: a ConfigError if any is the recipe's, a DataError if all are of files.
    """
    found = _faults(recipe, is_start=is_start, is_trained=is_trained)
    if found.recipe:
        raise ConfigError(error_page(f"recipe {recipe.name}", [*found.recipe, *found.files]))
    if found.files:
        raise DataError(error_page(f"files of recipe {recipe.name}", found.files))
    return found.layout


def load(path: str | Path, overrides: Sequence[str] = (), *, is_start: bool = True, is_of_run: bool = False) -> Recipe:
    """The recipe of a file, as `config.recipe.load` reads it; `is_of_run` as in `config.recipe.read`.

    Raises one ConfigError for a recipe that cannot be read in full; on its page stands too what `check` finds wrong
    with the rest, as far as that does not depend on fields that could not be read.
    """
    draft = read(path, overrides, is_of_run=is_of_run)
    if not draft.problems:
        return draft.recipe
    found = _faults(draft.recipe, is_start=is_start)
    unread = set(draft.unread)
    if unread & {"cluster.nodes", "cluster.ranks_per_node", "trainer.tp", "trainer.pp", "trainer.cp"}:
        unread.add("trainer.dp")
    # Most checks depend on the loop.
    further = [*([] if "loop" in unread else found.recipe), *found.files]
    depends = re.compile("|".join(rf"(?<![\w.]){re.escape(field)}(?!\w)" for field in sorted(unread)) or r"(?!)")
    further = [text for text in further if not depends.search(text)]
    raise draft.error(further)


@dataclass(frozen=True, slots=True)
class _Faults:
    """Faults of a recipe and of the files that it names, a line each; the layout is valid if there are none."""

    recipe: list[str]
    files: list[str]
    layout: ParallelConfig


def _faults(recipe: Recipe, *, is_start: bool, is_trained: bool = True) -> _Faults:
    """Those of all sources of a mixture; what all have in common is told once."""
    found = {
        source.name: _faults_of_source(source.recipe, is_start=is_start, is_trained=is_trained)
        for source in recipe.sources
    }
    of_all = [*learning.best(recipe), *device_faults(recipe, is_start=is_start)]
    of_all += [*format_faults(recipe, is_start=is_start, is_trained=is_trained)]
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
    """Lines by source as one list: those of all sources first, the others with the name of their source."""
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
            layout = layout if wrong else sizes.aligned(recipe, shape, layout)
        except DataError as error:
            broken.insert(0, str(error))
    return _Faults(wrong, broken, layout)


def check_plan(recipe: Recipe) -> tuple[ModelShape, ParallelConfig]:
    """Shape and layout of a recipe that can be planned: of model folders, config.json is enough.

    The ranks are not aligned yet, which takes longer: `aligned`. Raises DataError for that file, or one ConfigError
    that lists all sizes that do not fit.
    """
    shape = planned_shape(recipe.model.folder, recipe.model.override_config)
    if wrong := [*sizes.ranks(recipe), *sizes.model_fit(recipe, shape)]:
        raise ConfigError(error_page(f"recipe {recipe.name}", wrong))
    return shape, sizes.layout_of(recipe)


def _further_models(recipe: Recipe, policy: ModelShape) -> Iterator[str | DataError]:
    """Faults of the folders of critic, reward model and teacher: texts of the recipe's, errors of their files'."""
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
            yield f"{field} = {folder}: is a language model; give one that was trained with loop: reward_model"
        if is_teacher:
            yield from distillation.teacher_fit(recipe, field, shape, policy)
            yield from (DataError(f"{field}: {fault}") for fault in _tokens_beyond(folder, shape))


def _tokens_beyond(folder: str, shape: ModelShape) -> Iterator[str]:
    """A tokenizer must not make ids that the model has no embedding for."""
    if not (Path(folder) / TOKENIZER[0]).is_file():
        return  # told already
    token, number = largest_token(folder)
    if number >= shape.vocab_size:
        yield (
            f"{Path(folder) / TOKENIZER[0]}: the token {token!r} has the id {number}, but config.json's vocab_size "
            f"{shape.vocab_size} ends before it; take the model's own tokenizer, or enlarge its embedding"
        )


def _tokens(folder: str) -> tuple[object, object]:
    """Vocabulary and added tokens of a folder's tokenizer. Sizes of embeddings differ by their padding."""
    tokenizer = read_object(Path(folder) / "tokenizer.json")
    return tokenizer.get("model", {}).get("vocab"), [(t["content"], t["id"]) for t in tokenizer.get("added_tokens", ())]
