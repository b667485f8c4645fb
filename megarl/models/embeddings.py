"""Embeddings from a table that tensor-parallel ranks split, for parts that need no gradient of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megarl.models.logprobs import all_reduce


@torch.no_grad()
def embed_tokens(tokens: Tensor, positions: Tensor | None, table: Tensor, first_token_id: int, group: Any) -> Tensor:
    """Return the embeddings of these tokens without gradient: [tokens, 1, hidden_size], zero at position 0.

    Shapes: tokens and positions [tokens] (None: no embedding is zero); table [local vocabulary, hidden_size], rows from
    `first_token_id` on. The vocabulary is split over `group`.
    """
    local = tokens - first_token_id
    is_here = (local >= 0) & (local < len(table))
    embeddings = F.embedding(local.clamp(0, len(table) - 1), table) * is_here[:, None]
    all_reduce(embeddings, group, torch.distributed.ReduceOp.SUM)
    if positions is not None:
        embeddings = embeddings.masked_fill_(positions[:, None] == 0, 0.0)
    return embeddings[:, None]
