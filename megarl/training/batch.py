"""Packed rows: the tensors of one microbatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from megarl.models.attention import PackedRow
from megarl.types import PER_TOKEN, TrainingSequence


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One packed row. All tensors are [tokens] but `input_ids` and `labels`, [1, tokens].

    Position t of a sequence predicts its token t + 1, so what is known of that token is found at t. The last
    position of a sequence and the padding predict nothing: their mask is False and their weight zero.
    """

    input_ids: Tensor
    labels: Tensor
    row: PackedRow
    mask: Tensor
    known: dict[str, Tensor]
    """`token_weights`, `advantages`, `old_logprobs`, ... : what the sequences carried."""
    lengths: Sequence[int]
    padded: Sequence[int]
    """Tokens of each sequence of the whole row, and what they take in it."""
    routes: Tensor | None = None
    """[tokens, layers, top_k]: the experts of each token, where the sequences say."""


def pack_row(
    sequences: Sequence[TrainingSequence],
    *,
    multiple: int,
    qkv_format: str,
    device: torch.device,
    cp: int = 1,
    cp_rank: int = 0,
) -> Microbatch:
    """The row of these sequences, or a context-parallel rank's part of it.

    With cp > 1 each sequence is padded to a multiple of 2 * cp; the last one, so that the tokens of the row are a
    multiple of cp * `multiple`.
    """
    lengths = [len(sequence) for sequence in sequences]
    padded = padded_lengths(lengths, cp=cp, multiple=multiple)
    row = PackedRow.from_lengths(padded, device, qkv_format, cp=cp, cp_rank=cp_rank)
    assert row.local is not None
    local = row.local.cpu().numpy()

    def join(arrays: Sequence[np.ndarray]) -> Tensor:
        whole = np.zeros((sum(padded), *arrays[0].shape[1:]), arrays[0].dtype)
        for start, array in zip(np.cumsum([0, *padded]), arrays, strict=False):
            whole[start : start + len(array)] = array
        return torch.from_numpy(whole[local]).to(device)

    def next_token(arrays: Sequence[np.ndarray]) -> Tensor:
        return join([array[1:] for array in arrays])

    known: dict[str, Tensor] = {}
    for name in PER_TOKEN:
        arrays = [getattr(sequence, name) for sequence in sequences]
        if arrays[0] is not None:
            known[name] = next_token(arrays)
    routes = None
    if (first := sequences[0].routed_experts) is not None:
        # Padding goes to as many experts as a token; sequences count from the first of them.
        unused = np.arange(first.shape[-1], dtype=first.dtype)
        routes = join([s.routed_experts - unused for s in sequences]).long() + torch.from_numpy(unused).to(device)  # type: ignore[operator]
    return Microbatch(
        lengths=lengths,
        padded=padded,
        routes=routes,
        input_ids=join([sequence.token_ids for sequence in sequences])[None],
        labels=next_token([sequence.token_ids for sequence in sequences])[None],
        row=row,
        mask=next_token([sequence.loss_mask for sequence in sequences]),
        known=known,
    )


def padded_lengths(lengths: Sequence[int], *, cp: int, multiple: int) -> list[int]:
    """What the sequences of a row take in it; see `pack_row`."""
    each = 2 * cp if cp > 1 else 1
    padded = [-(-length // each) * each for length in lengths]
    # A chunk of the last sequence grows on every rank alike, by as much as makes the ranks' tokens divide.
    whole = math.lcm(each, cp * multiple)
    padded[-1] += -sum(padded) % whole
    return padded


def unpack_row(values: Tensor, lengths: Sequence[int], padded: Sequence[int]) -> list[np.ndarray]:
    """Per-token values of a whole row back to one float32 array per sequence; a sequence's first entry is zero."""
    flat = values.float().cpu().numpy()
    starts = np.cumsum([0, *padded])
    return [
        np.concatenate([np.zeros(1, np.float32), flat[start : start + length - 1]])
        for start, length in zip(starts, lengths, strict=False)
    ]


def whole_row(values: Tensor, row: PackedRow) -> Tensor:
    """Values [tokens] of a rank's part of a row, on every context-parallel rank as values of the whole row."""
    group: Any = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values
    assert row.local is not None
    places, parts = (x.new_empty(group.size() * len(x)) for x in (row.local, values))
    torch.distributed.all_gather_into_tensor(places, row.local, group=group)
    torch.distributed.all_gather_into_tensor(parts, values.contiguous(), group=group)
    return torch.empty_like(parts).index_copy_(0, places, parts)
