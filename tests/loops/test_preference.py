"""The validation of preferences: what an answer is worth."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.algorithms.preference_losses import dpo
from megarl.data.token_batch import TokenBatch
from megarl.loops.preference import answer_scores
from megarl.types import TrainingSequence


@pytest.mark.parametrize("by_length", [False, True])
def test_a_pair_is_won_in_validation_where_it_is_in_training(by_length: bool) -> None:
    """Log-ratios 4 * 0.5 against 1 * 1: the sum is the first answer's, the mean the second's."""
    batch = TokenBatch.from_sequences(
        [
            TrainingSequence(
                np.arange(length + 1), np.arange(length + 1) > 0, reference_logprobs=np.zeros(length + 1, np.float32)
            )
            for length in (4, 1)
        ]
    )
    logprobs = np.array([9, 0.5, 0.5, 0.5, 0.5, 9, 1], np.float32)
    found = answer_scores(batch, logprobs, by_length=by_length)
    _, rewards = dpo(
        torch.tensor([[2.0, 1.0]]), torch.zeros(1, 2), torch.tensor([[4.0, 1.0]]),
        beta=1.0, normalize_by_length=by_length,
    )  # fmt: skip
    assert found.tolist() == rewards[0].tolist() == ([0.5, 1.0] if by_length else [2.0, 1.0])
