"""Collecting a step's groups of answers: prompts are drawn until enough groups teach something."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from megarl.config import Recipe
from megarl.data.sampler import DataOrder
from megarl.rollout.batches import to_sequences
from megarl.rollout.evaluate import Answered, Respondents
from megarl.rollout.pool import AbandonedError
from megarl.types import Completion, MegarlError, Problem, Reward, SamplingSettings, TrainingSequence

Group = list[Answered]
STATE, ARRAYS = "collection.json", "collection.safetensors"


@dataclass
class Buffer:
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
        if recipe.algorithm.dynamic_sampling:
            asked = ceil(asked * recipe.algorithm.oversampling)
        self._order = DataOrder(len(self.problems), asked, recipe.seed, recipe.data.shuffle)
        self.kl_coefficient = recipe.algorithm.kl_coefficient

    async def step(self) -> tuple[list[Answered], list[Answered], dict[str, float]]:
        """The answers to train on, `train.prompts_per_step` groups in order; all that were drawn for it; metrics.

        Metrics, where groups are filtered: `rollout/attempts`, batches of prompts that were drawn; `rollout/kept`, the
        share of drawn groups that passed. Raises MegarlError if `algorithm.max_attempts` batches do not fill a step,
        AbandonedError, everything as before, where the run is to stop.
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
                    f"groups whose accuracy is within algorithm.dynamic_sampling {recipe.algorithm.dynamic_sampling}. "
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
            kept = [group for group in groups if passes_filter(group, recipe.algorithm.dynamic_sampling)]
            passed += len(kept)
            self.waiting = self.waiting + kept
        taken, self.waiting = self.waiting[:wanted], self.waiting[wanted:]
        answers = [replace(a, group=number) for number, group in enumerate(taken) for a in group]
        if recipe.algorithm.dynamic_sampling is None:
            return answers, asked, {}
        kept = passed / max(attempts * self._order.batch_size, 1)
        return answers, asked, {"rollout/attempts": attempts, "rollout/kept": kept}

    async def add_old_logprobs(
        self,
        answered: Sequence[Answered],
        forward: Callable[[Sequence[TrainingSequence]], Awaitable[Sequence[np.ndarray]]],
        weight_version: int,
    ) -> list[Answered]:
        """The answers to train on with the trainer's `old_logprobs` where needed. Call it before the step's update.

        Answers that wait for a later step get theirs now, while the trainer has the weights that sampled them,
        `weight_version`. Fresh answers that one update trains on need none: their ratio starts at that update's own
        pass. `forward` computes log-probs, float32 [tokens] a sequence; it is called at most once.
        """
        if self.recipe.algorithm.old_logprobs == "rollout":
            return list(answered)
        everything = [*answered, *(a for group in self.waiting for a in group)]
        first = 0 if self._needs_old_logprobs else len(answered)
        lacking = [place for place in range(first, len(everything)) if everything[place].old_logprobs is None]
        if lacking:
            sequences = to_sequences([everything[place] for place in lacking], self.recipe, weight_version)
            for place, logprobs in zip(lacking, await forward(sequences), strict=True):
                prompt = everything[place].problem.prompt_token_ids
                everything[place] = replace(everything[place], old_logprobs=logprobs[len(prompt) :])
        staying = iter(everything[len(answered) :])
        self.waiting = [[next(staying) for _ in group] for group in self.waiting]
        return everything[: len(answered)]

    @property
    def _needs_old_logprobs(self) -> bool:
        """Whether the trainer's log-probs of all that is trained on are needed before the first update."""
        algorithm = self.recipe.algorithm
        is_kl_before = algorithm.kl_coefficient > 0 and algorithm.kl_placement != "loss"
        return self.recipe.train.num_updates > 1 or algorithm.importance_sampling is not None or is_kl_before

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint's folder."""
        flat = [(number, a) for number, group in enumerate(self.waiting) for a in group]
        arrays: dict[str, np.ndarray] = {}
        for index, (_, a) in enumerate(flat):
            arrays[f"{index}.token_ids"] = a.completion.token_ids
            arrays[f"{index}.rollout_logprobs"] = a.completion.rollout_logprobs
            if a.completion.routed_experts is not None:
                arrays[f"{index}.routed_experts"] = a.completion.routed_experts
            if a.old_logprobs is not None:
                arrays[f"{index}.old_logprobs"] = a.old_logprobs
        state = {
            "drawn": self.drawn, "kl_coefficient": self.kl_coefficient,
            "waiting": [_plain(number, a) for number, a in flat],
        }  # fmt: skip
        (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        (folder / ARRAYS).write_bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))

    def load(self, folder: Path) -> int:
        """Go on from a checkpoint's state. Returns how many waiting answers lack the trainer's log-probs.

        The weights that sampled them are gone: those answers get the engine's log-probs instead.
        """
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        arrays = load_file(folder / ARRAYS)
        self.drawn = state["drawn"]
        if self.recipe.algorithm.kl_target is not None:
            self.kl_coefficient = state["kl_coefficient"]
        by_index = {problem.index: problem for problem in self.problems}
        answers: list[Answered] = []
        num_lacking = 0
        for index, plain in enumerate(state["waiting"]):
            completion = Completion(
                **plain["completion"],
                token_ids=arrays[f"{index}.token_ids"],
                rollout_logprobs=arrays[f"{index}.rollout_logprobs"],
                routed_experts=arrays.get(f"{index}.routed_experts"),
            )
            old_logprobs = arrays.get(f"{index}.old_logprobs")
            if old_logprobs is None and self.recipe.algorithm.old_logprobs == "trainer":
                old_logprobs = completion.rollout_logprobs
                num_lacking += 1
            answers.append(
                Answered(
                    by_index[plain["problem"]],
                    plain["group"],
                    completion,
                    plain["text"],
                    Reward(**plain["reward"]),
                    old_logprobs=old_logprobs,
                )
            )
        self.waiting = [list(group) for _, group in groupby(answers, key=lambda a: a.group)]
        return num_lacking


def passes_filter(group: Group, dynamic_sampling: tuple[float, float] | None) -> bool:
    """Whether a group's accuracy is between the two, both excluded; any is, without a range."""
    if dynamic_sampling is None:
        return True
    low, high = dynamic_sampling
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
