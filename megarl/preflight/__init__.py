"""Checks before a run starts: recipe fields, model folders, data files, rewards. One message lists all errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.config.recipe import error_page, read
from megarl.families.shape import ModelShape, planned_shape, read_model_shape
from megarl.files.model_folder import check_model_folder
from megarl.findings import Finding
from megarl.planner.defaults import with_memory_defaults
from megarl.planner.model_sizes import find_size_faults
from megarl.planner.sizes import align_parallel, find_rank_faults, parallel_of
from megarl.preflight.algorithm.learning import warn_of_shortened_warmups
from megarl.preflight.algorithm.off_policy import (
    list_off_policy_warnings,
    warn_of_kept_kv,
    warn_of_uncorrected_staleness,
)
from megarl.preflight.downloads import download_missing, download_model
from megarl.preflight.memory.disk_space import check_disk
from megarl.preflight.memory.memory_fit import memory_faults
from megarl.preflight.memory.resources import list_resource_warnings, warn_of_slower_layout, warn_of_small_cache
from megarl.preflight.overview import overview
from megarl.preflight.registry import Cost, faults, finding_of
from megarl.types import ConfigError, DataError

__all__ = [
    "check",
    "check_disk",
    "check_plan",
    "download_missing",
    "download_model",
    "list_off_policy_warnings",
    "list_resource_warnings",
    "load",
    "overview",
    "warn_of_kept_kv",
    "warn_of_shortened_warmups",
    "warn_of_slower_layout",
    "warn_of_small_cache",
    "warn_of_uncorrected_staleness",
]


def check(recipe: Recipe, *, is_start: bool = True, is_trained: bool = True) -> ParallelConfig:
    """Check a recipe and its files, and return the parallel layout of its ranks.

    `is_start` False: the run will start on other machines. `is_trained` False: only engines start, so folders of
    critic, reward model and teachers may be missing. Raises one exception with all errors: ConfigError if any is in the
    recipe, else DataError.
    """
    errors = _find_faults(recipe, is_start=is_start, is_trained=is_trained)
    if errors.recipe:
        raise ConfigError(error_page(f"recipe {recipe.name}", list(map(str, [*errors.recipe, *errors.files]))))
    if errors.files:
        raise DataError(error_page(f"files of recipe {recipe.name}", list(map(str, errors.files))))
    return errors.parallel


def load(path: str | Path, overrides: Sequence[str] = (), *, is_start: bool = True, is_of_run: bool = False) -> Recipe:
    """Load the recipe in a file, and check it. `is_of_run`: the file is the saved recipe of a run folder.

    Raises one ConfigError if parts of the recipe are unreadable. Its text lists these parts, then the errors of `check`
    that do not depend on them.
    """
    draft = read(path, overrides, is_of_run=is_of_run)
    if not draft.problems:
        return draft.recipe
    errors = _find_faults(draft.recipe, is_start=is_start)
    unread = set(draft.unread)
    # The data-parallel size follows from these fields, so errors about it are not reliable either.
    if unread & {"cluster.nodes", "cluster.ranks_per_node", "trainer.tp", "trainer.pp", "trainer.cp"}:
        unread.add("trainer.dp")
    # Most checks depend on the loop. If it is unreadable, their errors would mislead.
    further_faults = [*([] if "loop" in unread else errors.recipe), *errors.files]
    # Drop each error that names an unreadable field. Without such fields, the pattern (?!) matches nothing.
    unread_pattern = re.compile("|".join(rf"(?<![\w.]){re.escape(field)}(?!\w)" for field in sorted(unread)) or r"(?!)")
    raise draft.error([text for text in map(str, further_faults) if not unread_pattern.search(text)])


@dataclass(frozen=True, slots=True)
class _Faults:
    """Errors of a recipe and of its files. `parallel` is valid only without errors."""

    recipe: list[Finding]
    files: list[Finding]
    parallel: ParallelConfig


def _find_faults(recipe: Recipe, *, is_start: bool, is_trained: bool = True) -> _Faults:
    """Return the errors of a recipe and its files. In a mixture, errors common to all sources
    are listed once.
    """
    by_source = {
        source.name: _find_source_faults(source.recipe, is_start=is_start, is_trained=is_trained)
        for source in recipe.sources
    }
    facts = {"recipe": recipe, "is_start": is_start, "is_trained": is_trained}
    run_faults = list(faults(facts, Cost, per_run=True))
    # The memory table needs valid sizes and readable models, so compute it only without other errors.
    is_sound = not any(source_faults.recipe or source_faults.files for source_faults in by_source.values())
    sound_source = next(iter(by_source.values())) if is_sound else None
    if sound_source is not None and is_trained:
        planned_recipe = with_memory_defaults(recipe, is_start=is_start)
        run_faults += map(finding_of, memory_faults(planned_recipe, sound_source.parallel, is_start=is_start))
    if not recipe.mixture:
        faults_of_source = by_source[recipe.rollout.environment]
        return replace(faults_of_source, recipe=[*faults_of_source.recipe, *run_faults])
    recipe_faults = _merge_source_faults({name: source_faults.recipe for name, source_faults in by_source.items()})
    file_faults = _merge_source_faults({name: source_faults.files for name, source_faults in by_source.items()})
    return _Faults([*recipe_faults, *run_faults], file_faults, next(iter(by_source.values())).parallel)


def _merge_source_faults(by_source: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Merge the errors of all sources: first the common errors, then the others with their source's name."""
    first_faults, *other_faults = by_source.values()
    common_faults = [fault for fault in first_faults if all(fault in source_faults for source_faults in other_faults)]
    return common_faults + [
        fault._replace(place=": ".join(filter(None, (f"mixture.{name}", fault.place))))
        for name, source_faults in by_source.items()
        for fault in source_faults
        if fault not in common_faults
    ]


def _find_source_faults(recipe: Recipe, *, is_start: bool, is_trained: bool) -> _Faults:
    """Return the errors of one source's recipe and files, and the ranks' layout."""
    parallel, folder = parallel_of(recipe), recipe.model.folder
    folder_problems = check_model_folder(folder)
    facts: dict[str, Any] = {"recipe": recipe, "dp": parallel.dp, "is_start": is_start, "is_trained": is_trained}
    facts["has_model"] = not folder_problems
    source_faults = [
        *(finding_of(DataError(line)) for line in folder_problems),
        *faults(facts, (Cost.FIELDS, Cost.FILES)),
    ]
    if Path(folder).is_dir():
        try:
            shape = read_model_shape(folder, recipe.model.override_config)
            # An unreadable tokenizer is one error among others.
            source_faults += faults({**facts, "shape": shape}, (Cost.MODEL,))
        except DataError as error:
            source_faults.insert(0, finding_of(error))
        else:
            # Aligning ranks takes long and needs sizes that divide, so skip it if the recipe has errors.
            if not any(map(_is_of_recipe, source_faults)):
                parallel = align_parallel(recipe, shape, parallel)
    recipe_faults = [fault for fault in source_faults if _is_of_recipe(fault)]
    return _Faults(recipe_faults, [fault for fault in source_faults if not _is_of_recipe(fault)], parallel)


def _is_of_recipe(fault: Finding) -> bool:
    return fault.exit_code == ConfigError.exit_code


def check_plan(recipe: Recipe) -> tuple[ModelShape, ParallelConfig]:
    """Return the policy's shape and the parallel layout, for `megarl plan`. Reads no file except config.json.

    The trainer's ranks are in plain order: the order with the fastest weight updates takes longer to find. Raises
    DataError for an invalid config.json, or one ConfigError with all sizes that do not fit.
    """
    shape = planned_shape(recipe.model.folder, recipe.model.override_config)
    if misfits := [*find_rank_faults(recipe), *find_size_faults(recipe, shape)]:
        raise ConfigError(error_page(f"recipe {recipe.name}", misfits))
    return shape, parallel_of(recipe)
