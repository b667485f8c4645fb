"""Parallel sizes, ranks and batches that do not fit each other or the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.preflight import check

RANKS_4 = {"ranks_per_node": 4}
SEPARATE = {"placement": "separate"}
ENGINES_2 = {"groups": {"engines": {"ranks_per_node": 2}}}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        pytest.param(
            {"cluster": RANKS_4, "trainer": {"tp": 1, "pp": 3}},
            [
                "trainer.tp = 1, trainer.pp = 3",
                "does not divide the 4 ranks",
                "tp * pp 1, 2 or 4, or have 3 or 6 ranks",
            ],
            id="world",
        ),
        pytest.param(
            {"cluster": RANKS_4, "trainer": {"tp": 2, "dp": 4}},
            ["trainer.dp = 4", "set trainer.dp=2, leave it out, or have 8 ranks"],
            id="dp",
        ),
        pytest.param(
            {"cluster": RANKS_4, "rollout": {"placement": "separate"}},
            ["rollout.placement = separate", "needs rollout.ranks, how many of the 4 ranks", "use 1, 2 or 3"],
            id="engines without ranks",
        ),
        pytest.param(
            {"cluster": RANKS_4, "rollout": {**SEPARATE, "ranks": 4, "tp": 2}},
            ["rollout.ranks = 4", "leaves none of the 4 ranks", "to the trainer; use 2"],
            id="a trainer without ranks",
        ),
        pytest.param(
            {"cluster": RANKS_4, "rollout": {**SEPARATE, "ranks": 3, "tp": 2}},
            ["rollout.ranks = 3", "is not a multiple of rollout.tp 2", "use 2"],
            id="part of an engine",
        ),
        pytest.param(
            {"rollout": {**SEPARATE, "ranks": 1}},
            ["rollout.ranks = 1", "leaves none of the 1 ranks", "have more than 1 ranks (cluster.ranks_per_node)"],
            id="one rank for both",
        ),
        pytest.param(
            {"cluster": RANKS_4, "trainer": {"tp": 2}, "rollout": {**SEPARATE, "ranks": 1}},
            [
                "trainer.tp = 2",
                "does not divide the 3 training ranks",
                "- rollout.ranks 1",
                "1 or 3, or have 2 or 4 ranks",
            ],
            id="ranks that are left to the trainer",
        ),
        pytest.param(
            {"cluster": RANKS_4, "trainer": {"dp": 4}, "rollout": {**SEPARATE, "ranks": 2}},
            ["trainer.dp = 4", "the 2 training ranks", "set trainer.dp=2"],
            id="dp of all ranks",
        ),
        pytest.param(
            {"rollout": {"tp": 2}}, ["rollout.tp = 2", "the 1 ranks", "use 1, or have 2 ranks"], id="rollout.tp"
        ),
        pytest.param({"cluster": {"nodes": 2}}, ["cluster.nodes = 2", "set cluster.nodes=1"], id="nodes"),
        pytest.param(
            {"cluster": ENGINES_2, "rollout": SEPARATE},
            ["cluster.groups.engines: cluster.launcher local", "give rollout.ranks, or run megarl slurm submit"],
            id="nodes of engines",
        ),
        pytest.param(
            {"cluster": ENGINES_2 | {"launcher": "ray"}},
            ["cluster.groups.engines: ", "set that, or leave the group out"],
            id="nodes of engines that share the trainer's ranks",
        ),
        pytest.param(
            {"cluster": ENGINES_2 | {"launcher": "ray"}, "rollout": {**SEPARATE, "ranks": 1}},
            ["rollout.ranks = 1", "cluster.groups.engines = 1 nodes of 2 ranks make 2; leave it out"],
            id="ranks beside nodes of engines",
        ),
        pytest.param(
            {"cluster": ENGINES_2 | {"launcher": "ray"}, "rollout": {**SEPARATE, "tp": 4}},
            ["rollout.tp = 4", "does not divide the 2 ranks of cluster.groups.engines"],
            id="nodes of engines that hold no engine",
        ),
        pytest.param(
            {"cluster": {"ranks_per_node": 3}, "trainer": {"tp": 3}},
            ["trainer.tp = 3", "4 attention heads, 2 key-value heads", "use 1, 2 or 4"],
            id="heads of the trainer",
        ),
        pytest.param(
            {"cluster": {"ranks_per_node": 3}, "rollout": {"tp": 3}, "train": {"prompts_per_step": 33}},
            ["rollout.tp = 3", "4 attention heads, 448 rows", "2 key-value heads", "use 1, 2 or 4"],
            id="heads of the rollout",
        ),
        pytest.param(
            {"cluster": RANKS_4, "trainer": {"pp": 4, "vpp": 2}},
            ["trainer.pp = 4", "exceeds the model's 6 layers"],
            id="layers",
        ),
        pytest.param(
            {"cluster": RANKS_4, "train": {"prompts_per_step": 5, "samples_per_prompt": 3, "updates_per_step": 2}},
            ["train.prompts_per_step = 5", "train.samples_per_prompt 3 makes 15", "use 8"],
            id="rl batch, none below",
        ),
        pytest.param(
            {"cluster": RANKS_4, "train": {"prompts_per_step": 11, "samples_per_prompt": 2, "updates_per_step": 1}},
            ["train.prompts_per_step = 11", "makes 22 completions", "use 10 or 12"],
            id="rl batch, the group counts",
        ),
        pytest.param(
            {"loop": "sft", "cluster": RANKS_4, "train": {"prompts_per_step": 30}},
            ["train.prompts_per_step = 30", "data-parallel size 4 (trainer.dp); use 28 or 32"],
            id="sft batch",
        ),
    ],
)
def test_each_misfit_is_one_line_with_field_value_and_remedy(
    only_fault: Callable[..., str], changed: dict[str, Any], told: list[str]
) -> None:
    line = only_fault(**changed)
    assert all(words in line for words in told), line


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
