"""A NaN of one rank is named by tensor, layer and rank, wherever it begins; the state stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.tracking.model_outputs import NotFinite
from tests.rank_pool import RankPool
from tests.token_batches import row_batches
from tests.training.test_training_engine import build, make_updates, recipe_of, rows_of

PLACES = ("output", "gradient", "transient", "weight")


class _NanGradient(torch.autograd.Function):
    """Identity with a gradient that is not a number in one element."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        gradient = grad_outputs[0].clone()
        gradient.view(-1)[3] = float("nan")
        return gradient


def poisoned(recipe: Recipe, parallel: ParallelConfig, updates: list[Any], rank: int) -> dict[str, Any]:
    """Return the names that a rank gives for a NaN in each of PLACES on `rank`, and the state after its updates."""
    engine, *_ = build(recipe, parallel)
    is_faulty, found = dist.get_rank() == rank, {}
    layer = engine.chunks[0].decoder.layers[-1]
    rows = row_batches(updates[0], rows_of(recipe, parallel, updates[0]))
    calls: list[int] = []

    def spoil(place: str) -> Callable[..., Any]:
        def hook(_module: Any, _inputs: Any, output: Any) -> Any:
            values, *others = output
            if place == "gradient":
                return (_NanGradient.apply(values), *others)
            calls.append(1)
            if place == "transient" and len(calls) > 1:
                return output
            spoilt = values.clone()
            spoilt[0, 0, 0] = float("nan")
            return (spoilt, *others)

        return hook

    def update() -> float:
        metrics = engine.update(rows).metrics
        return metrics["train/not_finite"].number if metrics else 1.0

    before = {name: value.detach().clone() for name, value in engine.parameters.items()}
    for place in PLACES:
        calls.clear()
        handle = None
        if is_faulty and place == "weight":
            layer.mlp.linear_fc2.weight.data.view(-1)[7] = float("inf")
        elif is_faulty:
            handle = layer.mlp.linear_fc1.register_forward_hook(spoil(place), prepend=True)
        found[place] = (update(), engine.last_not_finite())
        if handle is not None:
            handle.remove()
        if place == "transient":
            found["stayed"] = all(torch.equal(before[name], value) for name, value in engine.parameters.items())
            found["sound"] = engine.update(rows).metrics.get("train/update_skipped")
            before = {}
        engine.optimizer_step.skipped_in_a_row = 0
    return found


@pytest.mark.parametrize(
    ("sizes", "rank", "settings"),
    [
        pytest.param((1, 2, 2), 3, {}, id="pp2 dp2"),
        pytest.param((2, 1, 2), 1, {"overlap_grad_reduce": True}, id="tp2 dp2 overlapped"),
    ],
)
def test_the_first_tensor_is_named(
    ranks: RankPool, tiny_model: Callable[..., Path], sizes: tuple[int, int, int], rank: int, settings: dict[str, Any]
) -> None:
    folder = tiny_model(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, vocab_size=431)
    recipe, parallel = recipe_of(folder, "sft", **settings), ParallelConfig(*sizes, 1)
    found = ranks.run(poisoned, recipe, parallel, make_updates(recipe, 431), rank, world_size=4)
    fc1, fc2 = "decoder.layers.1.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"
    for report in found:
        assert report["stayed"] and (report["sound"] is None or report["sound"].number == 0)
        named = {place: report[place][1] for place in PLACES}
        assert all(report[place][0] == 1 for place in PLACES)
        assert named == {
            "output": NotFinite("output", fc1, 1, (rank,)),
            "gradient": NotFinite("gradient", f"{fc1}.weight", 1, (rank,)),
            "transient": NotFinite("none", "", None, ()),
            "weight": NotFinite("weight", f"{fc2}.weight", 1, (rank,)),
        }
