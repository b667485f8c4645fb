"""Collecting groups: which are kept, what waits, where it ends, and that a resumed run goes on alike."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config import Recipe
from megarl.evaluation import Answered
from megarl.loops.collection import Collection, teaches
from megarl.types import Completion, MegarlError, Problem, Reward, SamplingSettings

PROBLEMS = [Problem(index, (), (index, 5), f"{index}") for index in range(10)]
SAMPLES = 4


@dataclass
class Students:
    """Answer as `right` says of each problem: so many of four samples; a routed expert is asked for where one is."""

    right: dict[int, int]
    seeds: list[str] = field(default_factory=list)

    async def answer(self, problems: Any, sampling: Any, *, samples_per_prompt: int, seed: str) -> list[Answered]:
        assert samples_per_prompt == SAMPLES
        self.seeds.append(seed)
        return [
            self.one(problem, group, number, f"{seed} {problem.index} {number}")
            for group, problem in enumerate(problems)
            for number in range(SAMPLES)
        ]

    def one(self, problem: Problem, group: int, number: int, name: str) -> Answered:
        is_right = number < self.right[problem.index]
        return Answered(problem, group, self.completion(name), "text", Reward(10.0 * is_right, True, is_right))

    def completion(self, name: str) -> Completion:
        random = np.random.default_rng(sum(name.encode()))
        size = int(random.integers(1, 6))
        logprobs = -random.random(size, dtype=np.float32)
        routed = random.integers(0, 8, (size + 1, 2, 2)).astype(np.int16)
        return Completion(name, random.integers(0, 99, size), logprobs, "stop", 3, routed)


def collection(right: dict[int, int], **algorithm: Any) -> Collection:
    recipe = Recipe.model_validate(
        {
            "name": "r", "loop": "rl", "model": {"path": "m"}, "data": {"train": "t", "shuffle": False},
            "train": {"prompts_per_step": 3, "samples_per_prompt": SAMPLES}, "algorithm": algorithm, "seed": 7,
        }
    )  # fmt: skip
    return Collection(recipe, PROBLEMS, Students(right), SamplingSettings(8))  # type: ignore[arg-type]


def step(collected: Collection) -> tuple[list[int], list[int], dict[str, float]]:
    """Problems that are trained on and that were asked, group by group; metrics."""
    answered, asked, metrics = asyncio.run(collected.step())
    assert [a.group for a in answered] == [group for group in range(3) for _ in range(SAMPLES)]
    return [a.problem.index for a in answered[::SAMPLES]], [a.problem.index for a in asked[::SAMPLES]], metrics


def test_without_a_filter_a_step_is_a_batch_of_the_data() -> None:
    collected = collection(dict.fromkeys(range(10), 0))
    assert [step(collected) for _ in range(2)] == [([0, 1, 2], [0, 1, 2], {}), ([3, 4, 5], [3, 4, 5], {})]
    assert collected.respondents.seeds == ["7 1", "7 2"]  # type: ignore[attr-defined]


def measured(attempts: int, kept: float) -> dict[str, float]:
    return {"rollout/attempts": attempts, "rollout/kept": kept, "rollout/waited": 0.0}


MIXED = {0: 4, 1: 1, 2: 0, 3: 2, 4: 4, 5: 3, 6: 1, 7: 1, 8: 1, 9: 0}


def test_groups_that_teach_nothing_are_replaced_and_what_is_left_over_waits() -> None:
    collected = collection(MIXED, filter_range=(0.0, 1.0))
    assert step(collected) == ([1, 3, 5], [0, 1, 2, 3, 4, 5], measured(2, 0.5))
    assert step(collected) == ([6, 7, 8], [6, 7, 8], measured(1, 1.0))
    assert step(collected)[0] == [1, 3, 5]  # of the next epoch

    collected = collection(MIXED, filter_range=(0.0, 1.0), oversampling=3.0)
    assert step(collected) == ([1, 3, 5], list(range(9)), measured(1, 6 / 9))
    assert step(collected) == ([6, 7, 8], [], measured(0, 0.0))


@pytest.mark.parametrize(("right", "is_taught"), [(0, False), (1, False), (2, True), (3, False), (4, False)])
def test_the_bounds_are_excluded(right: int, is_taught: bool) -> None:
    answered = asyncio.run(Students({0: right}).answer(PROBLEMS[:1], None, samples_per_prompt=SAMPLES, seed=""))
    assert teaches(answered, (0.25, 0.75)) == is_taught


def test_a_step_that_nothing_fills_ends_the_run() -> None:
    collected = collection(MIXED | {1: 0, 3: 4, 5: 0, 6: 4, 7: 0}, filter_range=(0.0, 1.0), max_attempts=3)
    with pytest.raises(MegarlError, match=r"3 batches of 3 prompts gave 1 of 3 groups .* Use problems of another"):
        asyncio.run(collected.step())


def test_a_resumed_run_goes_on_alike(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "filter_range": (0.0, 1.0),
        "oversampling": 2.0,
        "kl_coefficient": 0.5,
        "kl_target": 1.0,
    }
    first = collection(MIXED, **settings)
    asyncio.run(first.step())
    first.kl_coefficient = 0.125
    first.save(tmp_path)
    second = collection(MIXED, **settings)
    second.load(tmp_path)
    assert second.kl_coefficient == 0.125 and second.drawn == first.drawn
    constant = collection(MIXED, kl_coefficient=0.25)
    constant.load(tmp_path)
    assert constant.kl_coefficient == 0.25, "a constant coefficient is the recipe's"
    for _ in range(3):
        assert plain(asyncio.run(first.step())) == plain(asyncio.run(second.step()))


def test_groups_of_several_attempts_are_told_apart() -> None:
    collected = collection(MIXED, filter_range=(0.0, 1.0))
    _, asked, _ = asyncio.run(collected.step())
    assert [a.group for a in asked] == [group for group in range(6) for _ in range(SAMPLES)]


def test_answers_that_wait_survive_in_every_bit(tmp_path: Path) -> None:
    first = collection(MIXED, filter_range=(0.0, 1.0), oversampling=3.0)
    asyncio.run(first.step())
    assert len(first.waiting) == 3
    first.save(tmp_path)
    second = collection(MIXED, filter_range=(0.0, 1.0), oversampling=3.0)
    second.load(tmp_path)
    assert plain(second.waiting) == plain(first.waiting)


def plain(value: Any) -> Any:
    """The same with arrays as lists."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, Answered):
        completion = value.completion
        fields = ("token_ids", "rollout_logprobs", "routed_experts", "finish_reason", "weight_version", "request_id")
        return [value.problem.index, value.text, value.reward] + [plain(getattr(completion, name)) for name in fields]
    return value
