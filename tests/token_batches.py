"""Packed rows of sequences, and what a model returns of them, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megarl.config import AlgorithmConfig
from megarl.config.parallel import ParallelConfig
from megarl.data.packing import pack
from megarl.data.token_batch import TokenBatch
from megarl.rollout.step.rl_batch import assign_token_weights
from megarl.types import TrainingSequence


def row_batches(sequences: Sequence[TrainingSequence], rows: Sequence[Sequence[int]]) -> list[TokenBatch]:
    """A batch for each row of sequences' numbers."""
    return [TokenBatch.from_sequences([sequences[number] for number in row]) for row in rows]


def own_rows(
    lengths: Sequence[int] | NDArray[np.int64], parallel: ParallelConfig, max_tokens: int, *, together: int = 1
) -> list[list[int]]:
    """The numbers of the sequences in each of this rank's rows, packed as in a run."""
    from torch import distributed as dist

    rows = pack(
        lengths,
        max_tokens=max_tokens,
        num_ranks=parallel.dp,
        multiple=parallel.sequence_multiple * parallel.tp,
        rows_multiple=parallel.rows_multiple,
        together=together,
    )
    return rows[parallel.coordinates(dist.get_rank()).dp]


def weighed(
    sequences: Sequence[TrainingSequence], algorithm: AlgorithmConfig, constant_length: int | None = None
) -> list[TrainingSequence]:
    """The sequences with the token weights that they have in one minibatch."""
    batch = TokenBatch.from_sequences(sequences)
    assign_token_weights(batch, algorithm, constant_length)
    parts = np.split(batch.per_token["token_weights"], batch.cu_seqlens[1:-1])
    return [replace(sequence, token_weights=part) for sequence, part in zip(sequences, parts, strict=True)]


def by_sequence(
    sequences: Sequence[TrainingSequence], rows: Sequence[Sequence[int]], found: Sequence[NDArray[np.float32]] | None
) -> dict[int, NDArray[np.float32]]:
    """Each sequence's values [tokens], by its number; nothing on a rank that reports nothing."""
    values: dict[int, NDArray[np.float32]] = {}
    for row, row_values in zip(rows, found or (), strict=False):
        ends = np.cumsum([len(sequences[number]) for number in row])
        values |= dict(zip(row, np.split(row_values, ends[:-1]), strict=True))
    return values
