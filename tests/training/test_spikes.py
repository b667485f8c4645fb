"""An update above its limits is dropped by all ranks, as if it had never been."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.tracking.spikes import SpikeDetector, UpdateLimits
from tests.rank_pool import RankPool
from tests.token_batches import row_batches
from tests.training.test_training_engine import build, make_updates, recipe_of, rows_of


def state_after(
    recipe: Recipe, parallel: ParallelConfig, updates: list[Any], limits: list[UpdateLimits]
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """One rank's metrics of each update; its weights, main weights and moments in the end."""
    engine, *_ = build(recipe, parallel)
    metrics = []
    for sequences, limit in zip(updates, limits, strict=True):
        rows = row_batches(sequences, rows_of(recipe, parallel, sequences))
        update = engine.update(rows, limits=limit)
        numbers = {name: metric.number for name, metric in update.metrics.items()}
        metrics.append(numbers | {"is_spike": update.outcome.is_spike})
    state = dict(engine.parameters) | {f"optimizer {i}": t for i, t in enumerate(engine._optimizer_state())}
    return metrics, {name: value.detach().clone() for name, value in state.items()}


@pytest.mark.parametrize("distributed", [False, True])
def test_a_dropped_update_leaves_the_state_of_a_run_without_it(
    ranks: RankPool, tiny_model: Callable[..., Path], distributed: bool
) -> None:
    folder = tiny_model(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, vocab_size=431)
    recipe, parallel = recipe_of(folder, "rl", distributed_optimizer=distributed), ParallelConfig(1, 1, 2, 1)
    first, middle, last = make_updates(recipe, 431)
    # A poisoned batch: rewards that are a thousand times too large.
    poisoned = [replace(one, advantages=None if one.advantages is None else 1000 * one.advantages) for one in middle]
    none, norm, loss = UpdateLimits(), UpdateLimits(grad_norm=100.0), UpdateLimits(loss=10.0)

    def state(updates: list[Any], limits: list[UpdateLimits]) -> Any:
        return ranks.run(state_after, recipe, parallel, updates, limits, world_size=2)

    expected = state([first, last], [none, none])
    for limit, name in ((norm, "train/grad_norm"), (loss, "train/loss")):
        found = state([first, poisoned, last], [limit, limit, limit])
        # A rank reports its share of the loss. Shares may cancel each other out, so all of them are compared.
        healthy, spike = (sum(abs(metrics[update][name]) for metrics, _ in found) for update in (0, 1))
        assert spike > 50 * healthy
        for (metrics, tensors), (_, wanted) in zip(found, expected, strict=True):
            assert [one["is_spike"] for one in metrics] == [0, 1, 0]
            assert [one["train/update_skipped"] for one in metrics] == [0, 1, 0]
            assert tensors.keys() == wanted.keys() and all(torch.equal(tensors[n], wanted[n]) for n in wanted)
    # The poisoned update matters where nothing drops it.
    assert not torch.equal(
        state([first, poisoned, last], [none] * 3)[0][1]["optimizer 0"], expected[0][1]["optimizer 0"]
    )


def test_an_update_without_a_trained_token_leaves_the_state_of_a_run_without_it(
    ranks: RankPool, tiny_model: Callable[..., Path]
) -> None:
    """One trained token on one of the ranks is enough for an update."""
    folder = tiny_model(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, vocab_size=431)
    recipe, parallel = recipe_of(folder, "rl"), ParallelConfig(1, 1, 2, 1)
    recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"weight_decay": 0.1})})
    first, middle, last = make_updates(recipe, 431)
    empty = [replace(one, loss_mask=np.zeros_like(one.loss_mask)) for one in middle]
    single = [*empty[:-1], replace(middle[-1], loss_mask=np.arange(len(middle[-1].loss_mask)) == 5)]
    none = UpdateLimits()

    def state(updates: list[Any], limit: UpdateLimits) -> Any:
        return ranks.run(state_after, recipe, parallel, updates, [limit] * len(updates), world_size=2)

    found = state([first, empty, last], UpdateLimits(grad_norm=100.0, loss=10.0))
    for (metrics, tensors), (_, wanted) in zip(found, state([first, last], none), strict=True):
        assert [one["train/update_skipped"] for one in metrics] == [0, 1, 0]
        assert [one.get("train/empty_update") for one in metrics] == [None, 1, None]
        assert [one["is_spike"] for one in metrics] == [0, 0, 0]
        # This run has no limit for the difference of log-probs.
        assert not any("train/gap_exceeded" in one for one in metrics)
        assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)
    for metrics, tensors in state([first, single, last], none):
        assert [one["train/update_skipped"] for one in metrics] == [0, 0, 0]
        assert any(not torch.equal(tensors[name], found[0][1][name]) for name in tensors)


def test_limits_follow_the_median() -> None:
    detector = SpikeDetector(factor=10.0, loss_factor=2.0, window=4)
    detector.observe(1.0, 3.0, is_spike=False)
    assert detector.limits() == UpdateLimits()
    detector.observe(3.0, 5.0, is_spike=False)
    assert detector.limits() == UpdateLimits(20.0, 8.0)
    # Without a gradient, or not finite: no part of the median.
    detector.observe(0.0, float("nan"), is_spike=False)
    detector.observe(float("inf"), -1.0, is_spike=False)
    assert detector.limits() == UpdateLimits(20.0, 8.0)
    detector.observe(100.0, 4.0, is_spike=True)
    [spike] = detector.spikes
    assert str(spike) == "gradient norm 100 (limit 20)"
    detector.begin_step()
    assert detector.spikes == [] and detector.limits().grad_norm is not None
    # The new level counts: two of four, then three.
    detector.observe(100.0, 4.0, is_spike=True)
    assert detector.limits().grad_norm == 10 * (3 + 100) / 2
    detector.observe(100.0, 4.0, is_spike=False)
    assert detector.limits().grad_norm == 1000
    restored = SpikeDetector(factor=10.0, loss_factor=2.0, window=4)
    restored.restore(detector.as_json())
    assert restored.limits() == detector.limits()
    without_losses = SpikeDetector(factor=10.0, loss_factor=None, window=1)
    without_losses.observe(2.0, np.pi, is_spike=False)
    assert without_losses.limits() == UpdateLimits(20.0, None)
