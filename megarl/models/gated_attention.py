"""Attention with an output gate for each query head, at any tensor-parallel size."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.attention import SelfAttention


class GatedAttention(SelfAttention):
    """Megatron's self-attention, with the gates of this rank's own query heads.

    If tp exceeds the number of key-value heads, Megatron-Core 0.16.1 returns too many gates: the gates of all ranks
    with the same key-value head.
    """

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return queries [tokens, 1, heads, head_dim], keys and values, and gates shaped like the queries."""
        projections = super().get_query_key_value_tensors(*args, **kwargs)
        num_key_heads = self.config.num_query_groups
        assert num_key_heads is not None
        if len(projections) != 4 or num_key_heads >= self.world_size:
            return projections
        query, key, value, gate = projections
        # Ranks with the same key-value head are neighbours, and their query heads follow each other.
        first_gate = self.pg_collection.tp.rank() % (self.world_size // num_key_heads) * query.size(2)
        return query, key, value, gate[:, :, first_gate : first_gate + query.size(2)]
