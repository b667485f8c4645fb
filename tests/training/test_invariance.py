"""Layouts that split every part of a model train as one rank does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.rank_pool import RankPool
from tests.training import invariance

LOSSES_OF_EXPERTS = ("sft", "gspo", "all added", "critic", "balanced")
"""Losses of tokens, of trajectories, with other models' log-probs, of a value head, and those of the router."""


@pytest.mark.parametrize(
    ("model", "layouts", "objectives"),
    [
        pytest.param("dense", ["tp2"], ["sft", "all added"], id="dense, tp2"),
        pytest.param(
            "dense",
            ["tp2 cp2"],
            [name for name in invariance.OBJECTIVES if name != "balanced"],
            id="dense",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "moe", ["tp2", "etp2 dp2", "tp2 etp2 ep2 dp2"], LOSSES_OF_EXPERTS, id="experts", marks=pytest.mark.long
        ),
    ],
)
def test_layouts_train_as_one_rank_does(
    tiny_model: Callable[..., Path], ranks: RankPool, model: str, layouts: list[str], objectives: Sequence[str]
) -> None:
    folder = tiny_model(**invariance.MODELS[model])
    lines = list(invariance.check(model, folder, ranks, layouts, objectives, num_steps=1))
    expected = [(layout, objective) for layout in layouts for objective in objectives]
    assert [(line["layout"], line["objective"]) for line in lines] == expected
    assert all(line["met"] for line in lines), lines
    assert any(line["parameter"] > 0 for line in lines), "nothing was split"


@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        pytest.param("dense", ["tp2 dp2"], id="dense"),
        pytest.param("moe", ["ep2 dp2", "tp2 etp2", "pp2 ep2 dp2"], id="experts", marks=pytest.mark.long),
    ],
)
def test_layouts_train_as_one_rank_does_with_whole_matrices(
    tiny_model: Callable[..., Path], ranks: RankPool, model: str, layouts: list[str]
) -> None:
    """Muon turns small parts of a gradient into large ones, and with them what rounding left there."""
    folder = tiny_model(**invariance.MODELS[model])
    lines = list(invariance.check(model, folder, ranks, layouts, ["sft"], num_steps=2, optimizer=invariance.MUON))
    assert [line["layout"] for line in lines] == layouts
    assert all(line["met"] and line["parameter"] < 1e-5 for line in lines), lines


@pytest.mark.long
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("model", list(invariance.MODELS))
def test_all_layouts_of_up_to_eight_ranks_train_every_loss(
    tiny_model: Callable[..., Path], distributed_tier: None, model: str
) -> None:
    with RankPool(8) as pool:
        lines = list(invariance.check(model, tiny_model(**invariance.MODELS[model]), pool, only=()))
    assert [line for line in lines if not line["met"]] == []
    assert {line["layout"] for line in lines} == {name for name, _, _ in invariance.CASES[model][1:]}


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
