"""The models of a run with their sizes and parallel layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape, padded_vocab_size, planned_shape
from megarl.reshard.layouts.megatron import MegatronLayouts, megatron_layouts


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """Sizes and parallel layout of the policy, the critic, or a model that only scores."""

    shape: ModelShape
    parallel: ParallelConfig

    @property
    def layouts(self) -> MegatronLayouts:
        rows = padded_vocab_size(self.shape.vocab_size, self.parallel.tp)
        return megatron_layouts(self.shape, self.parallel, padded_vocab_size=rows)


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a run. `frozen`: reference, reward model and teachers, by name. They only score."""

    policy: PlannedModel
    critic: PlannedModel | None
    frozen: Mapping[str, PlannedModel]


def read_models(
    recipe: Recipe, policy: ModelShape, parallel: ParallelConfig, teacher_parallel: ParallelConfig | None = None
) -> Models:
    """Return the models of a recipe. Reads config.json of critic, reward model and teachers.

    Raises DataError for an invalid config.json.
    """

    def shape_of(folder: str) -> ModelShape:
        return policy if folder == recipe.model.folder else planned_shape(folder, recipe.override_of(folder))

    frozen: dict[str, PlannedModel] = {}
    # Under LoRA the reference is the policy without adapters: it needs no memory.
    if recipe.has_reference and not recipe.lora.rank:
        frozen["reference"] = PlannedModel(policy, parallel)
    folder_by_field = recipe.further_models
    if (folder := folder_by_field.get("reward.model")) is not None:
        frozen["reward_model"] = PlannedModel(shape_of(folder).with_value_head(), parallel)
    for name, folder in recipe.teachers.items():
        frozen[name] = PlannedModel(shape_of(folder), teacher_parallel or parallel)
    critic = None
    if recipe.has_critic:
        source = folder_by_field.get("critic.path", recipe.model.folder)
        critic = PlannedModel(shape_of(source).with_value_head(), parallel)
    trained_shape = policy.with_value_head() if recipe.loop == "reward_model" else policy
    return Models(
        PlannedModel(trained_shape.with_draft_layers(recipe.trainer.trains_draft_layers), parallel), critic, frozen
    )
