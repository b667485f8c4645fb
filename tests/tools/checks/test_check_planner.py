"""The check of the planner, in three layouts: what real workers hold, and what autograd saves, is what was planned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rank_pool import RankPool
from tools.checks import planner


@pytest.mark.parametrize("name", ["dense tp2 dp2", "dense pp2 dp2", "moe ep2 dp2 lora ppo"])
def test_what_ranks_hold_is_what_was_planned(tiny_model: Callable[..., Path], ranks: RankPool, name: str) -> None:
    lines = list(planner.check(name, tiny_model(**planner.MODELS[planner.CASES[name].model]), ranks))
    assert {"parameters", "gradients", "main weights", "moments", "engine weights", "KV cache", "activations"} <= {
        line["kind"] for line in lines if line["counted"]
    }
    assert all(line["met"] for line in lines), [line for line in lines if not line["met"]]


def test_the_layouts_are_of_all_kinds() -> None:
    layouts = [planner.parallel_of(case) for case in planner.CASES.values()]
    assert len(layouts) >= 12
    for axis in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp", "rollout_tp"):
        assert any(getattr(parallel, axis) > 1 for parallel in layouts), axis
