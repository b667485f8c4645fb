"""Evaluation outside of training (`megarl eval`): engines with a model's weights sample a recipe's validation sets.

Prompts, sampling parameters, random numbers and rewards are the recipe's, so a training run would make the same
attempts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.algorithms.estimates import Measure
from megarl.cluster.calls.deadlines import run_deadlines
from megarl.cluster.launchers.run_nodes import start_ranks
from megarl.config import DataConfig, Recipe
from megarl.config.formulas import either
from megarl.config.parallel import ParallelConfig
from megarl.config.reading.override_text import override_text
from megarl.config.recipe import read, to_yaml
from megarl.config.sections.cluster import GroupsConfig
from megarl.config.sections.data_sets import DataSetConfig, path_of
from megarl.data.chat import tokenizer_of
from megarl.datasets.reading import Dropped
from megarl.datasets.reward_trials import check_rewards
from megarl.files.atomic import append_whole, raise_storage_errors, replace_text
from megarl.files.model_folder import find_folder
from megarl.loops.sources import SourceData, make_sources, read_heldout, start_rewards
from megarl.loops.stopping import leaving_on_signals
from megarl.planner.defaults import with_memory_defaults
from megarl.preflight import check, download_missing, download_model, load
from megarl.rollout.evaluate import EvaluatedSet, evaluate
from megarl.rollout.pool import EnginePool
from megarl.rollout.source import Source
from megarl.rollout.step.sample_records import with_rendered_prompts
from megarl.rollout.tool_use import ToolUse, uncalled_text
from megarl.serving.local_model import model_folder
from megarl.terminal import FirstOfEachKind
from megarl.tracking.display import Display
from megarl.tracking.run_record import RunRecord
from megarl.tracking.tracker import json_line
from megarl.types import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

_OUT_EXISTS = "--out {}: already exists; give a new folder, or leave it out"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation with checked inputs.

    The model of `recipe` is the folder `model`. `parallel` has the engines' parallel sizes. `sets` names validation
    sets. Results go to `folder`.
    """

    model: Path
    recipe: Recipe
    parallel: ParallelConfig
    sets: frozenset[str]
    folder: Path


def prepare(
    model: Path,
    recipe: Path,
    overrides: Sequence[str],
    *,
    options: Mapping[str, Any],
    sets: Sequence[str] = (),
    out: Path | None = None,
    is_best: bool = False,
) -> Evaluation:
    """Check the inputs, then create the output folder. Starts no process.

    `model` is a model folder, a run folder, or a cached model's name on the Hub. A run folder stands for its exported
    model, or with `is_best` for the model of its best evaluation. `recipe` is a YAML file or a run folder. `options`
    sets fields of `evaluation` for all sources, by dotted name. `sets` names validation sets; empty: all.

    `out` must not exist. By default a new folder is made in `evaluations/` of the run, or of the current folder.
    `model.override_config` applies to the recipe's own model only, unless it is in `overrides`.

    Raises DataError without a model, and ConfigError or DataError with all errors of the recipe, its files and the
    sets.
    """
    for run in filter(Path.is_dir, (model, recipe)):
        # Before config.yaml is read: fields of another version would be reported as unknown keys.
        RunRecord.read(run).refuse_newer_version()
    # Read the recipe, with the evaluated model's folder and the options in it.
    notify = Display().info
    download_model(str(model), "MODEL", notify)
    folder = model_folder(model if model.exists() else Path(find_folder(str(model))), is_best=is_best)
    recipe_file = recipe / "config.yaml" if recipe.is_dir() else recipe
    recipe_without_options = read(recipe_file, overrides, is_of_run=recipe.is_dir()).recipe
    prefixes = [f"mixture.{name}." for name in recipe_without_options.mixture] or [""]
    all_overrides = [*overrides, override_text("model.path", str(folder))]
    all_overrides += [
        override_text(f"{prefix}evaluation.{name}", value) for prefix in prefixes for name, value in options.items()
    ]
    evaluated_recipe = load(recipe_file, all_overrides, is_of_run=recipe.is_dir())
    _refuse_unsuitable_recipe(evaluated_recipe, recipe_file, sets)
    if out is not None and out.exists():
        raise ConfigError(_OUT_EXISTS.format(out))
    is_override_given = any(override.startswith("model.override_config") for override in overrides)
    if not is_override_given and Path(recipe_without_options.model.folder).resolve() != folder.resolve():
        # `override_config` describes the recipe's model. A model exported from it has the changed fields already.
        plain_model = evaluated_recipe.model.model_copy(update={"override_config": {}})
        evaluated_recipe = evaluated_recipe.model_copy(update={"model": plain_model})
    evaluated_recipe = _without_training(evaluated_recipe)
    # Critics, reward models and teachers do not start here.
    download_missing(evaluated_recipe, notify, with_models=False)
    evaluated_recipe = with_memory_defaults(evaluated_recipe, is_start=True, is_trained=False)
    parallel = _find_engine_parallel(evaluated_recipe)
    run_folder = model if (model / "config.yaml").is_file() else Path()
    output_folder = _make_output_folder(
        out, run_folder / "evaluations" / f"{folder.absolute().name}_{evaluated_recipe.name}"
    )
    return Evaluation(
        folder, evaluated_recipe, parallel, frozenset(sets or _list_sets(evaluated_recipe)), output_folder
    )


def _list_sets(recipe: Recipe) -> list[str]:
    return [name for source in recipe.sources for name in source.recipe.data.validation]


def _refuse_unsuitable_recipe(recipe: Recipe, recipe_file: Path, sets: Sequence[str]) -> None:
    """Raise ConfigError for a recipe that cannot be evaluated, or for an unknown set in `sets`."""
    # Recipes of other loops have no sampling parameters or engines, so there is nothing to sample with.
    if recipe.loop not in ("rl", "sft", "distillation"):
        raise ConfigError(f"loop = {recipe.loop}: samples no answers; give a recipe with loop rl, sft or distillation")
    set_names = _list_sets(recipe)
    if not set_names:
        raise ConfigError(f"{recipe_file}: has no data.validation, so there is nothing to evaluate; give sets by name")
    if unknown := [name for name in sets if name not in set_names]:
        raise ConfigError(f"--set {unknown[0]}: is not a validation set of {recipe_file}; give {either(set_names)}")


def _without_training(recipe: Recipe) -> Recipe:
    """Return the recipe without training data and separate engines, which an evaluation does not need."""
    if not recipe.mixture:
        # The training data may be missing on this machine.
        recipe = recipe.model_copy(update={"data": _without_training_data(recipe.data)})
    if recipe.cluster.groups.engines is None:
        return recipe
    # Ranks of one group need nodes of one kind, and here all ranks are engines of one group.
    cluster = recipe.cluster.model_copy(update={"groups": GroupsConfig()})
    rollout = recipe.rollout.model_copy(update={"placement": "colocated", "ranks": None})
    return recipe.model_copy(update={"cluster": cluster, "rollout": rollout})


def _without_training_data(data: DataConfig) -> DataConfig:
    """Return the data config with a validation set as training data, so checks read no other file."""
    validation_sets = list(data.validation.values())
    for data_set in validation_sets:
        if isinstance(data_set, str) or not data_set.has_own_names:
            return data.model_copy(update={"train": path_of(data_set)})
    # All sets name their own fields, so the field names in `data` are free to use.
    first_set = validation_sets[0]
    assert isinstance(first_set, DataSetConfig)
    field_names = {"format": first_set.format, "fields": first_set.fields, "answer_field": first_set.answer_field}
    return data.model_copy(update={"train": first_set.path, **field_names})


def _find_engine_parallel(recipe: Recipe) -> ParallelConfig:
    """Return the engines' parallel sizes. Raises ConfigError for a recipe that cannot be evaluated."""
    parallel = check(recipe, is_trained=False)
    check_rewards(recipe)
    if not parallel.is_separate:
        return parallel
    # Nothing trains here, so the engines get all ranks.
    num_ranks, tp = parallel.num_ranks, parallel.rollout_tp
    if num_ranks % tp:
        raise ConfigError(
            f"rollout.tp = {tp}: does not divide the {num_ranks} ranks; an evaluation samples on all of them"
        )
    return ParallelConfig(tp=1, pp=1, dp=num_ranks, rollout_tp=tp, rollout_ep=parallel.rollout_ep)


def _make_output_folder(out: Path | None, default: Path) -> Path:
    """Create and return the output folder: `out`, or else `default`, with a number if that exists.

    Raises ConfigError if `out` exists.
    """
    folder_number, folder = 1, out or default
    while True:
        with raise_storage_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            # Another evaluation may create the same name at the same time. Then mkdir fails, and the next number is
            # tried.
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
        if out is not None:
            raise ConfigError(_OUT_EXISTS.format(out))
        folder_number += 1
        folder = default.with_name(f"{default.name}_{folder_number}")


async def run(evaluation: Evaluation) -> list[EvaluatedSet]:
    """Sample and score all attempts on the ranks of the recipe's cluster.

    Writes `config.yaml` (the recipe), `answers.jsonl` (all attempts, set by set), `metrics.json` and `logs/` to the
    folder. Raises StoppedError on a signal, or MegarlError if too many attempts could not be scored.
    """
    folder, recipe = evaluation.folder, evaluation.recipe
    with raise_storage_errors(folder):
        (folder / "logs").mkdir()
        replace_text(folder / "config.yaml", to_yaml(recipe))
    evaluated_sets: list[EvaluatedSet] = []
    tool_use = ToolUse()
    with leaving_on_signals(f"the evaluation was stopped before its end; {folder} has the finished sets"):
        async with AsyncExitStack() as stack:
            tokenizer = tokenizer_of(recipe.model)
            sources = await _start_sources(evaluation, tokenizer, stack)
            sets = await stack.enter_async_context(aclosing(evaluate(sources, recipe.reward.max_failed_fraction)))
            async for evaluated_set in sets:
                records = with_rendered_prompts(evaluated_set.records(), evaluated_set.trajectories, tokenizer)
                # Written set by set, so that an interrupted evaluation retains the finished sets.
                append_whole(folder / "answers.jsonl", b"".join(map(json_line, records)))
                evaluated_sets.append(evaluated_set)
                for trajectory in evaluated_set.trajectories:
                    tool_use.add_counts(trajectory.metrics)
    if never_called_tools := tool_use.never_called:
        _Screen().notice(uncalled_text(never_called_tools, "in this evaluation", f"megarl samples {folder}"))
    with raise_storage_errors(folder):
        replace_text(
            folder / "metrics.json", json.dumps(_make_metrics_file(evaluation, evaluated_sets), indent=2) + "\n"
        )
    return evaluated_sets


async def _start_sources(evaluation: Evaluation, tokenizer: Tokenizer, stack: AsyncExitStack) -> list[Source]:
    """Return the recipe's sources with the chosen validation sets, and engines closed by `stack`."""
    recipe, screen = evaluation.recipe, _Screen()
    dropped_counts: Dropped = Counter()
    problems_by_source = {
        source.name: read_heldout(source.recipe, tokenizer, dropped_counts) for source in recipe.sources
    }
    for path, count in dropped_counts.items():
        screen.notice(f"{path}: {count} prompts were dropped, because they are longer than data.max_prompt_tokens")
    logs = evaluation.folder / "logs"
    # Start the ranks with engines, and the processes of the rewards.
    run_ranks = await start_ranks(recipe.cluster, logs)
    engine_ranks = run_ranks.trainers
    # The stack closes in reverse order: reward workers and environments end before the ranks.
    stack.push_async_callback(engine_ranks.close)
    engine_ranks.deadlines = run_deadlines(recipe.cluster)
    engine_settings = {
        "folder": str(evaluation.model.absolute()),
        "config": recipe.rollout,
        "context_tokens": recipe.context_tokens,
        "dtype": recipe.model.dtype,
        "seed": recipe.seed,
        "override": recipe.model.override_config,
    }
    await engine_ranks.construct("megarl.serving.local_model:EngineRank", engine_settings)
    rewards = start_rewards(recipe, stack, logs, screen.notice)
    # Half of the requests wait in the engine, so that one can start as soon as another ends.
    max_running = 2 * recipe.rollout.max_concurrent_requests
    pool = EnginePool(engine_ranks, evaluation.parallel, max_running=max_running)
    chosen_sets = {
        source: SourceData((), {name: problems for name, problems in sets.items() if name in evaluation.sets})
        for source, sets in problems_by_source.items()
    }
    return await make_sources(
        recipe, chosen_sets, rewards, pool, tokenizer, stack, logs, screen, agents=lambda: run_ranks.agents
    )


class _Screen:
    """Terminal output of an evaluation, as the protocol `sources.Screen`."""

    def __init__(self) -> None:
        display = Display()
        self.info, self.notice = display.info, display.warn
        self.notice_once = FirstOfEachKind(display.warn).tell


def _make_metrics_file(evaluation: Evaluation, evaluated_sets: Sequence[EvaluatedSet]) -> dict[str, Any]:

    def measures_as_json(measures: Mapping[str, Measure]) -> dict[str, Any]:
        return {name: measure._asdict() for name, measure in measures.items()}

    sets = {
        evaluated_set.name: {
            "problems": len(evaluated_set.trajectories) // evaluated_set.samples_per_prompt,
            "samples_per_prompt": evaluated_set.samples_per_prompt,
            "temperature": evaluated_set.temperature,
            "measures": measures_as_json(evaluated_set.measures),
            "data_sources": {
                name: measures_as_json(measures) for name, measures in evaluated_set.by_data_source.items()
            },
        }
        for evaluated_set in evaluated_sets
    }
    metrics = {name: value for evaluated_set in evaluated_sets for name, value in evaluated_set.metrics.items()}
    return {
        "model": str(evaluation.model.absolute()),
        "recipe": evaluation.recipe.name,
        "confidence": 0.95,
        "sets": sets,
        "metrics": metrics,
    }
