"""Rows of trees: sequences with a common beginning share a row if it holds their stored tokens."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.data.tree_packing import _Cluster, _Prefixes, pack_trees, saved_share
from megarl.families.flops import SequenceFlops

# Two answers of four tokens to a prompt of six: 14 stored tokens.
ANSWERS = [[1, 2, 3, 4, 5, 6, 7, 7, 7, 7], [1, 2, 3, 4, 5, 6, 8, 8, 8, 8]]


def rows_of(max_tokens: int) -> list[list[list[int]]]:
    keys = np.concatenate(ANSWERS).astype(np.int64)
    return pack_trees(keys, np.array([0, 10, 20]), max_tokens=max_tokens, num_ranks=1)


@pytest.mark.parametrize(("max_tokens", "rows"), [(14, [[0, 1]]), (13, [[0], [1]])])
def test_a_tree_may_fill_its_row(max_tokens: int, rows: list[list[int]]) -> None:
    [found] = rows_of(max_tokens)
    assert sorted(map(sorted, found)) == rows


def test_the_saved_share_counts_attention() -> None:
    lengths, shared = np.array([10, 10]), np.array([0, 6])
    # At 10 tokens attention costs as much as all else: 10 * (1 + 1) for a sequence, 6 * (1 + 0.6) for the prefix.
    assert saved_share(lengths, shared, costs=lambda lengths: lengths * (1 + lengths / 10)) == pytest.approx(9.6 / 40)


@pytest.mark.parametrize("window", [0, 2, 5])
def test_the_saved_share_and_the_trees_count_windows(window: int) -> None:
    costs = SequenceFlops(token_flops=1.0, pair_flops=((window, 3.0), (0, 0.5)))

    def counted(length: int) -> float:
        """The FLOPs, token by token: a token attends to itself as half a pair."""
        pairs = sum(min(place, window or place) - 0.5 * (place <= (window or place)) for place in range(1, length + 1))
        return length + 3.0 * pairs + 0.5 * length**2 / 2

    lengths, shared = np.array([10, 10, 7]), np.array([0, 6, 3])
    expected = sum(map(counted, shared)) / sum(map(counted, lengths))
    assert saved_share(lengths, shared, costs) == pytest.approx(expected, rel=1e-12)
    prefixes = _Prefixes(lengths, np.arange(3), shared, costs)
    cluster = _Cluster()
    for member in range(3):
        cluster = cluster.with_set(np.array([member]), prefixes)
    assert cluster.tokens == 18
    assert cluster.cost == pytest.approx(sum(map(counted, lengths)) - sum(map(counted, shared)), rel=1e-12)
