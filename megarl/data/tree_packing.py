"""Packing of sequences with shared prefixes: similar beginnings come into one microbatch, stored as a tree.

Sequences are first collected into clusters, in lexicographic order. Clusters are then packed like single sequences, by
the tokens and the cost of their trees. Large clusters store fewer tokens, small clusters balance ranks better. So
several sizes are tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megarl.data.packing import Costs, balance_sets, count_tokens, expand_sets, pack
from megarl.data.prefixes import lexicographic_order

WORTH_SHARING = 0.05
"""Minimum share of the cost that sharing a prefix must save. A tree's gathers cost about as much."""
_CLUSTERS_PER_RANK = (0, 1, 4, 16)
"""Numbers of clusters per rank to try. A cluster costs at most the whole cost / (ranks * number). 0: no limit."""


def saved_share(lengths: NDArray[np.int64], shared: NDArray[np.int64], costs: Costs) -> float:
    """Return the share of the cost that a tree saves by storing the first `shared` tokens of each sequence once.

    `lengths` and `shared` are [sequences].
    """
    full_cost = costs(lengths).sum()
    return float(costs(shared).sum() / max(full_cost, 1.0))


def pack_trees(
    keys: NDArray[np.int64],
    cu_seqlens: NDArray[np.int64],
    *,
    max_tokens: int,
    num_ranks: int,
    multiple: int = 1,
    costs: Costs = count_tokens,
    rows_multiple: int = 1,
    together: int | NDArray[np.int64] = 1,
) -> list[list[list[int]]]:
    """Return sequence indices by rank and microbatch like `pack`: [num_ranks][num_microbatches][sequences].

    A microbatch holds at most `max_tokens` stored tokens. `prefixes.lexicographic_order` describes `keys` [tokens] and
    `cu_seqlens` [sequences + 1]. `together` keeps adjacent sequences in one microbatch. Without prefixes worth sharing,
    the result is that of `pack`, with each length rounded up to `multiple`. A tree needs no such padding.

    Raises ValueError for sequences that must share a microbatch and do not fit.
    """
    lengths = np.diff(cu_seqlens)
    sizes = np.full(len(lengths) // together, together) if isinstance(together, int) else together
    sets = np.split(np.arange(len(lengths)), np.cumsum(sizes)[:-1])
    prefixes = _Prefixes(lengths, *lexicographic_order(keys, cu_seqlens), costs)
    total_cost = sum(prefixes.cost_of(members) for members in sets)
    best_packing: tuple[float, list[list[list[int]]]] | None = None
    tried_counts: set[int] = set()
    # Larger clusters share more, smaller ones balance better: try several sizes, and keep the fastest packing.
    for clusters_per_rank in _CLUSTERS_PER_RANK:
        max_cost = total_cost / (clusters_per_rank * num_ranks * rows_multiple) if clusters_per_rank else np.inf
        clusters = _make_clusters(sets, prefixes, max_tokens, max_cost)
        tokens = np.array([cluster.tokens for cluster in clusters])
        # Skip clusters that share nothing, and a number of clusters that another limit gave already.
        if tokens.sum() == lengths.sum() or len(clusters) in tried_counts:
            continue
        tried_counts.add(len(clusters))
        # `pack`, below, reports a set that alone is too large.
        if tokens.max() > max_tokens or len(clusters) < num_ranks * rows_multiple:
            continue
        cluster_costs = np.array([cluster.cost for cluster in clusters])
        try:
            rows, makespan = balance_sets(tokens, cluster_costs, max_tokens, num_ranks, rows_multiple, "")
        except ValueError:
            continue
        is_filled = all(bin for row in rows for bin in row)
        if is_filled and (best_packing is None or makespan < best_packing[0]):
            best_packing = makespan, expand_sets(rows, [cluster.sequences for cluster in clusters])
        if num_ranks * rows_multiple == 1:
            break
    if best_packing is not None:
        return best_packing[1]
    return pack(
        lengths,
        max_tokens=max_tokens,
        num_ranks=num_ranks,
        multiple=multiple,
        costs=costs,
        rows_multiple=rows_multiple,
        together=together,
    )


class _Prefixes:
    """Lengths of the prefixes shared by any two sequences, from the lexicographic order."""

    def __init__(
        self, lengths: NDArray[np.int64], order: NDArray[np.int64], shared: NDArray[np.int64], costs: Costs
    ) -> None:
        self.lengths, self.shared = lengths, shared
        self.cost_of_length = costs(np.arange(lengths.max(initial=0) + 1))
        """Cost of a prefix by its number of tokens, up to the longest sequence."""
        # Position of each sequence in the lexicographic order.
        self.position_of = np.empty(len(order), np.int64)
        self.position_of[order] = np.arange(len(order))

    def cost_of(self, members: NDArray[np.int64]) -> float:
        """Return the cost of these sequences, each stored apart."""
        return float(self.cost_of_length[self.lengths[members]].sum())

    def num_common(self, lower_position: int, higher_position: int) -> int:
        """Return the number of prefix tokens shared by the sequences at two positions of the lexicographic order."""
        # `shared` compares neighbours. All sequences from one position to the other have the common prefix.
        return int(self.shared[lower_position + 1 : higher_position + 1].min())


@dataclass(slots=True)
class _Cluster:
    """Sequences stored as one tree."""

    sequences: list[int] = field(default_factory=list)
    tokens: int = 0
    """Number of stored tokens."""
    cost: float = 0.0
    positions: list[int] = field(default_factory=list)
    """Positions of the sequences in the lexicographic order, ascending."""

    def with_set(self, members: NDArray[np.int64], prefixes: _Prefixes) -> _Cluster:
        """Return this cluster plus `members`. Each adds only the tokens after its longest shared prefix."""
        positions, tokens, cost = list(self.positions), self.tokens, self.cost
        for sequence in members.tolist():
            position, length = int(prefixes.position_of[sequence]), int(prefixes.lengths[sequence])
            index = bisect_left(positions, position)
            # In lexicographic order, a neighbour shares the longest prefix.
            num_shared = prefixes.num_common(positions[index - 1], position) if index else 0
            if index < len(positions):
                num_shared = max(num_shared, prefixes.num_common(position, positions[index]))
            positions.insert(index, position)
            tokens += length - num_shared
            cost += float(prefixes.cost_of_length[length] - prefixes.cost_of_length[num_shared])
        return _Cluster([*self.sequences, *members.tolist()], tokens, cost, positions)


def _make_clusters(
    sets: Sequence[NDArray[np.int64]], prefixes: _Prefixes, max_tokens: int, max_cost: float
) -> list[_Cluster]:
    """Collect sets of sequences into clusters, in lexicographic order of each set's first sequence.

    A set joins the cluster before it if this saves enough. The cluster must stay within `max_tokens` stored tokens and
    `max_cost`.
    """
    order = np.argsort([prefixes.position_of[members].min() for members in sets], kind="stable")
    clusters: list[_Cluster] = []
    for members in (sets[index] for index in order):
        new_cluster = _Cluster().with_set(members, prefixes)
        if clusters:
            joined_cluster = clusters[-1].with_set(members, prefixes)
            saved_cost = new_cluster.cost - (joined_cluster.cost - clusters[-1].cost)
            if (
                saved_cost > WORTH_SHARING * new_cluster.cost
                and joined_cluster.tokens <= max_tokens
                and joined_cluster.cost <= max_cost
            ):
                clusters[-1] = joined_cluster
                continue
        clusters.append(new_cluster)
    return clusters
