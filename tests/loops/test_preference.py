"""Preferences: the value of an answer in validation, and the mismatched answers of KTO."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.algorithms.preference_losses import dpo
from megarl.data.token_batch import TokenBatch
from megarl.loops.preference import answer_scores, mismatch_answers
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


def test_mismatched_answers_are_to_other_prompts() -> None:
    """Answers made from pairs: both answers to a prompt are next to each other."""
    prompts, answers = [[1, 2], [1, 2], [3], [4, 5]], [[11, 12], [13], [14, 15, 16], [17]]
    tokens = [np.array([*prompt, *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
    masks = [np.arange(len(ids)) >= len(prompt) for ids, prompt in zip(tokens, prompts, strict=True)]
    batch = TokenBatch.from_sequences(list(map(TrainingSequence, tokens, masks)))
    mismatched, num_own = mismatch_answers(batch)
    sequences = [ids.tolist() for ids in np.split(mismatched.token_ids, mismatched.cu_seqlens[1:-1])]
    # Each answer is used once, two places before its own. The longest sequence has 4 tokens, so the first is cut.
    assert sequences == [[1, 2, 14, 15], [1, 2, 17], [3, 11, 12], [4, 5, 13]]
    is_answer = [[0, 0, 1, 1], [0, 0, 1], [0, 1, 1], [0, 0, 1]]
    assert mismatched.loss_mask.tolist() == [bool(value) for sequence in is_answer for value in sequence]
    assert num_own == 0
    # With one prompt there is no other answer to choose.
    of_one_prompt, num_own = mismatch_answers(batch.select([0, 1]))
    assert of_one_prompt.token_ids.tolist() == [1, 2, 13, 1, 2, 11, 12]
    assert num_own == 2
