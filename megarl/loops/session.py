"""Session of a run: the parts shared by all loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.cluster.rank_model import RankModel
from megarl.config import Recipe
from megarl.data.sampler import DataOrder
from megarl.files.atomic import storage_faults_named
from megarl.loops.reshard_schedule import ReshardSchedule
from megarl.loops.sample_writer import SampleWriter
from megarl.loops.saving.checkpointing import Checkpoints
from megarl.loops.saving.resume import Origin
from megarl.loops.steps import Steps
from megarl.preflight import Dropped
from megarl.rollout.evaluate import EvaluatedSet, evaluate
from megarl.rollout.pool import EnginePool
from megarl.rollout.source import Source
from megarl.tracking.draws import DrawEvents, rewind
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


@dataclass(frozen=True, kw_only=True)
class Session:
    """A started run with all its parts: models, engines, data, tracker, checkpoints."""

    recipe: Recipe
    folder: RunFolder
    origin: Origin
    """Checkpoint the run was resumed from, if any."""
    tracker: Tracker
    tokenizer: Tokenizer
    dropped: Dropped
    """Number of records dropped because they are too long, by data source."""
    models: Mapping[str, RankModel]
    """The recipe's models by name: `policy`, `reference`, `critic`, `reward_model`, `teacher0` and so on."""
    sources: Sequence[Source]
    """Sources of problems, in the order of the recipe."""
    pool: EnginePool
    reshard_schedule: ReshardSchedule
    checkpoints: Checkpoints
    samples: SampleWriter
    steps: Steps

    async def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of all validation sets (see `rollout.evaluate.EvaluatedSet`) and of the engines.

        The trajectories are written to samples/. Raises AbandonedError, and writes nothing, if a stop signal comes
        first.
        """
        with self.tracker.phase("evaluation"):
            sets = await self.steps.ranks.watching(self._evaluated_sets())
        # Read after all sets, so that the tokens of the whole evaluation count.
        metrics = self.pool.evaluation_metrics()
        for done in sets:
            await self.samples.write(step, done.records(), done.trajectories)
            metrics |= done.metrics
        return metrics

    async def _evaluated_sets(self) -> list[EvaluatedSet]:
        return [done async for done in evaluate(self.sources, self.recipe.reward.max_failed_fraction)]

    def rewind_draws(self, num_events: int) -> None:
        """Cut the ledger of a resumed run to the events before its checkpoint. Raises StorageError.

        A notice says if the ledger lacks some of them.
        """
        file = self.folder.draws_file
        with storage_faults_named(file):
            num_lacking = rewind(file, num_events)
        if num_lacking:
            self.tracker.notice(
                f"{file}: lacks {num_lacking} of {num_events} events of the steps before; it was cut or removed, or an "
                "earlier version of megarl wrote none. Training is not affected, but megarl samples --account cannot "
                "prove these steps: restore the file from a copy, then resume again"
            )

    def write_draws(self, step: int, order: DataOrder, batch: Sequence[int]) -> None:
        """Write to the ledger: a step's items were drawn from the data and trained on. Raises StorageError.

        Steps are counted from 1. `batch` are the indices that `order` gives for the step. On-policy loops draw in
        another way, and write their own events.
        """
        file, first = self.folder.draws_file, order.start(step - 1)
        if step > 1 and not file.exists():
            # The run began with a version of megarl that wrote no ledger for this loop.
            return
        # Each item drawn before has two events.
        events = DrawEvents(num_written=2 * first)
        for place, index in enumerate(batch, first):
            events.add("drawn", "train", place, index)
            events.add("used", "train", index)
        with storage_faults_named(file):
            events.write(file, step, {"train": order.num_items}, num_open=0, too_long=self.dropped.total())
