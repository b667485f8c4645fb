"""Embeddings without gradient, from a table split over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state
from torch import Tensor

from megarl.models.logprobs import all_reduce


@torch.no_grad()
def embed_tokens(tokens: Tensor, positions: Tensor | None, table: Tensor, first_token_id: int, group: Any) -> Tensor:
    """Return the tokens' embeddings without gradient: [tokens, 1, hidden_size], zero at position 0.

    Shapes: tokens [tokens]; positions [tokens] (None: no embedding is zero); table [local vocabulary, hidden_size],
    rows from `first_token_id` on. The vocabulary is split over `group`.
    """
    local_ids = tokens - first_token_id
    is_local = (local_ids >= 0) & (local_ids < len(table))
    embeddings = F.embedding(local_ids.clamp(0, len(table) - 1), table) * is_local[:, None]
    all_reduce(embeddings, group, torch.distributed.ReduceOp.SUM)
    if positions is not None:
        embeddings = embeddings.masked_fill_(positions[:, None] == 0, 0.0)
    return embeddings[:, None]


@torch.no_grad()
def copy_embedding_to_last_stage(chunks: Sequence[Any]) -> None:
    """Copy the embedding of the first pipeline stage to the last stage. A collective of both stages.

    On the last stage, writes `embedding_copy` [local vocabulary, hidden_size] of the last of this rank's `chunks`. With
    a single stage, copies nothing.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return
    if not parallel_state.is_rank_in_embedding_group(ignore_virtual=True):
        return
    is_first = parallel_state.is_pipeline_first_stage()
    # Megatron's groups of first and last stages list the first stage first.
    group: Any = parallel_state.get_embedding_group()
    table = chunks[0].embedding.word_embeddings.weight if is_first else torch.empty_like(chunks[-1].output_layer.weight)
    torch.distributed.broadcast(table.data, group=group, group_src=0)
    if not is_first:
        chunks[-1].embedding_copy = table
