"""The driver's state of an RL run (data positions, waiting groups, KL coefficient), and its files in a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from megarl.algorithms.kl import adapted
from megarl.config import AlgorithmConfig
from megarl.data.mixture import Position, Positions
from megarl.data.streamed import Places
from megarl.rollout.recording import RecordedCall, StartedGroup
from megarl.types import Completion, ConfigError, ExpertsHandle, KeptSets, Problem, Reward, Segment, Trajectory

METRICS = {
    "kl/coefficient": ("1", "coefficient of the KL in this step, if algorithm.kl_target adapts it"),
}
"""Names, units and meanings, for `tracking.table`."""

Find = Callable[[str, int], Problem | None]
"""Returns the problem of a source with an index; None if there is none."""
Group = list[Trajectory]
STATE, ARRAYS = "collection.json", "collection.safetensors"
TIMES = "collection_times.json"
"""File of measured times of trajectories. They differ between two otherwise equal runs, unlike
the rest of this state.
"""
SEGMENT_ARRAYS = [part.name for part in fields(Segment) if part.name != "kept_sets"]
"""Array fields of a segment, stored under these names."""
COMPLETION_ARRAYS = ["token_ids", "rollout_logprobs", "weight_versions", "routed_experts"]
"""Array fields of a completion, stored under these names."""
KEPT_SETS = [part.name for part in fields(KeptSets)]
SECONDS = ["engine_seconds", "environment_seconds"]


@dataclass(frozen=True, slots=True)
class _Beside:
    """Arrays and times of trajectories, saved in separate files. Names begin with the trajectory's prefix."""

    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    times: dict[str, dict[str, Any]] = field(default_factory=dict)


class RLState:
    """State carried from step to step of an RL run. With `save` and `load` a resumed run is bit-equal.

    `drawn` counts prompt batches. `positions` are the sources' positions in their data. `waiting` holds groups sampled
    for a later step. `kl_coefficient` is the adapted coefficient.

    If groups continue over steps (`carries_groups`), `drawn` counts prompts, and a group's number is its draw.
    `started` holds groups in flight by this number. Tokens of waiting groups have several weight versions. Every group
    drawn is then `used` (given to a step), `given_up` (dropped), `started` or `waiting`.
    """

    def __init__(self, algorithm: AlgorithmConfig, *, carries_groups: bool = False) -> None:
        self._algorithm, self.carries_groups = algorithm, carries_groups
        self.drawn = self.used = self.given_up = 0
        self.positions: Positions = {}
        self.waiting: list[Group] = []
        self.started: dict[int, StartedGroup] = {}
        self.kl_coefficient = algorithm.kl_coefficient
        self._before_step = self.drawn, self.waiting, self.positions
        self._given: list[Group] = []

    def begin_step(self) -> None:
        """Save the state for `forget_step` to restore."""
        self._before_step = self.drawn, self.waiting, self.positions

    def give(self, groups: Sequence[Group]) -> None:
        """Remove the given groups from the waiting ones, because the current step trains on them. Only for runs with
        groups continuing over steps."""
        draws = {group[0].group for group in groups}
        self.waiting = [group for group in self.waiting if group[0].group not in draws]
        self.used += len(groups)
        self._given = list(groups)

    def forget_step(self) -> None:
        """Restore the state before the last step's prompts were drawn.

        If groups continue over steps, all draws remain; only the groups given to the step wait again.
        """
        if not self.carries_groups:
            self.drawn, self.waiting, self.positions = self._before_step
            return
        self.waiting = [*self._given, *self.waiting]
        self.used -= len(self._given)
        self._given = []

    @property
    def waiting_experts(self) -> list[ExpertsHandle]:
        """Handles of the routed experts of all groups waiting or in flight."""
        segments = [segment for group in self.waiting for trajectory in group for segment in trajectory.segments]
        started = [handle for group in self.started.values() for handle in group.experts]
        return [segment.routed_experts for segment in segments if segment.routed_experts is not None] + started

    def adapt_kl(self, metrics: Mapping[str, float], num_samples: int) -> dict[str, float]:
        """Adapt the KL coefficient towards algorithm.kl_target, using a step's metrics.

        Returns `kl/coefficient` as used in this step, if the recipe adapts it.
        """
        before = self.kl_coefficient
        divergence = metrics.get("kl/reference")
        if self._algorithm.kl_target is None or divergence is None:
            return {}
        # A NaN would stay in the coefficient for the rest of the run.
        if math.isfinite(divergence):
            target, horizon = self._algorithm.kl_target, self._algorithm.kl_horizon
            self.kl_coefficient = adapted(before, divergence, target=target, horizon=horizon, num_samples=num_samples)
        return {"kl/coefficient": before}

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint folder.

        A completion in flight is saved with the tokens sampled before the last pause of the pool.
        """
        flat = [(number, trajectory) for number, group in enumerate(self.waiting) for trajectory in group]
        beside = _Beside()
        for index, (_, trajectory) in enumerate(flat):
            _put_beside(trajectory, f"{index}.", beside)
        state = {
            "drawn": self.drawn, "used": self.used, "given_up": self.given_up,
            "positions": {name: asdict(position) for name, position in self.positions.items()},
            "kl_coefficient": self.kl_coefficient,
            "waiting": [_plain(t.group if self.carries_groups else number, t) for number, t in flat],
            "started": [_plain_started(group, beside) for group in self.started.values()],
        }  # fmt: skip
        (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        (folder / TIMES).write_text(json.dumps(beside.times, indent=2) + "\n", encoding="utf-8")
        # safetensors writes the underlying buffer: a strided view would be saved wrongly.
        arrays = {name: np.ascontiguousarray(array) for name, array in beside.arrays.items()}
        (folder / ARRAYS).write_bytes(save(arrays))

    def load(self, folder: Path, find: Find) -> int:
        """Restore the state from a checkpoint folder; `find` looks up the run's problems.

        Returns the number of waiting trajectories lacking the trainer's log-probs. The weights used to sample them are
        gone, so they get the engine's log-probs instead.
        """
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        beside = _Beside(load_file(folder / ARRAYS), json.loads((folder / TIMES).read_text(encoding="utf-8")))
        self.drawn, self.used, self.given_up = state["drawn"], state["used"], state["given_up"]
        self.positions = {name: Position(**position) for name, position in state["positions"].items()}
        if self._algorithm.kl_target is not None:
            # Without a target the recipe's coefficient counts, so that a resumed run can change it.
            self.kl_coefficient = state["kl_coefficient"]
        trajectories: list[Trajectory] = []
        num_lacking = 0
        # Carried groups get log-probs only before the update that uses them.
        is_old_kept = self._algorithm.old_logprobs == "trainer" and not self.carries_groups
        for index, plain in enumerate(state["waiting"]):
            trajectory = _trajectory(plain, find, beside, f"{index}.")
            if is_old_kept and lacks_old_logprobs(trajectory):
                logprobs = [segment.rollout_logprobs for segment in trajectory.segments]
                trajectory = with_old_logprobs(trajectory, logprobs)
                num_lacking += 1
            trajectories.append(trajectory)
        self.waiting = in_groups(trajectories)
        groups = [_started(plain, find, beside) for plain in state["started"]]
        self.started = {group.draw: group for group in groups}
        return num_lacking


def finder(problems: Mapping[str, Sequence[Problem]]) -> Find:
    """Return a lookup of problems by source and index."""
    # An index of places once: problems of a streamed data set must not be scanned per lookup.
    places = {source: Places(found) for source, found in problems.items()}

    def find(source: str, index: int) -> Problem | None:
        place = places[source].get(index) if source in places else None
        return None if place is None else problems[source][place]

    return find


def _problem(source: str, index: int, find: Find) -> Problem:
    """Return a source's problem by index. Raises ConfigError if the run no longer has it."""
    if (found := find(source, index)) is None:
        raise ConfigError(
            f"mixture.{source}: its problem {index} waits in the checkpoint with its samples, but the recipe no longer "
            "has it; keep this source with a small weight, or start over with --restart"
        )
    return found


def in_groups(trajectories: Sequence[Trajectory]) -> list[Group]:
    """Split a list of trajectories into groups. Trajectories of a group must be consecutive."""
    return [list(group) for _, group in groupby(trajectories, key=lambda t: t.group)]


def in_one(groups: Sequence[Group]) -> list[Trajectory]:
    """Flatten groups into one list of trajectories."""
    return [trajectory for group in groups for trajectory in group]


def lacks_old_logprobs(trajectory: Trajectory) -> bool:
    """Return whether a segment lacks the trainer's log-probs."""
    return any(segment.old_logprobs is None for segment in trajectory.segments)


def lacks_entropies(trajectory: Trajectory) -> bool:
    """Return whether a segment lacks the trainer's entropies."""
    return any(segment.entropies is None for segment in trajectory.segments)


def with_old_logprobs(trajectory: Trajectory, logprobs: Sequence[np.ndarray]) -> Trajectory:
    """Return the trajectory with log-probs, float32 [tokens] per segment; zero on tokens not sampled."""
    parts = zip(trajectory.segments, logprobs, strict=True)
    return replace(trajectory, segments=tuple(replace(s, old_logprobs=_of_sampled(s, own)) for s, own in parts))


def with_entropies(trajectory: Trajectory, entropies: Sequence[np.ndarray]) -> Trajectory:
    """Return the trajectory with entropies, float32 [tokens] per segment; zero on tokens not sampled."""
    parts = zip(trajectory.segments, entropies, strict=True)
    return replace(trajectory, segments=tuple(replace(s, entropies=_of_sampled(s, own)) for s, own in parts))


def _of_sampled(segment: Segment, values: np.ndarray) -> np.ndarray:
    return np.where(segment.loss_mask, values, np.float32(0))


def _stored(record: Segment | Completion, names: Sequence[str], prefix: str) -> dict[str, np.ndarray]:
    """Return these arrays of a record, and its kept sets, under names beginning with `prefix`."""
    found = {name: getattr(record, name) for name in names}
    if (kept := record.kept_sets) is not None:
        found |= {f"kept_sets.{name}": getattr(kept, name) for name in KEPT_SETS}
    return {f"{prefix}{name}": np.asarray(array) for name, array in found.items() if array is not None}


def _read(arrays: Mapping[str, np.ndarray], names: Sequence[str], prefix: str) -> dict[str, Any]:
    """Return the fields of a record from the arrays written by `_stored`."""
    found: dict[str, Any] = {name: arrays[prefix + name] for name in names if prefix + name in arrays}
    # A handle is a tuple of integers; it was stored as an array.
    if "routed_experts" in found:
        found["routed_experts"] = ExpertsHandle(*found["routed_experts"].tolist())
    if f"{prefix}kept_sets.counts" in arrays:
        found["kept_sets"] = KeptSets(**{name: arrays[f"{prefix}kept_sets.{name}"] for name in KEPT_SETS})
    return found


def _put_beside(trajectory: Trajectory, prefix: str, beside: _Beside) -> None:
    """Add the arrays and times of a trajectory under names beginning with `prefix`."""
    for place, segment in enumerate(trajectory.segments):
        beside.arrays.update(_stored(segment, SEGMENT_ARRAYS, f"{prefix}{place}."))
    beside.times[prefix] = {
        **{name: getattr(trajectory, name) for name in SECONDS},
        "metrics": {name: value for name, value in trajectory.metrics.items() if _is_time(name)},
    }


def _is_time(metric: str) -> bool:
    """Return whether an environment's metric measures time."""
    return metric.endswith("seconds")


def _trajectory(plain: dict[str, Any], find: Find, beside: _Beside, prefix: str) -> Trajectory:
    """Return a trajectory from its JSON values, and its arrays and times under `prefix`."""
    num_segments, reward = plain.pop("segments"), plain.pop("reward")
    plain["turn_rewards"] = tuple((turn, value) for turn, value in plain["turn_rewards"])
    plain["texts"] = tuple(plain["texts"])
    plain["messages"] = tuple(tuple(new) for new in plain["messages"])
    plain["problem"] = _problem(plain.pop("source"), plain["problem"], find)
    times = beside.times[prefix]
    plain |= {name: times[name] for name in SECONDS}
    plain["metrics"] |= times["metrics"]
    segments = tuple(
        Segment(**_read(beside.arrays, SEGMENT_ARRAYS, f"{prefix}{place}.")) for place in range(num_segments)
    )
    return Trajectory(**plain, segments=segments, reward=reward and Reward(**reward))


def _plain_started(group: StartedGroup, beside: _Beside) -> dict[str, Any]:
    """Return a group in flight as JSON values; its arrays and times are added to `beside`."""
    home = f"started.{group.draw}."
    for number, trajectory in group.finished.items():
        _put_beside(trajectory, f"{home}{number}.", beside)
    calls: list[dict[str, Any]] = []
    recorded = [(number, call) for number, of_attempt in group.calls.items() for call in of_attempt]
    for number, call in recorded:
        prefix = f"{home}call{len(calls)}."
        beside.arrays[f"{prefix}prompt"] = call.prompt_token_ids
        for place, part in enumerate(call.parts):
            beside.arrays.update(_stored(part, COMPLETION_ARRAYS, f"{prefix}{place}."))
        parts = [{"request_id": p.request_id, "finish_reason": p.finish_reason, "error": p.error} for p in call.parts]
        calls.append({"number": number, "parts": parts, "is_done": call.is_done})
    finished = [_plain(group.draw, trajectory) for trajectory in group.finished.values()]
    return {
        "draw": group.draw, "problem": group.problem.index, "source": group.problem.source,
        "temperature": group.temperature,
        "finished": finished, "calls": calls,
    }  # fmt: skip


def _started(plain: Mapping[str, Any], find: Find, beside: _Beside) -> StartedGroup:
    """Return a group in flight from the JSON values and arrays written by `_plain_started`."""
    home = f"started.{plain['draw']}."
    group = StartedGroup(plain["draw"], _problem(plain["source"], plain["problem"], find), plain["temperature"])
    for one in plain["finished"]:
        number = one["number"]
        group.finished[number] = _trajectory(one, find, beside, f"{home}{number}.")
    for place, call in enumerate(plain["calls"]):
        prefix = f"{home}call{place}."
        parts = [
            Completion(**part, **_read(beside.arrays, COMPLETION_ARRAYS, f"{prefix}{number}."))
            for number, part in enumerate(call["parts"])
        ]
        recorded = RecordedCall(beside.arrays[f"{prefix}prompt"], parts, call["is_done"])
        group.calls.setdefault(call["number"], []).append(recorded)
    return group


def _plain(number: int, trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as JSON values; `segments` is their number."""
    return {
        "environment": trajectory.environment,
        "problem": trajectory.problem.index,
        "source": trajectory.problem.source,
        "group": number,
        "number": trajectory.number,
        "segments": len(trajectory.segments),
        "reward": trajectory.reward and asdict(trajectory.reward),
        "failure": trajectory.failure,
        "texts": trajectory.texts,
        "messages": trajectory.messages,
        "ended": trajectory.ended,
        "turn_rewards": trajectory.turn_rewards,
        "metrics": {name: value for name, value in trajectory.metrics.items() if not _is_time(name)},
        "restarts": trajectory.restarts,
        "temperature": trajectory.temperature,
    }
