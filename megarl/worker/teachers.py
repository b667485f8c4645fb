"""The teachers of a training rank: their models, their process groups, and the targets that the policy learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from megarl.checkpoint import safetensors
from megarl.config.parallel import ParallelConfig
from megarl.groups.megatron_ranks import RankGroups
from megarl.models.distillation.teacher_student import StudentModel, target_bytes
from megarl.training.distillation.targets import StoredTargets, TargetFetcher
from megarl.training.distillation.teacher import ModelInOwnGroups, Teacher
from megarl.training.model import FrozenModel
from megarl.training.replica import Replica
from megarl.training.training_engine import TrainingEngine
from megarl.worker.model_builder import ModelBuilder
from megarl.worker.trainer_part import TrainerPart


class Teachers(TrainerPart):
    """The teachers of a recipe: teacher0, teacher1 and so on. `parallel` are their parallel sizes."""

    def __init__(self, builder: ModelBuilder, parallel: ParallelConfig) -> None:
        self._builder, self._parallel, self._recipe = builder, parallel, builder.recipe
        self.models: dict[str, Any] = {}
        self.targets = StoredTargets()
        """Targets that this rank stores for the next update."""
        self._separate_groups: dict[tuple[ParallelConfig, bool], tuple[RankGroups, Replica]] = {}
        """Process groups of teachers that cannot share the policy's process groups. Keys: parallel sizes, and whether
        the teacher has experts."""

    @property
    def replicas(self) -> list[Replica]:
        """The data-parallel replicas of teachers with groups of their own."""
        return [replica for _, replica in self._separate_groups.values()]

    def build_models(self) -> None:
        for name, folder in self._recipe.teachers.items():
            self.models[name] = self._build_teacher(folder)

    def extend_policy(self, policy: TrainingEngine) -> None:
        if self._recipe.teachers and not self._recipe.has_advantages:
            policy.feeds.append(self._target_feed(policy))

    def built_models(self) -> Mapping[str, Any]:
        return self.models

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()

    def _build_teacher(self, folder: str) -> FrozenModel | ModelInOwnGroups:
        """Build the teacher model in a folder. It gets process groups of its own if the policy's do not fit."""
        kind = self._teacher_kind(folder)
        has_experts = [bool(self._builder.shape_of(model).num_experts) for model in (folder, self._recipe.model.folder)]
        if self._parallel == self._builder.parallel and has_experts[0] == has_experts[1]:
            return self._builder.build(kind, folder)
        # NCCL communicators take device memory, so teachers with equal groups share them.
        key = self._parallel, has_experts[0]
        if key not in self._separate_groups:
            self._separate_groups[key] = RankGroups(), Replica(self._parallel)
        groups, replica = self._separate_groups[key]
        with groups.in_place():
            return ModelInOwnGroups(self._builder.build(kind, folder, parallel=self._parallel, replica=replica), groups)

    def _teacher_kind(self, folder: str) -> Callable[..., FrozenModel]:
        """Return the class of a teacher: one scoring sampled tokens, or one storing whole distributions."""
        if self._recipe.has_advantages:
            return FrozenModel
        return partial(Teacher, num_common_tokens=self._num_common_tokens(folder), stored=self.targets)

    def _num_common_tokens(self, teacher: str) -> int:
        """Return the number of tokens that the vocabularies of policy and teacher share. Further rows are padding."""
        return min(self._builder.shape_of(folder).vocab_size for folder in (teacher, self._recipe.model.folder))

    def _target_feed(self, policy: TrainingEngine) -> TargetFetcher:
        """Return the feed of the teachers' targets for the policy's update.

        On the last pipeline stage it has this rank's rows of the teachers' output layers.
        """
        recipe, last = self._recipe, policy.chunks[-1]
        assert isinstance(last, StudentModel)
        widths, num_local_tokens = [], []
        heads: list[Tensor | None] = []
        for folder in recipe.teachers.values():
            shape, dtype = self._builder.shape_of(folder), policy.dtype
            widths.append(target_bytes(recipe.distillation, shape.hidden_size, dtype))
            rows = range(last.first_token_id, last.first_token_id + last.num_local_tokens)
            # The last tensor-parallel ranks may hold padding rows only: then the range is empty.
            rows = rows[: max(0, self._num_common_tokens(folder) - rows.start)]
            num_local_tokens.append(len(rows))
            has_head = recipe.distillation.loss == "full_vocabulary" and last.post_process
            override = recipe.override_of(folder)
            heads.append(safetensors.head_rows(folder, rows, override=override).to(dtype) if has_head else None)
        return TargetFetcher(self.targets, policy.device, widths=widths, num_local_tokens=num_local_tokens, heads=heads)
