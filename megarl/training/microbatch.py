"""Microbatches: packed rows of sequences, as tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from megarl.data.token_batch import TokenBatch, borders, ranges, select_retained
from megarl.models.attention import PackedRow
from megarl.models.expert_balance import RowTokens
from megarl.models.logprobs import Support


class MtpTargets(NamedTuple):
    """Targets of the MTP layers: at position t, values of the sequence's token t + 2. All are [tokens].

    Positions whose token t + 2 is not trained have mask False and weight zero.
    """

    labels: Tensor
    mask: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A microbatch: one packed row. All tensors are [tokens] except `input_ids` and `labels`, [1, tokens].

    Position t of a sequence predicts its token t + 1, so values of this token are stored at t. The last position of a
    sequence and the padding predict nothing: their mask is False and their weight zero.
    """

    input_ids: Tensor
    labels: Tensor
    row: PackedRow
    mask: Tensor
    per_token: dict[str, Tensor]
    """Values of each token by name: `token_weights`, `advantages`, `old_logprobs` and others."""
    lengths: NDArray[np.int64]
    padded: NDArray[np.int64]
    """[sequences]: number of tokens of each sequence of the whole row with padding; `lengths` is the number without."""
    samples: NDArray[np.int64]
    """[sequences]: for each sequence, the number of its sample, ascending. A sample may have several sequences
    (segments)."""
    support: Support | None = None
    """For each token, the set of tokens over which its log-prob is renormalised. None: the whole vocabulary
    everywhere.
    """
    temperature: float | Tensor = 1.0
    """Sampling temperature applied to the log-probs: one for all tokens, or [tokens]."""
    mtp: MtpTargets | None = None
    """Targets of the MTP layers, if these are trained."""


def pack_row(
    batch: TokenBatch,
    *,
    multiple: int,
    qkv_format: str,
    device: torch.device,
    cp: int = 1,
    cp_rank: int = 0,
    trains_mtp: bool = False,
) -> Microbatch:
    """Return the row of a batch's sequences, or a context-parallel rank's part of it.

    `trains_mtp` adds the targets of MTP layers.
    With cp > 1 each sequence is padded to a multiple of 2 * cp. The last one is padded further, so the tokens of
    the row are a multiple of cp * `multiple`.
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

    mtp = None
    if trains_mtp:
        # Neither of a sequence's first two tokens is the second one after a position.
        beyond = predicted & np.roll(predicted, 1)
        weighed = (batch.token_ids, batch.loss_mask, batch.per_token["token_weights"])
        mtp = MtpTargets(*(own_part(values[beyond], places[beyond] - 2) for values in weighed))
    support = None
    if batch.retained_sets is not None:
        # For each position: the index of its predicted token, or -1 if it predicts none.
        token = np.full(padded.sum(), -1, np.int64)
        token[places[predicted] - 1] = np.flatnonzero(predicted)
        kept = select_retained(batch.retained_sets, token[local])
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
        mtp=mtp,
    )


def row_tokens(batch: Microbatch, parts: int = 1, part: int = 0) -> RowTokens:
    """Return part `part` of `parts` of this context-parallel rank's tokens of a row, as sequence parallelism splits
    them.
    """
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
    """Return the temperature shared by all sequences of a row, else float32 [local positions]."""
    if temperatures is None:
        return 1.0
    # A number needs no tensor, and dividing by it is cheaper than by one value per token.
    if (temperatures == temperatures[0]).all():
        return float(temperatures[0])
    return torch.from_numpy(np.repeat(temperatures, padded)[local].astype(np.float32)).to(device)


def places_in_row(lengths: NDArray[np.int64], padded: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the index of each token of the sequences in the padded row: [tokens]."""
    return ranges(padded.cumsum() - padded, lengths)


def is_predicted(cu_seqlens: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return bool [tokens]: False on the first token of each sequence, because nothing predicts it."""
    predicted = np.ones(cu_seqlens[-1], np.bool_)
    predicted[cu_seqlens[:-1]] = False
    return predicted


def padded_lengths(lengths: Sequence[int] | NDArray[np.int64], *, cp: int, multiple: int) -> NDArray[np.int64]:
    """Return the lengths of a row's sequences with padding.

    With cp > 1 each length is a multiple of 2 * cp. The last one makes the row a multiple of cp * `multiple`.
    """
    # Zigzag context parallelism cuts each sequence into 2 * cp chunks: rank r gets chunks r and 2 * cp - 1 - r.
    each = 2 * cp if cp > 1 else 1
    padded = -(-np.asarray(lengths, np.int64) // each) * each
    # Padding only the last sequence extends its chunks by the same length on every rank. All ranks' tokens then divide.
    whole = math.lcm(each, cp * multiple)
    padded[-1] += -padded.sum() % whole
    return padded


def unpack_row(values: Tensor, lengths: NDArray[np.int64], padded: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return per-token values of a padded row in the batch's order: float32 [tokens], zero on first tokens."""
    row_values = values.float().cpu().numpy()
    predicted = is_predicted(borders(lengths))
    unpacked = np.zeros(len(predicted), np.float32)
    unpacked[predicted] = row_values[places_in_row(lengths, padded)[predicted] - 1]
    return unpacked


def whole_row(values: Tensor, row: PackedRow) -> Tensor:
    """Gather the whole row's values on every context-parallel rank, from `values` [tokens, ...] of each rank's part."""
    group: Any = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values
    assert row.local is not None
    # Parts arrive in rank order. Their places in the row are gathered as well, because zigzag parts are not contiguous.
    places, parts = (x.new_empty(group.size() * len(x), *x.shape[1:]) for x in (row.local, values))
    torch.distributed.all_gather_into_tensor(places, row.local, group=group)
    torch.distributed.all_gather_into_tensor(parts, values.contiguous(), group=group)
    return torch.empty_like(parts).index_copy_(0, places, parts)
