"""Model calls of unfinished attempts, stored in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megarl.rollout.requests.engine_requests import num_sampled
from megarl.tracking.renamed_metrics import current_metrics
from megarl.types import Archive, Completion, ExpertsHandle, FindProblem, Problem, Trajectory

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class RecordedCall:
    """A recorded model call: its prompt, int32 [prompt], and its completion. Each pause adds a part to the completion.

    `identity` names the call in journal and checkpoints, because parallel calls may have equal prompts. It is empty
    without a journal.
    """

    prompt_token_ids: NDArray[np.int32]
    parts: list[Completion] = field(default_factory=list)
    is_done: bool = False
    identity: str = ""

    @property
    def is_refused(self) -> bool:
        return self.is_done and self.parts[0].finish_reason == "error"

    def to_json(self, archive: Archive, prefix: str) -> dict[str, Any]:
        archive.arrays[f"{prefix}prompt"] = self.prompt_token_ids
        parts = [part.to_json(archive, f"{prefix}{part_index}.") for part_index, part in enumerate(self.parts)]
        return {"parts": parts, "is_done": self.is_done, "identity": self.identity}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], archive: Archive, prefix: str) -> RecordedCall:
        parts = [
            Completion.from_json(part, archive, f"{prefix}{part_index}.")
            for part_index, part in enumerate(values["parts"])
        ]
        # Earlier versions of megarl write no identities.
        identity = values.get("identity", "")
        return cls(archive.arrays[f"{prefix}prompt"], parts, values["is_done"], identity)


@dataclass(slots=True, eq=False)
class StartedGroup:
    """A group of attempts in flight, with its number (`draw`).

    `finished` has trajectories of ended attempts, `calls` the model calls of unfinished ones, both by attempt number.
    """

    draw: int
    problem: Problem
    temperature: float = 1.0
    finished: dict[int, Trajectory] = field(default_factory=dict)
    calls: dict[int, list[RecordedCall]] = field(default_factory=dict)

    def finish(self, trajectory: Trajectory) -> None:
        self.finished[trajectory.number] = trajectory
        self.calls.pop(trajectory.number, None)

    def oldest_version(self, weight_version: int) -> int:
        """Return the weight version of the group's oldest token; without tokens, the engines' `weight_version`."""
        versions_of_ended = [
            trajectory.oldest_version for trajectory in self.finished.values() if trajectory.num_sampled
        ]
        versions_of_running = [int(part.weight_versions.min()) for part in self._parts if len(part.weight_versions)]
        return min([weight_version, *versions_of_ended, *versions_of_running])

    @property
    def num_sampled(self) -> int:
        return num_sampled(self._parts)

    @property
    def experts(self) -> list[ExpertsHandle]:
        """Handles of the stored routed experts (MoE) of this group's tokens."""
        segments = [segment.routed_experts for t in self.finished.values() for segment in t.segments]
        return [handle for handle in [*(part.routed_experts for part in self._parts), *segments] if handle is not None]

    @property
    def _parts(self) -> list[Completion]:
        return [part for calls in self.calls.values() for call in calls for part in call.parts]

    def to_json(self, archive: Archive) -> dict[str, Any]:
        """Return the group as JSON values. Its arrays and measured times go to `archive`."""
        prefix = f"started.{self.draw}."
        numbered_calls = [(number, call) for number, calls in self.calls.items() for call in calls]
        return {
            "draw": self.draw,
            "problem": self.problem.index,
            "source": self.problem.source,
            "temperature": self.temperature,
            "finished": [t.to_json(archive, f"{prefix}{number}.") for number, t in self.finished.items()],
            "calls": [
                {"number": number} | call.to_json(archive, f"{prefix}call{call_index}.")
                for call_index, (number, call) in enumerate(numbered_calls)
            ],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], archive: Archive, find_problem: FindProblem) -> StartedGroup:
        group = cls(values["draw"], find_problem(values["source"], values["problem"]), values["temperature"])
        prefix = f"started.{group.draw}."
        for trajectory in values["finished"]:
            group.finish(load_trajectory(trajectory, archive, f"{prefix}{trajectory['number']}.", find_problem))
        for call_index, call in enumerate(values["calls"]):
            recorded_call = RecordedCall.from_json(call, archive, f"{prefix}call{call_index}.")
            group.calls.setdefault(call["number"], []).append(recorded_call)
        return group


def load_trajectory(values: Mapping[str, Any], archive: Archive, prefix: str, find_problem: FindProblem) -> Trajectory:
    """Return a trajectory from a checkpoint. Metrics with old names get their current names."""
    current = {**values, "metrics": current_metrics(values["metrics"])}
    return Trajectory.from_json(current, archive, prefix, find_problem)
