"""The policy as its own teacher."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
from numpy.typing import NDArray

from megarl.data.token_batch import TokenBatch
from megarl.training.distillation.targets import StoredTargets
from megarl.training.distillation.teacher import store_model_targets
from megarl.training.training_engine import TrainingEngine


class PolicyTeacher:
    """One rank's policy as its own teacher, with its current weights, or with the initial ones if `at_start`.

    It computes without gradients. Its rows have other prompts than the update's rows.
    """

    def __init__(self, policy: TrainingEngine, stored: StoredTargets, *, at_start: bool) -> None:
        self._policy, self._stored, self._at_start = policy, stored, at_start

    def forward(self, rows: Sequence[TokenBatch] | None) -> list[NDArray[np.float32]] | None:
        return self._policy.forward_frozen(rows) if self._at_start else self._policy.forward(rows)

    def store_targets(self, rows: Sequence[TokenBatch] | None) -> int:
        weights_context = self._policy.starting_weights() if self._at_start else nullcontext()
        with weights_context, self._policy.on_device():
            return store_model_targets(self._policy, rows, self._stored)
