"""Resuming a run: finds the newest valid checkpoint of the same models and data.

Everything is read and checked before the run folder is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import BaseModel

from megarl.checkpoint.manifest import canonical_sha256, file_record
from megarl.checkpoint.weight_samples import weights_identity
from megarl.config import Recipe, RolloutConfig
from megarl.config.override import apply_override
from megarl.config.recipe import error_page, recipe_changes
from megarl.config.schema import value_at
from megarl.config.sections.learning import LoraConfig
from megarl.data.chat import template_text
from megarl.data.kinds.problems import num_made
from megarl.data.sources.rows import data_files
from megarl.datasets.counts import RecordDigests
from megarl.datasets.fields import data_paths
from megarl.families.eagle3 import read_vocabulary_maps
from megarl.files.atomic import storage_faults_named
from megarl.files.model_folder import find_folder, read_object
from megarl.loops.saving.checkpointing import Survey, plain_recipe, remove_incomplete_saves, survey
from megarl.loops.saving.data_position import DataPosition
from megarl.terminal import Console
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.run_record import DRIVER, checkpoint_step, refuse_other_schema
from megarl.tracking.spikes import is_memory
from megarl.types import ConfigError, DataError

Resume = Literal["if-any", "must"]
""""must": a checkpoint is required. "if-any": without a checkpoint the run starts from the beginning."""

_PASSING_FIELDS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Fields of config.json that do not identify a model: they change with its path or transformers' version."""
_DRAW_FIELDS = ("stragglers", "placement", "max_staleness")
"""Fields of `rollout` that decide whether single prompts or batches are drawn."""
_NEW_RUN = "begin a new run with model.path set to an export of this one"
"""Remedy if the state of the checkpoint cannot continue under the changed recipe, but its weights can."""
_MODEL_SECTIONS = ("text_config", "vision_config")
"""Sections of config.json with a whole model's fields, in models with a vision tower."""
_REFERENCE_FIELDS = {
    "rl": "algorithm.kl_coefficient", "preference": "preference.loss", "distillation": "distillation.teacher",
}  # fmt: skip
"""Recipe fields that decide whether a run has a reference model, by loop."""
_DRAFTER_FIELD = "rollout.vllm.speculative_config.model"


@dataclass(frozen=True, slots=True)
class Inputs:
    """Identity of a run's models and data, by recipe field: sha256 of config.json and of each data file.

    `template` is the sha256 of the chat template's text. `record_digests` has, by data file, number and digest of the
    training records that are not too long. `drafter` describes a drafter that is trained with the policy. It has the
    sha256 of config.json and of each vocabulary map, by file and tensor. `frozen` identifies the weights missing in
    checkpoints, because the run does not train them.
    """

    models: Mapping[str, str]
    data: Mapping[str, str]
    template: str | None
    record_digests: Mapping[str, str]
    drafter: Mapping[str, str]
    frozen: Mapping[str, str]

    @classmethod
    def read(cls, recipe: Recipe, record_digests: RecordDigests | None = None) -> Self:
        """Hash the files that the recipe names.

        Raises DataError for a broken config.json or a drafter's broken weights, ConfigError for a missing chat
        template file, StorageError for unreadable files.
        """
        folders = {"model.path": recipe.model.folder, **recipe.further_models}
        models = {field: _model_identity(Path(folder), recipe.override_of(folder)) for field, folder in folders.items()}
        data = {}
        for field, path in data_paths(recipe).items():
            # Generated problems have no file. Their name determines them completely.
            if num_made(path) is not None:
                data[field] = canonical_sha256({"source": path})
                continue
            files = data_files(path)
            with storage_faults_named(files[0]):
                hashes = [file_record(file)["sha256"] for file in files]
            data[field] = hashes[0] if len(files) == 1 else canonical_sha256({"files": hashes})
        template = template_text(recipe.model)
        frozen = {name: weights_identity(folder) for name, folder in _frozen_models(recipe).items()}
        return cls(
            models,
            data,
            template and canonical_sha256({"template": template}),
            record_digests or {},
            _drafter_identity(recipe),
            frozen,
        )

    def as_json(self) -> dict[str, Any]:
        fields = {
            "models": self.models, "data": self.data, "kept": self.record_digests, "drafter": self.drafter,
            "frozen": self.frozen,
        }  # fmt: skip
        return {name: dict(by_field) for name, by_field in fields.items()} | {"template": self.template}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run starts: `checkpoint`, or the beginning (None).

    `position` is that in the data. `checksum` is the policy's; None if the saving run computed none
    (weights.check_every). `spikes` is the state of the spike detector, if any. With `copied_step`, the ranks have
    copies of the state after this step in memory. Then `checkpoint` is a folder with the driver's part alone.
    """

    checkpoint: Path | None
    inputs: Inputs
    position: DataPosition
    checksum: str | None = None
    spikes: Mapping[str, Any] | None = None
    copied_step: int | None = None


def find_origin(
    recipe: Recipe, folder: RunFolder, resume: Resume | None, record_digests: RecordDigests | None = None
) -> Origin:
    """Find the checkpoint to resume from, then register a new start of the run in its folder.

    Raises ConfigError for other models, adapters, chat template or order of the data. Raises DataError for a checkpoint
    of another schema, changed training data, other `record_digests` (dropped records), or if all checkpoints are
    damaged. Raises StorageError for failed reads or writes. An error leaves the folder unchanged.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    inputs = Inputs.read(recipe, record_digests)
    if folder.dead_owner:
        _warn(console, [f"{folder.path}: taken over from a process that ended without a word: {folder.dead_owner}"])
    surveyed = survey(folder.earlier) if resume else Survey(None, {})
    earlier: dict[str, Any] = {}
    position = DataPosition()
    if resume == "must":
        folder.earlier.require_checkpoint()
    if surveyed.good:
        # The schema is checked first: the other checks read fields of driver.json.
        refuse_other_schema(surveyed.good)
        earlier = read_driver(surveyed.good)
        _refuse_other_loop(earlier, recipe)
        _refuse_other_models(earlier, recipe, inputs)
        _refuse_other_adapters(earlier, recipe)
        _refuse_other_parts(earlier, recipe)
        _refuse_other_template(earlier, recipe, inputs)
        _refuse_other_optimizers(earlier, recipe)
        _refuse_other_updates(earlier, recipe)
        _refuse_changed_kl_coefficient(earlier, recipe)
        _refuse_other_drafter(earlier, recipe)
        _refuse_changed_drafter(earlier, recipe, inputs)
        _refuse_other_draws(earlier, recipe)
        _refuse_other_order(earlier, recipe)
        _refuse_other_buckets(earlier, recipe)
        position = DataPosition.from_checkpoint(checkpoint_step(surveyed.good), earlier)
        _refuse_steps_of_epochs(earlier, recipe, position)
        warnings = _data_changes(earlier, recipe, inputs)
        _refuse_other_records(earlier, recipe, inputs)
        _warn(console, [f"checkpoint {name} is left out: {reason}" for name, reason in surveyed.damaged.items()])
        console.print(f"resuming from {surveyed.good}")
        _warn(console, warnings)
        for change in recipe_changes(earlier["recipe"], recipe):
            console.print(f"changed since then: {change}", style="yellow")
    elif resume:
        console.print(f"{folder.path} has no checkpoint yet: starting from the beginning")
    # Begin before `settle` removes incomplete saves. Otherwise the space freed could hide a full disk until later.
    unreadable = folder.begin(
        checkpoint_step(surveyed.good) if surveyed.good else None, recipe.cluster.max_restarts, earlier.get("unlogged")
    )
    if resume:
        surveyed.settle(folder.checkpoints_folder)
    if unreadable:
        _warn(console, [f"{folder.metrics_file}: {unreadable} lines are not readable and are skipped"])
    return Origin(surveyed.good, inputs, position, earlier.get("checksum"), earlier.get("spikes"))


def begin_from_copy(origin: Origin, recipe: Recipe, folder: RunFolder) -> Origin:
    """Register a new start of the run from copies of its state in memory, and return their origin.

    Raises MegarlError if the run has started from this step too often. Raises ConfigError, DataError or StorageError as
    `find_origin` does.
    """
    # The driver's part of a copy has no driver.json, so compare with the inputs that the run began with.
    earlier = origin.inputs.as_json() | {"recipe": plain_recipe(recipe)}
    inputs = Inputs.read(recipe, dict(origin.inputs.record_digests))
    _refuse_other_models(earlier, recipe, inputs)
    _refuse_other_template(earlier, recipe, inputs)
    _refuse_changed_drafter(earlier, recipe, inputs)
    _warn(Console(highlight=False, soft_wrap=True, markup=False), _data_changes(earlier, recipe, inputs))
    folder.begin(origin.copied_step, recipe.cluster.max_restarts)
    # A save that the lost rank interrupted is incomplete. Do not read the checkpoints: the ranks do not load them.
    # Hashing them took 80 % of the time of a recovery.
    remove_incomplete_saves(folder.checkpoints_folder)
    return origin


def read_driver(checkpoint: Path) -> dict[str, Any]:
    """Return the driver's state in a checkpoint (driver.json). Raises DataError naming the file if it is damaged."""
    path = checkpoint / DRIVER
    driver = read_object(path)
    wrong = [name for name, is_right in _DRIVER_FIELDS.items() if name in driver and not is_right(driver[name])]
    if wrong or not driver.get("recipe"):
        raise DataError(
            f"{path}: the field {(wrong or ['recipe'])[0]} is missing or damaged. Remove this checkpoint, and resume "
            "from an older one."
        )
    return driver


def _is_recipe(value: Any) -> bool:
    """Return whether a value is a recipe in JSON values, as far as a resume reads it."""
    if not isinstance(value, dict) or not isinstance(value.get("loop"), str | None):
        return False
    sections = (value.get(name) for name, field in Recipe.model_fields.items() if _is_section(field.annotation))
    if not all(isinstance(section, dict | None) for section in sections):
        return False
    try:
        _draw_settings(value)
        _adapters(value)
    except ValueError:
        return False
    sizes = (_value_at(value, name) for name in ("train.prompts_per_step", "algorithm.ptx_conversations"))
    return all(size is None or (type(size) is int and size > 0) for size in sizes)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _are_counts(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and all(type(n) is int and n >= 0 for n in value.values()))


_DRIVER_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "recipe": _is_recipe,
    "models": _are_texts,
    "data": _are_texts,
    "kept": _are_texts,
    "drafter": _are_texts,
    "frozen": _are_texts,
    "drawn": _are_counts,
    "template": lambda value: isinstance(value, str | None),
    "checksum": lambda value: isinstance(value, str | None),
    "spikes": lambda value: value is None or is_memory(value),
    # Earlier versions logged a step after its evaluation, and saved the metrics of an interrupted one as `unlogged`.
    "unlogged": lambda value: isinstance(value, dict | None),
}
"""Checks of the fields of driver.json by name. A checkpoint may come from a stranger."""


def _refuse_other_loop(earlier: Mapping[str, Any], recipe: Recipe) -> None:
    before = earlier["recipe"].get("loop")
    if before not in (None, recipe.loop):
        raise ConfigError(
            f"loop = {recipe.loop}: the checkpoint is of a run with loop = {before}, and its position, schedules and "
            f"state belong to that loop; {_NEW_RUN}, choose another name=NAME, or start over with --restart"
        )


def _refuse_other_models(earlier: Mapping[str, Any], recipe: Recipe, inputs: Inputs) -> None:
    """Raise ConfigError if a model, or the weights of one that is not trained, differ from the run's first ones."""

    def describe_model(field: str) -> str:
        return (
            "is another model than the run began with (its config.json, or model.override_config, differs; then: "
            f"{_value_at(earlier['recipe'], field)}). Give that one, choose another name=NAME, or start over with "
            "--restart"
        )

    def describe_weights(field: str) -> str:
        return (
            f"has other weights than the run began with (then: {_value_at(earlier['recipe'], field)}). "
            f"{_use_of_frozen(recipe, field)} Give the earlier ones, choose another name=NAME, or start over with "
            "--restart"
        )

    folders = {"model.path": recipe.model.folder, **recipe.further_models}
    # Weights of another model differ too, so models come first.
    for part, identities, describe in (
        ("models", inputs.models, describe_model),
        ("frozen", inputs.frozen, describe_weights),
    ):
        # Checkpoints of earlier versions lack some parts.
        before = earlier.get(part, {})
        errors = [
            f"{field} = {folders[field]}: {describe(field)}"
            for field, identity in identities.items()
            if before.get(field, identity) != identity
        ]
        if errors:
            raise ConfigError(error_page(f"recipe {recipe.name}", errors))


def _use_of_frozen(recipe: Recipe, field: str) -> str:
    if field != "model.path":
        return "The rewards or targets of training would change."
    if recipe.lora.rank:
        return "A checkpoint has the adapters alone, which belong to the earlier weights."
    return "The reference model has these weights."


def _frozen_models(recipe: Recipe) -> dict[str, str]:
    """Return the folders of weights that the run reads but does not train, by recipe field."""
    folders = {field: folder for field, folder in recipe.further_models.items() if field != "critic.path"}
    if recipe.lora.rank or recipe.has_reference:
        folders["model.path"] = recipe.model.folder
    return folders


def _refuse_other_adapters(earlier: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if recipe and checkpoint have adapters of another rank, or at other layers.

    The checkpoint's adapters of a layer no longer named would be lost.
    """
    lora, lora_before = recipe.lora, _adapters(earlier["recipe"])
    remedy = f"or {_NEW_RUN}"
    if lora.rank != lora_before.rank:
        contents = f"adapters of rank {lora_before.rank}" if lora_before.rank else "all weights and no adapters"
        raise ConfigError(
            f"lora.rank = {lora.rank}: the checkpoint has {contents}; set lora.rank={lora_before.rank}, {remedy}"
        )
    if lora.rank and set(lora.targets) != set(lora_before.targets):
        raise ConfigError(
            f"lora.targets = [{', '.join(lora.targets)}]: the checkpoint has adapters of "
            f"{', '.join(lora_before.targets)}; set lora.targets=[{','.join(lora_before.targets)}], {remedy}"
        )
    if lora.rank and lora.scale != lora_before.scale:
        name = "alpha" if lora.alpha != lora_before.alpha else "rank_stabilised"
        value, value_before = _plain(getattr(lora, name)), _plain(getattr(lora_before, name))
        raise ConfigError(
            f"lora.{name} = {value}: the checkpoint's adapters were trained with the scale "
            f"{lora_before.scale:g}, and with {lora.scale:g} they would be another model; set "
            f"lora.{name}={value_before}, {remedy}"
        )


def _refuse_other_parts(earlier: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if only one of recipe and checkpoint has a critic or MTP layers, or if a moved reference
    would be lost.
    """
    now, before = recipe.model_dump(), earlier["recipe"]
    fields: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "algorithm.advantage": ("a critic", lambda value: value == "gae"),
        "trainer.mtp_loss_coefficient": ("trained MTP layers", lambda value: value is not None),
    }
    for field, (part, is_trained) in fields.items():
        then_value, value = _value_at(before, field), _value_at(now, field)
        # Fields that have no effect are not written.
        was_trained, will_be_trained = is_trained(then_value), is_trained(value)
        if was_trained == will_be_trained or (field == "algorithm.advantage" and recipe.loop != "rl"):
            continue
        contents = f"{part}, and this state would be lost" if was_trained else f"no state of {part}"
        shown, earlier_value = (_plain(item) if item is not None else "null" for item in (value, then_value))
        raise ConfigError(
            f"{field} = {shown}: the checkpoint has {contents}; set {field}={earlier_value}, or {_NEW_RUN}"
        )
    moves = _value_at(before, "algorithm.reference_update_steps") is not None
    if moves and not recipe.has_reference and (field := _REFERENCE_FIELDS.get(recipe.loop)) is not None:
        # Sources of a mixture may name the teacher, and then `distillation` does not.
        earlier_value = _value_at(before, field) or "reference"
        raise ConfigError(
            f"{field} = {_value_at(now, field)}: the checkpoint has an updated reference model "
            f"(algorithm.reference_update_steps), and it would be lost; set {field}={earlier_value}, or {_NEW_RUN}"
        )


def _adapters(recipe: Mapping[str, Any]) -> LoraConfig:
    return LoraConfig.model_validate(recipe.get("lora") or {})


def _refuse_other_template(earlier: Mapping[str, Any], recipe: Recipe, inputs: Inputs) -> None:
    """Raise ConfigError if the chat template's text differs from the run's first one."""
    if earlier.get("template") in (None, inputs.template):
        return
    template_name = recipe.model.chat_template or f"left out, that of {recipe.model.folder}"
    before = _value_at(earlier["recipe"], "model.chat_template") or "left out"
    raise ConfigError(
        f"model.chat_template = {template_name}: its text is not the one used when the run began "
        f"(model.chat_template at that time: {before}). Restore that text, give this run a new name (name=NEW_NAME), "
        "or start it from the beginning with --restart"
    )


def _refuse_other_optimizers(earlier: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if the checkpoint has the state of another optimizer."""
    for section in ("optimizer", *(("critic.optimizer",) if recipe.has_critic else ())):
        field = f"{section}.name"
        name, before = _value_at(recipe.model_dump(), field), _value_at(earlier["recipe"], field)
        if before not in (None, name):
            raise ConfigError(
                f"{field} = {name}: the checkpoint has the state of {before}; set {field}={before}, or {_NEW_RUN}"
            )


def _refuse_other_updates(earlier: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if a step has more or fewer updates than before the resume, and a learning rate decays.

    The learning rate decays over all updates of the run, and the checkpoint counts updates. If the total changes, the
    same count is another fraction of the run, maybe even its end.
    """
    fields: dict[str, tuple[str, ...]] = {}
    if recipe.is_on_policy:
        fields["optimizer"] = ("train.updates_per_step", "train.epochs_per_step")
    if recipe.has_critic:
        fields["critic.optimizer"] = ("critic.updates_per_step",)
    for section, names in fields.items():
        schedule = value_at(recipe, f"{section}.schedule")
        counts = {name: value_at(recipe, name) for name in names}
        # Idle fields are not written; 1 is the default of all.
        counts_before = {name: _value_at(earlier["recipe"], name) or 1 for name in names}
        if schedule == "constant" or prod(counts.values()) == prod(counts_before.values()):
            continue
        name = next(name for name in names if counts[name] != counts_before[name])
        raise ConfigError(
            f"{name} = {counts[name]}: {section}.schedule = {schedule} decays over all updates of the run, and a step "
            f"had {prod(counts_before.values())} until now; set {name}={counts_before[name]} or "
            f"{section}.schedule=constant, or {_NEW_RUN}"
        )


def _refuse_changed_kl_coefficient(earlier: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if algorithm.kl_coefficient has changed in a run with algorithm.kl_target.

    The run continues with the adapted coefficient of its checkpoint, so the recipe's change would have no effect.
    """
    coefficient = recipe.algorithm.kl_coefficient
    coefficient_before = _value_at(earlier["recipe"], "algorithm.kl_coefficient")
    if (
        recipe.has_kl_penalty
        and recipe.algorithm.kl_target is not None
        and coefficient_before not in (None, coefficient)
    ):
        raise ConfigError(
            f"algorithm.kl_coefficient = {coefficient:g}: with algorithm.kl_target the run continues with the "
            f"coefficient that it has adapted until now; set algorithm.kl_coefficient={coefficient_before:g}, or leave "
            "out algorithm.kl_target"
        )


def _refuse_other_drafter(earlier: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if only one of recipe and checkpoint has a trained drafter."""
    field = "trainer.drafter_learning_rate"
    before = _value_at(earlier["recipe"], field)
    if recipe.trains_drafter and before is None:
        raise ConfigError(
            f"{field} = {recipe.trainer.drafter_learning_rate:g}: the checkpoint has no drafter's state; leave it out, "
            f"or {_NEW_RUN}"
        )
    if before is not None and not recipe.trains_drafter:
        # A frozen drafter would begin again with the weights of its own files.
        raise ConfigError(
            f"{field} is left out: the checkpoint has a drafter trained until then, and its weights would be lost; set "
            f"{field}={before:g}, or begin a new run with model.path and rollout.vllm.speculative_config.model set to "
            "exports of this one"
        )


def _refuse_changed_drafter(earlier: Mapping[str, Any], recipe: Recipe, inputs: Inputs) -> None:
    """Raise ConfigError if a trained drafter's config.json or a map of its vocabulary changed since the run's start.

    The checkpoint has only the drafter's weights. Its computation and its tokens come from these files.
    """
    before = earlier.get("drafter")
    # Checkpoints of earlier versions name no drafter.
    if not before or not inputs.drafter:
        return
    parts = [part for part in sorted({*before, *inputs.drafter}) if before.get(part) != inputs.drafter.get(part)]
    if parts:
        raise ConfigError(
            f"{_DRAFTER_FIELD} = {recipe.drafter}: {' and '.join(parts)} of this drafter differ from those of the "
            f"drafter whose training the checkpoint continues (then: {_value_at(earlier['recipe'], _DRAFTER_FIELD)}). "
            "Restore that drafter's files, choose another name=NAME, or start over with --restart"
        )


def _refuse_other_draws(earlier: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if prompts are drawn in another way than before.

    A run whose groups continue over several steps draws single prompts, other runs draw batches. Their positions in the
    data cannot be converted.
    """
    rollout_before = _draw_settings(earlier["recipe"])
    if recipe.loop != "rl" or rollout_before.carries_groups == recipe.rollout.carries_groups:
        return
    settings_before, settings = (
        rollout.model_dump(include=set(_DRAW_FIELDS)) for rollout in (rollout_before, recipe.rollout)
    )
    changed_fields = [name for name in _DRAW_FIELDS if settings[name] != settings_before[name]]
    fields = ", ".join(f"rollout.{name} = {settings[name]}" for name in changed_fields)
    earlier_values = " ".join(
        f"rollout.{name}={'null' if settings_before[name] is None else settings_before[name]}"
        for name in changed_fields
    )
    raise ConfigError(
        f"{fields}: the run began with {earlier_values} and cannot continue, because it counts its position in the "
        f"data differently; set {earlier_values}, choose another name=NAME, or start over with --restart"
    )


def _draw_settings(recipe: Mapping[str, Any]) -> RolloutConfig:
    """Return a plain recipe's fields that decide how prompts are drawn. Raises ValueError for impossible values."""
    values = {name: _value_at(recipe, f"rollout.{name}") for name in _DRAW_FIELDS}
    return RolloutConfig.model_validate({name: value for name, value in values.items() if value is not None})


def _refuse_other_order(earlier: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if `seed` or `data.shuffle` changed: the position would mean other records."""
    before = earlier["recipe"]
    shuffled = _value_at(before, "data.shuffle")
    shuffled = True if shuffled is None else shuffled
    values: dict[str, tuple[object, object]] = {"seed": (before.get("seed", 0), recipe.seed)}
    if not recipe.mixture or recipe.data.ptx:
        values["data.shuffle"] = shuffled, recipe.data.shuffle
    for source in recipe.sources if recipe.mixture else ():
        # A new source has no position yet.
        if source.name in (before.get("mixture") or {}):
            source_shuffle_before = _value_at(before, f"mixture.{source.name}.data.shuffle")
            now = source.recipe.data.shuffle
            values[source.place("data.shuffle")] = (
                shuffled if source_shuffle_before is None else source_shuffle_before,
                now,
            )
    errors = [
        f"{field} = {_plain(now)}: the run began with {_plain(then)}. Another value gives the data another order, so "
        f"records would be skipped or repeated. Set {field}={_plain(then)}, choose another name=NAME, or start over "
        "with --restart"
        for field, (then, now) in values.items()
        if then != now
    ]
    if errors:
        raise ConfigError(error_page(f"recipe {recipe.name}", errors))


def _refuse_other_buckets(earlier: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if `data.curriculum.by` changed: the checkpoint's solve rates would be of other problems."""
    shared = _value_at(earlier["recipe"], "data.curriculum") or {}
    sources_before = earlier["recipe"].get("mixture") or {}
    for source in recipe.sources:
        # A new source has no solve rates yet.
        if recipe.mixture and source.name not in sources_before:
            continue
        # A source's section may have some of the fields, and the others are those of `data`.
        source_before = _value_at(sources_before[source.name], "data.curriculum") if recipe.mixture else None
        before, now = {**shared, **(source_before or {})}, source.recipe.data.curriculum
        # Without a band there are no solve rates.
        if now.band is None or before.get("band") is None or before.get("by") == now.by:
            continue
        field = source.place("data.curriculum.by")
        then, value = (item or "null" for item in (before.get("by"), now.by))
        raise ConfigError(
            f"{field} = {value}: the checkpoint has solve rates by {then}; set {field}={then}, choose another "
            "name=NAME, or start over with --restart"
        )


def _refuse_steps_of_epochs(earlier: Mapping[str, Any], recipe: Recipe, position: DataPosition) -> None:
    """Raise ConfigError if train.epochs does not match the records drawn so far.

    `train.steps` was computed as if each earlier step drew train.prompts_per_step records.
    """
    num_prompts, epochs = recipe.train.prompts_per_step, recipe.train.epochs
    if epochs is None:
        return
    num_prompts_before = _value_at(earlier["recipe"], "train.prompts_per_step")
    num_drawn = position.drawn.get("data.train", position.step * (num_prompts_before or num_prompts))
    if num_drawn == position.step * num_prompts:
        return
    raise ConfigError(
        f"train.prompts_per_step = {num_prompts}: the run drew {num_drawn} records in its first {position.step} steps, "
        f"so train.epochs = {epochs:g} cannot be converted into steps. Give train.steps=N instead "
        "(train.epochs=null), or set "
        f"train.prompts_per_step={num_prompts_before or num_drawn // max(position.step, 1)} again"
    )


def _data_changes(earlier: Mapping[str, Any], recipe: Recipe, inputs: Inputs) -> list[str]:
    """Return a warning per changed validation file. Raises DataError for a changed training file."""
    digests_before, paths = earlier.get("data", {}), data_paths(recipe)
    changes = {
        field: f"{paths[field]}: {field} is not what the run was trained on: its sha256 is {sha256}, it was "
        f"{digests_before[field]}"
        for field, sha256 in inputs.data.items()
        if digests_before.get(field, sha256) != sha256
    }
    errors = [
        f"{text}. Restore the file, choose another name=NAME, or start over with --restart"
        for field, text in changes.items()
        if "data.validation" not in field
    ]
    if errors:
        raise DataError(error_page(f"data of recipe {recipe.name}", errors))
    return list(changes.values())


def _refuse_other_records(earlier: Mapping[str, Any], recipe: Recipe, inputs: Inputs) -> None:
    """Raise DataError if other records than before are dropped as too long.

    The position in the data counts only the remaining records, so it would point at others.
    """
    before = earlier.get("kept", {})
    errors = [
        f"{field}: the records dropped as too long differ from those dropped when the run began (kept are {now}; then "
        f"{before[field]}), so its position in the data means other records. Restore the fields that decide this "
        "(data.overlong, data.max_prompt_tokens, trainer.max_tokens_per_microbatch, model.chat_template_kwargs, "
        "data.system_prompt, data.format, data.fields), choose another name=NAME, or start over with --restart"
        for field, now in inputs.record_digests.items()
        if before.get(field, now) != now
    ]
    if errors:
        raise DataError(error_page(f"data of recipe {recipe.name}", errors))


def _model_identity(folder: Path, override: Mapping[str, Any]) -> str:
    """Return the sha256 of a model's config.json with overrides, without fields that do not identify it."""
    config = _identifying(apply_override(read_object(folder / "config.json"), override))
    sections = {name: _identifying(config[name]) for name in _MODEL_SECTIONS if isinstance(config.get(name), dict)}
    return canonical_sha256({**config, **sections})


def _drafter_identity(recipe: Recipe) -> dict[str, str]:
    """Return the sha256 of a trained drafter's config.json and vocabulary maps, by file and tensor.

    Empty for a drafter that is not trained: engines may draft with another one at any time.
    """
    if not recipe.trains_drafter or recipe.drafter is None:
        return {}
    folder = find_folder(recipe.drafter)
    maps = {
        f"tensor {name}": canonical_sha256({"shape": values.shape, "values": values.astype(np.int64).tobytes().hex()})
        for name, values in read_vocabulary_maps(folder).items()
    }
    return {"config.json": _model_identity(Path(folder), {}), **maps}


def _identifying(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _PASSING_FIELDS}


def _value_at(recipe: Mapping[str, Any], field: str) -> Any:
    value: Any = recipe
    for part in field.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _warn(console: Console, warnings: list[str]) -> None:
    for text in warnings:
        console.print(f"warning: {text}", style="yellow")
