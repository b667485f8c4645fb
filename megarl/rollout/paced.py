"""Sampling ahead of training: groups start only as far ahead as they can be trained in time, and train as drawn."""

from __future__ import annotations

import asyncio

from megarl.rollout.partial import PartialBuffer, draw_of
from megarl.rollout.state import Group


class PacedBuffer(PartialBuffer):
    """Lets engines sample for later steps while the trainer trains, and gives out groups in the order of drawing.

    A group that engines of version v start may train at step v + `rollout.staleness_bound` at the latest. Since order
    is kept, that is a matter of how many are before it: at step n with P groups a step, so many steps' groups may be
    under way or ready, those of step n among them: 1 + staleness_bound - (n - v). It is AReaL's rule (arXiv 2505.24298,
    eq. 3) with the version of the engines, which `rollout.sync_every` holds back. A group that is filtered out leaves
    its place to the next prompt at once, also while the trainer trains.
    """

    _is_refilled = False
    """Whether groups that are filtered out are replaced at once: while no step waits, until an attempt fails."""

    async def take(self, num_groups: int, weight_version: int, engine_version: int | None = None) -> list[Group]:
        """As `PartialBuffer.take`; afterwards sampling goes on."""
        self._is_refilled = False
        groups = await super().take(num_groups, weight_version, engine_version)
        self._is_refilled = True
        return groups

    async def aclose(self) -> None:
        """As `PartialBuffer.aclose`."""
        self._is_refilled = False
        await super().aclose()

    @property
    def _num_live(self) -> int:
        return self._num_groups * self._steps_ahead

    @property
    def _steps_ahead(self) -> int:
        """The steps, with this one, whose groups may be sampled now; none after the run's last."""
        lag = self._step - self._engine_version
        left = self._recipe.train.steps - self._step + 1
        return min(1 + self._recipe.rollout.staleness_bound - lag, left)

    def _chosen(self) -> list[Group] | None:
        """The step's groups: those drawn first, once none that was drawn before them is under way."""
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
            self._start_more(self._num_live - self._num_groups)
