"""The check of trees of prefixes at its small size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rank_pool import RankPool
from tools.checks import invariance, prefixes


def test_every_sampled_token_is_an_edge() -> None:
    [line] = prefixes.check_edges()
    assert line["met"], line


@pytest.mark.parametrize("model", list(prefixes.MODELS))
def test_trees_have_the_gradients_of_separate_sequences(tmp_path: Path, ranks: RankPool, model: str) -> None:
    folder = prefixes.make_model(model, tmp_path / model)
    lines = list(prefixes.check_gradients(model, folder, ranks, prefixes.SMALL["depths"]))
    assert len(lines) == 2 and all(line["met"] for line in lines), lines


@pytest.mark.parametrize(
    ("model", "layout"),
    [("dense", "pp2 vpp2"), ("dense", "tp2 cp2"), pytest.param("moe", "cp2 ep2", marks=pytest.mark.long)],
)
def test_layouts_train_trees(tiny_model: Callable[..., Path], ranks: RankPool, model: str, layout: str) -> None:
    folder = tiny_model(**invariance.MODELS[model])
    lines = list(prefixes.check_layouts(model, folder, ranks, [layout], prefixes.SMALL["objectives"]))
    cases = {line["case"].split(",")[0] for line in lines}
    assert cases == {"one rank", layout} and all(line["met"] for line in lines), lines
