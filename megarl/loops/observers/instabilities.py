"""Unstable updates: reports the first tensor that is not finite, and acts on spikes (train.on_spike)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.loops.observers.step_observer import StepObserver
from megarl.loops.saving.checkpointing import Checkpoints, survey_checkpoints
from megarl.loops.step import Step
from megarl.tracking.metric_rows import SINCE_RUN_BEGAN, MetricRow
from megarl.tracking.model_outputs import NotFinite
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.run_record import RunRecord, checkpoint_step
from megarl.tracking.spikes import SpikeDetector
from megarl.tracking.tracker import Tracker
from megarl.types import MegarlError, UnhealthyError

METRICS = (
    MetricRow("train/spikes", "count", "updates dropped because they exceed a limit", condition="train.on_spike"),
    MetricRow(
        "train/rollbacks",
        "count",
        "returns to a checkpoint because of a spike",
        SINCE_RUN_BEGAN,
        condition="train.on_spike=rollback",
    ),
)


def make_spike_detector(recipe: Recipe, saved: Mapping[str, Any] | None) -> SpikeDetector | None:
    """Return a recipe's spike detector, or None if spikes are ignored. `saved` is its state in a checkpoint."""
    train = recipe.train
    if train.on_spike == "ignore":
        return None
    # A policy gradient's loss has no meaning as a size, and may be negative.
    loss_factor = None if recipe.is_on_policy else train.spike_loss_factor
    detector = SpikeDetector(factor=train.spike_factor, loss_factor=loss_factor, window=train.spike_window)
    if saved is not None:
        detector.restore(saved)
    return detector


class Instabilities(StepObserver):
    """Reports and acts on a step's unstable updates. `spikes` is the policy's detector; None: spikes are ignored."""

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        tracker: Tracker,
        ranks: RunRanks,
        checkpoints: Checkpoints,
        spikes: SpikeDetector | None,
    ) -> None:
        self._train, self._folder, self._tracker, self._ranks = recipe.train, folder, tracker, ranks
        self._checkpoints, self._spikes = checkpoints, spikes
        self._fault: str | None = None

    async def before_updates(self, step: Step) -> None:
        if self._spikes is not None:
            self._spikes.begin_step()

    async def after_updates(self, step: Step) -> None:
        """Act on the spikes of a step's updates: skip, stop or roll back."""
        if self._spikes is None or not self._spikes.spikes:
            return
        first_spike = self._spikes.spikes[0]
        fault_text = (
            f"step {step.number}: an update with {first_spike} was dropped (train.on_spike = {self._train.on_spike})"
        )
        if self._train.on_spike == "skip":
            self._tracker.notice_once("spike", f"{fault_text}; train/spikes counts such updates")
        elif self._train.on_spike == "stop":
            self._fault = fault_text
        elif self._spikes.rollbacks >= self._train.max_rollbacks:
            self._fault = f"{fault_text}, after {self._spikes.rollbacks} rollbacks (train.max_rollbacks)"
        else:
            await self._roll_back(fault_text)

    async def _roll_back(self, text: str) -> None:
        """Load the newest checkpoint into the trainer. Step numbers and position in the data do not change."""
        # A background save may be in progress. It is of a step before the spike, so it may be loaded.
        await self._checkpoints.complete_save(wait=True)
        checkpoint: Path | None = survey_checkpoints(RunRecord.read(self._folder.path)).newest_intact
        if checkpoint is None:
            self._tracker.notice(f"{text}. No rollback: there is no checkpoint yet")
            return
        assert self._spikes is not None
        self._spikes.rollbacks += 1
        self._tracker.notice(
            f"{text}. Rollback {self._spikes.rollbacks} of at most {self._train.max_rollbacks}: weights and optimizer "
            f"are those of step {checkpoint_step(checkpoint)} again; the data of the steps since then is not repeated"
        )
        await self._ranks.trainers.call("rollbacks.roll_back", checkpoint)

    async def observe(self, step: Step) -> None:
        """Report the first tensor that is not finite, and add the metrics of spikes."""
        for model in step.outcome.not_finite:
            tensors: list[NotFinite] = await self._ranks.trainers.call(f"{model}.last_not_finite")
            nodes = [self._ranks.topology[rank][0] for rank in tensors[0].ranks]
            self._folder.set_not_finite({"step": step.number, "model": model, **tensors[0]._asdict(), "nodes": nodes})
            self._tracker.notice(
                f"step {step.number}: an update of the {model} was skipped, because its loss or gradient is not "
                f"finite; {tensors[0]}"
            )
        if self._spikes is not None:
            num_spikes, num_rollbacks = len(self._spikes.spikes), self._spikes.rollbacks
            step.log({"train/spikes": float(num_spikes), "train/rollbacks": float(num_rollbacks)})

    def find_fault(self, step: Step) -> MegarlError | None:
        fault_text, self._fault = self._fault, None
        if fault_text is None:
            return None
        return UnhealthyError(
            f"{fault_text}. Look at the step's samples and at train/grad_norm; the state after the step is saved, go "
            f"on with: megarl train {self._folder.path} --resume"
        )
