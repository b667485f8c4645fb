"""A record of the model calls of attempts under way: what a checkpoint needs to go on with them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megarl.rollout.parts import num_kept
from megarl.rollout.pool import EnginePool
from megarl.types import Completion, ExpertsHandle, Problem, Request, Trajectory

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(slots=True, eq=False)
class RecordedCall:
    """A model call: its prompt, int32 [prompt], and its completion in parts, of which parks made all but the last.

    Without `is_done` the completion goes on.
    """

    prompt_token_ids: NDArray[np.int32]
    parts: list[Completion] = field(default_factory=list)
    is_done: bool = False


@dataclass(slots=True, eq=False)
class StartedGroup:
    """A group under way: the number of its prompt among all that were drawn, what is finished, what is recorded.

    `finished` are the trajectories that ended, by their number in the group, `calls` the model calls of the others, by
    the same number, in the order in which they began.
    """

    draw: int
    problem: Problem
    temperature: float = 1.0
    """The temperature that all of it is sampled at."""
    finished: dict[int, Trajectory] = field(default_factory=dict)
    calls: dict[int, list[RecordedCall]] = field(default_factory=dict)

    def finish(self, trajectory: Trajectory) -> None:
        """Keep the trajectory of an attempt that ended, in place of its calls."""
        self.finished[trajectory.number] = trajectory
        self.calls.pop(trajectory.number, None)

    def oldest_version(self, weight_version: int) -> int:
        """The weight version of its oldest token; `weight_version`, the engines', where none is known yet."""
        of_finished = [trajectory.oldest_version for trajectory in self.finished.values() if trajectory.num_sampled]
        of_parts = [int(part.weight_versions.min()) for part in self._parts if len(part.weight_versions)]
        return min([weight_version, *of_finished, *of_parts])

    @property
    def num_kept(self) -> int:
        """The tokens of its attempts that have not ended."""
        return num_kept(self._parts)

    @property
    def experts(self) -> list[ExpertsHandle]:
        """Handles of the routed experts of what it has so far."""
        segments = [segment.routed_experts for t in self.finished.values() for segment in t.segments]
        return [handle for handle in [*(part.routed_experts for part in self._parts), *segments] if handle is not None]

    @property
    def _parts(self) -> list[Completion]:
        return [part for calls in self.calls.values() for call in calls for part in call.parts]


class RecordedPool:
    """The engines for one attempt: what they sample is added to `calls`, and what is in them is not sampled anew.

    An attempt that is made again, after a resume, is given the completions of its calls as they were, each once, as
    long as it asks with the same prompts: an environment or an agent that is a function of its problem, its seed and
    the turns comes to where it was. At the first other prompt what it has not asked for again is forgotten, and it is
    sampled anew from there (`is_restarted`).
    """

    def __init__(self, pool: EnginePool, calls: list[RecordedCall]) -> None:
        self._pool, self._calls = pool, calls
        self._to_repeat = list(calls)
        self._is_closed = False
        self.is_restarted = False

    @property
    def seconds_held(self) -> float:
        """As `EnginePool.seconds_held`."""
        return self._pool.seconds_held

    def close(self) -> None:
        """Let the attempt sample no more: one that does not heed that it is cancelled ends here."""
        self._is_closed = True

    async def generate(self, request: Request, *, affinity: str | None = None, is_last: bool = False) -> Completion:
        """As `EnginePool.generate`, but that no completion is the last: another group waits for its place."""
        if self._is_closed:
            raise asyncio.CancelledError
        call = self._recorded(request.prompt_token_ids)
        if call is None:
            call = RecordedCall(request.prompt_token_ids)
            self._calls.append(call)
        if not call.is_done:
            completion = await self._pool.generate(request, affinity=affinity, parts=call.parts)
            call.parts[:] = [completion]
            call.is_done = True
        return call.parts[0]

    def forget(self, affinity: str) -> None:
        """As `EnginePool.forget`."""
        self._pool.forget(affinity)

    def _recorded(self, prompt_token_ids: NDArray[np.int32]) -> RecordedCall | None:
        """The call of this prompt that is to be repeated."""
        for place, call in enumerate(self._to_repeat):
            if np.array_equal(call.prompt_token_ids, prompt_token_ids):
                return self._to_repeat.pop(place)
        for call in self._to_repeat:
            self._calls.remove(call)
            self.is_restarted = True
        self._to_repeat.clear()
        return None
