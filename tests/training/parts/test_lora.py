"""Adapters on real ranks: alike however batch and model are cut, and what PEFT makes of the exported folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megarl.config import Recipe
from megarl.config.parallel import ParallelConfig
from megarl.families.shape import padded_vocab_size, read_model_shape
from megarl.tracking.metrics import merge, values
from megarl.types import TrainingSequence
from tests.rank_pool import RankPool
from tests.rounding import MARGIN, allowed_error
from tests.token_batches import by_sequence, own_rows, row_batches
from tests.training.invariance import cut_out
from tests.training.test_training_engine import distance, make_updates, recipe_of, whole

RANK, ALPHA = 3, 7.5
DENSE = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
SETTINGS = {"vocab_size": 431, "initializer_range": 0.15}


def lora_recipe(folder: Path, *, lora: Mapping[str, Any] | None = None, loop: str = "rl", **trainer: Any) -> Recipe:
    recipe = recipe_of(folder, loop, **({"distributed_optimizer": False} | trainer))
    return Recipe.model_validate(recipe.model_dump() | {"lora": {"rank": RANK, "alpha": ALPHA} | dict(lora or {})})


def build(recipe: Recipe, parallel: ParallelConfig, filled: bool = True) -> tuple[Any, Any, Any]:
    """An engine, all ranks' layouts and those of its adapters. Their B is random if `filled`: zeros would hide A."""
    from megarl.checkpoint import safetensors
    from megarl.models.configuration import uses_transformer_engine
    from megarl.models.lora import adapters_of
    from megarl.reshard.layouts.lora import adapter_layouts
    from megarl.reshard.layouts.megatron import check_shapes, megatron_layouts, parameter_shapes
    from megarl.training.training_engine import TrainingEngine

    shape, rank = read_model_shape(recipe.model.path), dist.get_rank()
    layouts = megatron_layouts(
        shape,
        parallel,
        padded_vocab_size=padded_vocab_size(shape.vocab_size, parallel.tp),
        transformer_engine=uses_transformer_engine(),
    )

    def load(parameters: Mapping[str, torch.Tensor]) -> None:
        check_shapes(parameter_shapes(layouts, parallel.coordinates(rank)), parameters)
        safetensors.load(recipe.model.path, layouts[rank], parameters)

    engine = TrainingEngine(recipe, parallel, shape, load)
    for _, _, adapter in adapters_of(engine.chunks) if filled else ():
        dim, size = adapter.split_dims["b"], list(adapter.b.shape)
        parts = 1 if dim is None else adapter.group.size()
        size[dim or 0] *= parts
        generator = torch.Generator().manual_seed(sum(adapter.key.encode()))
        values_of_b = torch.empty(size).uniform_(-0.3, 0.3, generator=generator)
        adapter.b.data.copy_(values_of_b.chunk(parts, dim or 0)[adapter.group.rank() % parts])
    if filled:
        engine.optimizer.reload_model_params()
    return engine, layouts, adapter_layouts(layouts, recipe.lora.targets, recipe.lora.rank)


def rows_of(recipe: Recipe, parallel: ParallelConfig, sequences: Sequence[TrainingSequence]) -> list[Any]:
    return own_rows([len(s) for s in sequences], parallel, recipe.trainer.max_tokens_per_microbatch)


def base_of(engine: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in engine.parameters.items() if ".adapter." not in n}


def train(recipe: Recipe, parallel: ParallelConfig, updates: list[list[TrainingSequence]]) -> dict[str, Any]:
    """One rank's metrics of every update, gradient of the first, adapters at the end, and log-probs."""
    engine, _, layouts = build(recipe, parallel)
    pieces, base = layouts[dist.get_rank()], base_of(engine)
    indices = rows_of(recipe, parallel, updates[0])
    first = row_batches(updates[0], indices)
    result: dict[str, Any] = {"indices": indices, "before": engine.forward(first), "metrics": []}
    result["reference"] = engine.forward_frozen(first)
    for sequences in updates:
        rows = row_batches(sequences, rows_of(recipe, parallel, sequences))
        result["metrics"].append(engine.update(rows).metrics)
        if "gradient" not in result and not recipe.trainer.distributed_optimizer:
            grads = {n: p.main_grad for n, p in engine.parameters.items() if ".adapter." in n}
            result["gradient"] = cut_out(pieces, grads)
    result["adapters"] = cut_out(pieces, engine.parameters)
    result["after"] = engine.forward(first)
    result["base"] = all(torch.equal(base[name], value) for name, value in base_of(engine).items())
    return result


def trained(ranks: RankPool, recipe: Recipe, sizes: Mapping[str, int]) -> dict[str, Any]:
    parallel = ParallelConfig(**{"tp": 1, "pp": 1, "dp": 1, "rollout_tp": 1, **sizes})
    updates = make_updates(recipe, 431)
    results = ranks.run(train, recipe, parallel, updates, world_size=parallel.world_size)
    assert all(r["base"] for r in results), "a frozen weight changed"
    logprobs = {
        name: {i: value for r in results for i, value in by_sequence(updates[0], r["indices"], r[name]).items()}
        for name in ("before", "reference", "after")
    }
    reported = [[part for part in step if part] for step in zip(*(r["metrics"] for r in results), strict=True)]
    return {
        "metrics": [values(merge(parts)) for parts in reported],
        "adapters": whole([r["adapters"] for r in results]),
        **({"gradient": whole([r["gradient"] for r in results])} if "gradient" in results[0] else {}),
        **{name: [found[i] for i in sorted(found)] for name, found in logprobs.items()},
    }


@pytest.fixture(scope="module")
def folders(tiny_model: Callable[..., Path]) -> dict[str, Path]:
    return {
        "dense": tiny_model(**(SETTINGS | DENSE)),
        "qwen2_moe": tiny_model(family="qwen2_moe", num_layers=4, num_kv_heads=2, **SETTINGS),
        "deepseek_v3": tiny_model(family="deepseek_v3", num_layers=2, **SETTINGS),
    }


@pytest.fixture(scope="module")
def baseline(ranks: RankPool, folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """One rank, the whole batch in one row."""
    return {name: trained(ranks, lora_recipe(folder), {}) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def allowed(folders: dict[str, Path]) -> dict[str, tuple[float, float]]:
    """Return how far log-probs of two layouts may differ, and gradients relative to their norm.

    1e-5, or what the model's own rounding asks for: that of experts is ten times that of a dense model.
    """
    found = {}
    for name, folder in folders.items():
        sequences = make_updates(lora_recipe(folder), 431)[0]
        (rounded, rough), (exact, smooth) = (
            transformers_logprobs(folder, sequences, dtype) for dtype in (torch.float32, torch.float64)
        )
        found[name] = max(1e-5, allowed_error(rounded, exact)), max(1e-5, MARGIN * distance(rough, smooth))
    return found


def transformers_logprobs(
    folder: Path, sequences: Sequence[TrainingSequence], dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of the base model at the recipe's temperature, and the gradient of their sum."""
    from transformers import AutoModelForCausalLM

    # torch's grouped product knows no float64.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
    temperature = lora_recipe(folder).rollout.sampling.temperature
    found = []
    for sequence in sequences:
        tokens = torch.from_numpy(sequence.token_ids)
        distribution = (model(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
        found.append(distribution.gather(1, tokens[1:, None])[:, 0])
    logprobs = torch.cat(found)
    logprobs.sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("model", "sizes", "trainer"),
    [
        pytest.param("dense", {"tp": 2}, {"max_tokens_per_microbatch": 40}, id="tp2"),
        pytest.param("dense", {"tp": 2}, {"sequence_parallel": False}, id="tp2 without sequence parallelism"),
        pytest.param("dense", {"tp": 2, "dp": 2}, {"distributed_optimizer": True}, id="tp2 dp2, distributed optimizer"),
        pytest.param("dense", {"pp": 2}, {"max_tokens_per_microbatch": 30, "recompute": "full"}, id="pp2 recompute"),
        pytest.param("dense", {"pp": 2, "vpp": 2}, {"max_tokens_per_microbatch": 50}, id="pp2 vpp2"),
        pytest.param("dense", {"cp": 2}, {}, id="cp2"),
        pytest.param("dense", {"dp": 2}, {"max_tokens_per_microbatch": 30}, id="dp2"),
        pytest.param("deepseek_v3", {"tp": 2}, {}, id="latent attention tp2"),
        pytest.param("qwen2_moe", {"tp": 2, "ep": 2}, {}, id="experts tp2 ep2"),
        pytest.param("qwen2_moe", {"etp": 2, "dp": 2}, {}, id="experts etp2 dp2"),
        pytest.param("qwen2_moe", {"tp": 2, "etp": 2, "ep": 2, "dp": 2}, {}, id="experts tp2 etp2 ep2 dp2"),
    ],
)
def test_updates_do_not_depend_on_the_cut(
    ranks: RankPool,
    folders: dict[str, Path],
    baseline: dict[str, dict[str, Any]],
    allowed: dict[str, tuple[float, float]],
    model: str,
    sizes: dict[str, int],
    trainer: dict[str, Any],
) -> None:
    got, expected = trained(ranks, lora_recipe(folders[model], **trainer), sizes), baseline[model]
    allowed_of_logprobs, allowed_of_gradient = allowed[model]
    for step, (mine, theirs) in enumerate(zip(got["metrics"], expected["metrics"], strict=True), 1):
        assert mine == pytest.approx(theirs, rel=1e-5 if step == 1 else 1e-4), f"update {step}"
    if "gradient" in got:
        assert distance(got["gradient"], expected["gradient"]) <= allowed_of_gradient
    assert distance(got["adapters"], expected["adapters"]) <= 1e-5
    for name in ("before", "reference", "after"):
        for mine, theirs in zip(got[name], expected[name], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-4 if name == "after" else allowed_of_logprobs)


def test_the_baseline_is_worth_comparing_with(baseline: dict[str, dict[str, Any]]) -> None:
    for got in baseline.values():
        for value in got["gradient"].values():
            assert value.abs().max() > 0
        assert max(np.abs(b - r).max() for b, r in zip(got["before"], got["reference"], strict=True)) > 0.05
        assert max(np.abs(b - a).max() for b, a in zip(got["before"], got["after"], strict=True)) > 1e-2
    assert math.isclose(len(baseline["dense"]["gradient"]), 4 * 7 * 2)
