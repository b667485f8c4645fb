"""Gradients of several passes before one step: as those of one pass over the same rows, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.tracking.spikes import UpdateLimits
from tests.rank_pool import RankPool
from tests.token_batches import row_batches
from tests.training.test_training_engine import build, make_updates, recipe_of


def train_in_passes(recipe: Recipe, parallel: ParallelConfig, num_passes: int) -> dict[str, torch.Tensor]:
    """Return one rank's weights after two steps, each with the gradients of `num_passes` passes."""
    from megarl.training.objective import StepNumbers
    from megarl.training.rows.metrics import read_metrics

    engine, *_ = build(recipe, parallel)
    objective = partial(engine.role.objective, numbers=StepNumbers(0.0))
    rank = torch.distributed.get_rank()
    for sequences in make_updates(recipe, 431)[:2]:
        rows = row_batches(sequences, [[4 * part + rank, 4 * part + 2 + rank] for part in range(2)])
        engine.clear_gradients()
        size = len(rows) // num_passes
        measured: list[Any] = []
        for first in range(0, len(rows), size):
            measured += engine.accumulate(rows[first : first + size], objective)
        assert engine.apply(read_metrics(measured), UpdateLimits()).outcome.applied
    return {name: value.detach().clone() for name, value in engine.parameters.items()}


def test_passes_before_a_step_add_up_over_replicas(ranks: RankPool, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, vocab_size=431)
    recipe, parallel = recipe_of(folder, "sft", overlap_grad_reduce=False), ParallelConfig(1, 1, 2, 1)
    one_pass, two_passes = (
        ranks.run(train_in_passes, recipe, parallel, num_passes, world_size=2) for num_passes in (1, 2)
    )
    for expected, weights in zip(one_pass, two_passes, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
