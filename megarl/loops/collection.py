"""Collecting a step's groups of answers: prompts are drawn until enough groups teach something."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from megarl.config import Recipe
from megarl.data.sampler import DataOrder
from megarl.evaluation import Answered, Respondents
from megarl.types import Completion, MegarlError, Problem, Reward, SamplingSettings
from megarl.workers.sampling import AbandonedError

Group = list[Answered]
STATE, ARRAYS = "collection.json", "collection.safetensors"


@dataclass
class Collection:
    """What a run has drawn, and groups that wait for the next step; `save` and `load` make a resumed run go on alike.

    `kl_coefficient` is the KL's weight as adapted so far.
    """

    recipe: Recipe
    problems: Sequence[Problem]
    respondents: Respondents
    sampling: SamplingSettings
    drawn: int = field(default=0, init=False)
    kl_coefficient: float = field(init=False)
    waiting: list[Group] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        recipe = self.recipe
        asked = recipe.train.prompts_per_step
        if recipe.algorithm.filter_range:
            asked = ceil(asked * recipe.algorithm.oversampling)
        self._order = DataOrder(len(self.problems), asked, recipe.seed, recipe.data.shuffle)
        self.kl_coefficient = recipe.algorithm.kl_coefficient

    async def step(self) -> tuple[list[Answered], list[Answered], dict[str, float]]:
        """The answers to train on, `train.prompts_per_step` groups in order; all that were drawn for it; metrics.

        Metrics, where groups are filtered: `rollout/attempts`, batches of prompts that were drawn; `rollout/kept`, the
        share of drawn groups that passed; `rollout/waited`, the share of answers from weights before the newest. Raises
        MegarlError if `algorithm.max_attempts` batches do not fill a step, AbandonedError, everything as before, where
        the run is to stop.
        """
        self._before = self.drawn, self.waiting
        try:
            return await self._step()
        except AbandonedError:
            self.forget_step()
            raise

    def forget_step(self) -> None:
        """As if the newest step's answers had not been drawn."""
        self.drawn, self.waiting = self._before

    async def _step(self) -> tuple[list[Answered], list[Answered], dict[str, float]]:
        recipe, wanted = self.recipe, self.recipe.train.prompts_per_step
        asked: list[Answered] = []
        attempts = passed = 0
        while len(self.waiting) < wanted:
            if attempts == recipe.algorithm.max_attempts:
                raise MegarlError(
                    f"{attempts} batches of {self._order.batch_size} prompts gave {len(self.waiting)} of {wanted} "
                    f"groups whose accuracy is within algorithm.filter_range {recipe.algorithm.filter_range}. "
                    "Use problems of another difficulty, or raise algorithm.max_attempts or train.samples_per_prompt."
                )
            answered = await self.respondents.answer(
                [self.problems[index] for index in self._order.batch(self.drawn)],
                self.sampling,
                samples_per_prompt=recipe.train.samples_per_prompt,
                seed=f"{recipe.seed} {self.drawn + 1}",
            )
            asked += [replace(a, group=a.group + attempts * self._order.batch_size) for a in answered]
            attempts, self.drawn = attempts + 1, self.drawn + 1
            groups = [list(group) for _, group in groupby(answered, key=lambda a: a.group)]
            kept = [group for group in groups if teaches(group, recipe.algorithm.filter_range)]
            passed += len(kept)
            self.waiting = self.waiting + kept
        taken, self.waiting = self.waiting[:wanted], self.waiting[wanted:]
        answers = [replace(a, group=number) for number, group in enumerate(taken) for a in group]
        if recipe.algorithm.filter_range is None:
            return answers, asked, {}
        versions = [a.completion.weight_version for a in answers]
        return (
            answers,
            asked,
            {
                "rollout/attempts": attempts,
                "rollout/kept": passed / max(attempts * self._order.batch_size, 1),
                "rollout/waited": float(np.mean([version < max(versions) for version in versions])),
            },
        )

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint's folder."""
        flat = [(number, a) for number, group in enumerate(self.waiting) for a in group]
        arrays: dict[str, np.ndarray] = {}
        for index, (_, a) in enumerate(flat):
            arrays[f"{index}.token_ids"] = a.completion.token_ids
            arrays[f"{index}.rollout_logprobs"] = a.completion.rollout_logprobs
            if a.completion.routed_experts is not None:
                arrays[f"{index}.routed_experts"] = a.completion.routed_experts
        state = {
            "drawn": self.drawn, "kl_coefficient": self.kl_coefficient,
            "waiting": [_plain(number, a) for number, a in flat],
        }  # fmt: skip
        (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        (folder / ARRAYS).write_bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint's state."""
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        arrays = load_file(folder / ARRAYS)
        self.drawn = state["drawn"]
        if self.recipe.algorithm.kl_target is not None:
            self.kl_coefficient = state["kl_coefficient"]
        by_index = {problem.index: problem for problem in self.problems}
        answers = []
        for index, plain in enumerate(state["waiting"]):
            completion = Completion(
                **plain["completion"],
                token_ids=arrays[f"{index}.token_ids"],
                rollout_logprobs=arrays[f"{index}.rollout_logprobs"],
                routed_experts=arrays.get(f"{index}.routed_experts"),
            )
            problem = by_index[plain["problem"]]
            answers.append(Answered(problem, plain["group"], completion, plain["text"], Reward(**plain["reward"])))
        self.waiting = [list(group) for _, group in groupby(answers, key=lambda a: a.group)]


def teaches(group: Group, filter_range: tuple[float, float] | None) -> bool:
    """Whether a group's accuracy is between the two, both excluded; any is, without a range."""
    if filter_range is None:
        return True
    low, high = filter_range
    return low < sum(a.reward.answer_correct for a in group) / len(group) < high


def _plain(number: int, answered: Answered) -> dict[str, Any]:
    completion, reward = answered.completion, answered.reward
    return {
        "problem": answered.problem.index,
        "group": number,
        "text": answered.text,
        "reward": {name: getattr(reward, name) for name in ("score", "format_valid", "answer_correct")},
        "completion": {
            name: getattr(completion, name) for name in ("request_id", "finish_reason", "weight_version")
        },
    }  # fmt: skip
