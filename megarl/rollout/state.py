"""The driver's state of an RL run, and its files in a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from megarl.algorithms.kl import adapted_coefficient
from megarl.config import AlgorithmConfig
from megarl.data.mixture import Position, Positions
from megarl.data.streamed import Places
from megarl.files.atomic import raise_storage_errors
from megarl.files.strict_json import loads
from megarl.rollout.recording import StartedGroup, load_trajectory
from megarl.tracking.draws import DrawEvents
from megarl.tracking.metric_rows import MetricRow
from megarl.types import Archive, ConfigError, DataError, ExpertsHandle, FindProblem, Group, Problem, Trajectory

METRICS = (MetricRow("kl/coefficient", "1", "coefficient of the KL in this step", condition="algorithm.kl_target"),)

STATE, ARRAYS = "collection.json", "collection.safetensors"
TIMES = "collection_times.json"
"""File with the measured times of trajectories. They differ between otherwise equal runs, so they are stored apart."""

DAMAGE = (
    ValueError, TypeError, LookupError, AttributeError, OverflowError, StopIteration, RecursionError, SafetensorError
)  # fmt: skip
"""Errors raised by reading damaged JSON and safetensors, or by unexpected values in them."""


class RLState:
    """State of an RL run between two steps: the positions in its data, and the groups that are not trained yet.

    A run resumed from a saved state continues bit-equal. If prompts are drawn one by one, each group counts in exactly
    one of `used`, `num_dropped`, `started` and `waiting`.
    """

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._algorithm = algorithm
        self.drawn = 0
        """Number of draws: of batches of prompts in synchronous training, otherwise of single prompts."""
        self.used = 0
        """Number of groups trained."""
        self.num_dropped = 0
        """Number of groups dropped without training."""
        self.positions: Positions = {}
        """Each source's position in its data."""
        self.waiting: list[Group] = []
        """Complete groups, to be trained in a later step."""
        self.started: dict[int, StartedGroup] = {}
        """Groups in flight, by their numbers."""
        self.draws = DrawEvents()
        """Events for the file draws.jsonl."""
        self.kl_coefficient = algorithm.kl_coefficient
        """Coefficient of the KL in the next step. With algorithm.kl_target it changes from step to step."""
        self.role_baselines: dict[str, float] = {}
        """Baselines of algorithm.advantage = rae, by role; in a mixture by SOURCE.ROLE."""
        self._baselines_before_step: dict[str, float] = {}
        self._step_groups: list[Group] = []
        self._state_before_step: tuple[int, int, int, list[Group], Positions] | None = None
        self._num_events_before_step = 0

    def begin_step(self, *, repeats_draws: bool) -> None:
        """Begin a training step. The previous step's groups have been trained.

        `repeats_draws`: if this step fails, `forget_step` also undoes its draws, and the next try repeats them.
        """
        self._step_groups = []
        self._baselines_before_step = dict(self.role_baselines)
        counts_and_positions = self.drawn, self.used, self.num_dropped, self.waiting, self.positions
        self._state_before_step = counts_and_positions if repeats_draws else None
        self._num_events_before_step = len(self.draws.pending)

    def start_group(self, group: StartedGroup, positions: Positions) -> None:
        """Add a group just drawn. `positions` are the sources' positions after the draw."""
        source = group.problem.source
        position_before, position_after = self.positions.get(source, Position()), positions[source]
        if num_skipped := position_after.passed - position_before.passed:
            self.draws.add("skipped", source, num_skipped)
        self.draws.add("drawn", source, position_after.taken - 1, group.problem.index)
        self.positions = positions
        self.started[group.draw] = group

    def drop_groups(self, ending: str, problems: Sequence[Problem]) -> None:
        """Count the groups of these problems as dropped, for the reason `ending` (one of `draws.ENDINGS`)."""
        self.num_dropped += len(problems)
        for problem in problems:
            self.draws.add(ending, problem.source, problem.index)

    def use_groups(self, groups: Sequence[Group]) -> None:
        """Remove these groups from the waiting ones: the current step trains on them."""
        draws = {draw_of(group) for group in groups}
        self.waiting = [group for group in self.waiting if draw_of(group) not in draws]
        self.used += len(groups)
        self._step_groups = list(groups)
        for group in groups:
            self.draws.add("used", group[0].problem.source, group[0].problem.index)

    def forget_step(self) -> None:
        """Undo the current step before its update.

        If the next try repeats its draws (see `begin_step`), restore the state before them. Otherwise keep the draws,
        and let the step's groups wait again.
        """
        self.role_baselines = dict(self._baselines_before_step)
        if self._state_before_step is not None:
            self.drawn, self.used, self.num_dropped, self.waiting, self.positions = self._state_before_step
            self.started = {}
            del self.draws.pending[self._num_events_before_step :]
            return
        for group in self._step_groups:
            self.draws.remove("used", group[0].problem.source, group[0].problem.index)
        self.waiting = [*self._step_groups, *self.waiting]
        self.used -= len(self._step_groups)
        self._step_groups = []

    @property
    def waiting_experts(self) -> list[ExpertsHandle]:
        """Handles of the stored routed experts (MoE) of all groups waiting or in flight."""
        waiting_segments = [
            segment for group in self.waiting for trajectory in group for segment in trajectory.segments
        ]
        handles_in_flight = [handle for group in self.started.values() for handle in group.experts]
        return [
            segment.routed_experts for segment in waiting_segments if segment.routed_experts is not None
        ] + handles_in_flight

    @property
    def journaled_names(self) -> set[str]:
        """Journal names of all ended attempts in waiting groups and in groups in flight."""
        ended_attempts = [trajectory for group in self.started.values() for trajectory in group.finished.values()]
        return {trajectory.journaled_as for trajectory in [*flatten(self.waiting), *ended_attempts]}

    def adapt_kl(self, divergence: float | None, num_samples: int) -> dict[str, float]:
        """Adapt the KL coefficient towards algorithm.kl_target, given a step's divergence in nats.

        Returns `kl/coefficient` as used in this step; empty if the coefficient is fixed.
        """
        coefficient_used = self.kl_coefficient
        if self._algorithm.kl_target is None or divergence is None:
            return {}
        # A NaN would stay in the coefficient until the end of the run.
        if math.isfinite(divergence):
            target, horizon = self._algorithm.kl_target, self._algorithm.kl_horizon
            self.kl_coefficient = adapted_coefficient(
                coefficient_used, divergence, target=target, horizon=horizon, num_samples=num_samples
            )
        return {"kl/coefficient": coefficient_used}

    def save(self, folder: Path) -> None:
        """Write the state into a checkpoint folder. An unfinished completion has its tokens up to the last pause."""
        archive = Archive()
        state = {
            "drawn": self.drawn,
            "used": self.used,
            "given_up": self.num_dropped,
            "draws": self.draws.as_json(),
            "positions": {name: asdict(position) for name, position in self.positions.items()},
            "kl_coefficient": self.kl_coefficient,
            "role_baselines": self.role_baselines,
            "waiting": [
                t.to_json(archive, f"{trajectory_index}.") for trajectory_index, t in enumerate(flatten(self.waiting))
            ],
            "started": [group.to_json(archive) for group in self.started.values()],
        }
        (folder / STATE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        (folder / TIMES).write_text(json.dumps(archive.times, indent=2) + "\n", encoding="utf-8")
        # safetensors writes the underlying buffer, so a strided view would be stored wrongly.
        arrays = {name: np.ascontiguousarray(array) for name, array in archive.arrays.items()}
        (folder / ARRAYS).write_bytes(save(arrays))

    def load(self, folder: Path, find_problem: FindProblem) -> None:
        """Restore the state from a checkpoint folder. Raises DataError if a file is missing or damaged."""
        try:
            with raise_storage_errors(folder):
                self._load(folder, find_problem)
        except DAMAGE as error:
            raise DataError(
                f"{folder}: {STATE}, {TIMES} or {ARRAYS} is damaged ({error!r:.300}). Remove this checkpoint, and "
                "resume from an older one."
            ) from None

    def _load(self, folder: Path, find_problem: FindProblem) -> None:
        """Read the files of a checkpoint. Raises an error of `DAMAGE` for invalid contents."""
        state = loads((folder / STATE).read_bytes(), None)
        archive = Archive(load_file(folder / ARRAYS), loads((folder / TIMES).read_bytes(), None))
        self.drawn, self.used, self.num_dropped = state["drawn"], state["used"], state["given_up"]
        self.draws = DrawEvents.from_json(state["draws"])
        self.positions = {name: Position(**position) for name, position in state["positions"].items()}
        if self._algorithm.kl_target is not None:
            # Without a target, use the recipe's coefficient, so that a resume can change it.
            self.kl_coefficient = state["kl_coefficient"]
        # Earlier versions of megarl write no baselines.
        self.role_baselines = {name: float(value) for name, value in state.get("role_baselines", {}).items()}
        waiting_trajectories = [
            load_trajectory(values, archive, f"{trajectory_index}.", find_problem)
            for trajectory_index, values in enumerate(state["waiting"])
        ]
        self.waiting = [list(group) for _, group in groupby(waiting_trajectories, key=lambda t: t.group)]
        started_groups = [StartedGroup.from_json(values, archive, find_problem) for values in state["started"]]
        self.started = {group.draw: group for group in started_groups}


def problem_lookup(
    problems: Mapping[str, Sequence[Problem]],
    origin: str = "the checkpoint",
    remedy: str = "keep the source with a small weight, or start over with --restart",
) -> FindProblem:
    """Return a function that looks up problems by source and index.

    It raises ConfigError if the recipe no longer has the problem. The message names `origin`, where the samples come
    from, and the `remedy`.
    """
    # `Places` maps problem indices to positions in the data. Build it once: a lookup must not scan the problems of a
    # streamed data set.
    positions = {source: Places(source_problems) for source, source_problems in problems.items()}

    def find_problem(source: str, index: int) -> Problem:
        position = positions[source].get(index) if source in positions else None
        if position is None:
            raise ConfigError(
                f"mixture.{source}: {origin} has samples for problem {index} of this source, but the recipe no longer "
                f"has the problem; {remedy}"
            )
        return problems[source][position]

    return find_problem


def draw_of(group: Group) -> int:
    """Return a group's number. Groups are numbered in the order in which their prompts were drawn."""
    return group[0].group


def flatten(groups: Iterable[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group]
