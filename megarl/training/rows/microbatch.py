"""Microbatches: packed rows of sequences, as tensors, and index functions of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from megarl.data.token_batch import borders, ranges
from megarl.models.attention import PackedRow
from megarl.models.experts.balance import RowTokens
from megarl.models.logprobs import Support
from megarl.rounding import round_up
from megarl.types import RetainedSets


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One packed row. All tensors are [tokens] except `input_ids` and `labels`, [1, tokens].

    Position t of a sequence predicts its token t + 1, so this token's values are stored at t. The last position of a
    sequence and the padding predict nothing: their mask is False and their weight zero.
    """

    input_ids: Tensor
    labels: Tensor
    row: PackedRow
    mask: Tensor
    per_token: dict[str, Tensor]
    """Values of each token by name: `token_weights`, `advantages`, `old_logprobs` and others."""
    lengths: NDArray[np.int64]
    padded_lengths: NDArray[np.int64]
    """[sequences]: padded length of each sequence of the whole row; `lengths` is without padding."""
    samples: NDArray[np.int64]
    """[sequences]: number of each sequence's sample, ascending. A sample may have several sequences (segments)."""
    support: Support | None = None
    """The tokens that sampling could choose, over which each log-prob is normalised. None: the whole vocabulary."""
    temperature: float | Tensor = 1.0
    """Sampling temperature of the log-probs: one number for all tokens, or [tokens]."""

    def make_row_tokens(self, num_parts: int = 1, part: int = 0) -> RowTokens:
        """Return the sequence of each token on this rank, for routers. They also need the lengths of all sequences.

        With sequence parallelism, the rank's tokens are cut into `num_parts`, and this is number `part`.
        """
        assert self.row.host_local is not None
        row_indices = np.split(self.row.host_local, num_parts)[part]
        starts = self.padded_lengths.cumsum() - self.padded_lengths
        sequences = np.repeat(np.arange(len(self.padded_lengths)), self.padded_lengths)[row_indices]
        is_not_padding = row_indices - starts[sequences] < self.lengths[sequences]
        device = self.mask.device
        return RowTokens(
            sequences=torch.from_numpy(sequences).to(device),
            weights=torch.from_numpy(is_not_padding).to(device),
            lengths=torch.from_numpy(self.lengths.astype(np.float32)).to(device),
        )

    def represented_tokens(self) -> NDArray[np.int64]:
        """Return the index in the padded row of each token in this rank's layers, padding included: [own tokens]."""
        assert self.row.host_local is not None
        return self.row.host_local


def indices_in_row(lengths: NDArray[np.int64], padded_lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index in the padded row of each token: [tokens]. `lengths` and `padded_lengths` are [sequences]."""
    return ranges(padded_lengths.cumsum() - padded_lengths, lengths)


def select_local(
    values: np.ndarray,
    *,
    indices: NDArray[np.int64],
    padded_lengths: NDArray[np.int64],
    local: NDArray[np.int64],
    device: torch.device,
) -> Tensor:
    """Put values into a row that is zero elsewhere, and return this rank's part of the row.

    `values` [values, ...] go to the positions `indices` [values]. `padded_lengths` is [sequences]. `local`
    [tokens]: positions on this rank.
    """
    row = np.zeros((padded_lengths.sum(), *values.shape[1:]), values.dtype)
    row[indices] = values
    return torch.from_numpy(row[local]).to(device)


def tokens_ahead(
    values: np.ndarray, lengths: NDArray[np.int64], padded_lengths: NDArray[np.int64], *, distance: int
) -> np.ndarray:
    """Shift values within each sequence: in the returned padded row [positions], each token has the value of the token
    that is `distance` tokens later.

    `values` [tokens]: a value per token. Zero (False): the sequence has no token at this distance.
    """
    row = np.zeros(padded_lengths.sum(), values.dtype)
    # No token of another sequence is ahead: the first `distance` tokens of a sequence are ahead of none.
    is_ahead = ranges(np.zeros_like(lengths), lengths) >= distance
    row[indices_in_row(lengths, padded_lengths)[is_ahead] - distance] = values[is_ahead]
    return row


def support_on(device: torch.device, retained: RetainedSets) -> Support:
    """Return the sets of tokens that sampling could choose, as tensors on a device."""
    return Support(torch.from_numpy(retained.token_ids).to(device), torch.from_numpy(retained.counts).to(device))


def is_predicted(cu_seqlens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return bool [tokens]: False on the first token of each sequence, because no position predicts it."""
    predicted = np.ones(cu_seqlens[-1], np.bool_)
    predicted[cu_seqlens[:-1]] = False
    return predicted


def pad_lengths(lengths: Sequence[int] | NDArray[np.int64], *, cp: int, multiple: int) -> NDArray[np.int64]:
    """Return the padded lengths [sequences] of a row's sequences.

    With cp > 1, each is a multiple of 2 * cp. The last one's padding makes the row a multiple of cp * `multiple`.
    """
    # Zigzag context parallelism cuts each sequence into 2 * cp chunks: rank r gets chunks r and 2 * cp - 1 - r.
    sequence_multiple = 2 * cp if cp > 1 else 1
    padded_lengths = round_up(np.asarray(lengths, np.int64), multiple=sequence_multiple)
    # Padding only the last sequence extends its chunks by the same length on every rank. All ranks' tokens then divide.
    row_multiple = math.lcm(sequence_multiple, cp * multiple)
    padded_lengths[-1] += -padded_lengths.sum() % row_multiple
    return padded_lengths


def unpack_row(
    values: NDArray[np.float32], lengths: NDArray[np.int64], padded_lengths: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return values of a padded row in the batch's order: float32 [tokens], zero on the first token of a sequence.

    `lengths` and `padded_lengths` [sequences]: their lengths in the batch and in the row.
    """
    predicted = is_predicted(borders(lengths))
    unpacked = np.zeros(len(predicted), np.float32)
    # A token's value is at the position before it, which predicts it.
    unpacked[predicted] = values[indices_in_row(lengths, padded_lengths)[predicted] - 1]
    return unpacked


def whole_row(values: Tensor, row: PackedRow) -> Tensor:
    """Gather the whole row on every context-parallel rank, from each rank's part `values` [tokens, ...]."""
    group: Any = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values
    assert row.gathered_index is not None
    # Pad, because a gather needs equal lengths, and in some kinds of rows the ranks' parts differ.
    padded = torch.cat([values, values.new_zeros(row.longest_part - len(values), *values.shape[1:])])
    parts = padded.new_empty(group.size() * len(padded), *padded.shape[1:])
    torch.distributed.all_gather_into_tensor(parts, padded, group=group)
    return parts.index_select(0, row.gathered_index)
