"""The table's command, on one layout that splits everything, for a dense model and one with experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megarl.testing import RankPool
from tools.checks import invariance


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
    tiny_model: Callable[..., Path], ranks: RankPool, model: str, layout: str
) -> None:
    lines = list(invariance.check(model, tiny_model(**invariance.MODELS[model]), ranks, [layout]))
    objectives = [name for name in invariance.OBJECTIVES if name != "balanced" or model == "moe"]
    assert [line["objective"] for line in lines] == objectives
    assert all(line["layout"] == layout and line["met"] for line in lines), lines
    assert any(line["parameter"] > 0 for line in lines), "nothing was split"


def test_a_difference_is_seen() -> None:
    before, alone = {"w": np.zeros(4, np.float32)}, {"w": np.ones(4, np.float32)}
    metrics = [{"train/loss": 2.0, "train/grad_norm": 1.0}]
    assert invariance.compare((metrics, alone), (metrics, alone), before)["met"]
    other = {"w": alone["w"] + np.float32([0, 0, 0, 1e-3])}
    line = invariance.compare((metrics, other), (metrics, alone), before)
    assert not line["met"] and line["worst_parameter"] == "w" and line["parameter"] == pytest.approx(5e-4, rel=1e-3)
    assert not invariance.compare(([{"train/loss": 2.0, "train/grad_norm": 1.001}], alone), (metrics, alone), before)[
        "met"
    ]
