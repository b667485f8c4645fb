"""An engine whose weights are one step old: the metrics show it, and the correction gives the trainer's own gradient.

Every answer of one token is there with the probability that the engine gives it, so that sums over them are
expectations, without the noise of sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import AlgorithmConfig, Recipe
from megarl.loops.batches import add_corrections, update_metrics
from megarl.parallel_layout import ParallelLayout
from megarl.testing import RankPool
from megarl.tracking.metrics import merge
from megarl.types import TrainingSequence
from tests.training.test_engine import build, cut_out, distance, rows_of, whole

VOCABULARY, PROMPT = 431, (7, 19, 5)
CASES: dict[str, dict[str, Any]] = {
    "fresh": {},
    "stale": {},
    "corrected": {"correction": "truncated", "correction_high": 1e6},
    "cut at 2": {"correction": "truncated", "correction_high": 2.0},
}


def recipe_of(folder: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "stale", "loop": "rl", "model": {"path": str(folder), "dtype": "float32"},
            "data": {"train": "unused"}, "algorithm": {"policy_loss": "policy_gradient"},
            "trainer": {"max_tokens_per_microbatch": 256, "distributed_optimizer": False},
            # A step so small that only its gradient tells.
            "optimizer": {"name": "sgd", "learning_rate": 1e-30, "clip_grad_norm": 0.0},
        }
    )  # fmt: skip


def gradients(recipe: Recipe, layout: ParallelLayout) -> dict[str, Any]:
    """One rank's part of the gradient, and its metrics, by case."""
    engine, _, pieces = build(recipe, layout)
    tokens = [np.array([*PROMPT, token]) for token in range(VOCABULARY)]
    last = np.arange(len(PROMPT) + 1) == len(PROMPT)
    advantage = np.random.default_rng(1).normal(0.0, 1.0, VOCABULARY).astype(np.float32)
    bare = [
        TrainingSequence(t, last, advantages=a * last.astype(np.float32))
        for t, a in zip(tokens, advantage, strict=True)
    ]

    def logprobs() -> list[np.ndarray]:
        indices = rows_of(recipe, layout, bare)
        found = engine.forward([[bare[i] for i in row] for row in indices])
        by_index = {
            i: v for row, values in zip(indices, found or (), strict=False) for i, v in zip(row, values, strict=True)
        }
        shared: list[Any] = [None] * layout.world_size
        torch.distributed.all_gather_object(shared, by_index)
        together = {i: v for part in shared for i, v in part.items()}
        return [together[i] for i in range(VOCABULARY)]

    engines = logprobs()
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(engine.parameters.items()):
            if "layernorm" in name:
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=random))
    trainers = logprobs()
    found: dict[str, Any] = {}
    for case, algorithm in CASES.items():
        rollout = trainers if case == "fresh" else engines
        sequences = [
            replace(s, rollout_logprobs=r, old_logprobs=t, token_weights=(np.exp(r) * last).astype(np.float32))
            for s, r, t in zip(bare, rollout, trainers, strict=True)
        ]
        corrected: dict[str, float] = {}
        if algorithm:
            sequences, corrected = add_corrections(sequences, AlgorithmConfig.model_validate(algorithm))
        metrics = engine.update([[sequences[i] for i in row] for row in rows_of(recipe, layout, sequences)])
        gradient = cut_out(pieces, {name: p.main_grad for name, p in engine.parameters.items()})
        found[case] = gradient, metrics, corrected
    return found


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)], ids=["one rank", "tp2 dp2"])
def test_a_stale_engine_is_seen_and_corrected(
    ranks: RankPool, tiny_model: Callable[..., Path], sizes: tuple[int, int]
) -> None:
    folder = tiny_model(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=VOCABULARY, initializer_range=0.15
    )
    layout = ParallelLayout(tp=sizes[0], pp=1, dp=sizes[1], rollout_tp=1)
    results = ranks.run(gradients, recipe_of(folder), layout, world_size=layout.world_size)
    gradient = {case: whole([result[case][0] for result in results]) for case in CASES}
    error = {case: distance(gradient[case], gradient["fresh"]) for case in CASES}
    gap = {case: update_metrics([merge([result[case][1] for result in results])]) for case in CASES}
    # Fresh, there is nothing to see; stale, the gradient is off by far more than what a cap takes away.
    assert gap["fresh"]["logprob_gap/max"] < 1e-5 and gap["fresh"]["logprob_gap/ess"] == pytest.approx(1, abs=1e-6)
    assert gap["stale"]["logprob_gap/mean"] > 0.05 and gap["stale"]["logprob_gap/ess"] < 0.99
    assert error["stale"] > 0.2
    assert error["corrected"] < 1e-5
    assert error["cut at 2"] < 0.5 * error["stale"]
    assert 0 < results[0]["cut at 2"][2]["importance/cut"] < 0.5
