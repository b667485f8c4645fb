"""Teachers' numbers and advantages, worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import DistillationConfig, Recipe
from megarl.data.token_batch import TokenBatch
from megarl.families.shape import ModelShape, read_model_shape
from megarl.rollout.step.rl_batch import RLBatch
from megarl.rollout.step.teachers import Teachers, add_reward_advantages, compute_teacher_advantages
from tests.rollout.batches import attempt, batch_of, of_sequences

POLICY = [0, 0, -1.0, -2.0, -0.5, 0, 0, -1.0]
TEACHER = [-9, -9, -3.0, -1.0, -0.5, -9, -9, -0.25]
"""Log-probs of two samples, of three and of one token."""


@pytest.mark.parametrize(
    ("config", "expected", "clipped"),
    [
        pytest.param({}, [[0, 0, -2.0, 1.0, 0.0], [0, 0, 0.75]], None, id="each token for itself"),
        pytest.param({"gamma": 1.0}, [[0, 0, -1.0, 1.0, 0.0], [0, 0, 0.75]], None, id="sequences"),
        pytest.param({"gamma": 0.5}, [[0, 0, -1.5, 1.0, 0.0], [0, 0, 0.75]], None, id="discounted"),
        pytest.param({"max_log_ratio": 0.8}, [[0, 0, -0.8, 0.8, 0.0], [0, 0, 0.75]], 0.5, id="held"),
        pytest.param({"max_log_ratio": 0.8, "gamma": 1.0}, [[0, 0, 0.0, 0.8, 0.0], [0, 0, 0.75]], 0.5, id="both"),
    ],
)
def test_advantages(config: dict[str, float], expected: list[list[float]], clipped: float | None) -> None:
    batch = batch_of([attempt(0, 1.0, 3), attempt(0, 0.0, 1)])
    batch.per_token["old_logprobs"] = np.array(POLICY, np.float32)
    found = compute_teacher_advantages(batch, np.array(TEACHER, np.float32), DistillationConfig.model_validate(config))
    for mine, theirs in zip(of_sequences(batch, "advantages"), expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)
    # Policy minus teacher: 2, -1, 0 and -0.75 over four tokens, whatever is held.
    assert found["distillation/reverse_kl"] == pytest.approx(0.0625)
    assert found.get("distillation/clipped") == clipped


def test_the_kl_of_tokens_by_their_place_in_the_sample() -> None:
    """Samples of 600 and 70 tokens: bands begin anew in each, and an untrained token has no number."""
    batch = batch_of([attempt(0, 1.0, 600), attempt(0, 0.0, 70)])
    batch.loss_mask[2] = False
    trained = np.flatnonzero(batch.loss_mask)
    numbers = np.concatenate([np.arange(599), np.arange(70)])
    old = np.zeros(len(batch.token_ids), np.float32)
    old[trained] = np.where(numbers < 64, 1.0, np.where(numbers < 512, 2.0, 4.0))
    batch.per_token["old_logprobs"] = old
    found = compute_teacher_advantages(batch, np.zeros_like(old), DistillationConfig())
    bands = [found[f"distillation/reverse_kl/{name}"] for name in ("first_64", "from_64", "from_512")]
    assert bands == [1.0, 2.0, 4.0]
    assert found["distillation/reverse_kl"] == pytest.approx(float(old[trained].mean()))
    short = batch_of([attempt(0, 1.0, 3)])
    short.per_token["old_logprobs"] = np.zeros(len(short.token_ids), np.float32)
    found = compute_teacher_advantages(short, np.zeros(len(short.token_ids), np.float32), DistillationConfig())
    assert "distillation/reverse_kl/from_64" not in found


def test_advantages_of_rewards_are_added() -> None:
    batch = batch_of([attempt(0, 1.0, 3), attempt(0, 0.0, 1)])
    batch.per_token["old_logprobs"] = np.array(POLICY, np.float32)
    distillation = {"teacher": "t", "use_task_rewards": True, "kl_coefficient": 0.5}
    recipe = Recipe.model_validate(
        {
            "name": "r",
            "loop": "distillation",
            "model": {"path": "m"},
            "data": {"train": "t"},
            "distillation": distillation,
            "algorithm": {"normalize_by_std": False},
        }
    )
    compute_teacher_advantages(batch, np.array(TEACHER, np.float32), recipe.distillation)
    assert add_reward_advantages(batch, recipe) == {}
    # Rewards 1 and 0 less their mean, and half of the log-ratios -2, 1, 0 and 0.75.
    expected = [[0, 0, 0.5 - 1.0, 0.5 + 0.5, 0.5], [0, 0, -0.5 + 0.375]]
    for mine, theirs in zip(of_sequences(batch, "advantages"), expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("preset", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_presets_kl_penalty_needs_no_reference_in_distillation(preset: str) -> None:
    batch = batch_of([attempt(0, 1.0, 3), attempt(0, 0.0, 1)])
    batch.per_token["old_logprobs"] = np.array(POLICY, np.float32)
    values = {
        "name": "r",
        "loop": "distillation",
        "model": {"path": "m"},
        "data": {"train": "t"},
        "distillation": {"teacher": "t", "use_task_rewards": True},
        "algorithm": {"preset": preset},
    }
    recipe, without = (
        Recipe.model_validate(values | {"algorithm": {"preset": preset} | changed})
        for changed in ({}, {"kl_coefficient": 0.0})
    )
    found = []
    for one in (recipe, without):
        compute_teacher_advantages(batch, np.array(TEACHER, np.float32), one.distillation)
        assert add_reward_advantages(batch, one) == {}
        found.append(batch.per_token["advantages"].tolist())
    assert found[0] == found[1] and any(found[0])


def test_samples_get_the_teacher_of_their_source() -> None:
    recipe = Recipe.model_validate(
        {
            "name": "r",
            "loop": "distillation",
            "model": {"path": "m"},
            "data": {"train": "t"},
            "distillation": {"teacher": "general"},
            "mixture": {
                "code": {"distillation": {"teacher": "coder"}},
                "chat": {},
                "math": {"distillation": {"teacher": "coder"}},
            },
        }
    )
    assert recipe.teachers == {"teacher0": "coder", "teacher1": "general"}
    sources = ["chat", "code", "math"]
    batch = batch_of([replace(attempt(0, 1.0, 2), environment=source) for source in sources])
    models = {name: object() for name in recipe.teachers}
    Teachers(recipe, models).assign_teachers(batch)  # type: ignore[arg-type]
    assert batch.target_keys is not None and batch.target_keys.tolist() == [[1, 0], [0, 1], [0, 2]]
    [minibatch] = [batch.select_samples([2, 0])]
    assert minibatch.target_keys is not None and minibatch.target_keys.tolist() == [[0, 2], [1, 0]]
    assert batch.with_arrays({}).target_keys is None


def test_a_reward_that_failed_keeps_no_sample_from_its_teacher() -> None:
    unscored = replace(attempt(0, 1.0, 2), reward=None)
    scored, taught = (RLBatch.from_groups([[unscored]], needs_rewards=needed) for needed in (True, False))
    assert scored.loss_mask.tolist() == [False] * 4 and taught.loss_mask.tolist() == [False, False, True, True]


@dataclass
class Scores:
    """A teacher of so large a vocabulary; its log-probs are minus a token's id."""

    shape: ModelShape

    async def forward(self, batch: TokenBatch) -> np.ndarray:
        return -batch.token_ids.astype(np.float32)


def test_tokens_that_a_teacher_lacks_are_not_trained(tiny_model: Callable[..., Path]) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "r",
            "loop": "distillation",
            "model": {"path": "m"},
            "data": {"train": "t"},
            "rollout": {"environment": "single_turn"},
            "distillation": {"teacher": "t"},
        }
    )
    shape = read_model_shape(tiny_model())
    batch = batch_of([attempt(0, 1.0, 3), attempt(0, 0.0, 1)])
    batch.token_ids[3] = shape.vocab_size
    models: Any = {"teacher0": Scores(shape)}
    teachers = Teachers(recipe, models)
    teachers.assign_teachers(batch)
    assert teachers.mask_unknown_tokens(batch) == {"distillation/unknown": pytest.approx(0.25)}
    assert batch.loss_mask.tolist() == [False, False, True, False, True, False, False, True]
    found = asyncio.run(teachers.score(batch))
    assert found.tolist() == [-10, -11, -50, 0, -52, -10, -11, -50]
    assert batch.token_ids[3] == shape.vocab_size
