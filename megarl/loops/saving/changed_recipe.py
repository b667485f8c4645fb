"""Refuses a resume if the checkpoint's state does not fit the changed recipe, its models or its chat template.

`driver_state` is driver.json (`read_driver`): the recipe and the hashes with which the checkpoint was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from megarl.config import Recipe
from megarl.config.recipe import error_page
from megarl.config.schema import value_at
from megarl.loops.saving.driver_state import adapters_of, saved_value, written_value
from megarl.loops.saving.run_inputs import Inputs
from megarl.types import ConfigError

_NEW_RUN = "begin a new run with model.path set to an export of this one"
"""Remedy if the state of the checkpoint cannot continue under the changed recipe, but its weights can."""
_REFERENCE_FIELDS = {
    "rl": "algorithm.kl_coefficient", "preference": "preference.loss", "distillation": "distillation.teacher",
}  # fmt: skip
"""Recipe fields that decide whether a run has a reference model, by loop."""
_DRAFTER_FIELD = "rollout.vllm.speculative_config.model"


def refuse_unfit_state(driver_state: Mapping[str, Any], recipe: Recipe, inputs: Inputs) -> None:
    """Raise ConfigError if training cannot continue with the checkpoint's weights, optimizers and schedules."""
    _refuse_other_loop(driver_state, recipe)
    _refuse_other_models(driver_state, recipe, inputs)
    _refuse_other_adapters(driver_state, recipe)
    _refuse_other_parts(driver_state, recipe)
    _refuse_other_template(driver_state, recipe, inputs)
    _refuse_other_vocabulary(driver_state, recipe, inputs)
    _refuse_other_optimizers(driver_state, recipe)
    _refuse_other_updates(driver_state, recipe)
    _refuse_changed_kl_coefficient(driver_state, recipe)
    _refuse_other_drafter(driver_state, recipe)
    _refuse_changed_drafter(driver_state, recipe, inputs)


def refuse_other_inputs(driver_state: Mapping[str, Any], recipe: Recipe, inputs: Inputs) -> None:
    """Raise ConfigError if files of models, chat template, tokenizer or drafter changed while the run went on."""
    _refuse_other_models(driver_state, recipe, inputs)
    _refuse_other_template(driver_state, recipe, inputs)
    _refuse_other_vocabulary(driver_state, recipe, inputs)
    _refuse_changed_drafter(driver_state, recipe, inputs)


def _refuse_other_loop(driver_state: Mapping[str, Any], recipe: Recipe) -> None:
    loop_before = driver_state["recipe"].get("loop")
    if loop_before not in (None, recipe.loop):
        raise ConfigError(
            f"loop = {recipe.loop}: the checkpoint is of a run with loop = {loop_before}, and its position, schedules "
            f"and state belong to that loop; {_NEW_RUN}, choose another name=NAME, or start over with --restart"
        )


def _refuse_other_models(driver_state: Mapping[str, Any], recipe: Recipe, inputs: Inputs) -> None:
    """Raise ConfigError if a model, or the weights of one that is not trained, differ from the run's first ones."""

    def describe_model(field: str) -> str:
        return (
            "is another model than the run began with (its config.json, or model.override_config, differs; then: "
            f"{saved_value(driver_state['recipe'], field)}). Give that one, choose another name=NAME, or start over "
            "with --restart"
        )

    def describe_weights(field: str) -> str:
        return (
            f"has other weights than the run began with (then: {saved_value(driver_state['recipe'], field)}). "
            f"{_describe_frozen_use(recipe, field)} Give the earlier ones, choose another name=NAME, or start over "
            "with --restart"
        )

    folders = {"model.path": recipe.model.folder, **recipe.further_models}
    # Weights of another model differ too, so models come first.
    for part, identities, describe in (
        ("models", inputs.models, describe_model),
        ("frozen", inputs.frozen, describe_weights),
    ):
        # Checkpoints of earlier versions lack some parts.
        identities_before = driver_state.get(part, {})
        errors = [
            f"{field} = {folders[field]}: {describe(field)}"
            for field, identity in identities.items()
            if identities_before.get(field, identity) != identity
        ]
        if errors:
            raise ConfigError(error_page(f"recipe {recipe.name}", errors))


def _describe_frozen_use(recipe: Recipe, field: str) -> str:
    if field != "model.path":
        return "The rewards or targets of training would change."
    if recipe.lora.rank:
        return "A checkpoint has the adapters alone, which belong to the earlier weights."
    return "The reference model has these weights."


def _refuse_other_adapters(driver_state: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if recipe and checkpoint have adapters of another rank, or at other layers.

    The checkpoint's adapters of a layer no longer named would be lost.
    """
    lora, lora_before = recipe.lora, adapters_of(driver_state["recipe"])
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
        value, value_before = written_value(getattr(lora, name)), written_value(getattr(lora_before, name))
        raise ConfigError(
            f"lora.{name} = {value}: the checkpoint's adapters were trained with the scale "
            f"{lora_before.scale:g}, and with {lora.scale:g} they would be another model; set "
            f"lora.{name}={value_before}, {remedy}"
        )


def _refuse_other_parts(driver_state: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if only one of recipe and checkpoint has a critic or MTP layers, or if a moved reference
    would be lost.
    """
    recipe_values, recipe_before = recipe.model_dump(), driver_state["recipe"]
    fields: dict[str, tuple[str, Callable[[Any], bool]]] = {
        "algorithm.advantage": ("a critic", lambda value: value == "gae"),
        "trainer.mtp_loss_coefficient": ("trained MTP layers", lambda value: value is not None),
    }
    for field, (part, is_trained) in fields.items():
        value_before, value = saved_value(recipe_before, field), saved_value(recipe_values, field)
        # Fields that have no effect are not written.
        was_trained, will_be_trained = is_trained(value_before), is_trained(value)
        if was_trained == will_be_trained or (field == "algorithm.advantage" and recipe.loop != "rl"):
            continue
        contents = f"{part}, and this state would be lost" if was_trained else f"no state of {part}"
        raise ConfigError(
            f"{field} = {written_value(value)}: the checkpoint has {contents}; set "
            f"{field}={written_value(value_before)}, or {_NEW_RUN}"
        )
    has_moved_reference = saved_value(recipe_before, "algorithm.reference_update_steps") is not None
    if has_moved_reference and not recipe.has_reference and (field := _REFERENCE_FIELDS.get(recipe.loop)) is not None:
        # Sources of a mixture may name the teacher, and then `distillation` does not.
        earlier_value = saved_value(recipe_before, field) or "reference"
        raise ConfigError(
            f"{field} = {saved_value(recipe_values, field)}: the checkpoint has an updated reference model "
            f"(algorithm.reference_update_steps), and it would be lost; set {field}={earlier_value}, or {_NEW_RUN}"
        )


def _refuse_other_template(driver_state: Mapping[str, Any], recipe: Recipe, inputs: Inputs) -> None:
    """Raise ConfigError if the chat template's text differs from the run's first one."""
    if driver_state.get("template") in (None, inputs.template):
        return
    template_name = recipe.model.chat_template or f"left out, that of {recipe.model.folder}"
    template_before = saved_value(driver_state["recipe"], "model.chat_template") or "left out"
    raise ConfigError(
        f"model.chat_template = {template_name}: its text is not the one used when the run began "
        f"(model.chat_template at that time: {template_before}). Restore that text, give this run a new name "
        "(name=NEW_NAME), or start it from the beginning with --restart"
    )


def _refuse_other_vocabulary(driver_state: Mapping[str, Any], recipe: Recipe, inputs: Inputs) -> None:
    """Raise ConfigError if the tokenizer gives tokens other ids than when the run began."""
    # Checkpoints of earlier versions have no identity of the vocabulary.
    if driver_state.get("vocabulary") in (None, inputs.vocabulary):
        return
    change = "has other tokens or ids than" if inputs.vocabulary is not None else "is missing, and was there"
    raise ConfigError(
        f"model.path = {recipe.model.folder}: its tokenizer.json {change} when the run began, so "
        "texts would become other tokens. Restore that file, choose another name=NAME, or start over with --restart"
    )


def _refuse_other_optimizers(driver_state: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if the checkpoint has the state of another optimizer."""
    for section in ("optimizer", *(("critic.optimizer",) if recipe.has_critic else ())):
        field = f"{section}.name"
        name, name_before = saved_value(recipe.model_dump(), field), saved_value(driver_state["recipe"], field)
        if name_before not in (None, name):
            raise ConfigError(
                f"{field} = {name}: the checkpoint has the state of {name_before}; set {field}={name_before}, or "
                f"{_NEW_RUN}"
            )


def _refuse_other_updates(driver_state: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if a step has more or fewer updates than before the resume, and a learning rate decays.

    The learning rate decays over all updates of the run, and the checkpoint counts updates. If the total changes, the
    same count is another fraction of the run, maybe even its end. The policy has no updates in the critic's warm-up.
    """
    _refuse_other_warmup(driver_state, recipe)
    fields: dict[str, tuple[str, ...]] = {}
    if recipe.is_on_policy:
        fields["optimizer"] = ("train.updates_per_step", "train.epochs_per_step")
    if recipe.has_critic:
        fields["critic.optimizer"] = ("critic.updates_per_step",)
    for section, names in fields.items():
        schedule = value_at(recipe, f"{section}.schedule")
        counts = {name: value_at(recipe, name) for name in names}
        # Idle fields are not written; 1 is the default of all.
        counts_before = {name: saved_value(driver_state["recipe"], name) or 1 for name in names}
        if schedule == "constant" or prod(counts.values()) == prod(counts_before.values()):
            continue
        name = next(name for name in names if counts[name] != counts_before[name])
        raise ConfigError(
            f"{name} = {counts[name]}: {section}.schedule = {schedule} decays over all updates of the run, and a step "
            f"had {prod(counts_before.values())} until now; set {name}={counts_before[name]} or "
            f"{section}.schedule=constant, or {_NEW_RUN}"
        )


def _refuse_other_warmup(driver_state: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if the critic's warm-up has another length than before, and the policy's learning rate
    decays.
    """
    warmup, schedule = recipe.critic.warmup_steps, recipe.optimizer.schedule
    # Idle fields are not written; 0 is the default.
    warmup_before = saved_value(driver_state["recipe"], "critic.warmup_steps") or 0
    if recipe.has_critic and schedule != "constant" and warmup != warmup_before:
        raise ConfigError(
            f"critic.warmup_steps = {warmup}: optimizer.schedule = {schedule} decays over all updates of the policy, "
            f"which began after {warmup_before} steps; set critic.warmup_steps={warmup_before} or "
            f"optimizer.schedule=constant, or {_NEW_RUN}"
        )


def _refuse_changed_kl_coefficient(driver_state: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if algorithm.kl_coefficient has changed in a run with algorithm.kl_target.

    The run continues with the adapted coefficient of its checkpoint, so the recipe's change would have no effect.
    """
    coefficient = recipe.algorithm.kl_coefficient
    coefficient_before = saved_value(driver_state["recipe"], "algorithm.kl_coefficient")
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


def _refuse_other_drafter(driver_state: Mapping[str, Any], recipe: Recipe) -> None:
    """Raise ConfigError if only one of recipe and checkpoint has a trained drafter."""
    field = "trainer.drafter_learning_rate"
    rate_before = saved_value(driver_state["recipe"], field)
    if recipe.trains_drafter and rate_before is None:
        raise ConfigError(
            f"{field} = {recipe.trainer.drafter_learning_rate:g}: the checkpoint has no drafter's state; leave the "
            f"field out, or {_NEW_RUN}"
        )
    if rate_before is not None and not recipe.trains_drafter:
        # A frozen drafter would begin again with the weights of its own files.
        raise ConfigError(
            f"{field} is left out: the checkpoint has a drafter trained until then, and its weights would be lost; set "
            f"{field}={rate_before:g}, or begin a new run with model.path and rollout.vllm.speculative_config.model "
            "set to exports of this one"
        )


def _refuse_changed_drafter(driver_state: Mapping[str, Any], recipe: Recipe, inputs: Inputs) -> None:
    """Raise ConfigError if a trained drafter's config.json or a map of its vocabulary changed since the run's start.

    The checkpoint has only the drafter's weights. Its computation and its tokens come from these files.
    """
    digests_before = driver_state.get("drafter")
    # Checkpoints of earlier versions name no drafter.
    if not digests_before or not inputs.drafter:
        return
    parts = [
        part
        for part in sorted({*digests_before, *inputs.drafter})
        if digests_before.get(part) != inputs.drafter.get(part)
    ]
    if parts:
        drafter_before = saved_value(driver_state["recipe"], _DRAFTER_FIELD)
        raise ConfigError(
            f"{_DRAFTER_FIELD} = {recipe.drafter}: this drafter's {' and '.join(parts)} differ from those of the "
            f"checkpoint's drafter, {drafter_before}. "
            "Restore that drafter's files, choose another name=NAME, or start over with --restart"
        )
