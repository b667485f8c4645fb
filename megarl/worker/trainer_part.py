"""The interface of an optional feature of a training rank, such as frozen models or copies of its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.training.state.checkpoint import Model
from megarl.training.training_engine import TrainingEngine


class TrainerPart:
    """An optional feature of a training rank. A method does nothing unless a part overrides it.

    The driver calls further methods of a part by its name, such as `rollbacks.roll_back`. The names stand in
    `trainer_parts`.
    """

    def build_models(self) -> None:
        """Build the feature's models, before the policy. A collective over the trainer's ranks."""

    def extend_policy(self, policy: TrainingEngine) -> None:
        """Change the policy after it is built. A collective over the trainer's ranks."""

    def built_models(self) -> Mapping[str, Any]:
        """Return the feature's models, by the name under which the driver calls them."""
        return {}

    def finish_build(self) -> None:
        """Prepare for the first step, after all models are built. A collective over the trainer's ranks."""

    def notices(self) -> Sequence[str]:
        """Return start-up notices for the user."""
        return ()

    def saved_models(self) -> Mapping[str, Model]:
        """Return the models of this feature for checkpoints. The keys begin the names of their tensors."""
        return {}

    def save(self, folder: Path) -> None:
        """Write further files into a checkpoint's folder. Raises DiskFullError."""

    def close(self) -> None:
        """Leave process groups, while the torch world still exists."""
