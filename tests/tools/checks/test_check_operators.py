"""The check that names the first operator in which trainer and engine differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.rank_pool import RankPool
from tools.checks.exact_operators import compare_operators


@pytest.mark.parametrize(("family", "last"), [("qwen3", "layer 1 down"), ("qwen3_moe", "layer 1 experts")])
def test_exact_operators_are_equal_and_usual_ones_differ(
    ranks: RankPool, tiny_model: Callable[..., Path], family: str, last: str
) -> None:
    compared = compare_operators
    model = tiny_model(family=family, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, hidden_size=128)
    tokens = np.random.default_rng(0).integers(3, 200, 40)
    [exact] = ranks.run(compared, str(model), tokens, True, world_size=1)
    names = [row["operator"] for row in exact]
    assert names[0] == "embedding" and names[-3:] == [last, "last norm", "log-probs"]
    assert [row["differing"] for row in exact] == [0] * len(exact)
    [usual] = ranks.run(compared, str(model), tokens, False, world_size=1)
    assert [row["operator"] for row in usual] == names
    assert sum(row["differing"] for row in usual) > 0
