"""Collecting a step's groups of trajectories: prompts are drawn until enough groups teach something."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from megarl.config import Recipe
from megarl.data.batch import TokenBatch
from megarl.data.sampler import DataOrder
from megarl.rollout.batch import RLBatch
from megarl.rollout.groups import GroupSampler
from megarl.rollout.pool import AbandonedError
from megarl.types import ExpertsHandle, MegarlError, Problem, Reward, SamplingSettings, Segment, Trajectory

Group = list[Trajectory]
STATE, ARRAYS = "collection.json", "collection.safetensors"
SEGMENT_ARRAYS = [part.name for part in fields(Segment)]


@dataclass
class Buffer:
    """What a run has drawn, and groups that wait for the next step; `save` and `load` make a resumed run go on alike.

    `kl_coefficient` is the KL's weight as adapted so far.
    """

    recipe: Recipe
    problems: Sequence[Problem]
    sampler: GroupSampler
    sampling: SamplingSettings
    drawn: int = field(default=0, init=False)
    kl_coefficient: float = field(init=False)
    waiting: list[Group] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        recipe = self.recipe
        drawn = recipe.train.prompts_per_step
        if recipe.algorithm.dynamic_sampling:
            drawn = ceil(drawn * recipe.algorithm.oversampling)
        self._order = DataOrder(len(self.problems), drawn, recipe.seed, recipe.data.shuffle)
        self.kl_coefficient = recipe.algorithm.kl_coefficient

    async def step(self) -> tuple[list[Trajectory], list[Trajectory], dict[str, float]]:
        """Trajectories to train on, `train.prompts_per_step` groups in order; all that were sampled; metrics.

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
        """As if the newest step's trajectories had not been drawn."""
        self.drawn, self.waiting = self._before

    async def _step(self) -> tuple[list[Trajectory], list[Trajectory], dict[str, float]]:
        recipe, wanted = self.recipe, self.recipe.train.prompts_per_step
        sampled: list[Trajectory] = []
        attempts = passed = 0
        while len(self.waiting) < wanted:
            if attempts == recipe.algorithm.max_attempts:
                raise MegarlError(
                    f"{attempts} batches of {self._order.batch_size} prompts gave {len(self.waiting)} of {wanted} "
                    f"groups whose accuracy is within algorithm.dynamic_sampling {recipe.algorithm.dynamic_sampling}. "
                    "Use problems of another difficulty, or raise algorithm.max_attempts or train.samples_per_prompt."
                )
            trajectories = await self.sampler.sample(
                [self.problems[index] for index in self._order.batch(self.drawn)],
                self.sampling,
                samples_per_prompt=recipe.train.samples_per_prompt,
                seed=f"{recipe.seed} {self.drawn + 1}",
            )
            sampled += [replace(t, group=t.group + attempts * self._order.batch_size) for t in trajectories]
            attempts, self.drawn = attempts + 1, self.drawn + 1
            groups = in_groups(trajectories)
            passing = [group for group in groups if passes_filter(group, recipe.algorithm.dynamic_sampling)]
            passed += len(passing)
            self.waiting = self.waiting + passing
        taken, self.waiting = self.waiting[:wanted], self.waiting[wanted:]
        kept = [replace(t, group=number) for number, group in enumerate(taken) for t in group]
        if recipe.algorithm.dynamic_sampling is None:
            return kept, sampled, {}
        kept_fraction = passed / max(attempts * self._order.batch_size, 1)
        return kept, sampled, {"rollout/attempts": attempts, "rollout/kept": kept_fraction}

    async def add_old_logprobs(
        self,
        kept: Sequence[Trajectory],
        forward: Callable[[TokenBatch], Awaitable[np.ndarray]],
        weight_version: int,
    ) -> list[Trajectory]:
        """Add the trainer's `old_logprobs` to `kept` where needed. Call it before the step's update.

        Trajectories that wait for a later step get theirs now, while the trainer has the weights that sampled them,
        `weight_version`. Fresh ones that one update trains on need none: their ratio starts at that update's own
        pass. `forward` computes log-probs, float32 [tokens]; it is called at most once.
        """
        if self.recipe.algorithm.old_logprobs == "rollout":
            return list(kept)
        everything = [*kept, *(t for group in self.waiting for t in group)]
        first = 0 if self._needs_old_logprobs else len(kept)
        lacking = [place for place in range(first, len(everything)) if _lacks_old_logprobs(everything[place])]
        if lacking:
            batch = RLBatch.from_groups([[everything[place] for place in lacking]])
            found = iter(np.split(await forward(batch), batch.cu_seqlens[1:-1]))
            for place in lacking:
                everything[place] = _with_old_logprobs(everything[place], found)
        staying = iter(everything[len(kept) :])
        self.waiting = [[next(staying) for _ in group] for group in self.waiting]
        return everything[: len(kept)]

    @property
    def waiting_experts(self) -> list[ExpertsHandle]:
        """Handles of the routed experts of what waits for a later step, where they are kept."""
        segments = [segment for group in self.waiting for trajectory in group for segment in trajectory.segments]
        return [segment.routed_experts for segment in segments if segment.routed_experts is not None]

    @property
    def _needs_old_logprobs(self) -> bool:
        """Whether the trainer's log-probs of all that is trained on are needed before the first update."""
        algorithm = self.recipe.algorithm
        is_kl_before = algorithm.kl_coefficient > 0 and algorithm.kl_placement != "loss"
        return self.recipe.train.num_updates > 1 or algorithm.importance_sampling is not None or is_kl_before

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint's folder."""
        flat = [(number, trajectory) for number, group in enumerate(self.waiting) for trajectory in group]
        arrays: dict[str, np.ndarray] = {}
        for index, (_, trajectory) in enumerate(flat):
            for place, segment in enumerate(trajectory.segments):
                found = {name: getattr(segment, name) for name in SEGMENT_ARRAYS}
                arrays |= {f"{index}.{place}.{name}": a for name, a in found.items() if a is not None}
        state = {
            "drawn": self.drawn, "kl_coefficient": self.kl_coefficient,
            "waiting": [_plain(number, trajectory) for number, trajectory in flat],
        }  # fmt: skip
        (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        (folder / ARRAYS).write_bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))

    def load(self, folder: Path) -> int:
        """Go on from a checkpoint's state. Returns how many waiting trajectories lack the trainer's log-probs.

        The weights that sampled them are gone: they get the engine's log-probs instead.
        """
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        arrays = load_file(folder / ARRAYS)
        self.drawn = state["drawn"]
        if self.recipe.algorithm.kl_target is not None:
            self.kl_coefficient = state["kl_coefficient"]
        by_index = {problem.index: problem for problem in self.problems}
        trajectories: list[Trajectory] = []
        num_lacking = 0
        for index, plain in enumerate(state["waiting"]):
            num_segments = plain.pop("segments")
            segments = tuple(_segment(arrays, f"{index}.{place}.") for place in range(num_segments))
            reward = plain.pop("reward")
            plain["turn_rewards"] = tuple((turn, value) for turn, value in plain["turn_rewards"])
            trajectory = Trajectory(
                **plain | {"problem": by_index[plain["problem"]]},
                segments=segments,
                reward=reward and Reward(**reward),
            )
            if self.recipe.algorithm.old_logprobs == "trainer" and _lacks_old_logprobs(trajectory):
                trajectory = _with_old_logprobs(trajectory, iter([s.rollout_logprobs for s in segments]))
                num_lacking += 1
            trajectories.append(trajectory)
        self.waiting = in_groups(trajectories)
        return num_lacking


def in_groups(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Trajectories, those of a group side by side, by their groups."""
    return [list(group) for _, group in groupby(trajectories, key=lambda t: t.group)]


def passes_filter(group: Group, dynamic_sampling: tuple[float, float] | None) -> bool:
    """Whether a group's accuracy is between the two, both excluded; any is, without a range."""
    if dynamic_sampling is None:
        return True
    low, high = dynamic_sampling
    rewards = [t.reward for t in group if t.reward is not None]
    return low < sum(reward.answer_correct for reward in rewards) / len(group) < high


def _segment(arrays: Mapping[str, np.ndarray], prefix: str) -> Segment:
    found: dict[str, Any] = {name: arrays[prefix + name] for name in SEGMENT_ARRAYS if prefix + name in arrays}
    if "routed_experts" in found:
        found["routed_experts"] = ExpertsHandle(*found["routed_experts"].tolist())
    return Segment(**found)


def _lacks_old_logprobs(trajectory: Trajectory) -> bool:
    return any(segment.old_logprobs is None for segment in trajectory.segments)


def _with_old_logprobs(trajectory: Trajectory, logprobs: Iterator[np.ndarray]) -> Trajectory:
    """The trajectory with the next log-probs, float32 [tokens] a segment, where its tokens were sampled."""
    segments = tuple(
        replace(segment, old_logprobs=np.where(segment.loss_mask, next(logprobs), np.float32(0)))
        for segment in trajectory.segments
    )
    return replace(trajectory, segments=segments)


def _plain(number: int, trajectory: Trajectory) -> dict[str, Any]:
    """What json keeps of a trajectory, `segments` their number."""
    return {
        "environment": trajectory.environment,
        "problem": trajectory.problem.index,
        "group": number,
        "number": trajectory.number,
        "segments": len(trajectory.segments),
        "reward": trajectory.reward and asdict(trajectory.reward),
        "failure": trajectory.failure,
        "text": trajectory.text,
        "ended": trajectory.ended,
        "turn_rewards": trajectory.turn_rewards,
        "metrics": dict(trajectory.metrics),
    }
