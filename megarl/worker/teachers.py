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
from megarl.models.policy import PolicyModel
from megarl.training.distillation.targets import StoredTargets, TargetFetcher
from megarl.training.distillation.teacher import ModelInOwnGroups, Teacher
from megarl.training.model import FrozenModel
from megarl.training.replica import Replica
from megarl.training.training_engine import TrainingEngine
from megarl.worker.model_builder import ModelBuilder
from megarl.worker.policy_teacher import PolicyTeacher
from megarl.worker.rank_state import RankState
from megarl.worker.trainer_part import TrainerPart


class Teachers(TrainerPart):
    """Part with the teachers of a recipe: teacher0, teacher1 and so on. `parallel` are their parallel sizes."""

    def __init__(
        self, state: RankState, builder: ModelBuilder, parallel: ParallelConfig, targets: StoredTargets
    ) -> None:
        self._state, self._builder, self._parallel, self._recipe = state, builder, parallel, builder.recipe
        self.models: dict[str, Any] = {}
        self.targets = targets
        """Targets that this rank stores for the next update."""
        self._separate_groups: dict[tuple[ParallelConfig, bool], tuple[RankGroups, Replica]] = {}
        """Process groups of teachers that cannot use the policy's, by (parallel sizes, whether the teacher has
        experts).
        """

    @property
    def replicas(self) -> list[Replica]:
        return [replica for _, replica in self._separate_groups.values()]

    def build_models(self) -> None:
        for name, folder in self._recipe.teachers.items():
            self.models[name] = self._build_teacher(folder)

    def extend_policy(self, policy: TrainingEngine) -> None:
        recipe = self._recipe
        if "reference" in recipe.teacher_models and recipe.lora.rank:
            # With LoRA, the reference is the policy without its adapters. It has no weights of its own.
            self.models["reference"] = PolicyTeacher(policy, self.targets, at_start=True)
        if "live_teacher" in recipe.teacher_models:
            self.models["live_teacher"] = PolicyTeacher(policy, self.targets, at_start=False)
        if recipe.teacher_models and not recipe.has_advantages:
            policy.update_feeds.append(self._make_target_feed(policy))

    def built_models(self) -> Mapping[str, Any]:
        return self.models

    def close(self) -> None:
        for replica in self.replicas:
            replica.close()

    def _build_teacher(self, folder: str) -> FrozenModel | ModelInOwnGroups:
        """Build the teacher model in a folder, with process groups of its own if the policy's do not fit."""
        teacher_class = choose_teacher_class(self._builder, folder, self.targets)
        teacher_has_experts, policy_has_experts = (
            bool(self._builder.shape_of(model).num_experts) for model in (folder, self._recipe.model.folder)
        )
        # Expert-parallel groups exist only for models with experts (MoE), so both models must agree in that.
        if self._parallel == self._builder.parallel and teacher_has_experts == policy_has_experts:
            return self._builder.build(teacher_class, folder)
        # NCCL communicators take device memory, so teachers with equal groups share them.
        key = self._parallel, teacher_has_experts
        if key not in self._separate_groups:
            self._separate_groups[key] = RankGroups(), Replica(self._parallel)
        groups, replica = self._separate_groups[key]
        with groups.in_place():
            return ModelInOwnGroups(
                self._builder.build(teacher_class, folder, parallel=self._parallel, replica=replica), groups
            )

    def _make_target_feed(self, policy: TrainingEngine) -> TargetFetcher:
        """Return the feed of the teachers' targets for the policy's update.

        On the last pipeline stage it has this rank's rows of the teachers' output layers.
        """
        recipe, last_chunk = self._recipe, policy.chunks[-1]
        assert isinstance(last_chunk, StudentModel)
        bytes_per_token, num_local_tokens = [], []
        output_layers: list[Callable[[], Tensor] | None] = []
        for name in recipe.teacher_models:
            folder = recipe.teachers.get(name, recipe.model.folder)
            shape, dtype = self._builder.shape_of(folder), policy.dtype
            bytes_per_token.append(target_bytes(recipe.distillation, shape.hidden_size, dtype))
            # Rows of an output layer are tokens. This tensor-parallel rank has a range of the policy's rows.
            rows = range(last_chunk.first_token_id, last_chunk.first_token_id + last_chunk.num_local_tokens)
            # The last tensor-parallel ranks may hold only padding rows. Their range is then empty.
            rows = rows[: max(0, num_common_tokens(self._builder, folder) - rows.start)]
            num_local_tokens.append(len(rows))
            needs_output_layer = recipe.distillation.loss == "full_vocabulary" and last_chunk.post_process
            output_layers.append(self._make_output_layer_reader(name, rows, policy) if needs_output_layer else None)
        return TargetFetcher(
            self.targets,
            policy.device,
            target_bytes=bytes_per_token,
            num_local_tokens=num_local_tokens,
            heads=output_layers,
        )

    def _make_output_layer_reader(self, name: str, rows: range, policy: TrainingEngine) -> Callable[[], Tensor]:
        """Return a function that returns the current `rows` of a teacher's output layer, [rows, hidden]."""
        recipe = self._recipe
        if (folder := recipe.teachers.get(name)) is not None:
            head = safetensors.read_head_rows(folder, rows, override=recipe.override_of(folder)).to(policy.dtype)
            return lambda: head
        # A reference with its own weights may have moved. LoRA adapts no head, so otherwise use the policy's.
        scoring_models = self._state.parts["scoring_models"].built_models()
        model = scoring_models["reference"] if name == "reference" and not recipe.lora.rank else policy
        last_chunk = model.chunks[-1]
        assert isinstance(last_chunk, PolicyModel)
        return lambda: last_chunk.head_weight().detach()


def choose_teacher_class(builder: ModelBuilder, folder: str, targets: StoredTargets) -> Callable[..., FrozenModel]:
    """Return the class of a frozen model: a teacher that stores `targets` if the recipe learns whole distributions."""
    recipe = builder.recipe
    if recipe.loop != "distillation" or recipe.has_advantages:
        return FrozenModel
    return partial(Teacher, num_common_tokens=num_common_tokens(builder, folder), stored=targets)


def num_common_tokens(builder: ModelBuilder, teacher: str) -> int:
    """Return the number of tokens in both vocabularies, policy's and teacher's. Further rows are padding."""
    return min(builder.shape_of(folder).vocab_size for folder in (teacher, builder.recipe.model.folder))
