"""Copies of accelerator tensors in page-locked host memory, for a checkpoint written in the background."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 30
"""Block size. torch's allocator of page-locked memory rounds up to powers of two and retains blocks for the next
save."""
# Copies start at multiples of a cache line, so any dtype can view them.
_ALIGNMENT = 64


def copy_to_pinned_blocks(tensors: Sequence[Tensor], *, pin: bool, block_bytes: int = BLOCK_BYTES) -> list[Tensor]:
    """Return contiguous, complete host copies [*shape] of the tensors, packed into page-locked blocks if `pin`.

    A tensor larger than a block gets its own.
    """
    copies: list[Tensor] = []
    block, taken = torch.empty(0, dtype=torch.uint8), 0
    for tensor in tensors:
        if taken + tensor.nbytes > block.nbytes:
            block = torch.empty(max(block_bytes, tensor.nbytes), dtype=torch.uint8, pin_memory=pin)
            taken = 0
        copy = block[taken : taken + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        copy.copy_(tensor, non_blocking=pin)
        copies.append(copy)
        taken += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if pin:
        torch.cuda.synchronize()
    return copies
