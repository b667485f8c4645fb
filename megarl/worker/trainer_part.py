"""Interface of an optional feature of a training rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.training.state.checkpoint import Model
from megarl.training.training_engine import TrainingEngine


class TrainerPart:
    """An optional feature of a training rank, such as frozen models. By default each method does nothing.

    The driver calls further methods by the part's name in `trainer_parts`, for example `rollbacks.roll_back`.
    """

    def build_models(self) -> None:
        """Build the feature's models, before the policy. A collective over the trainer's ranks."""

    def extend_policy(self, policy: TrainingEngine) -> None:
        """Add feeds to the built policy, or build models on it. A collective over the trainer's ranks."""

    def built_models(self) -> Mapping[str, Any]:
        """Return the feature's models, by the name under which the driver calls them."""
        return {}

    def finish_build(self) -> None:
        """Prepare for the first step, after all models are built. A collective over the trainer's ranks."""

    def notices(self) -> Sequence[str]:
        """Return sentences about this feature. The user sees them at the start of the run."""
        return ()

    def saved_models(self) -> Mapping[str, Model]:
        """Return this feature's models for checkpoints, by the beginning of their tensor names."""
        return {}

    def save(self, folder: Path) -> None:
        """Write further files into a checkpoint's folder. Raises DiskFullError."""

    def close(self) -> None:
        """Leave process groups, while the torch world still exists."""
