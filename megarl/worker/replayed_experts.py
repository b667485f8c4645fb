"""The routed experts (MoE) of a training rank: stored while it samples, replayed while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megarl.config import Recipe
from megarl.training.routed_experts import StoredExperts, make_route_feed
from megarl.training.training_engine import TrainingEngine
from megarl.types import ExpertsHandle
from megarl.worker.trainer_part import TrainerPart


class ReplayedExperts(TrainerPart):
    """Part with the experts of completions that this rank sampled, and their replay (`trainer.router_replay`)."""

    def __init__(self, recipe: Recipe, rank: int, world_size: int) -> None:
        self._recipe = recipe
        self.stored = StoredExperts(rank, world_size)

    def extend_policy(self, policy: TrainingEngine) -> None:
        if self._recipe.trainer.router_replay:
            policy.feeds.append(make_route_feed(self.stored, policy))

    def save(self, folder: Path) -> None:
        self.stored.save(folder)

    def retain(self, handles: Sequence[ExpertsHandle]) -> int:
        """Delete all stored experts except these handles'. Returns the bytes stored before."""
        return self.stored.retain(handles)

    def load(self, folder: Path, handles: Sequence[ExpertsHandle]) -> None:
        self.stored.load(folder, handles)
