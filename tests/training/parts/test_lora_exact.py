"""Adapters of exact models: the bits of the merged weights, and the gradient that these imply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.types import TrainingSequence
from tests.rank_pool import RankPool
from tests.token_batches import row_batches
from tests.training.invariance import parallel_of
from tests.training.parts.test_lora import DENSE, SETTINGS, build, lora_recipe, rows_of
from tests.training.test_training_engine import make_updates

LAYOUTS = [
    pytest.param("qwen3", {"tp": 2}, {}, id="tp2"),
    pytest.param("qwen3", {"tp": 2}, {"sequence_parallel": False}, id="tp2 without sequence parallelism"),
    pytest.param("qwen3", {"dp": 2}, {"recompute": "full"}, id="dp2 recompute"),
    pytest.param("qwen3_moe", {"tp": 2, "etp": 2}, {}, id="experts tp2 etp2"),
    pytest.param("qwen3_moe", {"dp": 2, "ep": 2}, {}, id="experts dp2 ep2"),
]


def exact_recipe(folder: Path, sizes: dict[str, int], **trainer: Any) -> Recipe:
    """Return the recipe of `lora_recipe` in exact arithmetic. Clipping would scale the compared gradients."""
    fields = lora_recipe(folder, exact=True, **sizes, **trainer).model_dump()
    fields["model"]["dtype"], fields["optimizer"]["clip_grad_norm"] = "bfloat16", 0.0
    return Recipe.model_validate(fields)


def compared(
    recipe: Recipe, parallel: ParallelConfig, sequences: list[TrainingSequence]
) -> tuple[bool, dict[str, float]]:
    """Return whether adapters and merged weights have equal log-probs, and errors of the adapters' gradients.

    The gradient of a merged weight gives both matrices' gradients. Errors are relative to these, by adapter and matrix.
    """
    from megarl.models.lora import adapters_of
    from megarl.training.training_engine import TrainingEngine

    engine, _, _ = build(recipe, parallel)
    rows = row_batches(sequences, rows_of(recipe, parallel, sequences))
    logprobs = engine.forward(rows)
    with engine._merged.merging():
        merged = {name: weight.clone() for name, weight in engine._merged.weights.items()}

    def load(tensors: Any) -> None:
        for name, tensor in tensors.items():
            tensor.data.copy_(merged[name])

    without = Recipe.model_validate(recipe.model_dump() | {"lora": {"rank": 0}})
    plain = TrainingEngine(without, parallel, engine.shape, load)
    is_equal = are_equal(logprobs, plain.forward(rows))
    own = {name: (adapter, adapter.a.clone(), adapter.b.clone()) for _, name, adapter in adapters_of(engine.chunks)}
    engine.update(rows)
    plain.update(rows)
    errors = {}
    for name, (adapter, a, b) in own.items():
        weight: Any = plain.parameters[name.removesuffix("adapter") + "weight"]
        gradient = weight.main_grad.double()
        expected = {
            "a": adapter.scale * b.flatten(0, -2).double().T @ gradient,
            "b": (adapter.scale * gradient @ a.double().T).view(b.shape),
        }
        for letter, value in expected.items():
            if adapter.split_dims[letter] is None:
                dist.all_reduce(value, group=adapter.group)
            found = getattr(adapter, letter).main_grad.double()
            errors[f"{adapter.key}.{letter}"] = float((found - value).norm() / value.norm().clamp(min=1e-12))
    return is_equal, errors


def are_equal(ours: Sequence[Any] | None, others: Sequence[Any] | None) -> bool:
    if ours is None or others is None:
        return ours is others
    return all((one == other).all() for one, other in zip(ours, others, strict=True))


@pytest.mark.parametrize(("family", "sizes", "trainer"), LAYOUTS)
def test_merged_weights_give_values_and_gradients(
    ranks: RankPool, tiny_model: Callable[..., Path], family: str, sizes: dict[str, int], trainer: dict[str, Any]
) -> None:
    experts = {"num_experts": 4} if family == "qwen3_moe" else {}
    folder = tiny_model(family=family, head_dim=32, **(SETTINGS | DENSE | experts))
    recipe = exact_recipe(folder, sizes, **trainer)
    parallel = parallel_of(sizes)
    [sequences, *_] = make_updates(recipe, 431)
    for is_equal, errors in ranks.run(compared, recipe, parallel, sequences, world_size=parallel.world_size):
        assert is_equal
        assert len(errors) >= 4 * 2 * DENSE["num_layers"]
        assert max(errors.values()) < 0.05, max(errors.items(), key=lambda item: item[1])
