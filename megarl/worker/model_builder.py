"""Builds the models of a training rank, and loads their weights from folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from megarl.checkpoint import safetensors
from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import ModelShape, padded_vocab_size, read_model_shape
from megarl.models.configuration import name_refused_overrides, uses_transformer_engine
from megarl.reshard.layouts.megatron import MegatronLayouts, check_shapes, megatron_layouts, parameter_shapes
from megarl.training.host.host_arena import HostArena
from megarl.training.model import ModelShard
from megarl.training.replica import Replica
from megarl.training.training_engine import TrainingEngine

Model = TypeVar("Model", bound=ModelShard)


class ModelBuilder:
    """Builds models with the trainer's parallel sizes, on all its ranks together.

    `replica` has the ranks of this rank's data-parallel replica. `arena` is host memory for tensors moved off the
    device.
    """

    def __init__(
        self, recipe: Recipe, parallel: ParallelConfig, rank: int, *, replica: Replica, arena: HostArena
    ) -> None:
        self.recipe, self.parallel, self.rank = recipe, parallel, rank
        self._replica, self._arena = replica, arena

    def build(
        self,
        model_class: Callable[..., Model],
        folder: str,
        *,
        has_value_head: bool = False,
        with_draft_layers: bool = False,
        parallel: ParallelConfig | None = None,
        replica: Replica | None = None,
    ) -> Model:
        """Build a model of the class `model_class`, and load its weights from a folder.

        `has_value_head` adds a new value head if the folder has none, `with_draft_layers` the folder's draft layers.
        `parallel` and `replica` default to the trainer's.
        """
        shape = self.shape_of(folder)
        shape = shape.with_value_head() if has_value_head else shape
        shape = shape.with_draft_layers(with_draft_layers)
        parallel = parallel or self.parallel
        layouts = self.layouts(shape, parallel)

        def load_weights(tensors: Mapping[str, Tensor]) -> None:
            # Before any byte is copied, compare the computed layout with Megatron-Core 0.16.1's real parameters.
            check_shapes(parameter_shapes(layouts, parallel.coordinates(self.rank)), tensors)
            override = self.recipe.override_of(folder)
            safetensors.load(
                folder, layouts[self.rank], tensors, override=override, with_draft_layers=with_draft_layers
            )

        with name_refused_overrides(self.recipe.trainer.megatron):
            return model_class(
                self.recipe, parallel, shape, load_weights, replica=replica or self._replica, arena=self._arena
            )

    def build_policy(self) -> TrainingEngine:
        recipe, is_reward_model = self.recipe, self.recipe.loop == "reward_model"
        return self.build(
            TrainingEngine,
            recipe.model.folder,
            has_value_head=is_reward_model,
            with_draft_layers=recipe.trainer.trains_draft_layers,
        )

    def shape_of(self, folder: str) -> ModelShape:
        return read_model_shape(folder, self.recipe.override_of(folder))

    def layouts(self, shape: ModelShape, parallel: ParallelConfig | None = None) -> MegatronLayouts:
        """Return the layouts of a model's weights on all ranks, by default with the trainer's parallel sizes."""
        parallel = parallel or self.parallel
        return megatron_layouts(
            shape,
            parallel,
            padded_vocab_size=padded_vocab_size(shape.vocab_size, parallel.tp),
            transformer_engine=uses_transformer_engine(),
        )
