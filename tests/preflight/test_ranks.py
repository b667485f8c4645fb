"""Parallel sizes that fit each other and the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.preflight import check

SEPARATE = {"placement": "separate"}


@pytest.mark.parametrize(
    ("ranks", "tp", "pp", "rollout_tp", "parallel"),
    [
        pytest.param(1, 1, 1, 1, ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1), id="one"),
        pytest.param(
            4, 2, 1, 4, ParallelConfig(tp=2, pp=1, dp=2, rollout_tp=4, rank_permutation=(2, 2)), id="(2,1,2)->4"
        ),
        pytest.param(
            4, 4, 1, 2, ParallelConfig(tp=4, pp=1, dp=1, rollout_tp=2, rank_permutation=(2, 2)), id="copies of kv heads"
        ),
        pytest.param(6, 1, 3, 2, ParallelConfig(tp=1, pp=3, dp=2, rollout_tp=2), id="(1,3,2)->2"),
    ],
)
def test_sizes_that_fit(
    recipe: Callable[..., Recipe], ranks: int, tp: int, pp: int, rollout_tp: int, parallel: ParallelConfig
) -> None:
    rollout = {"tp": rollout_tp}
    assert check(recipe(cluster={"ranks_per_node": ranks}, trainer={"tp": tp, "pp": pp}, rollout=rollout)) == parallel


def test_engines_on_ranks_of_their_own_leave_the_trainer_the_others(recipe: Callable[..., Recipe]) -> None:
    sizes = {"cluster": {"ranks_per_node": 6}, "trainer": {"tp": 2}, "rollout": {**SEPARATE, "ranks": 2, "tp": 2}}
    parallel = check(recipe(**sizes))
    # Nothing is gained by another order of the ranks.
    assert parallel == ParallelConfig(tp=2, pp=1, dp=2, rollout_tp=2, rollout_ranks=2)
    assert (parallel.world_size, parallel.num_ranks, parallel.leaders()) == (4, 6, (4,))
    assert str(parallel) == "4 ranks: trainer tp 2 * pp 1 * dp 2; 2 ranks: vLLM tp 2 * 1 replicas"
