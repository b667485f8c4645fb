"""Packed rows: the tensors of one microbatch."""

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

from megarl.data.batch import TokenBatch, borders, ranges, select_sets
from megarl.models.attention import PackedRow
from megarl.models.balance import RowTokens
from megarl.models.logprobs import Support


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One packed row. All tensors are [tokens] but `input_ids` and `labels`, [1, tokens].

    Position t of a sequence predicts its token t + 1, so the values that belong to that token stand at t. The last
    position of a sequence and the padding predict nothing: their mask is False and their weight zero.
    """

    input_ids: Tensor
    labels: Tensor
    row: PackedRow
    mask: Tensor
    per_token: dict[str, Tensor]
    """`token_weights`, `advantages`, `old_logprobs`, ... : what the sequences carried."""
    lengths: NDArray[np.int64]
    padded: NDArray[np.int64]
    """[sequences]: tokens of each sequence of the whole row, and what they take in it."""
    samples: NDArray[np.int64]
    """[sequences]: the sample that each is a segment of, numbers that do not fall."""
    support: Support | None = None
    """The sets of tokens that the log-probs are renormalised over; None: all over the whole vocabulary."""
    temperature: float | Tensor = 1.0
    """The temperature that the log-probs are taken at: one for all, or [tokens]."""


def pack_row(
    batch: TokenBatch,
    *,
    multiple: int,
    qkv_format: str,
    device: torch.device,
    cp: int = 1,
    cp_rank: int = 0,
) -> Microbatch:
    """The row of a batch's sequences, or a context-parallel rank's part of it.

    With cp > 1 each sequence is padded to a multiple of 2 * cp; the last one, so that the tokens of the row are a
    multiple of cp * `multiple`.
    """
    lengths = batch.lengths
    padded = padded_lengths(lengths, cp=cp, multiple=multiple)
    row = PackedRow.from_lengths(padded.tolist(), device, qkv_format, cp=cp, cp_rank=cp_rank)
    assert row.local is not None
    local = row.local.cpu().numpy()
    places, predicted = places_in_row(lengths, padded), is_predicted(batch.cu_seqlens)

    def own_part(values: np.ndarray, at: np.ndarray) -> Tensor:
        whole = np.zeros((padded.sum(), *values.shape[1:]), values.dtype)
        whole[at] = values
        return torch.from_numpy(whole[local]).to(device)

    def own_tokens(values: np.ndarray) -> Tensor:
        return own_part(values, places)

    def own_predictions(values: np.ndarray) -> Tensor:
        return own_part(values[predicted], places[predicted] - 1)

    support = None
    if batch.kept_sets is not None:
        # At each position the number of the token that it predicts; -1 where it predicts none.
        token = np.full(padded.sum(), -1, np.int64)
        token[places[predicted] - 1] = np.flatnonzero(predicted)
        kept = select_sets(batch.kept_sets, token[local])
        support = Support(torch.from_numpy(kept.token_ids).to(device), torch.from_numpy(kept.counts).to(device))
    return Microbatch(
        lengths=lengths,
        padded=padded,
        samples=batch.samples,
        input_ids=own_tokens(batch.token_ids)[None],
        labels=own_predictions(batch.token_ids)[None],
        row=row,
        mask=own_predictions(batch.loss_mask),
        per_token={name: own_predictions(values) for name, values in batch.per_token.items()},
        support=support,
        temperature=_temperature(batch.temperatures, padded, local, device),
    )


def row_tokens(batch: Microbatch, parts: int = 1, part: int = 0) -> RowTokens:
    """Part `part` of `parts` of this context-parallel rank's tokens of a row, as sequence parallelism splits them."""
    assert batch.row.local is not None
    local = np.split(batch.row.local.cpu().numpy(), parts)[part]
    starts = batch.padded.cumsum() - batch.padded
    sequences = np.repeat(np.arange(len(batch.padded)), batch.padded)[local]
    is_real = local - starts[sequences] < batch.lengths[sequences]
    device = batch.row.local.device
    return RowTokens(
        torch.from_numpy(sequences).to(device),
        torch.from_numpy(is_real).to(device),
        torch.from_numpy(batch.lengths.astype(np.float32)).to(device),
    )


def _temperature(
    temperatures: NDArray[np.float64] | None, padded: NDArray[np.int64], local: NDArray[np.int64], device: torch.device
) -> float | Tensor:
    """The temperature at all positions, where the row's sequences have the same; else float32 [local positions]."""
    if temperatures is None:
        return 1.0
    if (temperatures == temperatures[0]).all():
        return float(temperatures[0])
    return torch.from_numpy(np.repeat(temperatures, padded)[local].astype(np.float32)).to(device)


def places_in_row(lengths: NDArray[np.int64], padded: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each token of the sequences stands in the padded row: [tokens]."""
    return ranges(padded.cumsum() - padded, lengths)


def is_predicted(cu_seqlens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[tokens]: False on the first token of each sequence, which nothing predicts."""
    predicted = np.ones(cu_seqlens[-1], np.bool_)
    predicted[cu_seqlens[:-1]] = False
    return predicted


def padded_lengths(lengths: Sequence[int] | NDArray[np.int64], *, cp: int, multiple: int) -> NDArray[np.int64]:
    """The tokens that the sequences of a row take in it; see `pack_row`."""
    each = 2 * cp if cp > 1 else 1
    padded = -(-np.asarray(lengths, np.int64) // each) * each
    # A chunk of the last sequence grows on every rank alike, by as much as makes the ranks' tokens divide.
    whole = math.lcm(each, cp * multiple)
    padded[-1] += -padded.sum() % whole
    return padded


def unpack_row(values: Tensor, lengths: NDArray[np.int64], padded: NDArray[np.int64]) -> NDArray[np.float32]:
    """Per-token values of a whole padded row back in a batch's order: float32 [tokens], zero on first tokens."""
    row_values = values.float().cpu().numpy()
    predicted = is_predicted(borders(lengths))
    unpacked = np.zeros(len(predicted), np.float32)
    unpacked[predicted] = row_values[places_in_row(lengths, padded)[predicted] - 1]
    return unpacked


def whole_row(values: Tensor, row: PackedRow) -> Tensor:
    """Values [tokens, ...] of a rank's part of a row, on every context-parallel rank as values of the whole row."""
    group: Any = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values
    assert row.local is not None
    places, parts = (x.new_empty(group.size() * len(x), *x.shape[1:]) for x in (row.local, values))
    torch.distributed.all_gather_into_tensor(places, row.local, group=group)
    torch.distributed.all_gather_into_tensor(parts, values.contiguous(), group=group)
    return torch.empty_like(parts).index_copy_(0, places, parts)
