"""The driver's state of an RL run: position in the data, waiting groups, KL coefficient; how checkpoints store it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from megarl.algorithms.kl import adapted
from megarl.config import AlgorithmConfig
from megarl.types import ExpertsHandle, KeptSets, Problem, Reward, Segment, Trajectory

Group = list[Trajectory]
STATE, ARRAYS = "collection.json", "collection.safetensors"
SEGMENT_ARRAYS = [part.name for part in fields(Segment) if part.name != "kept_sets"]
KEPT_SETS = [part.name for part in fields(KeptSets)]


class RLState:
    """The state that an RL run carries from step to step; with `save` and `load` a resumed run is bit-equal.

    `drawn` is the number of prompt batches drawn so far, `waiting` are groups sampled for a later step,
    `kl_coefficient` is the coefficient as adapted so far.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._algorithm = algorithm
        self.drawn = 0
        self.waiting: list[Group] = []
        self.kl_coefficient = algorithm.kl_coefficient
        self._before_step = self.drawn, self.waiting

    def begin_step(self) -> None:
        """Remember what `forget_step` goes back to."""
        self._before_step = self.drawn, self.waiting

    def forget_step(self) -> None:
        """Return to the state before the newest step's prompts were drawn."""
        self.drawn, self.waiting = self._before_step

    @property
    def waiting_experts(self) -> list[ExpertsHandle]:
        """Handles of the routed experts of waiting groups, if there are any."""
        segments = [segment for group in self.waiting for trajectory in group for segment in trajectory.segments]
        return [segment.routed_experts for segment in segments if segment.routed_experts is not None]

    def adapt_kl(self, metrics: Mapping[str, float], num_samples: int) -> dict[str, float]:
        """Bring the KL's weight nearer to what holds algorithm.kl_target, after a step with these metrics.

        Metric: `kl/coefficient`, as it was in this step, where it is adapted at all.
        """
        before = self.kl_coefficient
        divergence = metrics.get("kl/reference")
        if self._algorithm.kl_target is None or divergence is None:
            return {}
        if math.isfinite(divergence):
            target, horizon = self._algorithm.kl_target, self._algorithm.kl_horizon
            self.kl_coefficient = adapted(before, divergence, target=target, horizon=horizon, num_samples=num_samples)
        return {"kl/coefficient": before}

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint's folder."""
        flat = [(number, trajectory) for number, group in enumerate(self.waiting) for trajectory in group]
        arrays: dict[str, np.ndarray] = {}
        for index, (_, trajectory) in enumerate(flat):
            for place, segment in enumerate(trajectory.segments):
                found = {name: getattr(segment, name) for name in SEGMENT_ARRAYS}
                if (kept := segment.kept_sets) is not None:
                    found |= {f"kept_sets.{name}": getattr(kept, name) for name in KEPT_SETS}
                arrays |= {f"{index}.{place}.{name}": a for name, a in found.items() if a is not None}
        state = {
            "drawn": self.drawn, "kl_coefficient": self.kl_coefficient,
            "waiting": [_plain(number, trajectory) for number, trajectory in flat],
        }  # fmt: skip
        (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        (folder / ARRAYS).write_bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))

    def load(self, folder: Path, problems: Sequence[Problem]) -> int:
        """Go on from a checkpoint's state; `problems` are the run's.

        Returns how many trajectories that wait lack the trainer's log-probs. The weights that sampled them are gone:
        they get the engine's log-probs instead.
        """
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        arrays = load_file(folder / ARRAYS)
        self.drawn = state["drawn"]
        if self._algorithm.kl_target is not None:
            self.kl_coefficient = state["kl_coefficient"]
        by_index = {problem.index: problem for problem in problems}
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
            if self._algorithm.old_logprobs == "trainer" and lacks_old_logprobs(trajectory):
                trajectory = with_old_logprobs(trajectory, iter([s.rollout_logprobs for s in segments]))
                num_lacking += 1
            trajectories.append(trajectory)
        self.waiting = in_groups(trajectories)
        return num_lacking


def in_groups(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Split a list of trajectories, those of a group consecutive, by group."""
    return [list(group) for _, group in groupby(trajectories, key=lambda t: t.group)]


def in_one(groups: Sequence[Group]) -> list[Trajectory]:
    """The trajectories of all groups in one list."""
    return [trajectory for group in groups for trajectory in group]


def lacks_old_logprobs(trajectory: Trajectory) -> bool:
    """Whether the trainer's log-probs of a segment were not computed."""
    return any(segment.old_logprobs is None for segment in trajectory.segments)


def with_old_logprobs(trajectory: Trajectory, logprobs: Iterator[np.ndarray]) -> Trajectory:
    """The trajectory with the next log-probs, float32 [tokens] a segment, where its tokens were sampled."""
    segments = tuple(
        replace(segment, old_logprobs=np.where(segment.loss_mask, next(logprobs), np.float32(0)))
        for segment in trajectory.segments
    )
    return replace(trajectory, segments=segments)


def _segment(arrays: Mapping[str, np.ndarray], prefix: str) -> Segment:
    found: dict[str, Any] = {name: arrays[prefix + name] for name in SEGMENT_ARRAYS if prefix + name in arrays}
    if "routed_experts" in found:
        found["routed_experts"] = ExpertsHandle(*found["routed_experts"].tolist())
    if f"{prefix}kept_sets.counts" in arrays:
        found["kept_sets"] = KeptSets(**{name: arrays[f"{prefix}kept_sets.{name}"] for name in KEPT_SETS})
    return Segment(**found)


def _plain(number: int, trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as JSON values; `segments` is their number."""
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
        "restarts": trajectory.restarts,
    }
