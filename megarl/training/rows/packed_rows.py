"""The plain packed row of a batch: its sequences one after the other, each with its padding."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.data.token_batch import TokenBatch, select_retained
from megarl.models.attention import PackedRow
from megarl.training.rows.microbatch import (
    Microbatch,
    indices_in_row,
    is_predicted,
    pad_lengths,
    select_local,
    support_on,
)


def pack_row(
    batch: TokenBatch,
    *,
    multiple: int,
    qkv_format: str,
    device: torch.device,
    cp: int = 1,
    cp_rank: int = 0,
) -> Microbatch:
    """Return a batch's sequences as one packed row; with context parallelism, this rank's part of it.

    The row's length is a multiple of cp * `multiple` (`pad_lengths`).
    """
    lengths = batch.lengths
    padded_lengths = pad_lengths(lengths, cp=cp, multiple=multiple)
    row = PackedRow.from_lengths(padded_lengths.tolist(), device, qkv_format, cp=cp, cp_rank=cp_rank)
    assert row.host_local is not None
    local_positions = row.host_local
    row_indices, is_predicted_token = indices_in_row(lengths, padded_lengths), is_predicted(batch.cu_seqlens)

    select_row_part = partial(select_local, padded_lengths=padded_lengths, local=local_positions, device=device)

    def select_predictions(values: np.ndarray) -> Tensor:
        """Return values [tokens] of predicted tokens, stored one position earlier, for this rank."""
        return select_row_part(values[is_predicted_token], indices=row_indices[is_predicted_token] - 1)

    # Log-probs are normalised over the tokens that sampling could choose.
    support = None
    if batch.retained_sets is not None:
        # For each position: the index of its predicted token, or -1 if it predicts none.
        predicted_token = np.full(padded_lengths.sum(), -1, np.int64)
        predicted_token[row_indices[is_predicted_token] - 1] = np.flatnonzero(is_predicted_token)
        support = support_on(device, select_retained(batch.retained_sets, predicted_token[local_positions]))
    return Microbatch(
        lengths=lengths,
        padded_lengths=padded_lengths,
        samples=batch.samples,
        input_ids=select_row_part(batch.token_ids, indices=row_indices)[None],
        labels=select_predictions(batch.token_ids if batch.labels is None else batch.labels)[None],
        row=row,
        mask=select_predictions(batch.loss_mask),
        per_token={name: select_predictions(values) for name, values in batch.per_token.items()},
        support=support,
        temperature=_select_temperature(batch.temperatures, padded_lengths, local_positions, device),
    )


def _select_temperature(
    temperatures: NDArray[np.float64] | None,
    padded_lengths: NDArray[np.int64],
    local: NDArray[np.int64],
    device: torch.device,
) -> float | Tensor:
    """Return the temperature of all sequences if it is the same, else float32 [local positions]."""
    if temperatures is None:
        return 1.0
    # Dividing by a number is cheaper than by one value per token.
    if (temperatures == temperatures[0]).all():
        return float(temperatures[0])
    return torch.from_numpy(np.repeat(temperatures, padded_lengths)[local].astype(np.float32)).to(device)
