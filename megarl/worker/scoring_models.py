"""Models of a training rank that only score."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megarl.training.distillation.targets import StoredTargets
from megarl.training.model import FrozenModel
from megarl.training.model_parts import ModelParts
from megarl.training.state.checkpoint import Model
from megarl.training.training_engine import StartingPolicy, TrainingEngine
from megarl.worker.model_builder import ModelBuilder
from megarl.worker.rank_state import RankState
from megarl.worker.teachers import choose_teacher_class
from megarl.worker.trainer_part import TrainerPart


class ScoringModels(TrainerPart):
    """Part with the models `reference` and `reward_model`, if the recipe has them.

    If the reference is a teacher, it stores its targets in `targets`.
    """

    def __init__(self, state: RankState, builder: ModelBuilder, targets: StoredTargets) -> None:
        self._state, self._builder, self._recipe, self._targets = state, builder, state.recipe, targets
        self.models: dict[str, Any] = {}

    def build_models(self) -> None:
        recipe = self._recipe
        if recipe.has_reference and not recipe.lora.rank:
            reference_class = choose_teacher_class(self._builder, recipe.model.folder, self._targets)
            reference_class = partial(reference_class, parts=ModelParts(exact_blocks=recipe.exact_blocks))
            self.models["reference"] = self._builder.build(reference_class, recipe.model.folder)
        if (folder := recipe.further_models.get("reward.model")) is not None:
            self.models["reward_model"] = self._builder.build(FrozenModel, folder, has_value_head=True)

    def extend_policy(self, policy: TrainingEngine) -> None:
        # If the reference is a teacher, the part `Teachers` has it.
        if self._recipe.has_reference and self._recipe.lora.rank and not self._recipe.teacher_models:
            # With LoRA, the reference is the policy without its adapters. It has no weights of its own.
            self.models["reference"] = StartingPolicy(policy)

    def built_models(self) -> Mapping[str, Any]:
        return self.models

    def saved_models(self) -> Mapping[str, Model]:
        reference = self.models.get("reference")
        return {"reference": reference} if isinstance(reference, FrozenModel) else {}

    def move_reference(self) -> None:
        """Mix the policy's weights into the reference model's, in the ratio algorithm.reference_mixing."""
        reference = self.models["reference"]
        assert isinstance(reference, FrozenModel)
        reference.move_towards(self._state.policy.tensors, self._recipe.algorithm.reference_mixing)
