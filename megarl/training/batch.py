"""Packed rows: the tensors of one microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megarl.models.attention import PackedRow
from megarl.types import TrainingSequence


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


PER_TOKEN = ("token_weights", "advantages", "old_logprobs", "rollout_logprobs", "reference_logprobs")
"""The optional arrays of a TrainingSequence."""


def pack_row(
    sequences: Sequence[TrainingSequence], *, multiple: int, qkv_format: str, device: torch.device
) -> Microbatch:
    """The row of these sequences, the last one padded so that the row's tokens are a multiple of `multiple`."""
    lengths = [len(sequence) for sequence in sequences]
    padding = -sum(lengths) % multiple
    row = PackedRow.from_lengths([*lengths[:-1], lengths[-1] + padding], device, qkv_format)

    def join(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate([*arrays, np.zeros(padding, arrays[0].dtype)])).to(device)

    def next_token(arrays: Sequence[np.ndarray]) -> Tensor:
        return join([np.append(array[1:], np.zeros(1, array.dtype)) for array in arrays])

    known: dict[str, Tensor] = {}
    for name in PER_TOKEN:
        arrays = [getattr(sequence, name) for sequence in sequences]
        if arrays[0] is not None:
            known[name] = next_token(arrays)
    return Microbatch(
        input_ids=join([sequence.token_ids for sequence in sequences])[None],
        labels=next_token([sequence.token_ids for sequence in sequences])[None],
        row=row,
        mask=next_token([sequence.loss_mask for sequence in sequences]),
        known=known,
    )


def unpack_row(values: Tensor, lengths: Sequence[int]) -> list[np.ndarray]:
    """Per-token values of a row back to one float32 array per sequence; a sequence's first entry is zero."""
    flat = values.float().cpu().numpy()
    ends = np.cumsum(lengths)
    return [
        np.concatenate([np.zeros(1, np.float32), flat[end - length : end - 1]])
        for end, length in zip(ends, lengths, strict=True)
    ]
