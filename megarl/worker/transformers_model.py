"""The policy's folder as a transformers model, for a comparison at a run's start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megarl.training.transformers_logprobs import transformers_logprobs
from megarl.worker.rank_state import RankState
from megarl.worker.trainer_part import TrainerPart


class TransformersModel(TrainerPart):
    """Part with transformers' own model of the policy's folder, on the first rank only."""

    def __init__(self, state: RankState) -> None:
        self._state = state

    def logprobs(self, sequences: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float32]] | str | None:
        """Compute log-probs of token ids with transformers, in nats.

        Returns the log-probs [tokens] of each sequence, or the reason why there are none; None on other ranks.
        """
        if self._state.rank:
            return None
        recipe, dtype = self._state.recipe, self._state.policy.dtype
        return transformers_logprobs(recipe.model.folder, recipe.override_of(recipe.model.folder), sequences, dtype)
