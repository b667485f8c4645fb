"""Choice of the optional features of a training rank, and their names for the driver."""

from __future__ import annotations

from megarl.config.parallel import ParallelConfig
from megarl.training.distillation.targets import StoredTargets
from megarl.worker.model_builder import ModelBuilder
from megarl.worker.rank_state import RankState
from megarl.worker.replayed_experts import ReplayedExperts
from megarl.worker.replicated_state import ReplicatedState
from megarl.worker.rollbacks import Rollbacks
from megarl.worker.scoring_models import ScoringModels
from megarl.worker.teachers import Teachers
from megarl.worker.trainer_part import TrainerPart
from megarl.worker.transformers_model import TransformersModel
from megarl.worker.weight_checks import WeightChecks


def build_trainer_parts(
    state: RankState, builder: ModelBuilder, frozen_parallel: ParallelConfig, world_size: int
) -> dict[str, TrainerPart]:
    """Return the parts of a training rank, by the name under which the driver calls their methods.

    They build their models in this order. `frozen_parallel` are the parallel sizes of teachers with their own weights.
    """
    targets = StoredTargets()
    return {
        "scoring_models": ScoringModels(state, builder, targets),
        "teachers": Teachers(state, builder, frozen_parallel, targets),
        "replayed_experts": ReplayedExperts(state.recipe, state.rank, world_size),
        "replicated_state": ReplicatedState(state),
        "weight_checks": WeightChecks(state, builder),
        "transformers_model": TransformersModel(state),
        "rollbacks": Rollbacks(state),
    }
