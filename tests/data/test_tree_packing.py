"""Rows of trees: sequences with a common beginning share a row if it holds their stored tokens."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.data.tree_packing import pack_trees, saved_share

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
    assert saved_share(lengths, shared, attention_ratio=10.0) == pytest.approx(9.6 / 40)
