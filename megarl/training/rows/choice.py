"""Makes one row of tokens from the sequences of a batch: one after another, or as a tree of their shared prefixes.

No other module chooses between the two forms.
"""

from __future__ import annotations

import torch

from megarl.data.token_batch import TokenBatch
from megarl.training.rows.microbatch import Microbatch
from megarl.training.rows.packed_rows import pack_row
from megarl.training.rows.tree_rows import pack_tree


def make_microbatch(
    batch: TokenBatch, *, multiple: int, qkv_format: str, device: torch.device, cp: int = 1, cp_rank: int = 0
) -> Microbatch:
    """Return a batch's sequences as one row, or a context-parallel rank's part of it.

    Each rank has a multiple of `multiple` tokens.
    """
    # No tree for sequences of one token: they have no prediction. No tree with labels: it computes one prediction for
    # equal tokens, but their labels may differ.
    if batch.shares_prefixes and batch.labels is None and batch.lengths.max() > 1:
        return pack_tree(batch, multiple=multiple, device=device, cp=cp, cp_rank=cp_rank)
    return pack_row(batch, multiple=multiple, qkv_format=qkv_format, device=device, cp=cp, cp_rank=cp_rank)
