"""Sums and means over the sequences of a packed row, and broadcasts of sequence values to tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_of_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Return the index of each token's sequence: int [tokens].

    `cu_seqlens` int [sequences + 1] holds cumulative lengths from 0 to `num_tokens`.
    """
    sequences = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device)
    # Passing the output size avoids a synchronisation with the GPU.
    return torch.repeat_interleave(sequences, cu_seqlens.diff(), output_size=num_tokens)


def broadcast_to_tokens(sequence_values: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Copy each sequence's value to all its tokens: [sequences] to [tokens]."""
    return sequence_values[sequence_of_tokens(cu_seqlens, num_tokens)]


def place_at_last_tokens(sequence_values: Tensor, cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    """Put each sequence's value at its last masked token, and zero elsewhere: [sequences] to [tokens]."""
    sequence = sequence_of_tokens(cu_seqlens, len(mask))
    # A token is its sequence's last masked one if it completes the sequence's number of masked tokens.
    num_masked = sequence_sums(mask.to(sequence_values.dtype), cu_seqlens, mask)[sequence]
    masked_so_far = mask.cumsum(0)
    masked_before = torch.where(cu_seqlens[:-1] > 0, masked_so_far[cu_seqlens[:-1] - 1], 0)[sequence]
    return torch.where(mask & (masked_so_far - masked_before == num_masked), sequence_values[sequence], 0.0)


def sequence_means(values: Tensor, cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each sequence's masked tokens: [sequences], zero without masked tokens.

    `values` and `mask` are [tokens].
    """
    sums = sequence_sums(values, cu_seqlens, mask)
    return sums / sequence_sums(torch.ones_like(values), cu_seqlens, mask).clamp(min=1)


def sequence_sums(values: Tensor, cu_seqlens: Tensor, mask: Tensor) -> Tensor:
    """Return the sum over each sequence's masked tokens: [sequences]; `values` and `mask` are [tokens]."""
    sums = values.new_zeros(len(cu_seqlens) - 1)
    # `where` instead of a product: an untrained token's inf or NaN must not reach the sum.
    return sums.index_add(0, sequence_of_tokens(cu_seqlens, len(values)), torch.where(mask, values, 0.0))
