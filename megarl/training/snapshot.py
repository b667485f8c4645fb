"""A copy of one version of a model's weights, for sending while training continues."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.training.training_engine import TrainingEngine


class Snapshot:
    """Copies of a policy's `weights` with adapters merged in, by the same names. Their memory never moves."""

    def __init__(self, policy: TrainingEngine) -> None:
        self._policy = policy
        self.weights: dict[str, Tensor] = {name: torch.empty_like(weight) for name, weight in policy.weights.items()}
        self.version: int | None = None

    @torch.no_grad()
    def take(self, version: int) -> None:
        """Copy the trainer's current weights and label the copy `version`. Do nothing if this version is already
        copied."""
        if version == self.version:
            return
        self._policy.onload(("parameters",))
        with self._policy.merged():
            for name, weight in self._policy.weights.items():
                self.weights[name].copy_(weight)
        self.version = version
