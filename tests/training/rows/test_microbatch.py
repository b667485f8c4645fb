"""Packed rows: the values of token t + 1 stand at position t, and come back to where they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megarl.data.token_batch import TokenBatch
from megarl.training.rows.choice import make_microbatch
from megarl.training.rows.microbatch import Microbatch, pad_lengths, tokens_ahead, unpack_row
from megarl.types import RetainedSets, TrainingSequence

CPU = torch.device("cpu")


def sequence(first: int, length: int, prompt: int) -> TrainingSequence:
    """Token ids count up from `first`; the values of a token are its id in another unit."""
    ids = np.arange(first, first + length)
    return TrainingSequence(
        token_ids=ids,
        loss_mask=np.arange(length) >= prompt,
        token_weights=(ids / 100).astype(np.float32),
        rollout_logprobs=(-ids).astype(np.float32),
    )


def pack_row_of(sequences: list[TrainingSequence], **settings: Any) -> Microbatch:
    return make_microbatch(TokenBatch.from_sequences(sequences), qkv_format="packed", device=CPU, **settings)


def test_make_microbatch() -> None:
    batch = pack_row_of([sequence(10, 3, 1), sequence(20, 4, 2)], multiple=4)
    assert batch.input_ids.tolist() == [[10, 11, 12, 20, 21, 22, 23, 0]]
    assert batch.labels.tolist() == [[11, 12, 0, 21, 22, 23, 0, 0]]
    assert batch.mask.tolist() == [True, True, False, False, True, True, False, False]
    assert batch.row.cu_seqlens_q.tolist() == [0, 3, 8]
    assert batch.row.positions is not None and batch.row.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.per_token.keys() == {"token_weights", "rollout_logprobs"}
    assert batch.per_token["rollout_logprobs"].tolist() == [-11, -12, 0, -21, -22, -23, 0, 0]
    torch.testing.assert_close(
        batch.per_token["token_weights"], torch.tensor([0.11, 0.12, 0, 0.21, 0.22, 0.23, 0, 0]), rtol=1e-6, atol=0
    )


def test_a_row_that_needs_no_padding() -> None:
    batch = pack_row_of([sequence(5, 1, 1), sequence(7, 3, 1)], multiple=2)
    assert batch.input_ids.tolist() == [[5, 7, 8, 9]]
    assert batch.labels.tolist() == [[0, 8, 9, 0]]
    assert batch.mask.tolist() == [False, True, True, False]


def test_unpack_row_undoes_the_shift() -> None:
    values = np.array([-11, -12, 99, -21, -22, -23, 99, 99], np.float32)
    unpacked = unpack_row(values, np.array([3, 4]), np.array([3, 5]))
    assert unpacked.tolist() == [0, -11, -12, 0, -21, -22, -23] and unpacked.dtype == np.float32
    assert unpack_row(np.array([7], np.float32), np.array([1]), np.array([1])).tolist() == [0.0]


def test_packing_and_unpacking_is_the_identity() -> None:
    sequences = [sequence(100, 5, 1), sequence(200, 1, 1), sequence(300, 7, 1)]
    batch = pack_row_of(sequences, multiple=8)
    unpacked = unpack_row(batch.per_token["rollout_logprobs"].numpy(), np.array([5, 1, 7]), np.array([5, 1, 10]))
    for got, had in zip(np.split(unpacked, [5, 6]), sequences, strict=True):
        assert had.rollout_logprobs is not None
        assert got.tolist() == [0.0, *had.rollout_logprobs[1:].tolist()]


def test_context_ranks_hold_a_front_and_a_back_chunk_of_every_sequence() -> None:
    sequences = [sequence(10, 7, 1), sequence(30, 3, 1)]
    ranks = [pack_row_of(sequences, multiple=1, cp=2, cp_rank=rank) for rank in (0, 1)]
    assert ranks[0].input_ids.tolist() == [[10, 11, 16, 0, 30, 0]]
    assert ranks[1].input_ids.tolist() == [[12, 13, 14, 15, 31, 32]]
    assert ranks[0].labels.tolist() == [[11, 12, 0, 0, 31, 0]]
    assert ranks[1].labels.tolist() == [[13, 14, 15, 16, 32, 0]]
    assert ranks[0].row.positions is not None and ranks[0].row.positions.tolist() == [0, 1, 6, 7, 0, 3]
    assert [rank.row.cu_seqlens_q.tolist() for rank in ranks] == [[0, 8, 12]] * 2
    assert sum(int(rank.mask.sum()) for rank in ranks) == 6 + 2


def test_each_position_has_the_set_of_the_token_that_it_predicts() -> None:
    """Token t has a set of t tokens, 100 t and on; token 0, and all of the second sequence, none."""
    counts = np.arange(7, dtype=np.int32)
    token_ids = np.concatenate([100 * t + np.arange(t) for t in counts]).astype(np.int32)
    sequences = [replace(sequence(10, 7, 1), retained_sets=RetainedSets(counts, token_ids)), sequence(30, 3, 1)]
    sets = []
    for settings in ({}, {"cp": 2, "cp_rank": 0}, {"cp": 2, "cp_rank": 1}):
        support = pack_row_of(sequences, multiple=1, **settings).support
        assert support is not None
        sets.append([ids.tolist() for ids in support.token_ids.split(support.counts.tolist())])
    expected = [[100 * t + n for n in range(t)] for t in range(1, 7)] + [[]] * 4
    assert sets[0] == expected
    a, b, c, d, e, f = expected[:6]
    assert sets[1] == [a, b, [], [], [], []] and sets[2] == [c, d, e, f, [], []]
    assert pack_row_of(sequences[1:], multiple=1).support is None


def test_padding_makes_every_ranks_tokens_divide() -> None:
    assert pad_lengths([7, 3], cp=1, multiple=4).tolist() == [7, 5]
    assert pad_lengths([7, 3], cp=2, multiple=1).tolist() == [8, 4]
    assert pad_lengths([7, 3], cp=2, multiple=4).tolist() == [8, 8]
    assert pad_lengths([5], cp=2, multiple=3).tolist() == [12]


def test_tokens_ahead_are_those_of_the_same_sequence() -> None:
    lengths, padded = np.array([4, 1, 3]), np.array([4, 2, 6])
    values = np.array([11, 12, 13, 14, 21, 31, 32, 33])
    assert tokens_ahead(values, lengths, padded, distance=2).tolist() == [13, 14, 0, 0, 0, 0, 33, 0, 0, 0, 0, 0]
    assert tokens_ahead(values, lengths, padded, distance=0).tolist() == [11, 12, 13, 14, 21, 0, 31, 32, 33, 0, 0, 0]
    assert not tokens_ahead(values > 0, lengths, padded, distance=4).any()
