"""Dropout and router noise act in training passes alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import read_model_shape
from megarl.tracking.metrics import merge, values
from tests.rank_pool import RankPool
from tests.token_batches import row_batches
from tests.training.experts.test_balance import VOCABULARY, make_sequences, recipe_of

ONE_RANK = ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1)


def passes(recipe: Recipe) -> dict[str, Any]:
    """Log-probs of two passes of a trained and of a frozen model, and entropies of two updates that change nothing."""
    from megarl.checkpoint import safetensors
    from megarl.families.shape import padded_vocab_size
    from megarl.reshard.layouts.megatron import megatron_layouts
    from megarl.training.model import FrozenModel
    from megarl.training.training_engine import TrainingEngine

    shape = read_model_shape(recipe.model.path)
    [pieces] = megatron_layouts(shape, ONE_RANK, padded_vocab_size=padded_vocab_size(shape.vocab_size, 1))
    models = [
        kind(recipe, ONE_RANK, shape, lambda p: safetensors.load(recipe.model.path, pieces, p))
        for kind in (TrainingEngine, FrozenModel)
    ]
    rows = row_batches(make_sequences(4), [[0, 1, 2, 3]])
    found: dict[str, Any] = {
        name: [model.forward(rows) for _ in range(2)]
        for name, model in zip(("policy", "reference"), models, strict=True)
    }
    engine = models[0]
    assert isinstance(engine, TrainingEngine)
    found["entropies"] = [values(merge([engine.update(rows).metrics]))["train/entropy"] for _ in range(2)]
    found["after"] = engine.forward(rows)
    return found


@pytest.mark.parametrize(
    "megatron",
    [
        pytest.param({"hidden_dropout": 0.2}, id="dropout"),
        pytest.param({"moe_input_jitter_eps": 0.2}, id="jitter of the router"),
    ],
)
def test_passes_without_gradients_drop_nothing(
    ranks: RankPool, tiny_model: Callable[..., Path], megatron: dict[str, Any]
) -> None:
    family = "qwen3_moe" if "moe_input_jitter_eps" in megatron else "qwen3"
    folder = tiny_model(family=family, num_layers=2, hidden_size=32, initializer_range=0.3, vocab_size=VOCABULARY)
    [plain] = ranks.run(passes, recipe_of(folder, {}), world_size=1)
    [found] = ranks.run(passes, recipe_of(folder, megatron), world_size=1)
    [[expected], _] = plain["policy"]
    for rows in (*found["policy"], *found["reference"], found["after"]):
        np.testing.assert_array_equal(rows[0], expected)
    assert plain["entropies"][0] == plain["entropies"][1]
    assert len({plain["entropies"][0], *found["entropies"]}) == 3, "training dropped nothing"
