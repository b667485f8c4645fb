"""Sampling ahead of training with bounded staleness: groups start only if they can be trained in time, in order."""

from __future__ import annotations

import asyncio

from megarl.rollout.partial import PartialBuffer, draw_of
from megarl.rollout.state import Group


class PacedBuffer(PartialBuffer):
    """A buffer for sampling during training. Groups are returned in the order of drawing.

    A group started by engines of version v may be trained at step v + `rollout.staleness_bound` at the latest. Groups
    keep their order, so only the number of earlier groups matters. Step n allows P * (1 + staleness_bound - (n - v))
    groups, in flight or ready, including its own P. This is AReaL's rule (arXiv 2505.24298, eq. 3) with the engines'
    version, which lags with `rollout.sync_every` above 1.

    A group filtered out is replaced by the next prompt at once, even during training.
    """

    _is_refilled = False
    """Whether filtered-out groups are replaced at once: True between two `take` calls, until an attempt fails."""

    async def take(self, num_groups: int, weight_version: int, engine_version: int | None = None) -> list[Group]:
        """Differs from `PartialBuffer.take`: sampling continues after it returns."""
        self._is_refilled = False
        groups = await super().take(num_groups, weight_version, engine_version)
        self._is_refilled = True
        return groups

    async def aclose(self) -> None:
        self._is_refilled = False
        await super().aclose()

    @property
    def _num_live(self) -> int:
        return self._num_groups * self._steps_ahead

    @property
    def _steps_ahead(self) -> int:
        """Number of steps, including this one, whose groups may be sampled now. Never beyond the run's last step."""
        # Engines behind the trainer produce older tokens, so fewer steps may be sampled ahead.
        lag = self._step - self._engine_version
        left = self._recipe.train.steps - self._step + 1
        return min(1 + self._recipe.rollout.staleness_bound - lag, left)

    def _chosen(self) -> list[Group] | None:
        """Return the step's groups: the ones drawn first, once no earlier group is in flight."""
        first_under_way = min(self._state.started, default=self._state.drawn)
        ready = [group for group in self._state.waiting if draw_of(group) < first_under_way]
        if len(ready) < self._num_groups:
            return None
        return sorted(ready, key=draw_of)[: self._num_groups]

    def _ended(self, task: asyncio.Task[None]) -> None:
        super()._ended(task)
        if task.cancelled() or task.exception() is not None:
            self._is_refilled = False  # the next `take` raises it
        if self._is_refilled:
            self._collect()
            # The step's own groups were taken already, but `_steps_ahead` still counts them.
            self._start_more(self._num_live - self._num_groups)
