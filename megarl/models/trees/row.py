"""A row stored as a tree of prefixes, for the model's layers, head and routers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megarl.data.token_batch import places_by_rank
from megarl.models.attention import PackedRow
from megarl.models.experts.balance import RowTokens
from megarl.models.trees.attention import TokenTree, gather_entries


@dataclass
class TreeRow(PackedRow):
    """The layers compute stored tokens only; `positions` has an entry for each stored token of this rank. The model's
    outputs, `local` and `gathered_index` have an entry for each token of the sequences.
    """

    tree: TokenTree = field(kw_only=True)

    @classmethod
    def from_tree(
        cls, tree: TokenTree, storing_ranks: NDArray[np.int64], longest_sequence: int, cp_rank: int = 0
    ) -> TreeRow:
        """Return the row of sequences stored as a tree. `longest_sequence`: length of the longest sequence.

        `storing_ranks` [tokens]: the context-parallel rank that stores each token of the sequences.
        """
        device = tree.reach.device
        lengths = torch.tensor([0, len(tree.own_tokens)], dtype=torch.int32, device=device)
        local = np.flatnonzero(storing_ranks == cp_rank)
        gathered_index, longest_part = None, 0
        if tree.gathered_index is not None:
            rank_order_index, longest_part = places_by_rank(storing_ranks)
            gathered_index = torch.from_numpy(rank_order_index).to(device)
        return cls(
            # Rotary angles follow `positions`. Kernels for packed rows would count from each sequence's start instead.
            qkv_format="packed",
            cu_seqlens_q=lengths,
            cu_seqlens_kv=lengths,
            max_seqlen_q=longest_sequence,
            max_seqlen_kv=longest_sequence,
            positions=torch.from_numpy(tree.positions[tree.own_tokens]).to(device),
            local=torch.from_numpy(local).to(device),
            host_local=local,
            gathered_index=gathered_index,
            longest_part=longest_part,
            tree=tree,
        )

    def prediction_states(self, hidden: Tensor) -> Tensor:
        """Return the states [edges, hidden_size] of the stored tokens that make the predictions (edges)."""
        return gather_entries(hidden, self.tree.edge_sources)

    def spread_predictions(self, outputs: Tensor) -> Tensor:
        """Copy outputs [values, edges] to each token of the sequences. An edge's gradient is the sum over its
        tokens.
        """
        return gather_entries(outputs, self.tree.edges, dim=1)

    def spread_states(self, values: Tensor) -> Tensor:
        """Copy values [values, stored tokens] to each token of the sequences."""
        return gather_entries(values, self.tree.stored_of, dim=1)

    def states_at(self, hidden: Tensor, indices: Tensor) -> Tensor:
        return gather_entries(hidden, self.tree.stored_of[indices])


@dataclass(frozen=True, slots=True)
class TreeTokens(RowTokens):
    """The stored tokens of a tree on one rank.

    `weights` int64 [stored tokens] counts the sequences' tokens that each one represents. `sequences` describes the
    tokens [tokens] of the sequences, and `stored_of` int64 [tokens] has the stored token of each.
    """

    stored_of: Tensor

    def spread(self, values: Tensor) -> Tensor:
        return gather_entries(values, self.stored_of)

    def weigh(self, values: Tensor) -> Tensor:
        """Return the values [tokens] unchanged: no token of the sequences is padding."""
        return values
