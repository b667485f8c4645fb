"""The table's command, on one layout that splits everything, for a dense model and one with experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from megarl.testing import RankPool


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param("dense", "tp2 cp2", id="dense"),
        pytest.param("moe", "tp2 etp2 ep2 dp2", id="experts"),
        pytest.param("moe", "tp2", id="experts whole on each tensor rank"),
        pytest.param("moe", "etp2 dp2", id="experts split, the rest whole"),
    ],
)
def test_layouts_train_as_one_rank_does(
    tool: Callable[[str], ModuleType], tiny_model: Callable[..., Path], ranks: RankPool, model: str, layout: str
) -> None:
    check = tool("check_invariance")
    lines = list(check.check(model, tiny_model(**check.MODELS[model]), ranks, [layout]))
    objectives = [name for name in check.OBJECTIVES if name != "balanced" or model == "moe"]
    assert [line["objective"] for line in lines] == objectives
    assert all(line["layout"] == layout and line["met"] for line in lines), lines
    assert any(line["parameter"] > 0 for line in lines), "nothing was split"


def test_a_difference_is_seen(tool: Callable[[str], ModuleType]) -> None:
    import numpy as np

    before, alone = {"w": np.zeros(4, np.float32)}, {"w": np.ones(4, np.float32)}
    metrics = [{"train/loss": 2.0, "train/grad_norm": 1.0}]
    compare = tool("check_invariance").compare
    assert compare((metrics, alone), (metrics, alone), before)["met"]
    other = {"w": alone["w"] + np.float32([0, 0, 0, 1e-3])}
    line = compare((metrics, other), (metrics, alone), before)
    assert not line["met"] and line["worst_parameter"] == "w" and line["parameter"] == pytest.approx(5e-4, rel=1e-3)
    assert not compare(([{"train/loss": 2.0, "train/grad_norm": 1.001}], alone), (metrics, alone), before)["met"]
