"""Steps of a run: each is measured, logged and checked, and a stop signal or a fault ends the run after a save."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass

from megarl.cluster.run_ranks import RunRanks
from megarl.config import Recipe
from megarl.loops.observers.step_observer import StepObservers
from megarl.loops.performance import Performance, Profiles
from megarl.loops.reshard_schedule import ReshardSchedule
from megarl.loops.resizing import ResizeAskedError, take_request
from megarl.loops.saving.checkpointing import Checkpoints
from megarl.loops.step import Step
from megarl.loops.stopping import StopRequest
from megarl.platform.spans import span
from megarl.preflight import Dropped
from megarl.rollout.pool import AbandonedError
from megarl.rollout.state import RLState
from megarl.tracking.metric_rows import MetricRow
from megarl.tracking.run_folder import RunFolder
from megarl.tracking.tracker import Tracker
from megarl.types import MegarlError, StoppedError

METRICS = (MetricRow("data/dropped", "count", "records dropped because they are too long"),)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of a run. When `stop` asks for it, they save to `checkpoints` and raise StoppedError."""

    recipe: Recipe
    ranks: RunRanks
    folder: RunFolder
    tracker: Tracker
    checkpoints: Checkpoints
    reshard_schedule: ReshardSchedule
    stop: StopRequest
    performance: Performance
    profiles: Profiles
    observers: StepObservers
    dropped: Dropped
    """Number of records dropped because they are too long, by data source."""
    recovery_metrics: Callable[[], Mapping[str, float]]
    """Function returning the metrics of a recovery from a lost rank, once, in the first step after it."""
    growth: Callable[[], ResizeAskedError | None]
    """Function returning the change back to the run's full size, if lost nodes have come back."""

    @property
    def remaining(self) -> range:
        """Numbers of the remaining steps."""
        return range(self.folder.resumed_step + 1, self.recipe.train.steps + 1)

    @asynccontextmanager
    async def step(self, number: int, state: RLState | None = None) -> AsyncIterator[Step]:
        """Enter a context for one training step. At its end, log metrics; end the run on a fault or a stop signal.

        `state`: state of the RL loop, saved with the step.
        """
        step = Step(number)
        self.tracker.begin(number)
        # Before the step's first call to the ranks, so that start-up does not count.
        await self.performance.begin()
        step.log(self.recovery_metrics())
        await self.ranks.begin_step(number)
        if self.dropped:
            step.log({"data/dropped": float(self.dropped.total())})
        is_profiled = number in self.recipe.train.profile_steps
        async with self.profiles.record_step(number) if is_profiled else nullcontext():
            async with self.saving_on_stop(step, state):
                yield step
            with span("log"):
                await self.observers.observe(step)
                step.log(self.checkpoints.copies.take_metrics())
                step.log(await self.performance.measure_step(self.tracker.seconds, step.metrics))
                fault = self._log(step)
                self.folder.set_status(step=number)
            # An asynchronous save is published at the end of the first step after it was written.
            await self.checkpoints.complete()
        if fault is not None:
            # Saved first, so that a resumed run continues after this step.
            await self._save(number, state)
            raise fault
        await self._stop_if_asked(number, state)
        await self._resize_if_asked(number, state)

    @asynccontextmanager
    async def updating(self, step: Step) -> AsyncIterator[None]:
        """Enter a context for a step's updates. From then on a stop signal saves this step, not the previous one."""
        with self.tracker.phase("train"):
            await self.observers.before_updates(step)
            step.is_trained = True
            yield
            await self.observers.after_updates(step)

    def finish(self, step: Step) -> None:
        """Log a step made outside `step`, and end the run on its fault. A checkpoint of its state exists already."""
        if (fault := self._log(step)) is not None:
            raise fault

    def abandon_if_asked(self) -> None:
        """Abandon the step if a signal asked the run to stop. Its updates must not have begun.

        A stop now loses only this step's samples; the state of the previous step is saved.
        """
        if self.stop:
            raise AbandonedError

    @asynccontextmanager
    async def saving_on_stop(self, step: Step, state: RLState | None = None) -> AsyncIterator[None]:
        """Save the progress and raise StoppedError if a stop signal aborts sampling within.

        Before the step's updates, the previous step is saved. After them, this step is saved without its evaluation.
        """
        try:
            yield
        except AbandonedError:
            if step.is_trained:
                self.folder.set_status(step=step.number)
                await self._stop_if_asked(step.number, state, unlogged=step)
            else:
                if state is not None:
                    # This step will be sampled again, so its groups must not count as drawn.
                    state.forget_step()
                await self._stop_if_asked(step.number - 1, state)
            raise

    async def complete_background_work(self) -> None:
        """Wait for the reshard, the trace and the save under way."""
        await self.reshard_schedule.finish()
        await self.profiles.finish()
        await self.checkpoints.complete(wait=True)

    def _log(self, step: Step) -> MegarlError | None:
        """Log a step's metrics, and keep its model if it is the best so far. Return the error that ends the run, if any
        (`StepObserver.find_fault`)."""
        self.tracker.log(step.number, step.metrics)
        self.checkpoints.judge(step.number, step.metrics)
        return self.observers.find_fault(step)

    async def _stop_if_asked(self, step: int, state: RLState | None, unlogged: Step | None = None) -> None:
        """Save the state after `step` and raise StoppedError, if a signal asked the run to stop.

        `unlogged` is the step if its evaluation was interrupted. The resumed run repeats the evaluation and logs it.
        """
        if not self.stop:
            return
        saved = "there is nothing to save yet"
        if step > 0:
            await self._save(step, state, unlogged)
            saved = f"saved after step {step} of {self.recipe.train.steps}"
        raise StoppedError(f"{self.stop.by}: {saved}; go on with: megarl train {self.folder.path} --resume")

    async def _resize_if_asked(self, step: int, state: RLState | None) -> None:
        """Copy the state after `step` and raise ResizeAskedError, if the run shall have other parallel sizes.

        `megarl resize` asks for them, or lost nodes have come back.
        """
        try:
            asked = take_request(self.folder.path, self.recipe)
            if step == self.recipe.train.steps:
                if asked is not None:
                    self.tracker.notice("the run is not resized, because this was its last step")
                return
            if asked is not None:
                await self.ranks.reserve(asked.parallel.world_size, asked.parallel.replica_sizes)
        except MegarlError as error:
            self.tracker.notice(f"the run cannot be resized: {error}")
            return
        asked = asked or self.growth()
        if asked is None:
            return
        await self.complete_background_work()
        await self.reshard_schedule.sleep_engines()
        await self.checkpoints.copy(step, state and state.save)
        # A signal may have arrived meanwhile.
        await self._stop_if_asked(step, state)
        raise asked

    async def _save(self, step: int, state: RLState | None, unlogged: Step | None = None) -> None:
        """Save a checkpoint outside of the regular steps, with the engines asleep."""
        await self.reshard_schedule.sleep_engines()
        await self.checkpoints.save(step, state and state.save, unlogged)
        # The run ends after this save, so pending traces are written now.
        await self.profiles.finish()
