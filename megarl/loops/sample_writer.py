"""Writer of a run's samples."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.cluster.rank_model import RankModel
from megarl.config import Recipe
from megarl.platform.spans import span
from megarl.rollout.step.rl_batch import RLBatch
from megarl.rollout.step.sample_records import token_records, with_rendered_prompts
from megarl.tracking.tracker import Tracker
from megarl.types import Group, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


@dataclass(frozen=True, slots=True)
class SampleWriter:
    """Writes trajectories and token-by-token records to the run's folder samples/."""

    recipe: Recipe
    tracker: Tracker
    tokenizer: Tokenizer
    policy: RankModel

    def is_due(self, step: int) -> bool:
        return step % self.recipe.samples_every_steps == 0

    async def write_step(
        self, step: int, trajectories: Sequence[Trajectory], tokens: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Write a step's trajectories if they are due, and its token-by-token records `tokens`."""
        if self.is_due(step):
            await self.write(step, [trajectory.record() for trajectory in trajectories], trajectories)
        if tokens:
            self.tracker.token_samples(step, tokens)

    async def write(self, step: int, records: Sequence[Mapping[str, Any]], trajectories: Sequence[Trajectory]) -> None:
        """Write the records of trajectories in a thread.

        Thousands of records take seconds, and the driver must answer other calls meanwhile.
        """

        def write_in_thread() -> None:
            self.tracker.samples(step, [*with_rendered_prompts(records, trajectories, self.tokenizer)])

        # A thread cannot be cancelled, so shield the task and await it.
        writing = asyncio.ensure_future(asyncio.to_thread(write_in_thread))
        with span("samples"):
            try:
                await asyncio.shield(writing)
            finally:
                # On cancellation too, wait for the thread: the run's end closes the files it writes.
                await asyncio.wait([writing])

    async def token_records(self, step: int, groups: Sequence[Group], batch: RLBatch) -> list[dict[str, Any]]:
        """Return token-by-token records of a few samples, if due. Call it before the step's update."""
        count = self.recipe.samples_with_tokens
        if not count or not self.is_due(step):
            return []
        with self.tracker.phase("logprobs"):
            return await token_records(
                groups,
                batch,
                self.tokenizer,
                self.policy.forward,
                count=count,
                weight_version=step,
                has_engine_logprobs=self.recipe.algorithm.old_logprobs == "rollout",
            )
