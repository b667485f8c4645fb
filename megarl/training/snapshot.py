"""A copy of a model's weights as of some version, to be sent while the model goes on learning."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.training.engine import TrainingEngine


class Snapshot:
    """Copies of a policy's `weights`, adapters merged in, by the same names; their memory stays where it is."""

    def __init__(self, policy: TrainingEngine) -> None:
        self._policy = policy
        self.weights: dict[str, Tensor] = {name: torch.empty_like(weight) for name, weight in policy.weights.items()}
        self.version: int | None = None

    @torch.no_grad()
    def take(self, version: int) -> None:
        """Copy the weights of now as this version's, unless the copies are that version's already."""
        if version == self.version:
            return
        self._policy.onload(("parameters",))
        with self._policy.merged():
            for name, weight in self._policy.weights.items():
                self.weights[name].copy_(weight)
        self.version = version
