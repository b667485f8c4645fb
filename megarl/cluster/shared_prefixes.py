"""Rows whose sequences share prefixes, stored as trees if this saves enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.cluster.row_packing import RowPacking, Savings
from megarl.data.packing import Costs
from megarl.data.prefixes import shared_lengths
from megarl.data.token_batch import TokenBatch
from megarl.data.tree_packing import WORTH_SHARING, pack_trees, saved_share
from megarl.rounding import round_up


@dataclass(frozen=True, slots=True)
class SharedPrefixes(RowPacking):
    """Packs sequences with common prefixes together, and computes each distinct prefix of a row once."""

    problem: str | None = None
    """Why this model cannot share prefixes and computes them repeatedly. None: it can."""

    def assign(self, batch: TokenBatch, **settings: Any) -> list[list[list[int]]]:
        if self.problem is not None:
            return RowPacking.assign(self, batch, **settings)
        return pack_trees(batch.prefix_keys, batch.cu_seqlens, **settings)

    def arrange(self, row: TokenBatch, *, sequence_multiple: int, capacity: int, costs: Costs) -> Savings:
        """Store the row as a tree if this saves enough, or if the row exceeds the capacity otherwise."""
        shared_tokens = shared_lengths(row.prefix_keys, row.cu_seqlens)
        saves_enough = bool(saved_share(row.lengths, shared_tokens, costs) > WORTH_SHARING)
        separate_tokens = int(round_up(row.lengths, multiple=sequence_multiple).sum())
        row.shares_prefixes = (saves_enough or separate_tokens > capacity) and self.problem is None
        return Savings(
            tokens=shared_tokens if row.shares_prefixes else np.zeros_like(row.lengths),
            is_refused=saves_enough and not row.shares_prefixes,
        )
