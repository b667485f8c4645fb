"""An engine whose weights are one step old: the metrics show it, and the correction gives the trainer's own gradient.
Answers that waited for a step: their ratio starts from the weights that sampled them, and there is no gap.

Every answer of one token is there with the probability that the engine gives it, so that sums over them are
expectations, without the noise of sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.importance import IMPORTANCE_SAMPLING
from megarl.config import AlgorithmConfig, Recipe
from megarl.config.parallel import ParallelConfig
from megarl.data.token_batch import TokenBatch
from megarl.rollout.step.advantages import compute_importance_weights
from megarl.rollout.step.updates import update_metrics
from megarl.tracking.metrics import merge
from megarl.training.objective import policy_objective
from megarl.types import TrainingSequence
from tests.rank_pool import RankPool
from tests.token_batches import by_sequence, row_batches
from tests.training.test_training_engine import build, cut_out, distance, rows_of, whole

VOCABULARY, PROMPT = 431, (7, 19, 5)
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "vocab_size": VOCABULARY,
    "initializer_range": 0.15,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "fresh": {},
    "stale": {},
    "corrected": {"importance_sampling": "tis", "importance_sampling_high": 1e6},
    "cut at 2": {"importance_sampling": "tis", "importance_sampling_high": 2.0},
}
WAITED = ("one update", "known", "engine's", "engine's, second update", "forgotten")


def recipe_of(folder: Path, **algorithm: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "stale", "loop": "rl", "model": {"path": str(folder), "dtype": "float32"},
            "data": {"train": "unused"}, "algorithm": algorithm,
            "trainer": {"max_tokens_per_microbatch": 256, "distributed_optimizer": False},
            # A step so small that only its gradient tells.
            "optimizer": {"name": "sgd", "learning_rate": 1e-30, "clip_grad_norm": 0.0},
        }
    )  # fmt: skip


@dataclass(frozen=True)
class Aged:
    """A trainer after its weights have moved, and every answer of one token with its log-probs before and after."""

    engine: Any
    pieces: Any
    answers: list[TrainingSequence]
    before: list[np.ndarray]
    after: list[np.ndarray]

    def update(self, recipe: Recipe, parallel: ParallelConfig, sequences: Sequence[TrainingSequence]) -> Any:
        """This rank's part of the gradient, and its metrics."""
        metrics = self.engine.update(row_batches(sequences, rows_of(recipe, parallel, sequences))).metrics
        return cut_out(self.pieces, {name: p.main_grad for name, p in self.engine.parameters.items()}), metrics


def aged(recipe: Recipe, parallel: ParallelConfig) -> Aged:
    engine, _, pieces = build(recipe, parallel)
    tokens = [np.array([*PROMPT, token]) for token in range(VOCABULARY)]
    last = np.arange(len(PROMPT) + 1) == len(PROMPT)
    advantage = np.random.default_rng(1).normal(0.0, 1.0, VOCABULARY).astype(np.float32)
    bare = [
        TrainingSequence(t, last, advantages=a * last.astype(np.float32))
        for t, a in zip(tokens, advantage, strict=True)
    ]

    def logprobs() -> list[np.ndarray]:
        indices = rows_of(recipe, parallel, bare)
        found = engine.forward(row_batches(bare, indices))
        shared: list[Any] = [None] * parallel.world_size
        torch.distributed.all_gather_object(shared, by_sequence(bare, indices, found))
        together = {i: v for part in shared for i, v in part.items()}
        return [together[i] for i in range(VOCABULARY)]

    engines = logprobs()
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in sorted(engine.parameters.items()):
            if "layernorm" in name:
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=random))
    return Aged(engine, pieces, bare, engines, logprobs())


def gradients(recipe: Recipe, parallel: ParallelConfig) -> dict[str, Any]:
    """One rank's part of the gradient, and its metrics, by case."""
    made = aged(recipe, parallel)
    found: dict[str, Any] = {}
    for case, algorithm in CASES.items():
        rollout = made.after if case == "fresh" else made.before
        sequences = [
            replace(s, rollout_logprobs=r, old_logprobs=t, token_weights=(np.exp(r) * s.loss_mask).astype(np.float32))
            for s, r, t in zip(made.answers, rollout, made.after, strict=True)
        ]
        if case in ("fresh", "stale"):
            # What training does without a correction: the ratio starts at the only update.
            sequences = [replace(s, old_logprobs=None) for s in sequences]
        corrected: dict[str, float] = {}
        if algorithm:
            batch = TokenBatch.from_sequences(sequences)
            corrected = compute_importance_weights(batch, AlgorithmConfig.model_validate(algorithm))
            parts = np.split(batch.per_token["importance_weights"], batch.cu_seqlens[1:-1])
            sequences = [replace(s, importance_weights=part) for s, part in zip(sequences, parts, strict=True)]
        found[case] = *made.update(recipe, parallel, sequences), corrected
    return found


def with_waiting(recipe: Recipe, parallel: ParallelConfig, from_engine: Recipe) -> dict[str, Any]:
    """The same of a batch whose every other answer has waited since before the weights moved."""
    made = aged(recipe, parallel)
    nothing = np.full(len(PROMPT) + 1, np.nan, np.float32)
    rollout = [
        before if i % 2 else after for i, (before, after) in enumerate(zip(made.before, made.after, strict=True))
    ]
    sequences = [
        replace(s, rollout_logprobs=r, token_weights=(s.loss_mask / VOCABULARY).astype(np.float32))
        for s, r in zip(made.answers, rollout, strict=True)
    ]
    old: dict[str, list[np.ndarray | None]] = {
        "one update": [r if i % 2 else nothing for i, r in enumerate(rollout)],
        "known": list(rollout),
        "forgotten": [None] * VOCABULARY,
    }
    found = {
        case: made.update(
            recipe, parallel, [replace(s, old_logprobs=o) for s, o in zip(sequences, old[case], strict=True)]
        )
        for case in old
    }
    made.engine.recipe = from_engine
    engines = [replace(s, old_logprobs=r) for s, r in zip(sequences, rollout, strict=True)]
    half = [replace(s, rollout_logprobs=nothing if i % 2 else s.rollout_logprobs) for i, s in enumerate(engines)]
    found["engine's"] = made.update(recipe, parallel, half)
    later = [replace(s, rollout_logprobs=nothing) for s in engines]
    found["engine's, second update"] = made.update(recipe, parallel, later)
    return found


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)], ids=["one rank", "tp2 dp2"])
def test_a_stale_engine_is_seen_and_corrected(
    ranks: RankPool, tiny_model: Callable[..., Path], sizes: tuple[int, int]
) -> None:
    folder = tiny_model(**SIZES)
    parallel = ParallelConfig(tp=sizes[0], pp=1, dp=sizes[1], rollout_tp=1)
    recipe = recipe_of(folder, policy_loss="policy_gradient")
    results = ranks.run(gradients, recipe, parallel, world_size=parallel.world_size)
    gradient = {case: whole([result[case][0] for result in results]) for case in CASES}
    error = {case: distance(gradient[case], gradient["fresh"]) for case in CASES}
    gap = {case: update_metrics([merge([result[case][1] for result in results])]) for case in CASES}
    # Fresh, there is nothing to see; stale, the gradient is off by far more than what a cap takes away.
    assert gap["fresh"]["logprob_gap/max"] < 1e-5 and gap["fresh"]["logprob_gap/ess"] == pytest.approx(1, abs=1e-6)
    assert gap["stale"]["logprob_gap/mean"] > 0.05 and gap["stale"]["logprob_gap/ess"] < 0.99
    assert error["stale"] > 0.2
    assert error["corrected"] < 1e-5
    assert error["cut at 2"] < 0.5 * error["stale"]
    assert 0 < results[0]["cut at 2"][2]["importance/clipped_share"] < 0.5


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2)], ids=["one rank", "tp2 dp2"])
def test_answers_that_waited_start_from_the_weights_that_sampled_them(
    ranks: RankPool, tiny_model: Callable[..., Path], sizes: tuple[int, int]
) -> None:
    folder = tiny_model(**SIZES)
    parallel = ParallelConfig(tp=sizes[0], pp=1, dp=sizes[1], rollout_tp=1)
    wide = {"clip_low": 0.9, "clip_high": 9.0}
    recipes = recipe_of(folder, **wide), recipe_of(folder, **wide, old_logprobs="rollout")
    results = ranks.run(with_waiting, recipes[0], parallel, recipes[1], world_size=parallel.world_size)
    gradient = {case: whole([result[case][0] for result in results]) for case in WAITED}
    found = {case: update_metrics([merge([result[case][1] for result in results])]) for case in WAITED}
    # As it would be if nothing were kept: each ratio starts at 1, and the gap is between two weights.
    assert found["forgotten"]["train/ratio"] == 1.0 and found["forgotten"]["logprob_gap/max"] > 1.0
    assert distance(gradient["forgotten"], gradient["known"]) > 0.1
    for case in ("one update", "known"):
        assert found[case]["logprob_gap/max"] < 1e-5 and found[case]["logprob_gap/measured"] == 1.0
        assert abs(found[case]["train/ratio"] - 1) > 0.01
    assert distance(gradient["one update"], gradient["known"]) < 1e-5
    # From the engine's log-probs the ratio starts alike; compared are those of equal weights alone.
    for case, measured in (("engine's", 216 / 431), ("engine's, second update", 0.0)):
        assert distance(gradient[case], gradient["known"]) < 1e-5
        assert found[case]["logprob_gap/measured"] == pytest.approx(measured)
    assert found["engine's"]["logprob_gap/max"] < 1e-5
    assert "logprob_gap/mean" not in found["engine's, second update"]


def in_pass_and_in_update(recipe: Recipe, parallel: ParallelConfig) -> dict[str, Any]:
    """Parts of the gradient by correction, and metrics: weights of a pass before the update, then of the update."""
    engine, _, pieces = build(recipe, parallel)
    random = np.random.default_rng(5)
    sequences = []
    for length in (9, 4, 17, 6, 11, 12):
        mask = np.arange(length) >= 3
        advantages, weights = (random.normal(size=length).astype(np.float32) * mask for _ in range(2))
        tokens = random.integers(1, VOCABULARY, length)
        sequences.append(TrainingSequence(tokens, mask, advantages=advantages, token_weights=weights))
    indices = rows_of(recipe, parallel, sequences)
    shared: list[Any] = [None] * parallel.world_size
    torch.distributed.all_gather_object(
        shared, by_sequence(sequences, indices, engine.forward(row_batches(sequences, indices)))
    )
    own = {i: v for part in shared for i, v in part.items()}
    drifts = [random.normal(0, 0.3, len(s.token_ids)).astype(np.float32) for s in sequences]
    sequences = [
        replace(s, rollout_logprobs=np.where(s.loss_mask, own[i] + drifts[i], np.float32(0)))
        for i, s in enumerate(sequences)
    ]
    found: dict[str, Any] = {}
    for name in IMPORTANCE_SAMPLING:
        algorithm = AlgorithmConfig.model_validate({"importance_sampling": name, "importance_sampling_high": 1.5})
        engine.role = replace(engine.role, objective=policy_objective(algorithm))
        known = [replace(s, old_logprobs=np.where(s.loss_mask, own[i], 0)) for i, s in enumerate(sequences)]
        batch = TokenBatch.from_sequences(known)
        metrics = compute_importance_weights(batch, algorithm)
        parts = np.split(batch.per_token["importance_weights"], batch.cu_seqlens[1:-1])
        weighed = [replace(s, importance_weights=part) for s, part in zip(known, parts, strict=True)]
        parts_of = []
        for batch_of in (weighed, sequences):
            updated = engine.update(row_batches(batch_of, indices)).metrics
            gradient = {name: p.main_grad.clone() for name, p in engine.parameters.items()}
            parts_of.append((cut_out(pieces, gradient), updated))
        found[name] = parts_of, metrics
    return found


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(ParallelConfig(tp=1, pp=1, dp=1, rollout_tp=1), id="one rank"),
        pytest.param(ParallelConfig(tp=2, pp=1, dp=2, rollout_tp=1), id="tp2 dp2"),
        pytest.param(ParallelConfig(tp=1, pp=1, dp=1, cp=2, rollout_tp=1), id="cp2"),
    ],
)
def test_an_update_corrects_as_a_pass_before_it(
    ranks: RankPool, tiny_model: Callable[..., Path], parallel: ParallelConfig
) -> None:
    recipe = recipe_of(tiny_model(**SIZES), policy_loss="policy_gradient")
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"cp": parallel.cp})})
    results = ranks.run(in_pass_and_in_update, recipe, parallel, world_size=parallel.world_size)
    for name in IMPORTANCE_SAMPLING:
        before, within = (whole([result[name][0][side][0] for result in results]) for side in (0, 1))
        assert all(np.array_equal(before[key], within[key]) for key in before)
        expected = results[0][name][1]
        got = update_metrics([merge([result[name][0][1][1] for result in results])])
        assert {key: got[key] for key in expected} == pytest.approx(expected, rel=1e-6)
        assert got["logprob_gap/measured"] == 1.0
    assert expected["importance/mean"] > 0
