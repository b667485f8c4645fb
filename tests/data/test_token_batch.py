"""Flat batches: sequences and samples chosen by number, put together again."""

from __future__ import annotations

import numpy as np

from megarl.data.token_batch import TokenBatch, concatenate, ranges
from megarl.types import TrainingSequence


def batch() -> TokenBatch:
    """Sequences of 2, 3, 1 and 2 tokens 10 11, 20 21 22, 30, 40 41; the middle two are segments of one sample."""
    sequences = [
        TrainingSequence(
            token_ids=np.arange(10 * number, 10 * number + length),
            loss_mask=np.arange(length) > 0,
            advantages=np.full(length, number / 2, np.float32),
        )
        for number, length in ((1, 2), (2, 3), (3, 1), (4, 2))
    ]
    made = TokenBatch.from_sequences(sequences)
    assert made.samples.tolist() == [0, 1, 2, 3] and made.cu_samples.tolist() == made.cu_seqlens.tolist()
    made.samples = np.array([0, 1, 1, 2])
    return made


def test_sequences_lie_one_after_the_other() -> None:
    made = batch()
    assert made.token_ids.tolist() == [10, 11, 20, 21, 22, 30, 40, 41]
    assert made.loss_mask.tolist() == [False, True, False, True, True, False, False, True]
    assert made.cu_seqlens.tolist() == [0, 2, 5, 6, 8] and made.lengths.tolist() == [2, 3, 1, 2]
    assert made.cu_samples.tolist() == [0, 2, 6, 8]
    assert made.per_token.keys() == {"advantages"}
    assert made.per_token["advantages"].tolist() == [0.5, 0.5, 1, 1, 1, 1.5, 2, 2]


def test_chosen_sequences_bring_their_tokens_along() -> None:
    chosen = batch().select([3, 1])
    assert chosen.token_ids.tolist() == [40, 41, 20, 21, 22] and chosen.cu_seqlens.tolist() == [0, 2, 5]
    assert chosen.per_token["advantages"].tolist() == [2, 2, 1, 1, 1] and chosen.samples.tolist() == [2, 1]
    assert batch().select([]).num_sequences == 0


def test_chosen_samples_bring_all_their_segments_along() -> None:
    chosen = batch().select_samples([2, 1])
    assert chosen.token_ids.tolist() == [40, 41, 20, 21, 22, 30]
    assert chosen.samples.tolist() == [0, 1, 1] and chosen.cu_samples.tolist() == [0, 2, 6]


def test_batches_are_put_together() -> None:
    both = concatenate([batch().select_samples([1]), batch()])
    assert both.token_ids.tolist() == [20, 21, 22, 30, 10, 11, 20, 21, 22, 30, 40, 41]
    assert both.cu_seqlens.tolist() == [0, 3, 4, 6, 9, 10, 12] and both.samples.tolist() == [0, 0, 1, 2, 2, 3]
    assert both.cu_samples.tolist() == [0, 4, 6, 10, 12]
    assert both.per_token["advantages"].tolist() == [1, 1, 1, 1.5, 0.5, 0.5, 1, 1, 1, 1.5, 2, 2]


def test_other_arrays_take_the_place_of_all() -> None:
    other = batch().with_arrays({"values": np.arange(8, dtype=np.float32)})
    assert other.per_token.keys() == {"values"} and other.cu_samples.tolist() == [0, 2, 6, 8]


def test_ranges() -> None:
    assert ranges(np.array([5, 0, 7]), np.array([2, 0, 3])).tolist() == [5, 6, 7, 8, 9]
