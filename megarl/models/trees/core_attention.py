"""A layer's core attention that also computes rows stored as trees of prefixes."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megarl.models.attention import PackedRow, attended_keys, gather_keys, score_factor
from megarl.models.trees import attention as tree_attention
from megarl.models.trees.row import TreeRow


def with_trees(attention: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a core attention that also attends over rows stored as trees of prefixes."""

    class TreeDotProductAttention(attention):
        def __init__(
            self, *, config: TransformerConfig, layer_number: int = 1, softmax_scale: float | None = None, **kwargs: Any
        ) -> None:
            super().__init__(config=config, layer_number=layer_number, softmax_scale=softmax_scale, **kwargs)
            self.tree_window = attended_keys(config, layer_number)
            self.tree_scale = score_factor(config, softmax_scale)
            self.tree_cp_group = getattr(kwargs.get("pg_collection"), "cp", None)

        def forward(
            self, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: PackedRow, **kwargs: Any
        ) -> Tensor:
            """Attend. Shapes of a tree: query [own tokens, 1, heads, head_dim], key [own tokens, 1, groups, head_dim],
            value [own tokens, 1, groups, v]; returns [own tokens, 1, heads * v].
            """
            if not isinstance(packed_seq_params, TreeRow):
                return super().forward(query, key, value, *args, packed_seq_params=packed_seq_params, **kwargs)
            tree = packed_seq_params.tree
            q, k, v = (x.flatten(0, -3) for x in (query, key, value))
            if tree.gathered_index is not None:
                k, v = (
                    tree_attention.gather_entries(x, tree.gathered_index) for x in gather_keys(k, v, self.tree_cp_group)
                )
            sinks = getattr(self, "softmax_offset", None)
            out = tree_attention.attend(q, k, v, tree, scale=self.tree_scale, window=self.tree_window, sinks=sinks)
            return out.reshape(out.size(0), 1, -1)

    return TreeDotProductAttention
